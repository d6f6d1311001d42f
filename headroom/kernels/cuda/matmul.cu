// Products of a few rows with packed weights on the tensor cores.
// KIND: the weight's type; TILES: groups of eight rows of activations, 1 to 4.
#include "dot.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef LOOK
#define LOOK 0
#endif

// Rows of activations, rounded to 8 bits with a scale per 32 columns, as lanes read them.
struct Rows {
    const u8* values;    // [row][record][t][block][2 words]
    const float* scales; // [row / 8][block][row % 8]
    const float* sums;   // the same: scale times the sum of the rounded values
    const float* halves; // [row / 8][block][2][row % 8]: the same of columns 0..15 and 16..31
};

__device__ __forceinline__ void mma32(int* c, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma16(int* c, u32 a0, u32 a1, u32 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// acc += c times the scales of two rows of the weight and two rows of activations.
__device__ __forceinline__ void add_scaled(float* acc, const int* c, float2 w, float2 x) {
    acc[0] = fmaf(static_cast<float>(c[0]), w.x * x.x, acc[0]);
    acc[1] = fmaf(static_cast<float>(c[1]), w.x * x.y, acc[1]);
    acc[2] = fmaf(static_cast<float>(c[2]), w.y * x.x, acc[2]);
    acc[3] = fmaf(static_cast<float>(c[3]), w.y * x.y, acc[3]);
}
__device__ __forceinline__ void add_low(float* acc, float2 w, float2 x) {
    acc[0] = fmaf(w.x, x.x, acc[0]);
    acc[1] = fmaf(w.x, x.y, acc[1]);
    acc[2] = fmaf(w.y, x.x, acc[2]);
    acc[3] = fmaf(w.y, x.y, acc[3]);
}

// One tile of sixteen rows of the weight times 8 * N rows of activations; each warp takes every
// WARPS-th record, and `acc` is what this lane has gathered: rows g, g, g + 8, g + 8 of the weight
// for rows 2t, 2t + 1, 2t, 2t + 1 of the activations.
template <int K, int N>
__device__ __forceinline__ void tile_product(const u8* tile, Rows x, int first_row, int rows, int records,
                                             float (*acc)[4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0;
    for (int r = warp; r < records; r += WARPS) {
        const u8* record = tile + static_cast<size_t>(r) * Record<K>::bytes;
        Quants<K> quants;
        Scales<K> scales;
        quants.load(record, lane);
        scales.load(record, g);
        float inner[N][4] = {}, under[N][4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            uint4 values[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int row = first_row + 8 * n + g;
                values[n] = row < rows
                    ? *reinterpret_cast<const uint4*>(
                          x.values + (static_cast<size_t>(row) * records + r) * 256 + t * 64 + pair * 16)
                    : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int b = 2 * pair + half;
                u32 a[4];
                float2 scale, low, second;
                quants.block(b, a);
                scales.block(b, scale, low, second);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const size_t at = (static_cast<size_t>(first_row / 8 + n) * records * 8 + r * 8 + b) * 8 + 2 * t;
                    const float2 by = *reinterpret_cast<const float2*>(x.scales + at);
                    const u32 b0 = half ? values[n].z : values[n].x, b1 = half ? values[n].w : values[n].y;
                    float* to = by_record(K) ? inner[n] : acc[n];
                    int c[4] = {0, 0, 0, 0};
                    if constexpr (K == Q6_K) {
                        const float* halves = x.halves + 2 * (at - 2 * t) + 2 * t;
                        mma16(c, a[0], a[1], b0);
                        add_scaled(to, c, scale, by);
                        add_low(to, low, *reinterpret_cast<const float2*>(halves));
                        int d[4] = {0, 0, 0, 0};
                        mma16(d, a[2], a[3], b1);
                        add_scaled(to, d, second, by);
                        add_low(to, make_float2(-32 * second.x, -32 * second.y),
                                *reinterpret_cast<const float2*>(halves + 8));
                    } else {
                        mma32(c, a, b0, b1);
                        add_scaled(to, c, scale, by);
                        if constexpr (has_min(K) || offset_of(K) != 0)
                            add_low(has_groups(K) ? under[n] : acc[n], low,
                                    *reinterpret_cast<const float2*>(x.sums + at));
                    }
                }
            }
        }
        if constexpr (by_record(K))
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[n][i] = fmaf(i < 2 ? scales.outer.x : scales.outer.y, inner[n][i], acc[n][i]);
                    if constexpr (has_groups(K))
                        acc[n][i] = fmaf(-(i < 2 ? scales.outer_min.x : scales.outer_min.y), under[n][i],
                                         acc[n][i]);
                }
    }
}

// Sums what the warps gathered, in their order: result [8 * N rows of activations][16].
template <int N> __device__ __forceinline__ void gather(const float (*acc)[4], float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            shared[(warp * 8 * N + 8 * n + 2 * t + i % 2) * 16 + g + i / 2 * 8] = acc[n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * N * 16; i += WARPS * 32) {
        float total = shared[i];
        for (int w = 1; w < WARPS; ++w) total += shared[w * 8 * N * 16 + i];
        shared[i] = total;
    }
    __syncthreads();
}

// Matrices of one type that share their input lie one after another, and each has an output of its
// own, up to four; `end` is one past its last column, counted over all of them.
// Each output [rows, its columns] = x times the weight's transpose, plus `add` of the same shape if
// there is one (then there is one output). blockIdx.x: the tile; blockIdx.y: the group of 8 * TILES
// rows of activations.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
product(const u8* weight, const u8* values, const float* scales, const float* sums, const float* halves,
        const float* add, float* out0, float* out1, float* out2, float* out3, int end0, int end1, int end2,
        int end3, int rows, int records) {
    __shared__ float shared[WARPS * 8 * TILES * 16];
    float acc[TILES][4];
    const int first = blockIdx.y * 8 * TILES;
    const u8* tile = weight + static_cast<size_t>(blockIdx.x) * records * Record<KIND>::bytes;
    tile_product<KIND, TILES>(tile, Rows{values, scales, sums, halves}, first, rows, records, acc);
    gather<TILES>(acc, shared);
    // All columns of a tile belong to one output: matrices are whole tiles, but for the last.
    const int column0 = blockIdx.x * 16;
    const int which = (column0 >= end0) + (column0 >= end1) + (column0 >= end2);
    float* out = which == 0 ? out0 : which == 1 ? out1 : which == 2 ? out2 : out3;
    const int begin = which == 0 ? 0 : which == 1 ? end0 : which == 2 ? end1 : end2;
    const int end = which == 0 ? end0 : which == 1 ? end1 : which == 2 ? end2 : end3;
    for (int i = threadIdx.x; i < 8 * TILES * 16; i += WARPS * 32) {
        const int row = first + i / 16, column = column0 + i % 16;
        if (row >= rows || column >= end) continue;
        const size_t at = static_cast<size_t>(row) * (end - begin) + column - begin;
        out[at] = shared[i] + (add ? add[at] : 0.0f);
    }
}

// The same for one row of activations, whose scales lie `group` apart.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
product_one(const u8* weight, const u8* values, const float* scales, int group, const float* add, float* out0,
            float* out1, float* out2, float* out3, int end0, int end1, int end2, int end3, int records) {
    __shared__ float sums[WARPS][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u8* tile = weight + static_cast<size_t>(blockIdx.x) * records * Record<KIND>::bytes;
    const Row x = row_of(values, scales, 0, records, group);
    gather_lanes(LOOK ? dot_records<KIND>(tile, x, warp, WARPS, records) : dot_plain<KIND>(tile, x, warp, WARPS, records), sums[warp]);
    __syncthreads();
    if (threadIdx.x >= 16) return;
    float total = sums[0][lane];
    for (int w = 1; w < WARPS; ++w) total += sums[w][lane];
    const int column0 = blockIdx.x * 16, column = column0 + lane;
    const int which = (column0 >= end0) + (column0 >= end1) + (column0 >= end2);
    float* out = which == 0 ? out0 : which == 1 ? out1 : which == 2 ? out2 : out3;
    const int begin = which == 0 ? 0 : which == 1 ? end0 : which == 2 ? end1 : end2;
    const int end = which == 0 ? end0 : which == 1 ? end1 : which == 2 ? end2 : end3;
    if (column < end) out[column - begin] = total + (add ? add[column - begin] : 0.0f);
}
