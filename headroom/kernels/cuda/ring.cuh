// Ring: a warp's ring buffer of records in shared memory, filled by asynchronous copies well ahead of use.
#include "early.cuh"

#ifndef HEADROOM_ON_CPU
__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}
#endif
#ifndef BULK  // copy records with cp.async.bulk (one lane copies a whole record), else 16 bytes per lane
#define BULK EARLY
#endif

#if BULK
__device__ __forceinline__ void set_barrier(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Bulk copies use the async proxy: a fence makes barriers that ordinary stores have initialised visible to
// it.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_bulk(u8* to, const u8* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Waits until the phase number `turn` of a barrier is complete; the first phase is 0.
__device__ __forceinline__ void wait_barrier(u64* barrier, int turn) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(turn & 1) : "memory");
}
#endif

// One warp's ring of DEPTH stages. A stage holds COUNT records of SIZE bytes, which are `apart` bytes from
// each other in global memory.
template <int DEPTH, int COUNT, int SIZE> struct Ring {
    u8* memory;
    u64* full;  // [DEPTH] barriers
    int lane;

    __device__ __forceinline__ void begin() {
#if BULK
        if (lane == 0) {
            for (int i = 0; i < DEPTH; ++i) set_barrier(full + i, 1);
            show_barriers();
        }
        __syncwarp();
#endif
    }
    // Starts to fill a stage; a null `from` copies nothing. __syncwarp makes sure that all lanes have read
    // what the stage held before, since a copy does not wait for loads in flight.
    __device__ __forceinline__ void ask(int stage, const u8* from, size_t apart) {
        u8* to = memory + stage * COUNT * SIZE;
        __syncwarp();
#if BULK
        if (lane != 0 || from == nullptr) return;
        expect(full + stage, COUNT * SIZE);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) copy_bulk(to + i * SIZE, from + i * apart, SIZE, full + stage);
#elif !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 800
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            for (int at = lane * 16; from != nullptr && at < SIZE; at += 512)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i * SIZE + at)),
                             "l"(from + i * apart + at) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
#else
        if (from != nullptr) load(to, from, apart);
#endif
    }
#if !BULK && (defined(HEADROOM_ON_CPU) || __CUDA_ARCH__ < 800)
    // Copies through registers: all loads before the first store, so that they are in flight together.
    __device__ __forceinline__ void load(u8* to, const u8* from, size_t apart) {
        constexpr int each = (SIZE + 511) / 512;
        uint4 words[COUNT * each];
#pragma unroll
        for (int i = 0; i < COUNT * each; ++i)
            if (const int at = i % each * 512 + lane * 16; at < SIZE)
                words[i] = *reinterpret_cast<const uint4*>(from + i / each * apart + at);
#pragma unroll
        for (int i = 0; i < COUNT * each; ++i)
            if (const int at = i % each * 512 + lane * 16; at < SIZE)
                *reinterpret_cast<uint4*>(to + i / each * SIZE + at) = words[i];
    }
#endif
    // Waits for a stage and returns its address; `turn` counts how often it was filled before.
    __device__ __forceinline__ const u8* wait(int stage, int turn) const {
#if BULK
        wait_barrier(full + stage, turn);
#else
#if !defined(HEADROOM_ON_CPU) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#endif
        __syncwarp();
#endif
        return memory + stage * COUNT * SIZE;
    }
};
