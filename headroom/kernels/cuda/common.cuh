// Functions that kernels of several sources share.
#ifndef HEADROOM_COMMON
#define HEADROOM_COMMON

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, o);
    return x;
}
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
// GELU in its tanh form.
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
#endif
