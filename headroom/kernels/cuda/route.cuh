// Top-k routing of one row by one warp.
// EXPERTS: number of experts, up to 1024; SIGMOID: scores are sigmoids of the logits, else their softmax.
#include "common.cuh"

#define NUMBERS ((EXPERTS + 31) / 32)  // experts that a lane holds: lane, lane + 32, ...
#define ALL 0xFFFFFFFFu

// Maps floats to unsigned numbers in the same order; 0 is smaller than all of them.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
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

struct Rule {
    int used, normalise;
    float scale, softcap;  // 0: none
};

// Chooses a row's experts, the best first and the lower id first on ties. Lane j receives the j-th expert
// in `chosen` and returns its weight.
__device__ __forceinline__ float choose(const float* logits, const float* bias, const Rule& rule, int lane,
                                        int& chosen) {
    float scores[NUMBERS];
    unsigned keys[NUMBERS];
    const float nothing = __uint_as_float(0xFF800000u);  // minus infinity
    float peak = nothing;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int expert = i * 32 + lane;
        float x = expert < EXPERTS ? logits[expert] : nothing;
        if (rule.softcap > 0 && expert < EXPERTS) x = __fmul_rn(tanhf(x / rule.softcap), rule.softcap);
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
    chosen = 0;
    for (int j = 0; j < rule.used; ++j) {
        // A lane's best expert by a tree of adjacent pairs, which keeps the lower id on ties.
        unsigned best[NUMBERS], number[NUMBERS];
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) best[i] = keys[i], number[i] = i;
#pragma unroll
        for (int gap = 1; gap < NUMBERS; gap *= 2)
#pragma unroll
            for (int i = 0; i + gap < NUMBERS; i += 2 * gap)
                if (best[i + gap] > best[i]) best[i] = best[i + gap], number[i] = number[i + gap];
        const unsigned top = max_of_warp(best[0]);
        const unsigned expert = min_of_warp(best[0] == top ? number[0] * 32 + lane : ~0u);
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (i * 32 + lane == static_cast<int>(expert)) keys[i] = 0;
        if (lane == j) chosen = expert;
    }
    float mine = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const float there = __shfl_sync(ALL, scores[i], chosen % 32);
        if (i == chosen / 32) mine = there;
    }
    for (int j = 0; j < rule.used; ++j) sum += __shfl_sync(ALL, mine, j);
    return (rule.normalise ? mine / sum : mine) * rule.scale;
}
