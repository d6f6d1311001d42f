// Records on their way into shared memory: each warp has a ring of stages, asked for well ahead.
#ifndef HEADROOM_ON_CPU
__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}
#endif
#if defined(HEADROOM_ON_CPU) || __CUDA_ARCH__ < 900
#define BULK 0
#else
#define BULK 1
#endif

// Lets the next kernel of the stream begin, and waits for the one before; nothing before the wait may
// read what another kernel writes.
__device__ __forceinline__ void let_next_begin() {
#if BULK
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if BULK
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A stage holds COUNT pieces of SIZE bytes, `apart` bytes from each other in global memory.
template <int DEPTH, int COUNT, int SIZE> struct Ring {
    u8* memory;
    u64* full;  // [DEPTH] barriers
    int lane;

    __device__ __forceinline__ void begin() {
#if BULK
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i)
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(full + i)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
#endif
    }
    // All lanes have read what the stage held before. `from` null: nothing more to ask for.
    __device__ __forceinline__ void ask(int stage, const u8* from, size_t apart) {
        u8* to = memory + stage * COUNT * SIZE;
#if BULK
        __syncwarp();
        if (lane != 0 || from == nullptr) return;
        const u32 barrier = shared_address(full + stage);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(COUNT * SIZE)
                     : "memory");
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_address(to + i * SIZE)), "l"(from + i * apart), "r"(SIZE), "r"(barrier)
                         : "memory");
#else
        __syncwarp();
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            for (int at = lane * 16; from != nullptr && at < SIZE; at += 512) {
#if defined(HEADROOM_ON_CPU) || __CUDA_ARCH__ < 800
                *reinterpret_cast<uint4*>(to + i * SIZE + at) =
                    *reinterpret_cast<const uint4*>(from + i * apart + at);
#else
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i * SIZE + at)),
                             "l"(from + i * apart + at) : "memory");
#endif
            }
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
#endif
    }
    // Waits for a stage; `turn` counts how often it was filled before.
    __device__ __forceinline__ const u8* wait(int stage, int turn) const {
#if BULK
        const u32 barrier = shared_address(full + stage);
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(barrier), "r"(turn & 1) : "memory");
#else
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#endif
        __syncwarp();
#endif
        return memory + stage * COUNT * SIZE;
    }
};
