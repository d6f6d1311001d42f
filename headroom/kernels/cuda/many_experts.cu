// Routed experts of many rows in bf16: the activation between the products, and the weighted sum after
// them. GELU: the activation is GELU, else silu.
#include "experts.cuh"

#include <cuda_bf16.h>

// inner = act(gate) * up for ends[last] picks; `both` [picks, 2 * width] has the gates first.
extern "C" __global__ void activate(const __nv_bfloat16* both, __nv_bfloat16* inner, const int* ends, int last,
                                    int width) {
    const size_t pairs = static_cast<size_t>(ends[last]) * (width / 2);
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        const size_t row = i / (width / 2), column = i % (width / 2) * 2;
        const __nv_bfloat16* from = both + row * 2 * width + column;
        const float2 gate = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
        const float2 up = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + width));
        *reinterpret_cast<__nv_bfloat162*>(inner + row * width + column) =
            __floats2bfloat162_rn(activated(gate.x) * up.x, activated(gate.y) * up.y);
    }
}

// The weighted sum of each row's answers [picks, hidden], the best expert first. blockIdx.x: the row.
// places [rows, used]: the place of a pick's answer among all sorted picks; `answers` begins at place
// *start (null: 0). Only picks of experts first .. last are summed; the answers of others are elsewhere.
extern "C" __global__ void combine(const __nv_bfloat16* answers, const long long* places, const int* start,
                                   const int* ids, int first, int last, const float* weights, int used, int hidden,
                                   const float* residual, const float* shared_out, const float* logits, int stride,
                                   float* out) {
    const int row = blockIdx.x;
    const long long before = start ? *start : 0;
    const Addends addends{residual, shared_out, logits, stride};
    for (int column = threadIdx.x * 2; column < hidden; column += blockDim.x * 2) {
        float2 sum = make_float2(0, 0);
        for (int j = 0; j < used; ++j) {
            const int pick = row * used + j;
            if (ids[pick] < first || ids[pick] > last) continue;
            const float2 answer = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
                answers + (places[pick] - before) * hidden + column));
            sum = make_float2(fmaf(weights[pick], answer.x, sum.x), fmaf(weights[pick], answer.y, sum.y));
        }
        const size_t at = static_cast<size_t>(row) * hidden + column;
        out[at] = addends.add(sum.x, row, at);
        out[at + 1] = addends.add(sum.y, row, at + 1);
    }
}
