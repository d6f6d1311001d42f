// Enough of CUDA to run a kernel on a CPU: one fiber for each thread of a block, blocks in turn.
#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(...)
#define __CUDA_ARCH__ 750
#define HEADROOM_ON_CPU  // a source leaves out its assembly

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
typedef _Float16 __half;
struct __half2 { __half x, y; };
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(64) float shared[1 << 16];  // dynamic shared memory goes by one of these names in every kernel
extern uint4 memory[1 << 14] __attribute__((alias("shared")));

enum State { RUNS, AT_WARP, AT_BLOCK, DONE };
struct Fiber {
    ucontext_t start;
    jmp_buf place;  // where it waits: unlike swapcontext, a jump asks the system for nothing
    std::vector<char> stack = std::vector<char>(1 << 16);
    State state;
    bool started = false;
};
static std::vector<Fiber*> fibers;
static jmp_buf scheduler;
static int current;
static uint64_t exchanged[1024];

static void wait_as(State state) {
    Fiber* fiber = fibers[current];
    fiber->state = state;
    if (!_setjmp(fiber->place)) _longjmp(scheduler, 1);
}
static void resume(Fiber* fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->place, 1);
    fiber->started = true;
    setcontext(&fiber->start);
}
static void __syncthreads() { wait_as(AT_BLOCK); }
static void __syncwarp() { wait_as(AT_WARP); }

// Every lane of a warp that still runs must take part, as on a GPU.
template <class T> T lane_value(T value, int lane) {
    const int me = current;
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof value);
    exchanged[me] = raw;
    wait_as(AT_WARP);
    raw = exchanged[me / 32 * 32 + lane];
    wait_as(AT_WARP);
    memcpy(&value, &raw, sizeof value);
    return value;
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return lane_value(v, current % 32 ^ mask); }
template <class T> T __shfl_sync(unsigned, T v, int lane) { return lane_value(v, lane & 31); }
template <class T> T __shfl_up_sync(unsigned, T v, int by) {
    return lane_value(v, current % 32 >= by ? current % 32 - by : current % 32);
}

template <class T> T __shfl_down_sync(unsigned, T v, int by) {
    return lane_value(v, current % 32 + by < 32 ? current % 32 + by : current % 32);
}
static unsigned __ballot_sync(unsigned, bool mine) {
    unsigned found = 0;
    exchanged[current] = mine;
    wait_as(AT_WARP);
    for (int lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(exchanged[current / 32 * 32 + lane]) << lane;
    wait_as(AT_WARP);
    return found;
}
static unsigned __match_any_sync(unsigned, int mine) {
    unsigned found = 0;
    exchanged[current] = mine;
    wait_as(AT_WARP);
    for (int lane = 0; lane < 32; ++lane)
        found |= static_cast<unsigned>(static_cast<int>(exchanged[current / 32 * 32 + lane]) == mine) << lane;
    wait_as(AT_WARP);
    return found;
}
static bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine); }
static int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }

static int atomicMin(int* at, int value) {
    const int old = *at;
    *at = min(old, value);
    return old;
}
template <class T> T atomicExch(T* at, T value) {
    const T old = *at;
    *at = value;
    return old;
}
template <class T> T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}

