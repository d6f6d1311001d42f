// The power of two by which a row is divided so that it fits into f16.
#define POWER_THREADS 256  // threads of a block; a block handles one row

// Returns 1 / power for a row and writes the power to `to`; `peak` is the largest magnitude among this
// thread's numbers. The largest number of the row becomes 512 to 1023, as in halves.cuh. All threads must
// call it.
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
