// Parts of matrices of 16 bits on their way to the tensor cores: into shared memory while others are worked
// on (before sm_80 at once), and from there to the lanes of a warp.
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ < 800
// Copies that take their way through registers: what was asked for is there after a barrier.
__device__ __forceinline__ void end_group() {}
template <int N> __device__ __forceinline__ void await_groups() {}
#elif !defined(HEADROOM_ON_CPU)
// Asks for 16 bytes; the line they lie in comes near with them. Where they are not `there` zeros come.
__device__ __forceinline__ void ask16(void* to, const void* from, bool there) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
// All that was asked for since the last call is one group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N groups are there; other threads see them after a barrier.
template <int N> __device__ __forceinline__ void await_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif
// Asks for 16 bytes of each of COUNT places, to places `apart` bytes from each other; zeros where they are not
// `there`.
template <int COUNT>
__device__ __forceinline__ void ask_all(u8* to, int apart, const u16* const (&from)[COUNT], bool there) {
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ < 800
    uint4 words[COUNT];  // all are read before the first is written, so that they are under way together
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        words[i] = there ? *reinterpret_cast<const uint4*>(from[i]) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) *reinterpret_cast<uint4*>(to + i * apart) = words[i];
#else
#pragma unroll
    for (int i = 0; i < COUNT; ++i) ask16(to + i * apart, from[i], there);
#endif
}
#ifndef HEADROOM_ON_CPU
// Four matrices of 8 x 8 numbers: lane 8i + r brings the address of row r of matrix i, and lane 4r + c
// takes columns 2c and 2c + 1 of row r of each.
__device__ __forceinline__ void load_four(u32* to, const void* from) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
#endif
