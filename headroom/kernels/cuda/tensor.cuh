// Products of a packed weight's tile (16 rows) with rows of activations (pieces, halves.cuh) on the tensor
// cores.
//
// Quantised weights are whole numbers and become f16 operands. K types have whole-number scales per block,
// which are multiplied into the operands first, so that the tensor cores add up all blocks of a record. The
// result is exact in f16 for Q4_K and Q5_K (at most 31 x 63); for Q6_K (at most 32 x 128) it is rounded
// above 2048. The scales of other types are applied in f32 after each block.
#include "tiles.cuh"
#include "halves.cuh"
#include "mma.cuh"

// The factor from operands to values. Nibbles become subnormal f16 numbers, in steps of 2^-24, without any
// conversion: their bits are the operand.
__host__ __device__ constexpr float unit_of(int k) {
    return k == Q8_0 || k == IQ4_NL ? 1.0f : k == MXFP4 ? 32768.0f : 16777216.0f;
}
__host__ __device__ constexpr bool in_bytes(int k) { return k == Q8_0 || k == IQ4_NL; }

// Two columns of low nibbles and two of high nibbles as operands, with their high bits. The upper ones come
// out multiplied by sixteen.
template <int K> __device__ __forceinline__ void nibble_pairs(u32 word, u32 high, u32& lower, u32& upper) {
    lower = word & 0x000F000Fu;
    upper = word & 0x00F000F0u;
    if constexpr (one_high_bit(K)) {
        lower |= high << 4 & 0x00100010u;
        upper |= high << 7 & 0x01000100u;
    }
    if constexpr (K == Q6_K) {
        lower |= high << 4 & 0x00300030u;
        upper |= high << 6 & 0x03000300u;
    }
    if constexpr (K == MXFP4) {  // sign, exponent and mantissa moved to where f16 has them: value * 2^-14
        lower = (word << 12 & 0x80008000u) | (word << 9 & 0x0E000E00u);
        upper = (word << 8 & 0x80008000u) | (word << 5 & 0x0E000E00u);
        upper = as_word(__hmul2(as_halves(upper), as_halves(0x4C004C00u)));
    }
}
// Bytes 0 and 2, or 1 and 3 (odd), of a word as f16 operands; with `sixteen` multiplied by sixteen.
__device__ __forceinline__ u32 byte_pair(u32 word, bool odd, bool sixteen) {
    const u32 shifted = __byte_perm(word ^ 0x80808080u, 0x64646464u, odd ? 0x4341 : 0x4240);  // 1152 + byte
    return as_word(__hfma2(as_halves(shifted), as_halves(sixteen ? 0x4C004C00u : 0x3C003C00u),
                           as_halves(sixteen ? 0xF480F480u : 0xE480E480u)));
}

