// Tiles: the memory layout of packed weights that the GPU kernels read, and how a warp reads them.
//
// Sixteen rows of a matrix form a tile; 256 columns of a tile form a record. A record is read by one warp.
// With g = lane / 4 and t = lane % 4 a lane holds what the tensor cores want from it (mma.cuh): columns 4t
// .. 4t+3 and 16+4t .. 16+4t+3 of rows g and g + 8, for each of the eight blocks of 32 columns.
//
//                 block 0 (32 columns)              block 1   ...   block 7
//   row g     | 4t..4t+3 | ... | 16+4t..16+4t+3 |
//   row g + 8 | 4t..4t+3 | ... | 16+4t..16+4t+3 |
//
// A record is a run of planes:
//
//   quants   4-bit: [pair of blocks][lane] for each block a word for row g and one for row g + 8; low
//            nibbles are columns 4t.., high nibbles columns 16+4t..
//            8-bit: [block][lane] two words for row g, two for row g + 8
//   high     [lane] 5-bit: 4 words, one bit of each byte for each of 8 words; 6-bit: 8 words, two bits
//   groups   [g] K types: 8 x 2 bytes of scale and low bits of the min; Q6_K: 8 x 2 x 2 scales
//   lows     [g] Q4_K, Q5_K: 4 x 2 bytes, the high bits of two mins each
//   scales   [g] f16 for rows g and g + 8 (of each block of 32, or of the record); MXFP4: exponents
//   mins     [g] ordered as the scales, if the type has mins
//
// F16 and BF16 have one plane: [block][half of its columns][lane] four words of two numbers, columns 4t and
// 4t + 2 of rows g and g + 8, then columns 4t + 1 and 4t + 3 of both; see plain.cuh.
//
// Packing rounds nothing: a record holds exactly the numbers of the file, in as many bytes.
#include "types.cuh"

__host__ __device__ constexpr bool has_min(int k) { return k == Q4_1 || k == Q5_1 || k == Q4_K || k == Q5_K; }
__host__ __device__ constexpr bool has_groups(int k) { return k == Q4_K || k == Q5_K; }
__host__ __device__ constexpr bool one_high_bit(int k) { return k == Q5_0 || k == Q5_1 || k == Q5_K; }
__host__ __device__ constexpr bool by_record(int k) { return k == Q4_K || k == Q5_K || k == Q6_K; }
__host__ __device__ constexpr bool is_plain(int k) { return k == F16 || k == BF16; }
__host__ __device__ constexpr float offset_of(int k) {
    return k == Q4_0 ? 8 : k == Q5_0 ? 16 : k == Q6_K ? 32 : 0;
}

// Offsets of the planes of a record.
template <int K> struct Record {
    static constexpr int quants = 0;
    static constexpr int high = quants + (K == Q8_0 ? 4096 : 2048);
    static constexpr int groups = high + (one_high_bit(K) ? 512 : K == Q6_K ? 1024 : 0);
    static constexpr int lows = groups + (has_groups(K) ? 128 : K == Q6_K ? 256 : 0);
    static constexpr int scales = lows + (has_groups(K) ? 64 : 0);
    static constexpr int mins = scales + (by_record(K) ? 32 : K == MXFP4 ? 128 : 256);
    static constexpr int bytes = is_plain(K) ? 8192 : mins + (!has_min(K) ? 0 : by_record(K) ? 32 : 256);
};

__device__ __forceinline__ u32 look_up(u32 nibbles, const u32* table) {
    // Four nibbles, one in each byte, become the bytes of a table of sixteen.
    const u32 index = nibbles & 0x07070707u;
    const u32 select = (index & 7) | (index >> 4 & 0x70) | (index >> 8 & 0x700) | (index >> 12 & 0x7000);
    const u32 low = __byte_perm(table[0], table[1], select);
    const u32 high = __byte_perm(table[2], table[3], select);
    const u32 upper = (nibbles >> 3 & 0x01010101u) * 255u;  // bytes of ones where bit 3 is set
    return (low & ~upper) | (high & upper);
}

__constant__ const u32 IQ4_TABLE[4] = {0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u};
__constant__ const u32 MXFP4_TABLE[4] = {0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu};

