// Kernels around attention: `merge` combines the partial results of a context's pieces (decode path),
// `gather` copies a sequence's keys or values out of their pages for dense products (prefill path). DIM:
// values of a head; PAGE: slots of a page.
// merge: BASE2: the pieces' scores are times log2(e), so that weights are powers of 2; GATE: 0 none, 1
// sigmoid, 2 softplus; GATE_PER_HEAD: one gate per head, else one per value.
// gather: KIND: type of the cache; OUT_KIND: F32, F16 or BF16.
#include "early.cuh"
#include "attention.cuh"

// Each kernel is compiled on its own; these are the values of defines that it does not use.
#ifndef BASE2
#define BASE2 0
#endif
#ifndef GATE
#define GATE 0
#define GATE_PER_HEAD 0
#endif
#ifndef KIND
#define KIND F32
#define OUT_KIND F32
#endif

#define CHUNK 64   // values of a head that one block merges
#define TEAMS 16   // teams of CHUNK / 4 threads; each team takes every TEAMS-th piece

__device__ __forceinline__ float power(float x) { return BASE2 ? exp2f(x) : expf(x); }
__device__ __forceinline__ float gate_of(float x) {
    if constexpr (GATE == 1) return 1.0f / (1.0f + expf(-x));
    return x > 20.0f ? x : log1pf(expf(x));
}

// Merges the pieces of each row and head to out [rows, heads * DIM], and applies the gate. blockIdx: the
// head, the row, the chunk. Padding rows become zeros.
extern "C" __global__ void __launch_bounds__(TEAMS * CHUNK / 4)
merge(const float* parts, const float2* stats, const int* sequence, const int* index, const int* starts,
      const float* gates, float* out, int gate_stride, int window, int pieces) {
    let_next_begin();
    __shared__ float4 shared[TEAMS][CHUNK / 4];
    __shared__ float2 shared_stats[TEAMS];
    const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x;
    const int team = threadIdx.x / (CHUNK / 4), d = blockIdx.z * CHUNK + threadIdx.x % (CHUNK / 4) * 4;
    const int s = sequence[row];
    const size_t head_of_all = static_cast<size_t>(row) * heads + head;
    const int first = piece_of(first_seen(s < 0 ? 0 : starts[s], window)), last = piece_of(index[row]);
    wait_for_last();
    if (s < 0) {
        if (team == 0 && d < DIM) *reinterpret_cast<float4*>(out + head_of_all * DIM + d) = make_float4(0, 0, 0, 0);
        return;
    }
    const float2* stat = stats + head_of_all * pieces;
    const float* part = parts + head_of_all * pieces * DIM;
    float peak = LOWEST, total = 0;
    for (int p = first - first % TEAMS + team; p <= last; p += TEAMS)
        if (p >= first) peak = fmaxf(peak, stat[p].x);
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int p = first - first % TEAMS + team; p <= last; p += TEAMS) {
        if (p < first) continue;
        const float by = power(stat[p].x - peak);
        total += stat[p].y * by;
        if (d < DIM) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(part + static_cast<size_t>(p) * DIM + d));
            sum.x += x.x * by;
            sum.y += x.y * by;
            sum.z += x.z * by;
            sum.w += x.w * by;
        }
    }
    shared[team][threadIdx.x % (CHUNK / 4)] = sum;
    if (threadIdx.x % (CHUNK / 4) == 0) shared_stats[team] = make_float2(peak, total);
    __syncthreads();
    if (team != 0 || d >= DIM) return;
    for (int i = 1; i < TEAMS; ++i) peak = fmaxf(peak, shared_stats[i].x);
    sum = make_float4(0, 0, 0, 0);
    total = 0;
    for (int i = 0; i < TEAMS; ++i) {
        const float by = power(shared_stats[i].x - peak);
        const float4 x = shared[i][threadIdx.x];
        total += shared_stats[i].y * by;
        sum.x += x.x * by;
        sum.y += x.y * by;
        sum.z += x.z * by;
        sum.w += x.w * by;
    }
    float result[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
    if constexpr (GATE != 0)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            result[i] *= gate_of(gates[static_cast<size_t>(row) * gate_stride + (GATE_PER_HEAD ? head : head * DIM + d + i)]);
    *reinterpret_cast<float4*>(out + head_of_all * DIM + d) =
        make_float4(result[0], result[1], result[2], result[3]);
}

// Copies keys (or values) first .. first + count of one sequence to out [count, kv_heads, DIM]. blockIdx.x:
// the key; one warp per head.
extern "C" __global__ void gather(const u8* cache, const long long* pages, void* out, int first, int kv_heads) {
    const int key = first + blockIdx.x, lane = threadIdx.x % 32;
    const size_t slot = static_cast<size_t>(pages[key / PAGE]) * PAGE + key % PAGE;
    for (int kv = threadIdx.x / 32; kv < kv_heads; kv += blockDim.x / 32) {
        const u8* row = cache + (slot * kv_heads + kv) * row_bytes(KIND, DIM);
        const size_t at = (static_cast<size_t>(blockIdx.x) * kv_heads + kv) * DIM;
        for (int i = lane; i < DIM; i += 32) {
            const float x = value_at<KIND>(row, i);
            if constexpr (OUT_KIND == F32) static_cast<float*>(out)[at + i] = x;
            else if constexpr (OUT_KIND == F16) static_cast<__half*>(out)[at + i] = __float2half_rn(x);
            else static_cast<__nv_bfloat16*>(out)[at + i] = __float2bfloat16_rn(x);
        }
    }
}
