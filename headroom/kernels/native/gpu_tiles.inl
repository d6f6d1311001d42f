// Conversion of GPU tiles to panels.
//
// Cold experts lie in host memory in the GPU's tile layout (kernels/cuda/tiles.cuh), so that the GPU can
// copy them without conversion. Instruction sets that cannot multiply with tiles directly (wide.inl)
// convert sixteen rows at a time into a panel just before its product.
//
// Both layouts consist of records of sixteen rows and 256 columns that hold the same numbers in as many
// bytes. The last record of a tile is always full. F16 and BF16 have no records in panels.
//
// Letters in this file: a tile's rows are g and g + 8h with g = 0..7, h = 0..1; a GPU lane 4g + t (t =
// 0..3) holds columns 4t .. 4t+3 and 16+4t .. 16+4t+3 of a block b of 32 columns; `half` says which of
// the two.

#include <algorithm>

namespace headroom {
namespace {

// The byte offset of each plane in a record of a tile; the values begin at 0.
template <Kind K> struct TileShape {
    static constexpr int high = K == Q8_0 ? 4096 : 2048;
    static constexpr int groups = high + (has_high_bit(K) ? 512 : K == Q6_K ? 1024 : 0);
    static constexpr int lows = groups + (has_groups(K) ? 128 : K == Q6_K ? 256 : 0);
    static constexpr int scales = lows + (has_groups(K) ? 64 : 0);
    static constexpr int mins = scales + (by_record(K) ? 32 : K == MXFP4 ? 128 : 256);
    static constexpr int bytes = mins + (!has_min(K) ? 0 : by_record(K) ? 32 : 256);
};

inline uint32_t word_at(const uint8_t* p, int index) {
    uint32_t word;
    std::memcpy(&word, p + 4 * index, 4);
    return word;
}
inline void put_word(uint8_t* p, int index, uint32_t word) { std::memcpy(p + 4 * index, &word, 4); }

#if defined(__AVX2__)
// Transposes 8 x 8 words.
inline void transpose_eight(__m256i* rows) {
    __m256i a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + j + 2]);
            b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + j + 2]);
        }
    for (int c = 0; c < 4; ++c) {
        rows[c] = _mm256_permute2x128_si256(b[c], b[c + 4], 0x20);
        rows[c + 4] = _mm256_permute2x128_si256(b[c], b[c + 4], 0x31);
    }
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// Transposes words [g][16] into sixteen vectors of the eight words of all g.
inline void turn_lanes(const uint8_t* lanes, __m256i* out) {
    for (int part = 0; part < 2; ++part) {
        for (int g = 0; g < 8; ++g)
            out[8 * part + g] =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes + 64 * g + 32 * part));
        transpose_eight(out + 8 * part);
    }
}
#endif

#if defined(__AVX512F__)
// Transposes words [g][t][x][y] (vector z[g]) into vectors out[x][t] of sixteen words [y][g].
inline void rows_together(const __m512i* z, __m512i (*out)[4]) {
    __m512i four[2][4];  // [x]: g = 0..3 and 4..7 of y = 0, then of y = 1; 128 bits for each t
    for (int i = 0; i < 2; ++i) {
        const __m512i* q = z + 4 * i;
        const __m512i a = _mm512_unpacklo_epi32(q[0], q[1]), b = _mm512_unpacklo_epi32(q[2], q[3]);
        const __m512i c = _mm512_unpackhi_epi32(q[0], q[1]), d = _mm512_unpackhi_epi32(q[2], q[3]);
        four[0][i] = _mm512_unpacklo_epi64(a, b);
        four[0][i + 2] = _mm512_unpackhi_epi64(a, b);
        four[1][i] = _mm512_unpacklo_epi64(c, d);
        four[1][i + 2] = _mm512_unpackhi_epi64(c, d);
    }
    for (int x = 0; x < 2; ++x) {
        const __m512i even0 = _mm512_shuffle_i32x4(four[x][0], four[x][1], 0x88);
        const __m512i even1 = _mm512_shuffle_i32x4(four[x][2], four[x][3], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(four[x][0], four[x][1], 0xDD);
        const __m512i odd1 = _mm512_shuffle_i32x4(four[x][2], four[x][3], 0xDD);
        out[x][0] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        out[x][2] = _mm512_shuffle_i32x4(even0, even1, 0xDD);
        out[x][1] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        out[x][3] = _mm512_shuffle_i32x4(odd0, odd1, 0xDD);
    }
}
#endif

// Converts two neighbouring blocks of 4-bit values; `cells` receives 256 bytes for each.
inline void four_bit_pair(const uint8_t* pair, uint8_t* cells) {
#if defined(__AVX512F__)
    __m512i z[8], turned[2][4];
    for (int g = 0; g < 8; ++g) z[g] = _mm512_loadu_si512(pair + 64 * g);
    rows_together(z, turned);
    const __m512i mask = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(-16);
    for (int b = 0; b < 2; ++b)
        for (int i = 0; i < 2; ++i) {
            const __m512i first = turned[b][2 * i], second = turned[b][2 * i + 1];
            const __m512i lows = _mm512_or_si512(
                _mm512_and_si512(first, mask), _mm512_and_si512(_mm512_slli_epi16(second, 4), upper));
            const __m512i highs = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(first, 4), mask),
                                                  _mm512_and_si512(second, upper));
            _mm512_storeu_si512(cells + 256 * b + 64 * i, lows);
            _mm512_storeu_si512(cells + 256 * b + 64 * (i + 2), highs);
        }