#define __expf expf  // the C library has a function of that name
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
using std::isinf;
static int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcv(const T* at) { return *at; }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const uint64_t both = a | static_cast<uint64_t>(b) << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i)
        found |= static_cast<unsigned>(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
static float __half2float(__half h) { return static_cast<float>(h); }
static __half __float2half_rn(float x) { return static_cast<__half>(x); }
static __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
static __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
// A double holds every product and sum of the kernels exactly, so that one rounding is left.
static __half rounded(double x) { return static_cast<__half>(x); }
static __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {rounded(double(a.x) * double(b.x) + double(c.x)), rounded(double(a.y) * double(b.y) + double(c.y))};
}
static __half2 __hmul2(__half2 a, __half2 b) { return __hfma2(a, b, {0, 0}); }
static __half2 __hadd2(__half2 a, __half2 b) { return __hfma2(a, {1, 1}, b); }
static float2 __half22float2(__half2 h) { return {static_cast<float>(h.x), static_cast<float>(h.y)}; }
static float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float(b.bits << 16); }
static __nv_bfloat16 __float2bfloat16(float x) {
    const unsigned bits = __float_as_uint(x);
    return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
static __nv_bfloat16 __float2bfloat16_rn(float x) { return __float2bfloat16(x); }
static float2 __bfloat1622float2(__nv_bfloat162 b) { return {__bfloat162float(b.x), __bfloat162float(b.y)}; }
static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16(x), __float2bfloat16(y)};
}

// mma.cuh: the lanes bring their parts of two matrices of f16, and take their sums.
static __half matrices[32][2][16][8];  // of each warp: 16 rows, then 8
static void mma_k8(float* c, unsigned a0, unsigned a1, unsigned b) {
    const int me = current % 32, g = me / 4, t = me % 4;
    auto& mine = matrices[current / 32];
    memcpy(&mine[0][g][2 * t], &a0, 4);
    memcpy(&mine[0][g + 8][2 * t], &a1, 4);
    memcpy(&mine[1][g][2 * t], &b, 4);
    wait_as(AT_WARP);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 8; ++k)
            c[i] += static_cast<float>(mine[0][g + i / 2 * 8][k]) * static_cast<float>(mine[1][2 * t + i % 2][k]);
    wait_as(AT_WARP);
}

// fragments.cuh: copies come as late as they may, and what was at their places is gone when they are asked
// for, so that a part that is read too early or too late has no numbers.
struct Copy {
    void* to;
    const void* from;  // null: zeros
};
static std::vector<std::vector<Copy>> groups[1024];  // of each thread; the last one is still open
static void ask16(void* to, const void* from, bool there) {
    if (groups[current].empty()) groups[current].emplace_back();
    groups[current].back().push_back({to, there ? from : nullptr});
    memset(to, 255, 16);
}
static void end_group() {
    if (groups[current].empty()) groups[current].emplace_back();
    groups[current].emplace_back();
}
template <int N> void await_groups() {
    auto& mine = groups[current];
    for (; mine.size() > N + 1; mine.erase(mine.begin()))
        for (const Copy& copy : mine.front())
            if (copy.from) memcpy(copy.to, copy.from, 16);
            else memset(copy.to, 0, 16);
}
static void load_four(unsigned* to, const void* from) {
    const int lane = current % 32;
    exchanged[current] = reinterpret_cast<uint64_t>(from);
    wait_as(AT_WARP);
    for (int i = 0; i < 4; ++i) {
        const uint64_t row = exchanged[current - lane + 8 * i + lane / 4];
        memcpy(to + i, reinterpret_cast<const char*>(row) + lane % 4 * 4, 4);
    }
    wait_as(AT_WARP);
}
static void mma_bf16(float* c, const unsigned* a, const unsigned* b) {
    static float all[32][24][16];  // of each warp: 16 rows, then 8
    const int me = current % 32, g = me / 4, t = me % 4;
    auto& mine = all[current / 32];
    const auto put = [&](int row, int column, unsigned word) {
        mine[row][column] = __uint_as_float(word << 16);
        mine[row][column + 1] = __uint_as_float(word & 0xFFFF0000u);
    };
    for (int i = 0; i < 4; ++i) put(g + i % 2 * 8, 2 * t + i / 2 * 8, a[i]);
    for (int i = 0; i < 2; ++i) put(16 + g, 2 * t + i * 8, b[i]);
    wait_as(AT_WARP);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) c[i] += mine[g + i / 2 * 8][k] * mine[16 + 2 * t + i % 2][k];
    wait_as(AT_WARP);
}

