// One tensor-core product of a warp, in f16 with sums in f32. With g = lane / 4 and t = lane % 4 a lane
// holds of the first matrix rows g, g + 8, g, g + 8 in columns 2t, 2t, 2t + 8, 2t + 8 and the next, of
// the second the same columns for row g, and of the sums rows g, g, g + 8, g + 8 for rows 2t, 2t + 1.
// All lanes of a warp must reach one together: none may be moved to where only some of them go.
// Where tensor cores take eight columns at a time, the second eight are added to the sums of the first.
#ifndef HEADROOM_ON_CPU
__device__ __forceinline__ void mma_k8(float* c, u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
#if __CUDA_ARCH__ >= 800
// The same of bf16.
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
