// Parts of bf16 matrices on their way to the tensor cores: into shared memory while others are worked on,
// and from there to the lanes of a warp. For sm_80 and later.
#ifndef HEADROOM_ON_CPU
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
// Four matrices of 8 x 8 numbers: lane 8i + r brings the address of row r of matrix i, and lane 4r + c
// takes columns 2c and 2c + 1 of row r of each.
__device__ __forceinline__ void load_four(u32* to, const void* from) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(from));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
#endif
