// What steps of few rows and of many share of routed experts. GELU: the activation, else silu.
__device__ __forceinline__ float activated(float x) {
#if GELU
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
#else
    return x / (1.0f + __expf(-x));
#endif
}

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
