// Distributes the joint result of matrices that share an input to their own outputs.
// ADD: add to what the outputs hold; WIDE: values that a thread moves, 4 if all widths are multiples of 4,
// else 1.
#include <cuda_bf16.h>

// answers [rows, count] in bf16 are columns first .. first + count of the matrices side by side; matrix i
// ends before column end_i. Rows of the float32 output i are apart_i floats apart. blockIdx.y: the row.
extern "C" __global__ void spread(const __nv_bfloat16* answers, float* out_0, float* out_1, float* out_2, float* out_3,
                                  int end_0, int end_1, int end_2, int end_3, int apart_0, int apart_1, int apart_2,
                                  int apart_3, int first, int count) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * WIDE, at = first + column;
    if (column >= count || at >= end_3) return;
    const size_t row = blockIdx.y;
    float* to = at < end_0 ? out_0 + row * apart_0 + at
              : at < end_1 ? out_1 + row * apart_1 + (at - end_0)
              : at < end_2 ? out_2 + row * apart_2 + (at - end_1) : out_3 + row * apart_3 + (at - end_2);
    __align__(8) __nv_bfloat16 from[WIDE];
    const __nv_bfloat16* place = answers + row * count + column;
    if constexpr (WIDE == 4) *reinterpret_cast<uint2*>(from) = *reinterpret_cast<const uint2*>(place);
    else from[0] = *place;
    __align__(16) float values[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) values[i] = ADD ? to[i] + __bfloat162float(from[i]) : __bfloat162float(from[i]);
    if constexpr (WIDE == 4) *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(values);
    else to[0] = values[0];
}
