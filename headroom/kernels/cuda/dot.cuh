// One row of activations with sixteen rows of a packed weight: a lane multiplies what it holds, so
// that no tensor core works on seven empty rows.
#include "tiles.cuh"

// A row of activations in 8 bits; layouts as in struct Rows of matmul.cu.
struct Row {
    const u8* values;    // [record][t][block][2 words]
    const float* scales; // [block], each `step` after the one before
    int step;
};

__device__ __forceinline__ Row row_of(const u8* values, const float* scales, int row, int records, int group) {
    return Row{values + static_cast<size_t>(row) * records * 256,
               scales + static_cast<size_t>(row / group) * records * 8 * group + row % group, group};
}

// A lane's share of a record: sums for rows g and g + 8 over its columns.
template <int K> struct Share {
    Quants<K> quants;
    Scales<K> scales;

    __device__ __forceinline__ void load(const u8* record, int lane) {
        quants.load(record, lane);
        scales.load(record, lane / 4);
    }

    __device__ __forceinline__ float2 dot(const Row& x, int r, int lane) const {
        const uint4* words = reinterpret_cast<const uint4*>(x.values + r * 256 + lane % 4 * 64);
        float2 sum = make_float2(0, 0), under = make_float2(0, 0);
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            const uint4 both = words[b / 2];
            const int b0 = b % 2 ? both.z : both.x, b1 = b % 2 ? both.w : both.y;
            const float by = x.scales[(r * 8 + b) * x.step];
            u32 a[4];
            float2 scale, low = make_float2(0, 0), second;
            quants.block(b, a);
            scales.block(b, scale, low, second);
            if constexpr (K == Q6_K) {
                const int s0 = -32 * __dp4a(0x01010101, b0, 0), s1 = -32 * __dp4a(0x01010101, b1, 0);
                sum.x = fmaf(by, scale.x * __dp4a(static_cast<int>(a[0]), b0, s0) +
                                     second.x * __dp4a(static_cast<int>(a[2]), b1, s1), sum.x);
                sum.y = fmaf(by, scale.y * __dp4a(static_cast<int>(a[1]), b0, s0) +
                                     second.y * __dp4a(static_cast<int>(a[3]), b1, s1), sum.y);
                continue;
            }
            int offset = 0;
            if constexpr (has_min(K) || offset_of(K) != 0)
                offset = __dp4a(0x01010101, b0, __dp4a(0x01010101, b1, 0));
            const int start = offset_of(K) != 0 ? -static_cast<int>(offset_of(K)) * offset : 0;
            const int c0 = __dp4a(static_cast<int>(a[0]), b0, __dp4a(static_cast<int>(a[2]), b1, start));
            const int c1 = __dp4a(static_cast<int>(a[1]), b0, __dp4a(static_cast<int>(a[3]), b1, start));
            sum.x = fmaf(by * scale.x, static_cast<float>(c0), sum.x);
            sum.y = fmaf(by * scale.y, static_cast<float>(c1), sum.y);
            if constexpr (has_min(K)) {
                under.x = fmaf(by * low.x, static_cast<float>(offset), under.x);
                under.y = fmaf(by * low.y, static_cast<float>(offset), under.y);
            }
        }
        if constexpr (has_groups(K))
            return make_float2(scales.outer.x * sum.x - scales.outer_min.x * under.x,
                               scales.outer.y * sum.y - scales.outer_min.y * under.y);
        if constexpr (K == Q6_K) return make_float2(scales.outer.x * sum.x, scales.outer.y * sum.y);
        return make_float2(sum.x + under.x, sum.y + under.y);
    }
};

// Records `first`, first + step, ... of a tile, the next asked for before the work on one begins.
template <int K>
__device__ __forceinline__ float2 dot_records(const u8* tile, const Row& x, int first, int step, int records) {
    const int lane = threadIdx.x % 32;
    float2 sum = make_float2(0, 0);
    Share<K> share, next;
    if (first < records) next.load(tile + static_cast<size_t>(first) * Record<K>::bytes, lane);
    for (int r = first; r < records; r += step) {
        share = next;
        if (r + step < records) next.load(tile + static_cast<size_t>(r + step) * Record<K>::bytes, lane);
        const float2 more = share.dot(x, r, lane);
        sum = make_float2(sum.x + more.x, sum.y + more.y);
    }
    return sum;
}

// The same without asking ahead: where many warps share a processor, others work while one waits.
template <int K>
__device__ __forceinline__ float2 dot_plain(const u8* tile, const Row& x, int first, int step, int records) {
    const int lane = threadIdx.x % 32;
    float2 sum = make_float2(0, 0);
    for (int r = first; r < records; r += step) {
        Share<K> share;
        share.load(tile + static_cast<size_t>(r) * Record<K>::bytes, lane);
        const float2 more = share.dot(x, r, lane);
        sum = make_float2(sum.x + more.x, sum.y + more.y);
    }
    return sum;
}

// The lanes' sums of rows g and g + 8 to `out [16]`.
__device__ __forceinline__ void gather_lanes(float2 sum, float* out) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        sum.x += __shfl_xor_sync(0xFFFFFFFFu, sum.x, o);
        sum.y += __shfl_xor_sync(0xFFFFFFFFu, sum.y, o);
    }
    if (lane % 4 == 0) {
        out[lane / 4] = sum.x;
        out[lane / 4 + 8] = sum.y;
    }
}