// matrices.cuh: each lane says where a row of eight is, and takes two neighbours of each matrix.
static const uint16_t* places[32][32];
template <bool TURN> void load_matrices(unsigned* to, const uint16_t* from) {
    const int me = current % 32, g = me / 4, t = me % 4;
    const auto* mine = places[current / 32];
    places[current / 32][me] = from;
    wait_as(AT_WARP);
    for (int i = 0; i < 4; ++i) {
        const auto* rows = mine + 8 * i;
        to[i] = TURN ? rows[2 * t][g] | rows[2 * t + 1][g] << 16 : rows[g][2 * t] | rows[g][2 * t + 1] << 16;
    }
    wait_as(AT_WARP);
}
static unsigned turn(unsigned x) {
    const int me = current % 32, g = me / 4, t = me % 4;
    static uint16_t held[32][8][8];  // of each warp
    auto& mine = held[current / 32];
    memcpy(&mine[g][2 * t], &x, 4);
    wait_as(AT_WARP);
    const unsigned turned = mine[2 * t][g] | mine[2 * t + 1][g] << 16;
    wait_as(AT_WARP);
    return turned;
}

// handover.cu: the words that a thread of the host writes, and a clock.
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static void __threadfence_system() { __threadfence(); }
static unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static void store_release(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
static unsigned long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
static void rest() { sched_yield(); }

static void (*body)(void*);
static void* body_call;
static void fiber_main() {
    for (;;) {  // once for each block
        body(body_call);
        wait_as(DONE);
    }
}
static Fiber* new_fiber() {
    Fiber* fiber = new Fiber;
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.data();
    fiber->start.uc_stack.ss_size = fiber->stack.size();
    makecontext(&fiber->start, fiber_main, 0);
    return fiber;
}

// Runs a warp until each of its threads is done or waits for the block.
static void run_warp(int first, int end) {
    for (bool again = true; again;) {
        int at_warp = 0, at_block = 0;
        for (int i = first; i < end; ++i) {
            if (fibers[i]->state == RUNS) {
                current = i;
                threadIdx = {static_cast<unsigned>(i), 0, 0};
                resume(fibers[i]);
            }
            at_warp += fibers[i]->state == AT_WARP;
            at_block += fibers[i]->state == AT_BLOCK;
        }
        if (at_warp && at_block) {
            fprintf(stderr, "threads of one warp wait in different places\n");
            abort();
        }
        again = at_warp > 0;
        for (int i = first; i < end; ++i)
            if (fibers[i]->state == AT_WARP) fibers[i]->state = RUNS;
    }
}

static void run_block(int threads) {
    while (static_cast<int>(fibers.size()) < threads) fibers.push_back(new_fiber());
    for (int i = 0; i < threads; ++i) {
        fibers[i]->state = RUNS;
        groups[i].clear();
    }
    for (int done = 0; done < threads;) {
        for (int first = 0; first < threads; first += 32) run_warp(first, min(first + 32, threads));
        done = 0;
        for (int i = 0; i < threads; ++i) {
            done += fibers[i]->state == DONE;
            if (fibers[i]->state == AT_BLOCK) fibers[i]->state = RUNS;
        }
    }
}

template <class... A> struct Call {
    void (*kernel)(A...);
    void** args;
    template <size_t... I> void with(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<A>*>(args[I])...);
    }
    static void enter(void* call) { static_cast<Call*>(call)->with(std::index_sequence_for<A...>()); }
};

template <class... A> void launch(void (*kernel)(A...), const int* grid, int threads, void** args) {
    Call<A...> call{kernel, args};
    body = Call<A...>::enter;
    body_call = &call;
    gridDim = {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])};
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    for (unsigned z = 0; z < gridDim.z; ++z)
        for (unsigned y = 0; y < gridDim.y; ++y)
            for (unsigned x = 0; x < gridDim.x; ++x) {
                blockIdx = {x, y, z};
                std::fill(std::begin(shared), std::end(shared), NAN);  // nothing may rely on zeros
                run_block(threads);
            }
}
