// Routers: which experts a row visits.
// EXPERTS: up to 1024; SIGMOID: scores are sigmoids of the logits, else their softmax.
#include "early.cuh"
#define NUMBERS ((EXPERTS + 31) / 32)  // that a lane holds: experts lane, lane + 32, ...
#define ALL 0xFFFFFFFFu

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(ALL, x, o);
    return x;
}

// logits [rows, outputs] = x [rows, hidden] times the transpose of weight [outputs, hidden], hidden
// divisible by 4. blockIdx.x: the output; blockIdx.y: ROWS rows, so that each weight is read once for them.
#ifndef ROWS
#define ROWS 1
#endif
extern "C" __global__ void __launch_bounds__(128)
score(const float* x, const float* weight, float* logits, int rows, int outputs, int hidden) {
    begin_after_last();
    __shared__ float part[4][ROWS];
    const int output = blockIdx.x, first = blockIdx.y * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float4* w = reinterpret_cast<const float4*>(weight + static_cast<size_t>(output) * hidden);
    float sum[ROWS] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < hidden / 4; i += 128) {
        const float4 by = w[i];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const int row = min(first + n, rows - 1);
            const float4 v = reinterpret_cast<const float4*>(x + static_cast<size_t>(row) * hidden)[i];
            sum[n] = fmaf(by.x, v.x, fmaf(by.y, v.y, fmaf(by.z, v.z, fmaf(by.w, v.w, sum[n]))));
        }
    }
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
        const float total = sum_of_warp(sum[n]);
        if (lane == 0) part[warp][n] = total;
    }
    __syncthreads();
    const int n = threadIdx.x;
    if (n < ROWS && first + n < rows)
        logits[static_cast<size_t>(first + n) * outputs + output] =
            (part[0][n] + part[1][n]) + (part[2][n] + part[3][n]);
}

// Floats as whole numbers in the same order; 0 is below all of them.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned max_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    for (int o = 16; o > 0; o >>= 1) x = max(x, __shfl_xor_sync(ALL, x, o));
    return x;
#endif
}
__device__ __forceinline__ unsigned min_of_warp(unsigned x) { return ~max_of_warp(~x); }

// The best experts first, the lower number on ties; a warp for each row. `sequence` may be null;
// rows where it is negative choose none: their ids are -1, their weights 0.
extern "C" __global__ void __launch_bounds__(128)
route(const float* logits, int stride, const float* bias, const int* sequence, int* ids, float* weights,
      unsigned long long* counts, int rows, int used, int normalise, float scale, float softcap) {
    begin_after_last();
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    if (sequence && sequence[row] < 0) {
        if (lane < used) ids[row * used + lane] = -1, weights[row * used + lane] = 0.0f;
        return;
    }
    float scores[NUMBERS];
    unsigned keys[NUMBERS];
    const float nothing = __uint_as_float(0xFF800000u);  // minus infinity
    float peak = nothing;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int expert = i * 32 + lane;
        float x = expert < EXPERTS ? logits[static_cast<size_t>(row) * stride + expert] : nothing;
        if (softcap > 0 && expert < EXPERTS) x = tanhf(x / softcap) * softcap;
        scores[i] = x;
        peak = fmaxf(peak, x);
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, o));
    float total = 0;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        scores[i] = SIGMOID ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - peak);
        total += scores[i];
    }
    if (!SIGMOID) total = sum_of_warp(total);
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int expert = i * 32 + lane;
        if (!SIGMOID) scores[i] /= total;
        keys[i] = expert < EXPERTS ? ordered(bias ? scores[i] + bias[expert] : scores[i]) : 0u;
    }
    float mine = 0, sum = 0;  // lane j keeps what was chosen j-th
    int chosen = -1;
    for (int j = 0; j < used; ++j) {
        unsigned best = 0, number = ~0u;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (keys[i] > best) best = keys[i], number = i * 32 + lane;
        const unsigned top = max_of_warp(best);
        const unsigned expert = min_of_warp(best == top ? number : ~0u);
        float score = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (i == static_cast<int>(expert / 32)) {
                score = scores[i];
                if (static_cast<int>(expert % 32) == lane) keys[i] = 0;
            }
        score = __shfl_sync(ALL, score, expert % 32);
        sum += score;
        if (lane == j) mine = score, chosen = expert;
    }
    if (lane >= used) return;
    ids[row * used + lane] = chosen;
    weights[row * used + lane] = (normalise ? mine / sum : mine) * scale;
    atomicAdd(counts + chosen, 1ull);
}
