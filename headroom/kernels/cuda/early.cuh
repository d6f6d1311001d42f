// Programmatic dependent launch (sm_90 and later): a kernel may start while the previous kernel of the
// stream still finishes, and prefetches its weights meanwhile. On other GPUs these functions do nothing.
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 900
#define EARLY 1  // this GPU has programmatic dependent launch
#else
#define EARLY 0
#endif

// let_next_begin allows the next kernel of the stream to start; wait_for_last waits until the previous one
// has finished. Before the wait a kernel may read only what no kernel of the same step writes: weights,
// tables of the step, and results of earlier steps. The first kernel of a step (the embedding) never starts
// early, so that all of these are complete.
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
// Both, for kernels that have nothing to prefetch.
__device__ __forceinline__ void begin_after_last() {
    let_next_begin();
    wait_for_last();
}