#elif defined(__AVX2__)
    __m256i turned[16];  // [t][b][h]
    turn_lanes(pair, turned);
    const __m256i mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(-16);
    for (int b = 0; b < 2; ++b)
        for (int i = 0; i < 2; ++i)
            for (int h = 0; h < 2; ++h) {
                const __m256i first = turned[8 * i + 2 * b + h], second = turned[8 * i + 4 + 2 * b + h];
                const __m256i lows =
                    _mm256_or_si256(_mm256_and_si256(first, mask),
                                    _mm256_and_si256(_mm256_slli_epi16(second, 4), upper));
                const __m256i highs =
                    _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), mask),
                                    _mm256_and_si256(second, upper));
                uint8_t* cell = cells + 256 * b + 64 * i + 32 * h;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(cell), lows);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(cell + 128), highs);
            }
#else
    constexpr uint32_t MASK = 0x0F0F0F0Fu;
    for (int b = 0; b < 2; ++b)
        for (int row = 0; row < PANEL_ROWS; ++row)
            for (int i = 0; i < 2; ++i) {
                const int at = 16 * (row % 8) + 8 * i + 2 * b + row / 8;
                const uint32_t first = word_at(pair, at), second = word_at(pair, at + 4);
                uint8_t* cell = cells + 256 * b;
                put_word(cell, 16 * i + row, (first & MASK) | (second & MASK) << 4);
                put_word(cell, 16 * (i + 2) + row, (first >> 4 & MASK) | (second & ~MASK));
            }
#endif
}

// Converts a block of 8-bit values, which panels store with an offset of 128.
inline void eight_bit_block(const uint8_t* block, uint8_t* cell) {
#if defined(__AVX512F__)
    __m512i z[8], turned[2][4];
    for (int g = 0; g < 8; ++g)  // [t][h][half] becomes [t][half][h]
        z[g] = _mm512_shuffle_epi32(_mm512_loadu_si512(block + 64 * g), _MM_PERM_DBCA);
    rows_together(z, turned);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int i = 0; i < 8; ++i)
        _mm512_storeu_si512(cell + 64 * i, _mm512_xor_si512(turned[i / 4][i % 4], sign));
#elif defined(__AVX2__)
    __m256i turned[16];  // [t][h][half]
    turn_lanes(block, turned);
    for (int i = 0; i < 16; ++i)
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(cell + 256 * (i % 2) + 64 * (i / 4) + 32 * (i / 2 % 2)),
            _mm256_xor_si256(turned[i], _mm256_set1_epi8(-128)));
#else
    for (int row = 0; row < PANEL_ROWS; ++row)
        for (int half = 0; half < 2; ++half)
            for (int t = 0; t < 4; ++t)
                put_word(cell, 16 * (4 * half + t) + row,
                         word_at(block, 4 * (4 * (row % 8) + t) + 2 * (row / 8) + half) ^ 0x80808080u);
#endif
}

// Transposes `words [g][t][n]` into `out [t][n][g]`.
template <int n> inline void lanes_together(const uint8_t* words, uint32_t* out) {
#if defined(__AVX2__)
    // 8 x 8 words at a time: all g, and eight consecutive places of [t][n].
    for (int first = 0; first < 4 * n; first += 8) {
        __m256i rows[8];
        for (int g = 0; g < 8; ++g)
            rows[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + 4 * (4 * n * g + first)));
        transpose_eight(rows);
        for (int c = 0; c < 8; ++c)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * (first + c)), rows[c]);
    }
