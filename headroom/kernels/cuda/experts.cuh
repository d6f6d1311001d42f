// What the decode path and the prefill path of routed experts share. GELU: the activation is GELU, else
// silu.
#include "common.cuh"

__device__ __forceinline__ float activated(float x) { return GELU ? gelu(x) : silu(x); }

// What is added to the sum of a row's routed experts; null pointers where there is nothing.
struct Addends {
    const float* residual;    // [rows, hidden]
    const float* shared_out;  // [rows, hidden]: the shared expert's output
    const float* logits;      // the shared expert's gate logits, `stride` floats apart; null: its weight is 1
    int stride;

    __device__ __forceinline__ float add(float x, int row, size_t at) const {
        if (shared_out) x += shared_out[at] * (logits ? 1.0f / (1.0f + expf(-logits[row * stride])) : 1.0f);
        return residual ? residual[at] + x : x;
    }
};
