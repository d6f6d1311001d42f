// Rounding of rows to f16, each divided by a power of two of its own (powers.cuh).
#include "types.cuh"
#include "powers.cuh"

// out [rows, columns] = x / powers[row]. blockIdx.x: the row; rows of x are `stride` floats apart.
extern "C" __global__ void __launch_bounds__(POWER_THREADS)
narrow_rows(const float* x, __half* out, float* powers, int columns, int stride) {
    const float* from = x + static_cast<size_t>(blockIdx.x) * stride;
    __half* to = out + static_cast<size_t>(blockIdx.x) * columns;
    float peak = 0;
    for (int i = threadIdx.x; i < columns; i += POWER_THREADS) peak = fmaxf(peak, fabsf(from[i]));
    const float inverse = inverse_power(peak, powers + blockIdx.x);
    for (int i = threadIdx.x; i < columns; i += POWER_THREADS) to[i] = __float2half_rn(from[i] * inverse);
}
