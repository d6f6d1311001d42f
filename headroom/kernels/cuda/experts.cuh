// What steps of few rows and of many share of routed experts. GELU: the activation, else silu.
#include "common.cuh"

__device__ __forceinline__ float activated(float x) { return GELU ? gelu(x) : silu(x); }

// What every row gets besides its experts; null where there is none.
struct Others {
    const float* residual;  // [rows, hidden]
    const float* visited;   // [rows, hidden]: of the expert that every row visits
    const float* logits;    // of that expert's weight, `stride` apart
    int stride;

    __device__ __forceinline__ float add(float x, int row, size_t at) const {
        if (visited) x += visited[at] * (logits ? 1.0f / (1.0f + expf(-logits[row * stride])) : 1.0f);
        return residual ? residual[at] + x : x;
    }
};
