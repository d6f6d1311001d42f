// Loading of 16-bit matrices for the tensor cores: asynchronous copies into shared memory (cp.async; before
// sm_80 ordinary loads and stores), and ldmatrix from there into the registers of a warp.
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ < 800
// Without cp.async the copies are ordinary stores: other threads see them after a barrier.
__device__ __forceinline__ void end_group() {}
template <int N> __device__ __forceinline__ void await_groups() {}
#elif !defined(HEADROOM_ON_CPU)
// Starts a copy of 16 bytes, and prefetches their 128-byte line into L2. If not `there`, zeros are written.
__device__ __forceinline__ void ask16(void* to, const void* from, bool there) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    const int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
// Makes all copies that were started since the last call one group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N groups have arrived; other threads see them after a barrier.
template <int N> __device__ __forceinline__ void await_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif
// Starts copies of 16 bytes from each of COUNT addresses to places `apart` bytes from each other; if not
// `there`, zeros are written.
template <int COUNT>
__device__ __forceinline__ void ask_all(u8* to, int apart, const u16* const (&from)[COUNT], bool there) {
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ < 800
    uint4 words[COUNT];  // all loads before the first store, so that they are in flight together
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
// ldmatrix of four 8 x 8 matrices: lane 8i + r supplies the address of row r of matrix i; lane 4r + c
// receives columns 2c and 2c + 1 of row r of each.
__device__ __forceinline__ void load_four(u32* to, const void* from) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
#endif
