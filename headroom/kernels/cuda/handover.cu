// Cold experts handed to the CPU from inside a captured step, and their answers taken back.
// The mailbox is pinned host memory: one request at a time, since a layer's answers are taken before the
// next layer's router runs. Its words are REQUEST, ANSWER (numbers of requests), LAYER, ROWS, DONE (steps
// that have ended), FAILED, IDS [rows, used], WEIGHTS [rows, used] and INPUTS [rows, hidden].
// A second block of words, `own`, stays on the GPU and outlives steps.
#include "early.cuh"
typedef unsigned u32;
typedef unsigned long long u64;
#define ALL 0xFFFFFFFFu
#define MOST_ROWS 32  // a warp for each, in one block

enum Own { REQUESTS = 0, STEPS = 1, LOST = 2, FIRST = 3, SINCE = 4, ASKED = 8 };  // SINCE: two words
enum Count { HOT_NS = 0, WAIT_NS = 1, GPU_PICKS = 2 };

#ifndef HEADROOM_ON_CPU
__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void rest() { __nanosleep(64); }
#endif

// Asks the CPU for the picks that it takes: of a row's cold picks all but the first `left[their number]`,
// which the GPU reads in place. Their ids become -1, so that the kernels after this one pass them over.
// is_hot [experts]: 1 where an expert is in GPU memory. One block, a warp for each row.
extern "C" __global__ void __launch_bounds__(MOST_ROWS * 32)
publish(const float* x, int* ids, const float* weights, const int* is_hot, const int* left, int rows, int used,
        int hidden, int layer, u32* mail, u32* own, u64* counts) {
    begin_after_last();
    __shared__ int taken[MOST_ROWS], others[MOST_ROWS];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, pick = row * used + lane;
    const int expert = row < rows && lane < used ? ids[pick] : -1;
    const u32 cold = __ballot_sync(ALL, expert >= 0 && !is_hot[max(expert, 0)]);
    const int before = __popc(cold & ((1u << lane) - 1)), kept = left[__popc(cold)];
    const bool mine = (cold >> lane & 1) && before >= kept;
    if (lane == 0) {
        taken[row] = max(0, __popc(cold) - kept);
        others[row] = __popc(cold) - taken[row];
    }
    __syncthreads();
    int total = 0, first = rows;
    for (int r = rows - 1; r >= 0; --r)
        if (taken[r]) total += taken[r], first = r;
    u32 number = own[REQUESTS] + 1;
    if (number == 0) number = 1;  // after four thousand million requests
    __syncthreads();  // everyone has read the last number
    if (lane == 0) own[ASKED + row] = taken[row] ? number : 0;
    if (threadIdx.x == 0) {
        for (int r = 0; r < rows; ++r) counts[GPU_PICKS] += others[r];
        own[FIRST] = first;
        if (total) own[REQUESTS] = number;
        *reinterpret_cast<u64*>(own + SINCE) = now_ns();
    }
    if (!total) return;  // nobody will wait
    if (row < rows && lane < used) {
        if (mine) ids[pick] = -1;
        mail[IDS + pick] = mine ? expert : -1;
        reinterpret_cast<float*>(mail)[WEIGHTS + pick] = weights[pick];
    }
    if (threadIdx.x == 0) mail[LAYER] = layer, mail[ROWS] = rows;
    for (int r = first; r < rows; ++r) {
        if (!taken[r]) continue;
        const float4* from = reinterpret_cast<const float4*>(x + static_cast<size_t>(r) * hidden);
        float4* to = reinterpret_cast<float4*>(mail + INPUTS + static_cast<size_t>(r) * hidden);
        for (int i = threadIdx.x; i < hidden / 4; i += blockDim.x) to[i] = from[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release(mail + REQUEST, number);
}

// Waits for the answers of the layer and adds them to `out`. blockIdx.x: row. A CPU that does not answer
// within `limit_ms` is given up for good: FAILED tells the host. `last`: of a step's layers with cold experts.
extern "C" __global__ void collect(float* out, const float* answers, u32* mail, u32* own, u64* counts, int hidden,
                                   int limit_ms, int last) {
    begin_after_last();
    __shared__ bool there;
    const int row = blockIdx.x;
    const u32 number = own[ASKED + row];
    if (number) {
        if (threadIdx.x == 0) {
            const u64 start = now_ns();
            there = own[LOST] == 0;
            while (there && load_acquire(mail + ANSWER) != number) {
                rest();
                if (now_ns() - start > limit_ms * 1000000ull) {
                    there = false;
                    own[LOST] = 1;
                    store_release(mail + FAILED, 1);
                }
            }
            if (row == static_cast<int>(own[FIRST])) {
                counts[HOT_NS] += start - *reinterpret_cast<const u64*>(own + SINCE);
                counts[WAIT_NS] += now_ns() - start;
            }
        }
        __syncthreads();
        if (there) {
            const float4* from = reinterpret_cast<const float4*>(answers + static_cast<size_t>(row) * hidden);
            float4* to = reinterpret_cast<float4*>(out + static_cast<size_t>(row) * hidden);
            for (int i = threadIdx.x; i < hidden / 4; i += blockDim.x) {
                const float4 a = __ldcv(from + i), b = to[i];  // never what a cache had of an earlier layer
                to[i] = make_float4(b.x + a.x, b.y + a.y, b.z + a.z, b.w + a.w);
            }
        }
    }
    if (last && row == 0 && threadIdx.x == 0) store_release(mail + DONE, ++own[STEPS]);
}

// Leaves cold picks out: the weights of a row's others grow so that their sum stays. A warp for each row.
extern "C" __global__ void __launch_bounds__(128)
drop(int* ids, float* weights, const int* is_hot, int rows, int used) {
    begin_after_last();
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, pick = row * used + lane;
    if (row >= rows) return;
    const int expert = lane < used ? ids[pick] : -1;
    const bool kept = expert >= 0 && is_hot[max(expert, 0)];
    const float weight = expert >= 0 ? weights[pick] : 0.0f;
    float all = weight, rest = kept ? weight : 0.0f;
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        all += __shfl_xor_sync(ALL, all, o);
        rest += __shfl_xor_sync(ALL, rest, o);
    }
    if (lane >= used) return;
    ids[pick] = kept ? expert : -1;
    weights[pick] = kept && rest != 0.0f ? weight * (all / rest) : 0.0f;
}

// How fast kernels read host memory: every block reads its share, 16 bytes a thread at a time.
extern "C" __global__ void read_all(const uint4* data, int pieces, u32* out) {
    u32 sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) {
        const uint4 v = __ldcs(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) *out = sum;  // so that the reads are not left out
}
