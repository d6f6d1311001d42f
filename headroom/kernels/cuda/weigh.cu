// The weights of attention made of plain products: a part of each row's scores becomes powers of e in place,
// and the row's running peak and sum take them in.
// OUT_KIND: F16 or BF16.
#include "types.cuh"
#include <cuda_bf16.h>

#define THREADS 256
#define PAIRS 2        // of neighbours, that a thread holds at a time
#define LOWEST -1e30f  // a running maximum before any key; finite, so that differences stay numbers

// The largest, or the sum, of what the threads of a block hold.
template <bool SUM> __device__ __forceinline__ float over_block(float x) {
    __shared__ float held[THREADS / 32];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x, by);
        x = SUM ? x + other : fmaxf(x, other);
    }
    if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = x;
    __syncthreads();
    x = held[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) x = SUM ? x + held[i] : fmaxf(x, held[i]);
    return x;
}

__device__ __forceinline__ u32 rounded_pair(float x, float y) {
#if OUT_KIND == F16
    const __half2 pair = __floats2half2_rn(x, y);
#else
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
#endif
    return *reinterpret_cast<const u32*>(&pair);
}

// scores [kv_heads, rows * group, stride], of which `count` are keys; row 0 sees `seen` of them, each next row one
// more. Weights of half the size take their places from each row's beginning on: of a row, what is written lies
// before what is still to be read. stats: peak and sum of each row; factors: what sums of earlier parts are
// multiplied by. blockIdx: the row's head, the key head.
extern "C" __global__ void __launch_bounds__(THREADS)
weigh(float* scores, float2* stats, float* factors, int count, int stride, int group, int seen, int fresh) {
    const size_t line = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const float2* from = reinterpret_cast<const float2*>(scores + line * stride);
    u32* to = reinterpret_cast<u32*>(scores + line * stride);
    const int limit = max(0, min(count, seen + static_cast<int>(blockIdx.x) / group));
    const float2 before = fresh ? make_float2(LOWEST, 0) : stats[line];
    float peak = before.x, sum = 0;
#pragma unroll 4
    for (int i = 2 * threadIdx.x; i < limit; i += 2 * THREADS) {
        const float2 x = from[i / 2];
        peak = fmaxf(peak, i + 1 < limit ? fmaxf(x.x, x.y) : x.x);
    }
    peak = over_block<false>(peak);
    for (int first = 0; first < count; first += 2 * PAIRS * THREADS) {
        u32 made[PAIRS];
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = first + 2 * (j * THREADS + threadIdx.x);
            const float2 x = i < limit ? from[i / 2] : make_float2(0, 0);
            const float a = i < limit ? __expf(x.x - peak) : 0, b = i + 1 < limit ? __expf(x.y - peak) : 0;
            sum += a + b;
            made[j] = rounded_pair(a, b);
        }
        __syncthreads();  // all have read what is overwritten now
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = first + 2 * (j * THREADS + threadIdx.x);
            if (i < count) to[i / 2] = made[j];
        }
    }
    sum = over_block<true>(sum);
    if (threadIdx.x) return;
    const float by = expf(before.x - peak);
    factors[line] = by;
    stats[line] = make_float2(peak, before.y * by + sum);
}
