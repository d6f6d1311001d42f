// Kernels that start while the one before them still runs out, where the GPU can do that.
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 900
#define EARLY 1  // kernels may start while the one before runs out
#else
#define EARLY 0
#endif

// Lets the next kernel of the stream begin, and waits for the one before; nothing before the wait may
// read what another kernel of the same step writes. What earlier steps wrote, and a step's tables, are there:
// the first kernel of a step, of the embedding, does not start early.
__device__ __forceinline__ void let_next_begin() {
#if EARLY
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if EARLY
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Both at once, for kernels that have nothing to do before.
__device__ __forceinline__ void begin_after_last() {
    let_next_begin();
    wait_for_last();
}
