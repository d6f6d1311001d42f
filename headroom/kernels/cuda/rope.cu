// Norms of heads, rotary embedding, and writing of new keys and values to the KV cache, in one pass.
// DIM: values of a head; HALF: rotary pairs; K_KIND, V_KIND: types of the cache; Q_BF16: queries are
// written in bf16, else in f32. One warp per head: query heads, then key heads, then value heads.
#include "early.cuh"
#include "rows.cuh"

#define WARPS 4
#define OWN(count) (((count) + 31) / 32)  // how many of `count` values a lane holds


__device__ __forceinline__ float inverse_of(float step) {
    const float inverse = __fdiv_rn(1.0f, step);
    return isinf(inverse) ? 0.0f : inverse;
}
__device__ __forceinline__ void put_half(u8* at, float scale) {
    *reinterpret_cast<__half*>(at) = __float2half_rn(fminf(fmaxf(scale, -65504.0f), 65504.0f));
}

// Quantises and stores one block of 32 values, one per lane.
template <int K> __device__ __forceinline__ void put_block(u8* to, float x, int lane) {
    if constexpr (K == Q8_0) {
        const float step = __fdiv_rn(warp_max(fabsf(x)), 127.0f);
        const float scaled = __fmul_rn(x, inverse_of(step)), whole = truncf(scaled);
        const float rounded = whole + truncf(2 * (scaled - whole));  // halves go away from zero
        if (lane == 0) put_half(to, step);
        to[2 + lane] = static_cast<u8>(static_cast<int>(fminf(fmaxf(rounded, -127.0f), 127.0f)));
        return;
    }
    int value;
    if constexpr (K == Q4_0 || K == Q5_0) {
        // The value of largest magnitude becomes the lowest code: -8 or -16.
        constexpr int zero = K == Q5_0 ? 16 : 8;
        const float size = fabsf(x), largest = warp_max(size);
        const float peak = __shfl_sync(~0u, x, __ffs(__ballot_sync(~0u, size == largest)) - 1);
        const float step = __fdiv_rn(peak, static_cast<float>(-zero));
        const float raised = __fmaf_rn(x, inverse_of(step), zero + 0.5f);
        value = static_cast<int>(fminf(fmaxf(truncf(raised), 0.0f), 2.0f * zero - 1));
        if (lane == 0) put_half(to, step);
    } else {
        constexpr float top = K == Q5_1 ? 31 : 15;
        const float low = -warp_max(-x), high = warp_max(x);
        const float step = __fdiv_rn(__fsub_rn(high, low), top);
        const float raised = times_plus(__fsub_rn(x, low), inverse_of(step), 0.5f);
        value = static_cast<int>(fminf(fmaxf(truncf(raised), 0.0f), top));
        if (lane == 0) {
            put_half(to, step);
            put_half(to + 2, low);
        }
    }
    const u32 fifth = __ballot_sync(~0u, value >> 4 & 1);
    const int other = __shfl_down_sync(~0u, value, 16);
    if (has_fifth(K) && lane < 2)
        *reinterpret_cast<u16*>(to + (K == Q5_0 ? 2 : 4) + 2 * lane) = static_cast<u16>(fifth >> (16 * lane));
    if (lane < 16) to[nibbles_at(K) + lane] = static_cast<u8>((value & 15) | (other & 15) << 4);
}

template <int K> __device__ __forceinline__ void put_head(u8* to, const float* head, int lane) {
    for (int i = lane; i < DIM; i += 32) {
        const float x = head[i];
        if constexpr (K == F32) reinterpret_cast<float*>(to)[i] = x;
        else if constexpr (K == F16) reinterpret_cast<__half*>(to)[i] = __float2half_rn(x);
        else if constexpr (K == BF16) reinterpret_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(x);
        else put_block<K>(to + i / 32 * block_bytes(K), x, lane);
    }
}

// head = weight * head / sqrt(mean of squares + eps); a lane holds weight[lane], weight[lane + 32], ...
__device__ __forceinline__ void norm_head(float* head, const float* weight, float eps, int lane) {
    float squares = 0;
    for (int i = lane; i < DIM; i += 32) squares += head[i] * head[i];
    const float by = 1.0f / sqrtf(warp_sum(squares) / DIM + eps);
#pragma unroll
    for (int i = 0; i < OWN(DIM); ++i)
        if (const int at = i * 32 + lane; at < DIM) head[at] = __fmul_rn(weight[i], __fmul_rn(head[at], by));
    __syncwarp();
}

// blockIdx.x: WARPS heads; blockIdx.y: the row. Key and value heads come after the query heads; if k is
// null, there are none. Padding rows (sequence < 0) are skipped.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
rope_write(const float* q, const float* k, const float* v, const float* cos, const float* sin,
           const float* q_norm, const float* k_norm, const int* sequence, const long long* slots, u8* keys,
           u8* values, void* queries, int heads, int kv_heads, int q_stride, int k_stride, int v_stride,
           int norm_values, float eps, float scale) {
    let_next_begin();
    __shared__ float shared[WARPS][DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
    const int job = blockIdx.x * WARPS + warp, kv = (job - heads) % max(kv_heads, 1);
    const bool is_q = job < heads, is_v = job >= heads + kv_heads && !is_q;
    const bool there = sequence[row] >= 0 && job < heads + (k ? 2 * kv_heads : 0);
    const size_t place = static_cast<size_t>(slots[row]) * kv_heads + kv;
    const float* weight = is_q ? q_norm : is_v ? nullptr : k_norm;
    float own[OWN(DIM)];
#pragma unroll
    for (int i = 0; i < OWN(DIM); ++i) own[i] = weight && i * 32 + lane < DIM ? weight[i * 32 + lane] : 1.0f;
    wait_for_last();
    if (!there) return;
    const float* from = is_q ? q + static_cast<size_t>(row) * q_stride + job * DIM
                      : is_v ? v + static_cast<size_t>(row) * v_stride + kv * DIM
                             : k + static_cast<size_t>(row) * k_stride + kv * DIM;
    float* head = shared[warp];
    float turn[OWN(HALF)][2];  // cos and sin, loaded together with the head
#pragma unroll
    for (int i = 0; i < OWN(HALF); ++i)
        if (const int at = i * 32 + lane; !is_v && at < HALF)
            turn[i][0] = cos[row * HALF + at], turn[i][1] = sin[row * HALF + at];
#pragma unroll
    for (int i = 0; i < OWN(DIM); ++i)
        if (const int at = i * 32 + lane; at < DIM) head[at] = from[at];
    __syncwarp();
    if (weight || (is_v && norm_values)) norm_head(head, own, eps, lane);
    if (!is_v) {
#pragma unroll
        for (int i = 0; i < OWN(HALF); ++i)
            if (const int at = i * 32 + lane; at < HALF) {
                const float c = turn[i][0], s = turn[i][1], a = head[at], b = head[at + HALF];
                head[at] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
                head[at + HALF] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
            }
        __syncwarp();
    }
    if (is_q) {
        const size_t at = (static_cast<size_t>(row) * heads + job) * DIM;
        for (int i = lane; i < DIM; i += 32) {
            const float x = __fmul_rn(head[i], scale);
            if constexpr (Q_BF16) static_cast<__nv_bfloat16*>(queries)[at + i] = __float2bfloat16_rn(x);
            else static_cast<float*>(queries)[at + i] = x;
        }
        return;
    }
    if (is_v) put_head<V_KIND>(values + place * row_bytes(V_KIND, DIM), head, lane);
    else put_head<K_KIND>(keys + place * row_bytes(K_KIND, DIM), head, lane);
}
