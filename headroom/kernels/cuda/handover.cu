// Hands cold picks to the CPU from inside a captured step, and takes their answers back.
//
// `resolve` (expert_cache.cu) runs after the router: it writes the request into a mailbox in pinned host memory
// and removes the picks from the GPU's own list. Then the GPU computes its experts. `collect` waits for the
// CPU's answer (native/cold.h, ColdWorker) and adds it. There is one request at a time: a layer's answers are
// collected before the next layer's router runs.
//
// The words of the mailbox: REQUEST, ANSWER (numbers of the last request and answer; behind ANSWER stands how
// many ns the CPU took from seeing the request to answering it), LAYER, ROWS, DONE
// (steps that the GPU has finished), FAILED, IDS [rows, used], WEIGHTS [rows, used], INPUTS [rows, hidden].
// A second block of words, `own`, is in GPU memory and keeps its contents between steps.
#include "early.cuh"
#include "mailbox.cuh"
#define ALL 0xFFFFFFFFu

// REQUESTS: number of the last request; STEPS: finished steps; LOST: 1 after the CPU has not answered in
// time; FIRST: the first row with cold picks; SINCE (two words): when the request was published, in ns;
// ASKED [rows]: the number of the request that a row waits for, 0 if it has no picks for the CPU.
enum Own { REQUESTS = 0, STEPS = 1, LOST = 2, FIRST = 3, SINCE = 4, ASKED = 8 };
// LATES: requests whose answer the GPU had to wait for; LATE_NS: of these, the time from the request to the
// answer without the CPU's own time.
enum Count { HOT_NS = 0, WAIT_NS = 1, GPU_PICKS = 2, LATE_NS = 3, LATES = 4 };

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
            bool late = false;
            while (there && load_acquire(mail + ANSWER) != number) {
                late = true;
                rest();
                if (now_ns() - start > limit_ms * 1000000ull) {
                    there = false;
                    own[LOST] = 1;
                    store_release(mail + FAILED, 1);
                }
            }
            if (row == static_cast<int>(own[FIRST])) {
                const u64 since = *reinterpret_cast<const u64*>(own + SINCE), now = now_ns();
                counts[HOT_NS] += start - since;
                counts[WAIT_NS] += now - start;
                if (there && late) {
                    const u64 busy = load_acquire(mail + ANSWER + 1);
                    counts[LATE_NS] += now - since > busy ? now - since - busy : 0;
                    counts[LATES] += 1;
                }
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