// A lane's share of a record: quants and scales.
template <int K> struct Share {
    Quants<K> quants;
    Scales<K> scales;
    u32 lows[2];  // rows g and g + 8: f16 mins of blocks 2t and 2t + 1; without mins their scales, for the offset
    float2 own[2];  // not K types: the scales of blocks 2t and 2t + 1, for rows g and g + 8

    static constexpr bool has_lows = has_min(K) || (offset_of(K) != 0 && K != Q6_K);

    template <bool STREAMED> __device__ __forceinline__ void load(const u8* record, int lane) {
        const int g = lane / 4, t = lane % 4;
        quants.template load<STREAMED>(record, lane);
        scales.load(record, g);
        if constexpr (has_groups(K)) {
            const u32 both = *reinterpret_cast<const u32*>(record + Record<K>::groups + 16 * g + 4 * t);
            const u32 high = *reinterpret_cast<const u16*>(record + Record<K>::lows + 8 * g + 2 * t);
            lows[0] = (both >> 6 & 0x00030003u) | (high & 15) << 2 | (high & 0xF0) << 14;
            lows[1] = (both >> 14 & 0x00030003u) | (high >> 6 & 0x3C) | (high & 0xF000) << 6;
        } else if constexpr (K == MXFP4) {
            const u32 both = *reinterpret_cast<const u32*>(record + Record<K>::scales + 16 * g + 4 * t);
            own[0] = make_float2(power_of_two(both & 255), power_of_two(both >> 8 & 255));
            own[1] = make_float2(power_of_two(both >> 16 & 255), power_of_two(both >> 24));
        } else if constexpr (K != Q6_K) {
            const uint2 both = *reinterpret_cast<const uint2*>(record + Record<K>::scales + 32 * g + 8 * t);
            own[0] = Scales<K>::pair(both.x);
            own[1] = Scales<K>::pair(both.y);
        }
        if constexpr (has_lows && !has_groups(K)) {
            constexpr int plane = has_min(K) ? Record<K>::mins : Record<K>::scales;
            const uint2 both = *reinterpret_cast<const uint2*>(record + plane + 32 * g + 8 * t);
            lows[0] = __byte_perm(both.x, both.y, 0x5410);
            lows[1] = __byte_perm(both.x, both.y, 0x7632);
        }
    }
    // The scales of block b for rows g and g + 8.
    __device__ __forceinline__ float2 scale(int b) const {
        float2 found, low, second;
        scales.block(b, found, low, second);
        return found;
    }

    // Block b as the first operands of two products of sixteen columns each.
    __device__ __forceinline__ void block(int b, u32 (*a)[4]) const {
        if constexpr (in_bytes(K)) {
            u32 bytes[4];
            quants.block(b, bytes);
#pragma unroll
            for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = byte_pair(bytes[i % 4], i / 4, i % 4 >= 2);
            return;
        }
        u32 high = 0;
        if constexpr (one_high_bit(K)) high = Quants<K>::word(quants.high[0], b / 2) >> (b % 2 * 4);
        if constexpr (K == Q6_K) high = Quants<K>::word(quants.high[b / 4], b % 4);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u32 word = Quants<K>::word(quants.words[b / 2], b % 2 * 2 + row);
            const u32 bits = high >> (K == Q6_K ? 4 * row : 2 * row);
            nibble_pairs<K>(word, bits, a[0][row], a[0][row + 2]);
            nibble_pairs<K>(word >> 8, bits >> 8, a[1][row], a[1][row + 2]);
        }
        if constexpr (has_groups(K)) {
            const u32 both = Quants<K>::word(scales.blocks[0], b / 2) & 0x3F3F3F3Fu;
            const __half2 by = __hadd2(as_halves(__byte_perm(both, 0x64646464u, b % 2 ? 0x4342 : 0x4140)),
                                       as_halves(0xE400E400u));  // (1024 + scale) - 1024
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                u32& at = a[i / 4][i % 4];
                at = as_word(__hmul2(as_halves(at), i % 2 ? __high2half2(by) : __low2half2(by)));
            }
        }
        if constexpr (K == Q6_K) {
            const u32 four = Quants<K>::word(scales.blocks[b / 4], b % 4) ^ 0x80808080u;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const __half2 by = __hadd2(as_halves(__byte_perm(four, 0x64646464u, half ? 0x4342 : 0x4140)),
                                           as_halves(0xE480E480u));
                const __half2 low = __hmul2(by, as_halves(half ? 0x82008200u : 0x80208020u));  // -32 * scale
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32& at = a[i / 2][i % 2 + 2 * half];
                    at = as_word(i % 2 ? __hfma2(as_halves(at), __high2half2(by), __high2half2(low))
                                       : __hfma2(as_halves(at), __low2half2(by), __low2half2(low)));
                }
            }
        }
    }
};

// Where a lane reads activations: its slot of a piece, and the powers of two of the rows whose sums it
// holds. For a missing row any other row may be read: no row's sums depend on another row.
struct Slot {
    int words;
    int scales[2];
};

// The activations of N groups for one record, read block by block or all AT_ONCE.
template <int L, int N, bool AT_ONCE> struct Rows {
    const u8* piece;
    Slot slots[N];
    uint4 words[AT_ONCE ? 8 : 1][N];

    __device__ __forceinline__ uint4 read(int b, int n) const {
        return *reinterpret_cast<const uint4*>(piece + n * Piece<L>::bytes + b * L * 16 + slots[n].words * 16);
    }
    __device__ __forceinline__ void load(const u8* from, const Slot* of) {
        piece = from;
#pragma unroll
        for (int n = 0; n < N; ++n) slots[n] = of[n];
        if constexpr (AT_ONCE)
#pragma unroll
            for (int i = 0; i < 8 * N; ++i) words[i / N][i % N] = read(i / N, i % N);
    }
    __device__ __forceinline__ uint4 block(int b, int n) const {
        if constexpr (AT_ONCE) return words[b][n];
        return read(b, n);
    }
    __device__ __forceinline__ float2 powers(int n) const {
        const float* all = reinterpret_cast<const float*>(piece + n * Piece<L>::bytes + Piece<L>::scales);
        return make_float2(all[slots[n].scales[0]], all[slots[n].scales[1]]);
    }
    __device__ __forceinline__ uint2 sums(int n) const {
        return *reinterpret_cast<const uint2*>(piece + n * Piece<L>::bytes + Piece<L>::sums + slots[n].words * 8);
    }
};