#else
    for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 4 * n; ++i) out[8 * i + g] = word_at(words, 4 * n * g + i);
#endif
}

// Converts the fifth bits of all blocks. A panel has one 64-bit mask per four columns, with a bit for each
// row and column. A byte of a tile's word is one column and has the bits [block of a pair][h][half].
inline void fifth_bits(const uint8_t* high, int cells, uint8_t* masks) {
    alignas(64) uint32_t words[4 * 4 * 8];  // [t][pair][g]
    lanes_together<4>(high, words);
    for (int b = 0; b < cells; ++b)
        for (int half = 0; half < 2; ++half)
            for (int t = 0; t < 4; ++t) {
                const uint32_t* eight = words + 8 * (4 * t + b / 2);
                uint64_t mask = 0;
#if defined(__AVX2__)
                const __m256i all = _mm256_load_si256(reinterpret_cast<const __m256i*>(eight));
                for (int h = 0; h < 2; ++h) {  // the bit of each byte becomes its highest one
                    const __m128i by = _mm_cvtsi32_si128(7 - (4 * (b % 2) + 2 * h + half));
                    const int bits = _mm256_movemask_epi8(_mm256_sll_epi32(all, by));
                    mask |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << 32 * h;
                }
#else
                for (int g = 0; g < 8; ++g)
                    for (int h = 0; h < 2; ++h) {
                        const uint32_t bits = eight[g] >> (4 * (b % 2) + 2 * h + half) & 0x01010101u;
                        // The multiplication gathers the lowest bit of each byte into four adjacent bits.
                        mask |= static_cast<uint64_t>(bits * 0x01020408u >> 24 & 15) << (4 * (8 * h + g));
                    }
#endif
                std::memcpy(masks + 64 * b + 8 * (4 * half + t), &mask, 8);
            }
}

// Converts the high two bits of Q6_K. A byte of a tile's word has two bits for each [h][half] of a block.
inline void two_more_bits(const uint8_t* high, int cells, uint8_t* out) {
    alignas(64) uint32_t words[4 * 8 * 8];  // [t][block][g]
    lanes_together<8>(high, words);
    for (int b = 0; b < cells; ++b)
        for (int half = 0; half < 2; ++half) {
#if defined(__AVX512F__)
            __m512i joined = _mm512_setzero_si512();
            for (int t = 0; t < 4; ++t) {
                const __m256i w = _mm256_load_si256(
                    reinterpret_cast<const __m256i*>(words + 8 * (8 * t + b)));
                const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(w),
                                                        _mm256_srli_epi32(w, 4), 1);
                const __m512i two = _mm512_and_si512(
                    _mm512_srl_epi32(both, _mm_cvtsi32_si128(2 * half)), _mm512_set1_epi8(3));
                joined = _mm512_or_si512(joined, _mm512_sll_epi32(two, _mm_cvtsi32_si128(2 * t)));
            }
            _mm512_storeu_si512(out + 128 * b + 64 * half, joined);
#elif defined(__AVX2__)
            for (int h = 0; h < 2; ++h) {
                __m256i joined = _mm256_setzero_si256();
                for (int t = 0; t < 4; ++t) {
                    const __m256i w = _mm256_load_si256(
                        reinterpret_cast<const __m256i*>(words + 8 * (8 * t + b)));
                    const __m256i two = _mm256_and_si256(
                        _mm256_srl_epi32(w, _mm_cvtsi32_si128(4 * h + 2 * half)), _mm256_set1_epi8(3));
                    joined = _mm256_or_si256(joined, _mm256_sll_epi32(two, _mm_cvtsi32_si128(2 * t)));
                }
                _mm256_storeu_si256(
                    reinterpret_cast<__m256i*>(out + 128 * b + 64 * half + 32 * h), joined);
            }
#else
            for (int row = 0; row < PANEL_ROWS; ++row) {
                uint32_t four = 0;
                for (int t = 0; t < 4; ++t)
                    four |= (words[8 * (8 * t + b) + row % 8] >> (4 * (row / 8) + 2 * half) &
                             0x03030303u) << 2 * t;
                put_word(out + 128 * b + 64 * half, row, four);
            }
#endif
        }
}

