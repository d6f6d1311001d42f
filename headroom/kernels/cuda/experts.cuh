// What the decode path and the prefill path of routed experts share. GELU: the activation is GELU, else
// silu.
#include "common.cuh"

__device__ __forceinline__ float activated(float x) { return GELU ? gelu(x) : silu(x); }

// What is added to a row beside its routed experts; null pointers where there is none.
struct Others {
    const float* residual;  // [rows, hidden]
    const float* visited;   // [rows, hidden]: the shared expert's output
    const float* logits;    // the shared expert's gate logits, `stride` floats apart; null: its weight is 1
    int stride;

    __device__ __forceinline__ float add(float x, int row, size_t at) const {
        if (visited) x += visited[at] * (logits ? 1.0f / (1.0f + expf(-logits[row * stride])) : 1.0f);
        return residual ? residual[at] + x : x;
    }
};
