// The softmax of prefill attention, which multiplies queries with a part of the keys, weighs, and
// multiplies with the values (attention.py). `weigh` turns a part of each row's scores into 16-bit weights in
// place, and updates the row's running maximum and sum.
// OUT_KIND: F16 or BF16.
#include "types.cuh"
#include <cuda_bf16.h>

#define THREADS 256
#define PAIRS 2        // pairs of adjacent scores that a thread holds at a time
#define LOWEST -1e30f  // start of a running maximum; finite, so that LOWEST - LOWEST is 0 and not NaN

// The maximum, or with SUM the sum, of x over the threads of a block.
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

// scores [kv_heads, rows * group, stride] for `count` keys; row 0 sees the first `seen` of them, each next
// row one more. The weights, half as large as the scores, are written from the beginning of each row on,
// always before the scores that are still to be read. stats: running maximum and sum of each row; factors:
// what the sums of earlier parts must be multiplied by; fresh: this is the first part. blockIdx: the query
// head of a row, the KV head.
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
        __syncthreads();  // all threads have read what is overwritten now
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
