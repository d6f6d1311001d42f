// Operations of a warp on 16-bit matrices in shared memory: copy, load, transpose, multiply.
#include "types.cuh"
#include "mma.cuh"
#include <cuda_bf16.h>

#define HAS_BF16 (__CUDA_ARCH__ >= 800)  // tensor cores take bf16

template <bool BF> __device__ __forceinline__ u32 pack(float a, float b) {
    if constexpr (BF) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<const u32*>(&both);
    } else {
        const __half2 both = __floats2half2_rn(a, b);
        return *reinterpret_cast<const u32*>(&both);
    }
}
template <bool BF> __device__ __forceinline__ float2 unpack(u32 both) {
    if constexpr (BF) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&both));
    else return __half22float2(*reinterpret_cast<const __half2*>(&both));
}
// Reads eight bf16 numbers as floats; if not `there`, `to` is left as it is (zeros).
__device__ __forceinline__ void eight_of_bf16(const u8* from, bool there, float* to) {
    if (!there) return;
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(each[i] << 16);
        to[2 * i + 1] = __uint_as_float(each[i] & 0xFFFF0000u);
    }
}

template <bool BF> __device__ __forceinline__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {
#if HAS_BF16
    if constexpr (BF) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                     "{%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        return;
    }
#endif
    mma(c, a, b0, b1);
}

#ifndef HEADROOM_ON_CPU
// ldmatrix of four 8 x 8 matrices, transposed with TURN; lanes 8i .. 8i + 7 supply the rows of matrix i.
template <bool TURN> __device__ __forceinline__ void load_matrices(u32* to, const u16* from) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(from));
    if constexpr (TURN)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ u32 turn(u32 x) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(x));
    return turned;
}
#endif

// Copies to shared memory: asynchronous until awaited (cp.async), before sm_80 done at once.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void copy16(u16* to, const u8* from, bool there) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    const int bytes = there ? 16 : 0;  // the rest becomes zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#else
__device__ __forceinline__ void copy16(u16* to, const u8* from, bool there) {
    uint4 words = {0, 0, 0, 0};
    if (there) words = *reinterpret_cast<const uint4*>(from);
    *reinterpret_cast<uint4*>(to) = words;
}
__device__ __forceinline__ void end_copies() {}
template <int N> __device__ __forceinline__ void await_copies() {}
#endif
