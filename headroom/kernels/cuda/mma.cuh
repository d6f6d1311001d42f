// Tensor-core products of one warp (mma.sync m16n8k16): C [16, 8] += A [16, 16] * B [8, 16]^T, f16
// operands, f32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//
//   a[0..3]  two columns each of A: (row g, 2t), (row g + 8, 2t), (row g, 2t + 8), (row g + 8, 2t + 8)
//   b0, b1   two columns each of row g of B: 2t and 2t + 8
//   c[0..3]  sums: C (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1); C's columns are B's rows
//
// All lanes of a warp must execute a product together, so a product may not stand in a divergent branch.
// The asm is volatile so that the compiler does not move it into one. Before sm_80 a product has 8 columns
// (k8), and two of them are added.
#ifndef HEADROOM_ON_CPU
__device__ __forceinline__ void mma_k8(float* c, u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
#if __CUDA_ARCH__ >= 800
// The product with bf16 operands.
__device__ __forceinline__ void mma_bf16(float* c, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
#endif
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma_k8(c, a[0], a[1], b0);
    mma_k8(c, a[2], a[3], b1);
#endif
}