// The permutation that turns 16-bit numbers [g][of][inner] into [of][inner][g]: the source of each place.
template <int of, int inner> struct ByRow {
    static constexpr int count = 8 * of * inner;
    uint16_t from[count < 32 ? 32 : count];
    constexpr ByRow() : from() {
        for (int b = 0; b < of; ++b)
            for (int h = 0; h < inner; ++h)
                for (int g = 0; g < 8; ++g)
                    from[(b * inner + h) * 8 + g] = static_cast<uint16_t>((g * of + b) * inner + h);
    }
};

template <int of, int inner> inline void reorder(const uint8_t* plane, uint8_t* out) {
    static constexpr ByRow<of, inner> order;
    constexpr int count = ByRow<of, inner>::count;
#if defined(__AVX512BW__)
    if constexpr (count >= 32) {
        __m512i from[count / 32];
        for (int i = 0; i < count / 32; ++i) from[i] = _mm512_loadu_si512(plane + 64 * i);
        for (int i = 0; i < count / 32; ++i) {
            const __m512i index = _mm512_loadu_si512(order.from + 32 * i);
            __m512i found = _mm512_permutexvar_epi16(index, from[0]);
            if constexpr (count >= 64) found = _mm512_permutex2var_epi16(from[0], index, from[1]);
            if constexpr (count == 128) {
                const __m512i rest = _mm512_permutex2var_epi16(from[2], index, from[3]);
                const __mmask32 later = _mm512_cmpge_epu16_mask(index, _mm512_set1_epi16(64));
                found = _mm512_mask_mov_epi16(found, later, rest);
            }
            _mm512_storeu_si512(out + 64 * i, found);
        }
        return;
    }
#endif
    for (int i = 0; i < count; ++i) std::memcpy(out + 2 * i, plane + 2 * order.from[i], 2);
}

// Reorders bytes [g][of][h] to [of][row].
template <int of> inline void bytes_by_row(const uint8_t* plane, uint8_t* out) {
    alignas(64) uint8_t pairs[16 * of];  // [of][g][h]
    reorder<of, 1>(plane, pairs);
    for (int b = 0; b < of; ++b)
        for (int h = 0; h < 2; ++h)
            for (int g = 0; g < 8; ++g) out[16 * b + 8 * h + g] = pairs[16 * b + 2 * g + h];
}

// Converts the scales or mins of all blocks of a record.
template <Kind K> inline void scales_by_row(const uint8_t* plane, int cells, uint8_t* out) {
    if constexpr (by_record(K)) {
        reorder<1, 2>(plane, out);
    } else {
        alignas(64) uint8_t all[256];
        if constexpr (K == MXFP4) bytes_by_row<8>(plane, all);
        else reorder<8, 2>(plane, all);
        std::memcpy(out, all, static_cast<size_t>(cells * kind_info(K).scale_bytes));
    }
}

template <Kind K> void record_to_panel(const uint8_t* tile, int cells, uint8_t* panel) {
    using From = TileShape<K>;
    const RecordShape to = RecordShape::of(K, cells);
    if constexpr (K == Q8_0) {
        for (int b = 0; b < cells; ++b) eight_bit_block(tile + 512 * b, panel + 512 * b);
    } else {
        for (int b = 0; b + 1 < cells; b += 2) four_bit_pair(tile + 256 * b, panel + 256 * b);
        if (cells % 2) {
            uint8_t both[512];
            four_bit_pair(tile + 256 * (cells - 1), both);
            std::memcpy(panel + 256 * (cells - 1), both, 256);
        }
    }
    if constexpr (has_high_bit(K)) fifth_bits(tile + From::high, cells, panel + to.high);
    if constexpr (K == Q6_K) two_more_bits(tile + From::high, cells, panel + to.high);
    if constexpr (has_groups(K)) {
        bytes_by_row<8>(tile + From::groups, panel + to.groups);
        bytes_by_row<4>(tile + From::lows, panel + to.groups + RECORD * PANEL_ROWS);
    }
    if constexpr (K == Q6_K) bytes_by_row<16>(tile + From::groups, panel + to.groups);
    scales_by_row<K>(tile + From::scales, cells, panel + to.scales);
    if constexpr (has_min(K)) scales_by_row<K>(tile + From::mins, cells, panel + to.mins);
}