// A lane's quants of a whole record, loaded at once, so that many loads are in flight.
template <int K> struct Quants {
    static constexpr bool wide = K == Q8_0;
    uint4 words[wide ? 8 : 4];
    uint4 high[K == Q6_K ? 2 : 1];

    // STREAMED: the record is in global memory and is read once; caches need not keep it.
    template <bool STREAMED> __device__ __forceinline__ void load(const u8* record, int lane) {
#pragma unroll
        for (int i = 0; i < (wide ? 8 : 4); ++i)
            words[i] = read<STREAMED>(reinterpret_cast<const uint4*>(record) + i * 32 + lane);
        const uint4* bits = reinterpret_cast<const uint4*>(record + Record<K>::high);
        if constexpr (one_high_bit(K)) high[0] = read<STREAMED>(bits + lane);
        if constexpr (K == Q6_K) {
            high[0] = read<STREAMED>(bits + 2 * lane);
            high[1] = read<STREAMED>(bits + 2 * lane + 1);
        }
    }
    template <bool STREAMED> static __device__ __forceinline__ uint4 read(const uint4* at) {
        if constexpr (STREAMED) return __ldcs(at);
        return *at;
    }

    // Unpacks block b to bytes: a[0], a[1] columns 4t.. of rows g and g + 8, a[2], a[3] columns 16 + 4t...
    __device__ __forceinline__ void block(int b, u32* a) const {
        if constexpr (wide) {
            a[0] = words[b].x;
            a[2] = words[b].y;
            a[1] = words[b].z;
            a[3] = words[b].w;
            return;
        }
        const u32 mask = 0x0F0F0F0Fu;
        const u32 first = b % 2 ? words[b / 2].z : words[b / 2].x;
        const u32 second = b % 2 ? words[b / 2].w : words[b / 2].y;
        a[0] = first & mask;
        a[2] = first >> 4 & mask;
        a[1] = second & mask;
        a[3] = second >> 4 & mask;
        if constexpr (K == IQ4_NL || K == MXFP4)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = look_up(a[i], K == IQ4_NL ? IQ4_TABLE : MXFP4_TABLE);
        if constexpr (one_high_bit(K)) {
            const u32 bits = word(high[0], b / 2) >> (b % 2 * 4);
            a[0] |= (bits & 0x01010101u) << 4;
            a[2] |= (bits >> 1 & 0x01010101u) << 4;
            a[1] |= (bits >> 2 & 0x01010101u) << 4;
            a[3] |= (bits >> 3 & 0x01010101u) << 4;
        }
        if constexpr (K == Q6_K) {
            const u32 bits = word(high[b / 4], b % 4);
            a[0] |= (bits & 0x03030303u) << 4;
            a[2] |= (bits >> 2 & 0x03030303u) << 4;
            a[1] |= (bits >> 4 & 0x03030303u) << 4;
            a[3] |= (bits >> 6 & 0x03030303u) << 4;
        }
    }

    static __device__ __forceinline__ u32 word(const uint4& v, int i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }
};

__device__ __forceinline__ float power_of_two(u32 e) {  // 2^(e - 128), also where that is subnormal
    return e < 2 ? __uint_as_float(0x00200000u << e) : __uint_as_float((e - 1) << 23);
}

// The scales of rows g and g + 8 of a record. A value is scale * stored + low; for K types both are
// multiplied by the record's own `outer` and `outer_min`. The `second` scales are for columns 16..31 of
// Q6_K.
template <int K> struct Scales {
    uint4 blocks[K == Q6_K || !by_record(K) ? 2 : 1], mins[has_min(K) && !by_record(K) ? 2 : 1];
    uint2 lows;
    float2 outer, outer_min;

    __device__ __forceinline__ void load(const u8* record, int g) {
        if constexpr (K == MXFP4) {
            blocks[0] = *reinterpret_cast<const uint4*>(record + Record<K>::scales + 16 * g);
        } else if constexpr (!by_record(K)) {
            read32(record + Record<K>::scales + 32 * g, blocks);
            if constexpr (has_min(K)) read32(record + Record<K>::mins + 32 * g, mins);
        } else {
            outer = pair(*reinterpret_cast<const u32*>(record + Record<K>::scales + 4 * g));
            if constexpr (K == Q6_K) {
                read32(record + Record<K>::groups + 32 * g, blocks);
            } else {
                blocks[0] = *reinterpret_cast<const uint4*>(record + Record<K>::groups + 16 * g);
                lows = *reinterpret_cast<const uint2*>(record + Record<K>::lows + 8 * g);
                outer_min = pair(*reinterpret_cast<const u32*>(record + Record<K>::mins + 4 * g));
            }
        }
    }
    // (scale, low) of rows g and g + 8 for block b.
    __device__ __forceinline__ void block(int b, float2& scale, float2& low, float2& second) const {
        if constexpr (has_groups(K)) {
            const u32 both = half_word(blocks[0], b);  // row g in the low byte, row g + 8 in the next
            scale = make_float2(both & 63, both >> 8 & 63);
            const u32 high = (b / 2 % 2 ? (b / 4 ? lows.y : lows.x) >> 16 : (b / 4 ? lows.y : lows.x));
            const u32 mine = high >> (b % 2 * 4);
            low = make_float2((both >> 6 & 3) | (mine & 15) << 2, (both >> 14 & 3) | (mine >> 8 & 15) << 2);
        } else if constexpr (K == Q6_K) {
            const u32 four = Quants<K>::word(blocks[b / 4], b % 4);  // half 0: g, g+8; half 1: g, g+8
            scale = make_float2(static_cast<signed char>(four), static_cast<signed char>(four >> 8));
            second = make_float2(static_cast<signed char>(four >> 16), static_cast<signed char>(four >> 24));
        } else if constexpr (K == MXFP4) {
            const u32 both = half_word(blocks[0], b);
            scale = make_float2(power_of_two(both & 255), power_of_two(both >> 8 & 255));
        } else {
            scale = pair(Quants<K>::word(blocks[b / 4], b % 4));
            if constexpr (has_min(K)) low = pair(Quants<K>::word(mins[b / 4], b % 4));
        }
        if constexpr (!has_min(K) && offset_of(K) != 0)
            low = make_float2(-offset_of(K) * scale.x, -offset_of(K) * scale.y);
    }

    static __device__ __forceinline__ u32 half_word(const uint4& v, int i) {
        return Quants<K>::word(v, i / 2) >> (i % 2 * 16);
    }
    static __device__ __forceinline__ float2 pair(u32 halves) {
        return __half22float2(*reinterpret_cast<const __half2*>(&halves));
    }
    static __device__ __forceinline__ void read32(const u8* p, uint4* out) {
        out[0] = *reinterpret_cast<const uint4*>(p);
        out[1] = *reinterpret_cast<const uint4*>(p + 16);
    }
};
