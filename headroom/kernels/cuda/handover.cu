// Hands cold picks to the CPU from inside a captured step, and takes their answers back.
//
// `publish` runs after the router: it writes the request into a mailbox in pinned host memory and removes
// the picks from the GPU's own list. Then the GPU computes the hot experts. `collect` waits for the CPU's
// answer (native/cold.h, ColdWorker) and adds it. There is one request at a time: a layer's answers are
// collected before the next layer's router runs.
//
// The words of the mailbox: REQUEST, ANSWER (numbers of the last request and answer), LAYER, ROWS, DONE
// (steps that the GPU has finished), FAILED, IDS [rows, used], WEIGHTS [rows, used], INPUTS [rows, hidden].
// A second block of words, `own`, is in GPU memory and keeps its contents between steps.
#include "early.cuh"
typedef unsigned u32;
typedef unsigned long long u64;
#define ALL 0xFFFFFFFFu
#define MOST_ROWS 32  // one block has a warp for each row

// REQUESTS: number of the last request; STEPS: finished steps; LOST: 1 after the CPU has not answered in
// time; FIRST: the first row with cold picks; SINCE (two words): when the request was published, in ns;
// ASKED [rows]: the number of the request that a row waits for, 0 if it has no cold picks.
enum Own { REQUESTS = 0, STEPS = 1, LOST = 2, FIRST = 3, SINCE = 4, ASKED = 8 };
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

// Publishes a request for a row's cold picks. The first left[number of cold picks] of them stay with the
// GPU, which reads those experts from host memory; the CPU gets the others. Their ids become -1, so that
// later kernels of the step skip them. is_hot [experts]: 1 if an expert is in GPU memory. One block, a warp
// per row.
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
    if (number == 0) number = 1;  // 0 means "no request"; the number wraps after 2^32 requests
    __syncthreads();  // all threads have read the last number
    if (lane == 0) own[ASKED + row] = taken[row] ? number : 0;
    if (threadIdx.x == 0) {
        for (int r = 0; r < rows; ++r) counts[GPU_PICKS] += others[r];
        own[FIRST] = first;
        if (total) own[REQUESTS] = number;
        *reinterpret_cast<u64*>(own + SINCE) = now_ns();
    }
    if (!total) return;  // no cold picks: `collect` will not wait
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

// Waits for the layer's answers and adds them to `out`. blockIdx.x: the row. If the CPU does not answer
// within `limit_ms`, the GPU stops waiting for good and sets FAILED for the host. last: 1 in the step's
// last layer with cold experts.
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
                const float4 a = __ldcv(from + i), b = to[i];  // __ldcv: not from a cache, which may be stale
                to[i] = make_float4(b.x + a.x, b.y + a.y, b.z + a.z, b.w + a.w);
            }
        }
    }
    if (last && row == 0 && threadIdx.x == 0) store_release(mail + DONE, ++own[STEPS]);
}

// Drops cold picks and scales the weights of a row's hot picks so that their sum stays the same. A warp per
// row.
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

// Reads host memory, 16 bytes per thread at a time, to measure how fast kernels can do that.
extern "C" __global__ void read_all(const uint4* data, int pieces, u32* out) {
    u32 sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) {
        const uint4 v = __ldcs(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) *out = sum;  // uses `sum`, so that the compiler cannot drop the reads
}