template <Kind K> void all_records(int64_t columns, const uint8_t* tile, uint8_t* panel) {
    for (int64_t column = 0; column < columns; column += RECORD * CELL) {
        const int cells = static_cast<int>(std::min<int64_t>(RECORD, (columns - column) / CELL));
        // Prefetch the record after the next: the conversion is fast enough to be bound by memory.
        prefetch(tile + 2 * TileShape<K>::bytes, TileShape<K>::bytes);
        record_to_panel<K>(tile, cells, panel);
        tile += TileShape<K>::bytes;
        panel += RecordShape::of(K, cells).bytes;
    }
}

// Converts four columns of sixteen rows of 16-bit values. The tile's lanes for g = 0..7 are 64 bytes apart;
// each holds columns 0 and 2 of rows g and g + 8, then columns 1 and 3 of both rows.
inline void plain_four(const uint8_t* lanes, uint8_t* panel) {
    for (int g = 0; g < 8; ++g)
        for (int h = 0; h < 2; ++h)
            for (int c = 0; c < 4; ++c)
                std::memcpy(panel + 32 * c + 16 * h + 2 * g, lanes + 64 * g + 8 * (c % 2) + 4 * h + 2 * (c / 2), 2);
}

// Converts eight columns: the lanes of two neighbouring t are adjacent.
inline void plain_eight(const uint8_t* lanes, uint8_t* panel) {
#if defined(__AVX2__)
    __m256i r[8], a[8], b[8];
    for (int g = 0; g < 8; ++g) r[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes + 64 * g));
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            b[4 * i + 2 * j] = _mm256_unpacklo_epi32(a[4 * i + j], a[4 * i + j + 2]);
            b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi32(a[4 * i + j], a[4 * i + j + 2]);
        }
    // For each t, b[n] has numbers 2n and 2n + 1 of the lanes g = 0..3, and b[n + 4] those of g = 4..7.
    // Even n belong to rows g, odd n to rows g + 8.
    for (int n = 0; n < 4; n += 2) {
        const __m256i first[2] = {_mm256_unpacklo_epi64(b[n], b[n + 4]), _mm256_unpackhi_epi64(b[n], b[n + 4])};
        const __m256i second[2] = {_mm256_unpacklo_epi64(b[n + 1], b[n + 5]),
                                   _mm256_unpackhi_epi64(b[n + 1], b[n + 5])};
        for (int i = 0; i < 2; ++i) {
            __m256i* to = reinterpret_cast<__m256i*>(panel) + n / 2 + 2 * i;
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(first[i], second[i], 0x20));
            _mm256_storeu_si256(to + 4, _mm256_permute2x128_si256(first[i], second[i], 0x31));
        }
    }
#else
    for (int t = 0; t < 2; ++t) plain_four(lanes + 16 * t, panel + 128 * t);
#endif
}

// Converts plain 16-bit values: sixteen per column in a panel, groups of sixteen columns in a tile.
void plain_to_panel(int64_t columns, const uint8_t* tile, uint8_t* panel) {
    const auto from = [&](int64_t column) { return tile + 32 * (column / 16 * 16) + 4 * (column % 16); };
    int64_t column = 0;
    for (; column + 8 <= columns; column += 8) {
        prefetch(tile + 32 * (column + 512), 256);
        plain_eight(from(column), panel + 32 * column);
    }
    for (; column < columns; column += 4) plain_four(from(column), panel + 32 * column);
}

void tile_to_panel(Kind kind, int64_t columns, const uint8_t* tile, uint8_t* panel) {
    switch (kind) {
        case Q4_0: return all_records<Q4_0>(columns, tile, panel);
        case Q4_1: return all_records<Q4_1>(columns, tile, panel);
        case Q5_0: return all_records<Q5_0>(columns, tile, panel);
        case Q5_1: return all_records<Q5_1>(columns, tile, panel);
        case Q8_0: return all_records<Q8_0>(columns, tile, panel);
        case IQ4_NL: return all_records<IQ4_NL>(columns, tile, panel);
        case MXFP4: return all_records<MXFP4>(columns, tile, panel);
        case Q4_K: return all_records<Q4_K>(columns, tile, panel);
        case Q5_K: return all_records<Q5_K>(columns, tile, panel);
        case Q6_K: return all_records<Q6_K>(columns, tile, panel);
        case F16: case BF16: return plain_to_panel(columns, tile, panel);
        case F32: return;  // has no tiles
    }
}

}  // namespace
}  // namespace headroom