// Applies a record's own scale and min to the sum of its blocks and adds the result to one row's sum.
template <int K>
__device__ __forceinline__ void add_value(const Share<K>& share, int upper, float value, float under, float by,
                                          float& acc) {
    if constexpr (by_record(K))
        value *= upper ? share.scales.outer.y : share.scales.outer.x;
    else
        value *= unit_of(K);
    if constexpr (has_groups(K))
        value = fmaf(-(upper ? share.scales.outer_min.y : share.scales.outer_min.x), under, value);
    else if constexpr (Share<K>::has_lows)
        value = fmaf(has_min(K) ? 1.0f : -offset_of(K), under, value);
    acc = fmaf(by, value, acc);
}

// acc += the records of M tiles times the pieces of N groups of rows. Blocks with f32 scales are summed as
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), the order in which add_row_records sums them across lanes.
template <int K, int M, int N, class R>
__device__ __forceinline__ void add_records(const Share<K>* share, const R& rows, float (*acc)[N][4]) {
    float inner[M][N][4] = {}, half[M][N][4], pair[M][N][4];
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        uint4 x[N];
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = rows.block(b, n);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            u32 a[2][4];
            share[m].block(b, a);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if constexpr (by_record(K)) {
                    mma(inner[m][n], a[0], x[n].x, x[n].y);
                    mma(inner[m][n], a[1], x[n].z, x[n].w);
                } else {
                    float c[4] = {};
                    mma(c, a[0], x[n].x, x[n].y);
                    mma(c, a[1], x[n].z, x[n].w);
                    const float2 scale = share[m].scale(b);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float by = i < 2 ? scale.x : scale.y;
                        float& sum = pair[m][n][i];
                        sum = b % 2 ? fmaf(by, c[i], sum) : by * c[i];
                        if (b % 4 == 1) half[m][n][i] = sum;
                        if (b == 3) inner[m][n][i] = half[m][n][i] + sum;
                        if (b == 7) inner[m][n][i] += half[m][n][i] + sum;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 powers = rows.powers(n);
        constexpr float unit = by_record(K) ? unit_of(K) : 1.0f;
        uint2 sums = {0, 0};
        if constexpr (Share<K>::has_lows) sums = rows.sums(n);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float under[4] = {};
            if constexpr (Share<K>::has_lows) {
                const u32 a[4] = {share[m].lows[0], share[m].lows[1], share[m].lows[0], share[m].lows[1]};
                mma(under, a, sums.x, sums.y);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_value<K>(share[m], i / 2, inner[m][n][i], under[i], unit * (i % 2 ? powers.y : powers.x),
                             acc[m][n][i]);
        }
    }
}

// A single row of activations. A lane holds block g of it, so that the eight columns of a product's result
// are the eight blocks instead of eight rows.
template <int L> struct OneRow {
    uint4 words;
    uint2 sums;
    float power;

    __device__ __forceinline__ void load(const u8* piece, int row, int lane) {
        const int slot = row * 4 + lane % 4;
        words = *reinterpret_cast<const uint4*>(piece + lane / 4 * L * 16 + slot * 16);
        sums = *reinterpret_cast<const uint2*>(piece + Piece<L>::sums + slot * 8);
        power = reinterpret_cast<const float*>(piece + Piece<L>::scales)[row];
    }
};

// acc += the records of M tiles times one row, for types whose blocks have f32 scales; the same bits as
// from add_records. Every lane ends with the sums of weight rows g and g + 8.
template <int K, int L, int M>
__device__ __forceinline__ void add_row_records(const Share<K>* share, const OneRow<L>& row, float (*acc)[2]) {
    static_assert(!by_record(K), "the lanes of K types have no scales of their own");
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        float first[2], second[2];  // sums of blocks 2t and 2t + 1, for rows g and g + 8
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            u32 a[2][4];
            float c[4] = {};
            share[m].block(b, a);
            mma(c, a[0], row.words.x, row.words.y);
            mma(c, a[1], row.words.z, row.words.w);
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                float& to = b % 2 ? second[upper] : first[upper];
                to = b < 2 || t == b / 2 ? c[2 * upper + b % 2] : to;
            }
        }
        float under[4] = {};
        if constexpr (Share<K>::has_lows) {
            const u32 a[4] = {share[m].lows[0], share[m].lows[1], share[m].lows[0], share[m].lows[1]};
            mma(under, a, row.sums.x, row.sums.y);
        }
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const float2* own = share[m].own;
            float value = (upper ? own[0].y : own[0].x) * first[upper];
            value = fmaf(upper ? own[1].y : own[1].x, second[upper], value);
            value += __shfl_xor_sync(~0u, value, 1);
            value += __shfl_xor_sync(~0u, value, 2);
            add_value<K>(share[m], upper, value, under[2 * upper], row.power, acc[m][upper]);
        }
    }
}
