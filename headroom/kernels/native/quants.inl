// Reading of panels: the values, scales and mins of one cell (32 columns of 16 rows).
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace headroom {
namespace {

#define HEADROOM_QUANT_KINDS(CASE)                                                             \
    CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)    \
        CASE(IQ4_NL) CASE(MXFP4)

constexpr bool has_min(Kind k) { return k == Q4_1 || k == Q5_1 || k == Q4_K || k == Q5_K; }
constexpr bool has_groups(Kind k) { return k == Q4_K || k == Q5_K; }
constexpr bool has_high_bit(Kind k) { return k == Q5_0 || k == Q5_1 || k == Q5_K; }
// Whether a value is a nibble and nothing else.
constexpr bool has_plain_nibbles(Kind k) { return k == Q4_0 || k == Q4_1 || k == Q4_K; }
constexpr bool has_table(Kind k) { return k == IQ4_NL || k == MXFP4; }
// Whether a block is as long as a record (K types). Its scale is then applied once per record.
constexpr bool by_record(Kind k) { return kind_info(k).block == RECORD * CELL; }
// Whether 4-bit values are turned into floats by a table lookup, where an instruction exists for it.
constexpr bool has_float_table(Kind k) {
    return HAS_NIBBLE_TABLE && (has_plain_nibbles(k) || has_table(k));
}

// The offset of stored values: the real value is the stored one minus this.
constexpr int offset_of(Kind k) {
    switch (k) {
        case Q4_0: return 8;
        case Q5_0: return 16;
        case MXFP4: return 16;
        case Q6_K: return 32;
        case Q8_0: return 128;
        case IQ4_NL: return 128;
        default: return 0;
    }
}

// The largest stored value.
constexpr int most_of(Kind k) {
    switch (k) {
        case Q4_0: case Q4_1: case Q4_K: return 15;
        case MXFP4: return 28;
        case Q5_0: case Q5_1: case Q5_K: return 31;
        case Q6_K: return 63;
        default: return 255;
    }
}

template <Kind K> struct Unpacker {
    Table table;
    FloatTable floats;

    Unpacker() {
        if constexpr (K == IQ4_NL) table = make_table(IQ4_VALUES, offset_of(K));
        if constexpr (K == MXFP4) table = make_table(MXFP4_VALUES, offset_of(K));
        if constexpr (has_float_table(K)) {
            float stored[16];
            for (int i = 0; i < 16; ++i)
                stored[i] = static_cast<float>(!has_table(K) ? i
                                               : (K == IQ4_NL ? IQ4_VALUES : MXFP4_VALUES)[i] +
                                                     offset_of(K));
            floats = make_float_table(stored);
        }
    }

    // Unpacks columns 8i .. 8i+7 of a cell: w[0] has the first four columns of the sixteen rows.
    template <int i> inline void eight(const uint8_t* quants, const uint8_t* high, I* w) const {
        if constexpr (K == Q8_0) {
            w[0] = load_bytes(quants + 128 * i);
            w[1] = load_bytes(quants + 128 * i + 64);
            return;
        }
        const I both = load_bytes(quants + 64 * i);
        w[0] = low_nibbles(both);
        w[1] = high_nibbles(both);
        if constexpr (has_table(K))
            for (int t = 0; t < 2; ++t) w[t] = look_up(table, w[t]);
        if constexpr (has_high_bit(K))
            for (int t = 0; t < 2; ++t) w[t] = add_sixteen_where(w[t], high + 16 * i + 8 * t);
        if constexpr (K == Q6_K) {
            const I bits = load_bytes(high + 64 * (i / 2));
            w[0] = add_two_bits<i % 2 * 2>(w[0], bits);
            w[1] = add_two_bits<i % 2 * 2 + 1>(w[1], bits);
        }
    }

    // Unpacks the 32 columns of a cell: vector w[t] has columns 4t .. 4t+3 of the sixteen rows.
    inline void cell(const uint8_t* quants, const uint8_t* high, I* w) const {
        eight<0>(quants, high, w);
        eight<1>(quants, high, w + 2);
        eight<2>(quants, high, w + 4);
        eight<3>(quants, high, w + 6);
    }
};

// The 6-bit scales and mins of a Q4_K or Q5_K record, one byte each: [8 groups, 16 rows].
struct KGroups {
    alignas(64) uint8_t scales[RECORD * PANEL_ROWS], mins[RECORD * PANEL_ROWS];

    // The packed form is in panels.cpp (put_k_groups). Compilers vectorise these loops.
    explicit inline KGroups(const uint8_t* groups) {
        const uint8_t* pairs = groups + RECORD * PANEL_ROWS;
        for (int g = 0; g < RECORD; g += 2)
            for (int i = 0; i < PANEL_ROWS; ++i) {
                const int even = PANEL_ROWS * g + i, odd = even + PANEL_ROWS;
                const uint8_t high = pairs[PANEL_ROWS * (g / 2) + i];
                scales[even] = groups[even] & 63;
                scales[odd] = groups[odd] & 63;
                mins[even] = static_cast<uint8_t>(groups[even] >> 6 | (high & 15) << 2);
                mins[odd] = static_cast<uint8_t>(groups[odd] >> 6 | (high >> 4) << 2);
            }
    }
};
struct NoGroups {
    explicit inline NoGroups(const uint8_t*) {}
};

// Scale and min (`low`) of one cell. `scale2` is Q6_K's scale of columns 16..31. For K types these do not
// include the scale and min of the block, which are applied once per record.
struct CellScales { F scale, scale2, low; };

template <Kind K, class Groups>
inline CellScales read_scales(const uint8_t* record, const RecordShape& shape, int c,
                              const Groups& groups) {
    constexpr KindInfo info = kind_info(K);
    CellScales s;
    if constexpr (has_groups(K)) {
        s.scale = load_uint8(groups.scales + PANEL_ROWS * c);
        s.low = load_uint8(groups.mins + PANEL_ROWS * c);
    } else if constexpr (K == Q6_K) {
        s.scale = load_int8(record + shape.groups + 32 * c);
        s.scale2 = load_int8(record + shape.groups + 32 * c + 16);
    } else {
        if constexpr (K == MXFP4) s.scale = powers_of_two(record + shape.scales + c * info.scale_bytes);
        else s.scale = load_half(record + shape.scales + c * info.scale_bytes);
        if constexpr (has_min(K)) s.low = load_half(record + shape.mins + c * info.min_bytes);
    }
    return s;
}

template <Kind K> inline F load_plain(const uint8_t* p) {
    if constexpr (K == F32) return load(reinterpret_cast<const float*>(p));
    if constexpr (K == F16) return load_half(p);
    return load_bf16(p);
}

inline QuantisedRows rows_from(QuantisedRows x, int64_t row, int64_t columns) {
    return {x.values + row * columns, x.scales + row * (columns / CELL),
            x.sums + row * (columns / 16)};
}

}  // namespace
}  // namespace headroom
