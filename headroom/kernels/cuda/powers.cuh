// The power of two that a row is divided by so that f16 holds it.
#define POWER_THREADS 256  // of a block, which has one row

// One over the power of a row whose largest number in this thread is `peak`; the power itself goes to `to`.
// The largest of the row becomes 512 to 1023, as in halves.cuh; a row of zeros stays one.
__device__ __forceinline__ float inverse_power(float peak, float* to) {
    __shared__ float peaks[POWER_THREADS / 32];
#pragma unroll
    for (int o = 16; o; o /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < POWER_THREADS / 32; ++i) peak = fmaxf(peak, peaks[i]);
    const u32 exponent = max(__float_as_uint(peak) >> 23, 24u);
    if (threadIdx.x == 0) *to = __uint_as_float((exponent - 9) << 23);
    return __uint_as_float((263 - exponent) << 23);
}
