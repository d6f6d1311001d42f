// The kernels, written once over the sixteen-lane vectors of a simd_*.h file.
// Every row is computed by the same operations in the same order however many share a call.
#include "kernels.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace headroom {
namespace {

constexpr bool has_min(Kind k) { return k == Q4_1 || k == Q5_1 || k == Q4_K || k == Q5_K; }
constexpr bool has_groups(Kind k) { return k == Q4_K || k == Q5_K; }
constexpr bool has_high_bit(Kind k) { return k == Q5_0 || k == Q5_1 || k == Q5_K; }
constexpr bool has_table(Kind k) { return k == IQ4_NL || k == MXFP4; }
// Whether a block is a whole record, whose own scale is applied once.
constexpr bool by_record(Kind k) { return kind_info(k).block == RECORD * CELL; }
// Whether four bits look up a float: where there is an instruction for it.
constexpr bool has_float_table(Kind k) {
    return HAS_NIBBLE_TABLE && (k == Q4_0 || k == Q4_1 || k == Q4_K || has_table(k));
}

// What is subtracted from a stored value to get the real one.
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

    // The 32 columns of a cell: vector t has columns 4t .. 4t+3 of the sixteen rows.
    inline void cell(const uint8_t* quants, const uint8_t* high, I* w) const {
        if constexpr (K == Q8_0) {
            for (int t = 0; t < 8; ++t) w[t] = load_bytes(quants + 64 * t);
            return;
        }
        for (int i = 0; i < 4; ++i) {
            const I both = load_bytes(quants + 64 * i);
            w[2 * i] = low_nibbles(both);
            w[2 * i + 1] = high_nibbles(both);
        }
        if constexpr (has_table(K))
            for (int t = 0; t < 8; ++t) w[t] = look_up(table, w[t]);
        if constexpr (has_high_bit(K))
            for (int t = 0; t < 8; ++t) w[t] = add_sixteen_where(w[t], high + 8 * t);
        if constexpr (K == Q6_K)
            for (int half = 0; half < 2; ++half) {
                const I bits = load_bytes(high + 64 * half);
                w[4 * half] = add_two_bits<0>(w[4 * half], bits);
                w[4 * half + 1] = add_two_bits<1>(w[4 * half + 1], bits);
                w[4 * half + 2] = add_two_bits<2>(w[4 * half + 2], bits);
                w[4 * half + 3] = add_two_bits<3>(w[4 * half + 3], bits);
            }
    }
};

// The 6-bit scales and mins of a K record, one byte each: [8 groups, 16 rows].
struct KGroups {
    alignas(64) uint8_t scales[RECORD * PANEL_ROWS], mins[RECORD * PANEL_ROWS];

    // The layout is in panels.cpp; plain loops, since compilers make vectors of them.
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

inline void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
}

// Bytes asked for before they are needed, where memory is the bound: far ahead into the second
// cache, which can wait for many at once, and shortly before their use into the first.
constexpr int64_t FAR_AHEAD = 8192, NEAR_AHEAD = 512;

template <int R> inline void prefetch_ahead(const uint8_t* data, int64_t bytes) {
    if constexpr (R <= 2)
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(data + FAR_AHEAD + i, 0, 2);
            __builtin_prefetch(data + NEAR_AHEAD + i, 0, 3);
        }
}
// The share of cell c in its record.
template <int R> inline void prefetch_cell(const uint8_t* record, const RecordShape& shape, int c) {
    const int64_t share = static_cast<int64_t>(shape.bytes + 511) / 512 * 64;
    prefetch_ahead<R>(record + c * share, share);
}

// What the rows of a record add up to. A K type's block scale is applied once a record, so that
// `inner` and `low` (of its mins) are sums within the record.
template <int R> struct Sums {
    F total[R], inner[R], low[R];
};

// Scales of one cell; the second pair is for columns 16..31 of Q6_K. K types leave out the scale
// of the block.
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

// R rows of 8-bit activations times one panel, record after record.
template <Kind K, int R> struct Int8Product {
    const Unpacker<K> unpacker;
    const QuantisedRows x;
    const int64_t cells;  // of a row

    template <class Groups>
    inline void cell(const uint8_t* record, const RecordShape& shape, int c, int64_t column,
                     const Groups& groups, Sums<R>& sums) const {
        constexpr KindInfo info = kind_info(K);
        I w[8];
        prefetch_cell<R>(record, shape, c);
        unpacker.cell(record + c * info.quant_bytes, record + shape.high + c * info.high_bytes, w);
        const CellScales s = read_scales<K>(record, shape, c, groups);
        for (int r = 0; r < R; ++r) {
            const int64_t at = r * cells + column;
            const int8_t* values = x.values + at * CELL;
            const int32_t *counts = x.sums + at * 2, both = counts[0] + counts[1];
            const F by = set1(x.scales[at]);
            // Sums begin at minus the offset times the activations, so that they end exact.
            I first = set1_ints(-offset_of(K) * (K == Q6_K ? counts[0] : both));
            I second = K == Q6_K ? set1_ints(-offset_of(K) * counts[1]) : zero_ints();
            for (int t = 0; t < 4; ++t) first = dot(first, w[t], values + 4 * t);
            for (int t = 4; t < 8; ++t) second = dot(second, w[t], values + 4 * t);
            F& to = by_record(K) ? sums.inner[r] : sums.total[r];
            if constexpr (K == Q6_K) {
                to = fma(mul(to_float(first), s.scale), by, to);
                to = fma(mul(to_float(second), s.scale2), by, to);
            } else {
                to = fma(mul(to_float(add_ints(first, second)), s.scale), by, to);
            }
            if constexpr (has_min(K)) {
                F& under = by_record(K) ? sums.low[r] : sums.total[r];
                under = fma(s.low, set1(x.scales[at] * static_cast<float>(both)), under);
            }
        }
    }
};

// R rows of float activations times one panel, record after record.
template <Kind K, int R> struct FloatProduct {
    const Unpacker<K> unpacker;
    const FloatRows x;
    const int64_t cells;  // of a row

    // Eight columns of a cell as floats, for sixteen rows of the weight each.
    inline void eight(const uint8_t* quants, const I* w, int i, F* columns) const {
        if constexpr (has_float_table(K)) {
            nibbles_to_floats(load_bytes(quants + 64 * i), unpacker.floats, columns);
        } else {
            bytes_to_floats(w[2 * i], columns);
            bytes_to_floats(w[2 * i + 1], columns + 4);
        }
    }

    template <class Groups>
    inline void cell(const uint8_t* record, const RecordShape& shape, int c, int64_t column,
                     const Groups& groups, Sums<R>& sums) const {
        constexpr KindInfo info = kind_info(K);
        const uint8_t* quants = record + c * info.quant_bytes;
        I w[8];
        prefetch_cell<R>(record, shape, c);
        if constexpr (!has_float_table(K))
            unpacker.cell(quants, record + shape.high + c * info.high_bytes, w);
        const CellScales s = read_scales<K>(record, shape, c, groups);
        F parts[R][2];
        for (int r = 0; r < R; ++r) parts[r][0] = parts[r][1] = zero();
        for (int half = 0; half < 2; ++half) {
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                F columns[8];
                eight(quants, w, i, columns);
                for (int r = 0; r < R; ++r) {
                    const float* values = x.values + (r * cells + column) * CELL + 8 * i;
                    for (int j = 0; j < 8; ++j)  // two sums hide the latency
                        parts[r][j % 2] = fma(columns[j], set1(values[j]), parts[r][j % 2]);
                }
            }
            if (half == 0 && K != Q6_K) continue;
            for (int r = 0; r < R; ++r) {
                const float* values = x.sums + (r * cells + column) * 2;
                const float all = K == Q6_K ? values[half] : values[0] + values[1];
                F value = add(parts[r][0], parts[r][1]);
                if constexpr (offset_of(K) != 0)
                    value = fma(set1(static_cast<float>(-offset_of(K))), set1(all), value);
                parts[r][0] = parts[r][1] = zero();
                F& to = by_record(K) ? sums.inner[r] : sums.total[r];
                to = fma(value, K == Q6_K && half ? s.scale2 : s.scale, to);
                if constexpr (has_min(K)) {
                    F& under = by_record(K) ? sums.low[r] : sums.total[r];
                    under = fma(s.low, set1(all), under);
                }
            }
        }
    }
};

// All records of a panel; whole ones have a size that the compiler knows.
template <Kind K, int R, class Product>
void product_rows(const Product& product, const uint8_t* panel, float* out) {
    using Groups = std::conditional_t<has_groups(K), KGroups, NoGroups>;
    constexpr RecordShape WHOLE = RecordShape::of(K, RECORD);
    Sums<R> sums;
    for (int r = 0; r < R; ++r) sums.total[r] = zero();
    int64_t column = 0;
    for (; column + RECORD <= product.cells; column += RECORD, panel += WHOLE.bytes) {
        const Groups groups(panel + WHOLE.groups);
        for (int r = 0; r < R; ++r) sums.inner[r] = sums.low[r] = zero();
        for (int c = 0; c < RECORD; ++c)
            product.cell(panel, WHOLE, c, column + c, groups, sums);
        if constexpr (by_record(K)) {
            const F scale = load_half(panel + WHOLE.scales);
            for (int r = 0; r < R; ++r) {
                sums.total[r] = fma(scale, sums.inner[r], sums.total[r]);
                if constexpr (has_min(K))
                    sums.total[r] = fma(sub(zero(), load_half(panel + WHOLE.mins)), sums.low[r],
                                        sums.total[r]);
            }
        }
    }
    if constexpr (!by_record(K)) {  // K types have whole records only
        const int rest = static_cast<int>(product.cells - column);
        const RecordShape shape = RecordShape::of(K, rest);
        for (int c = 0; c < rest; ++c)
            product.cell(panel, shape, c, column + c, Groups(nullptr), sums);
    }
    for (int r = 0; r < R; ++r) store(out + PANEL_ROWS * r, sums.total[r]);
}

template <Kind K, int R>
void int8_rows(const uint8_t* panel, int64_t columns, QuantisedRows x, float* out) {
    product_rows<K, R>(Int8Product<K, R>{{}, x, columns / CELL}, panel, out);
}

template <Kind K, int R>
void float_rows(const uint8_t* panel, int64_t columns, FloatRows x, float* out) {
    product_rows<K, R>(FloatProduct<K, R>{{}, x, columns / CELL}, panel, out);
}

template <Kind K> inline F load_plain(const uint8_t* p) {
    if constexpr (K == F32) return load(reinterpret_cast<const float*>(p));
    if constexpr (K == F16) return load_half(p);
    return load_bf16(p);
}

// R rows of float activations times a panel of plain values; four sums hide the latency.
template <Kind K, int R>
void plain_rows(const uint8_t* panel, int64_t columns, FloatRows x, float* out) {
    constexpr int bytes = kind_info(K).block_bytes * PANEL_ROWS;
    F totals[R][4];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) totals[r][j] = zero();
    int64_t k = 0;
    for (; k + 4 <= columns; k += 4) {
        prefetch_ahead<R>(panel + k * bytes, 4 * bytes);
        for (int j = 0; j < 4; ++j) {
            const F w = load_plain<K>(panel + (k + j) * bytes);
            for (int r = 0; r < R; ++r)
                totals[r][j] = fma(w, set1(x.values[r * columns + k + j]), totals[r][j]);
        }
    }
    for (; k < columns; ++k) {
        const F w = load_plain<K>(panel + k * bytes);
        for (int r = 0; r < R; ++r)
            totals[r][0] = fma(w, set1(x.values[r * columns + k]), totals[r][0]);
    }
    for (int r = 0; r < R; ++r)
        store(out + PANEL_ROWS * r,
              add(add(totals[r][0], totals[r][1]), add(totals[r][2], totals[r][3])));
}

inline QuantisedRows rows_from(QuantisedRows x, int64_t row, int64_t columns) {
    return {x.values + row * columns, x.scales + row * (columns / CELL),
            x.sums + row * (columns / 16)};
}
inline FloatRows rows_from(FloatRows x, int64_t row, int64_t columns) {
    return {x.values + row * columns, x.sums ? x.sums + row * (columns / 16) : nullptr};
}

template <Kind K>
void int8_panel(const uint8_t* panel, int64_t columns, QuantisedRows x, int64_t rows, float* out) {
    int64_t row = 0;
    const auto at = [&] { return rows_from(x, row, columns); };
    for (; row + 8 <= rows; row += 8) int8_rows<K, 8>(panel, columns, at(), out + PANEL_ROWS * row);
    for (; row + 4 <= rows; row += 4) int8_rows<K, 4>(panel, columns, at(), out + PANEL_ROWS * row);
    for (; row + 2 <= rows; row += 2) int8_rows<K, 2>(panel, columns, at(), out + PANEL_ROWS * row);
    for (; row < rows; ++row) int8_rows<K, 1>(panel, columns, at(), out + PANEL_ROWS * row);
}

template <Kind K>
void float_panel(const uint8_t* panel, int64_t columns, FloatRows x, int64_t rows, float* out) {
    int64_t row = 0;
    const auto at = [&] { return rows_from(x, row, columns); };
    if constexpr (is_plain(K)) {
        for (; row + 4 <= rows; row += 4)
            plain_rows<K, 4>(panel, columns, at(), out + PANEL_ROWS * row);
        for (; row < rows; ++row) plain_rows<K, 1>(panel, columns, at(), out + PANEL_ROWS * row);
    } else {
        for (; row + 8 <= rows; row += 8)
            float_rows<K, 8>(panel, columns, at(), out + PANEL_ROWS * row);
        for (; row + 4 <= rows; row += 4)
            float_rows<K, 4>(panel, columns, at(), out + PANEL_ROWS * row);
        for (; row < rows; ++row) float_rows<K, 1>(panel, columns, at(), out + PANEL_ROWS * row);
    }
}

#define HEADROOM_QUANT_KINDS(CASE)                                                             \
    CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)    \
        CASE(IQ4_NL) CASE(MXFP4)

void panel_int8(const Matrix& w, int64_t panel, QuantisedRows x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * panel_size(w.kind, w.columns);
    switch (w.kind) {
#define CASE(K) case K: return int8_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
#undef CASE
        default: return;
    }
}

void panel_float(const Matrix& w, int64_t panel, FloatRows x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * panel_size(w.kind, w.columns);
    switch (w.kind) {
#define CASE(K) case K: return float_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
        CASE(F32) CASE(F16) CASE(BF16)
#undef CASE
        default: return;
    }
}

void quantise(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums) {
    for (int64_t cell = 0; cell < columns / CELL; ++cell) {
        const float* from = x + cell * CELL;
        F a = load(from), b = load(from + 16);
        const float peak = largest(max(max(a, sub(zero(), a)), max(b, sub(zero(), b))));
        const float scale = peak / 127;
        const F inverse = set1(peak > 0 ? 127 / peak : 0);
        a = round_even(mul(a, inverse));
        b = round_even(mul(b, inverse));
        store_int8(values + cell * CELL, a);
        store_int8(values + cell * CELL + 16, b);
        scales[cell] = scale;
        sums[2 * cell] = static_cast<int32_t>(sum(a));  // whole numbers: exact
        sums[2 * cell + 1] = static_cast<int32_t>(sum(b));
    }
}

void sum_columns(const float* x, int64_t columns, float* sums) {
    for (int64_t i = 0; i < columns / 16; ++i) sums[i] = sum(load(x + 16 * i));
}

// Reads memory and does next to nothing else: the yardstick of all other kernels.
float read_bytes(const uint8_t* data, int64_t bytes) {
    I sums[4] = {zero_ints(), zero_ints(), zero_ints(), zero_ints()};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int j = 0; j < 4; ++j) sums[j] = add_ints(sums[j], load_bytes(data + i + 64 * j));
    return sum(to_float(add_ints(add_ints(sums[0], sums[1]), add_ints(sums[2], sums[3]))));
}

void rms_norm(const float* x, const float* weight, int64_t columns, float eps, float* out) {
    F squares = zero();
    int64_t k = 0;
    for (; k + 16 <= columns; k += 16) squares = fma(load(x + k), load(x + k), squares);
    float total = sum(squares);
    for (int64_t i = k; i < columns; ++i) total += x[i] * x[i];
    const float scale = 1 / std::sqrt(total / static_cast<float>(columns) + eps);
    for (k = 0; k + 16 <= columns; k += 16)
        store(out + k, mul(load(weight + k), mul(load(x + k), set1(scale))));
    for (; k < columns; ++k) out[k] = weight[k] * (x[k] * scale);
}

// e^x to about one unit in the last place, for x from -104 to 88.
inline F exponential(F x) {
    x = min(max(x, set1(-104.0f)), set1(88.7f));
    const F power = round_even(mul(x, set1(1.44269504f)));
    F rest = fma(power, set1(-0.693359375f), x);
    rest = fma(power, set1(2.12194440e-4f), rest);
    F value = set1(1.9875691500e-4f);
    value = fma(value, rest, set1(1.3981999507e-3f));
    value = fma(value, rest, set1(8.3334519073e-3f));
    value = fma(value, rest, set1(4.1665795894e-2f));
    value = fma(value, rest, set1(1.6666665459e-1f));
    value = fma(value, rest, set1(5.0000001201e-1f));
    value = fma(mul(rest, rest), value, add(rest, set1(1.0f)));
    return scale_by_power(value, power);
}

inline F silu(F x) { return div(x, add(set1(1.0f), exponential(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F gelu(F x) {
    const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(x, add(set1(1.0f), exponential(mul(cubic, set1(-1.5957691216f)))));
}

template <class Function>
inline void gated(const float* gate, const float* up, int64_t count, float* out, Function act) {
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) store(out + k, mul(act(load(gate + k)), load(up + k)));
    if (k == count) return;
    float g[16] = {}, u[16] = {};
    std::memcpy(g, gate + k, (count - k) * sizeof(float));
    std::memcpy(u, up + k, (count - k) * sizeof(float));
    store(g, mul(act(load(g)), load(u)));
    std::memcpy(out + k, g, (count - k) * sizeof(float));
}

void silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    gated(gate, up, count, out, [](F x) { return silu(x); });
}

void gelu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    gated(gate, up, count, out, [](F x) { return gelu(x); });
}

void rope(const float* x, int64_t heads, int64_t dim, const float* cos, const float* sin,
          int64_t half, float* out) {
    for (int64_t head = 0; head < heads; ++head, x += dim, out += dim) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            out[i] = a * cos[i] - b * sin[i];
            out[half + i] = b * cos[i] + a * sin[i];
        }
        for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
    }
}

void store_q8_0(const float* x, int64_t dim, uint8_t* out) {
    for (int64_t block = 0; block < dim / 32; ++block, x += 32, out += 34) {
        const F a = load(x), b = load(x + 16);
        const float peak = largest(max(max(a, sub(zero(), a)), max(b, sub(zero(), b))));
        const float scale = peak / 127;
        const float inverse = scale > 0 ? 1 / scale : 0;
        const uint16_t half = float_to_half(scale < 65504.0f ? scale : 65504.0f);
        std::memcpy(out, &half, 2);
        float rounded[32];
        store(rounded, round_even(mul(a, set1(inverse))));
        store(rounded + 16, round_even(mul(b, set1(inverse))));
        for (int i = 0; i < 32; ++i) {
            const float value = rounded[i] < -127 ? -127 : rounded[i] > 127 ? 127 : rounded[i];
            out[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(value));
        }
    }
}

void store_head(Kind kind, const float* x, int64_t dim, uint8_t* out) {
    if (kind == Q8_0) return store_q8_0(x, dim, out);
    if (kind == F32) {
        std::memcpy(out, x, dim * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < dim; ++i) {
        uint16_t word;
        if (kind == F16) {
            word = float_to_half(x[i]);
        } else {  // round to nearest, ties to even; NaN stays NaN
            uint32_t bits;
            std::memcpy(&bits, x + i, 4);
            const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
            word = nan ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        }
        std::memcpy(out + 2 * i, &word, 2);
    }
}

// Sixteen values of a cached head from column 16 * chunk on; zeros beyond its end.
inline F load_cached(Kind kind, const uint8_t* head, int64_t chunk, int64_t dim) {
    if (kind == Q8_0) {
        const uint8_t* block = head + chunk / 2 * 34;
        uint16_t scale;
        std::memcpy(&scale, block, 2);
        return mul(set1(half_to_float(scale)), load_int8(block + 2 + chunk % 2 * 16));
    }
    const int size = kind == F32 ? 4 : 2;
    const uint8_t* from = head + chunk * 16 * size;
    uint8_t tail[64];
    if (16 * (chunk + 1) > dim) {
        std::memset(tail, 0, sizeof tail);
        std::memcpy(tail, from, (dim - 16 * chunk) * size);
        from = tail;
    }
    if (kind == F32) return load(reinterpret_cast<const float*>(from));
    return kind == F16 ? load_half(from) : load_bf16(from);
}

// Walks along a sequence's cached heads; a division per key would cost more than the key does.
class HeadWalk {
  public:
    HeadWalk(const AttentionJob& job, const KvPlane& plane, int64_t position)
        : job_(job), plane_(plane), page_(position / job.page_size),
          offset_(position % job.page_size) {}

    inline const uint8_t* next() {
        const int64_t slot = job_.pages[page_] * job_.page_size + offset_;
        if (++offset_ == job_.page_size) {
            offset_ = 0;
            ++page_;
        }
        return plane_.data + slot * plane_.slot_bytes + job_.head * plane_.head_bytes;
    }

  private:
    const AttentionJob& job_;
    const KvPlane& plane_;
    int64_t page_, offset_;
};

constexpr int KEY_TILE = 64;  // keys that are turned at a time: four vectors of sixteen

// Scores of Q queries with KEY_TILE keys that were turned: turned [dim, KEY_TILE].
template <int Q>
inline void score_tile(const float* const* queries, int dim, const float* turned, float* scores) {
    F sums[Q][4];
    for (int q = 0; q < Q; ++q)
        for (int j = 0; j < 4; ++j) sums[q][j] = zero();
    for (int d = 0; d < dim; ++d)
        for (int j = 0; j < 4; ++j) {
            const F key = load(turned + d * KEY_TILE + 16 * j);
            for (int q = 0; q < Q; ++q) sums[q][j] = fma(set1(queries[q][d]), key, sums[q][j]);
        }
    for (int q = 0; q < Q; ++q)
        for (int j = 0; j < 4; ++j) store(scores + q * KEY_BLOCK + 16 * j, sums[q][j]);
}

// Asks for the keys of the next tile and for the values of this one while this one is scored:
// heads lie apart in memory, too far for the hardware to guess.
void prefetch_tile(const AttentionJob& job, int64_t from, int64_t to) {
    HeadWalk values(job, job.values, from), keys(job, job.keys, from + KEY_TILE);
    for (int64_t key = from; key < to && key < from + KEY_TILE; ++key) {
        prefetch(values.next(), job.values.head_bytes);
        if (key + KEY_TILE < to) prefetch(keys.next(), job.keys.head_bytes);
    }
}

// Scores of every query with the keys [from, from + KEY_TILE); those at `to` and on are not read.
void score_keys(const AttentionJob& job, int64_t from, int64_t to, float* turned, float* scores) {
    const int64_t chunks = padded_dim(job.dim) / 16;
    prefetch_tile(job, from, to);
    HeadWalk walk(job, job.keys, from);
    for (int group = 0; group < KEY_TILE; group += 16) {
        const uint8_t* heads[16];
        int keys = 0;
        for (; keys < 16 && from + group + keys < to; ++keys) heads[keys] = walk.next();
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            F rows[16];
            for (int j = 0; j < 16; ++j)
                rows[j] = j < keys ? load_cached(job.keys.kind, heads[j], chunk, job.dim) : zero();
            transpose(rows);
            for (int i = 0; i < 16; ++i)
                store(turned + (16 * chunk + i) * KEY_TILE + group, rows[i]);
        }
    }
    int q = 0;
    for (; q + 4 <= job.count; q += 4)
        score_tile<4>(job.queries + q, job.dim, turned, scores + q * KEY_BLOCK);
    const auto rest = [&](auto tile) {
        tile(job.queries + q, job.dim, turned, scores + q * KEY_BLOCK);
    };
    if (job.count - q == 3) rest(score_tile<3>);
    if (job.count - q == 2) rest(score_tile<2>);
    if (job.count - q == 1) rest(score_tile<1>);
}

// Adds the values of `keys` keys, weighted, to C vectors of one query's sums.
template <int C>
inline void add_values(const float* values, int64_t width, const float* weights, int64_t keys,
                       float* sums) {
    F totals[C];
    for (int c = 0; c < C; ++c) totals[c] = load(sums + 16 * c);
    for (int64_t key = 0; key < keys; ++key) {
        const F weight = set1(weights[key]);
        for (int c = 0; c < C; ++c)
            totals[c] = fma(weight, load(values + key * width + 16 * c), totals[c]);
    }
    for (int c = 0; c < C; ++c) store(sums + 16 * c, totals[c]);
}

// Turns one query's scores into weights: keys it does not see get none.
Partial weigh(float* scores, int64_t count, int64_t low, int64_t high) {
    const float none = -INFINITY;
    for (int64_t i = 0; i < low; ++i) scores[i] = none;
    for (int64_t i = high; i < count; ++i) scores[i] = none;
    F peaks = set1(none);
    for (int64_t i = 0; i < count; i += 16) peaks = max(peaks, load(scores + i));
    const float peak = largest(peaks);
    if (high <= low) {
        std::memset(scores, 0, count * sizeof(float));
        return {none, 0};
    }
    for (int64_t i = 0; i < count; i += 16)
        store(scores + i, exponential(sub(load(scores + i), set1(peak))));
    for (int64_t i = 0; i < low; ++i) scores[i] = 0;
    for (int64_t i = high; i < count; ++i) scores[i] = 0;
    F totals = zero();
    for (int64_t i = 0; i < count; i += 16) totals = add(totals, load(scores + i));
    return {peak, sum(totals)};
}

inline int64_t clamped(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

void attend(const AttentionJob& job, int64_t from, int64_t to, Partial* partials, float* sums,
            float* scratch) {
    float* scores = scratch;                         // [count, KEY_BLOCK]
    float* tile = scratch + job.count * KEY_BLOCK;   // keys turned, then values: KEY_TILE of them
    const int64_t width = padded_dim(job.dim), keys = to - from;
    const int64_t count = (keys + KEY_TILE - 1) / KEY_TILE * KEY_TILE;
    for (int64_t key = 0; key < keys; key += KEY_TILE)
        score_keys(job, from + key, to, tile, scores + key);
    for (int q = 0; q < job.count; ++q)
        partials[q] = weigh(scores + q * KEY_BLOCK, count, clamped(job.first[q] - from, 0, keys),
                            clamped(job.last[q] - from, 0, keys));
    std::memset(sums, 0, job.count * width * sizeof(float));
    HeadWalk walk(job, job.values, from);
    for (int64_t first = 0; first < keys; first += KEY_TILE) {
        const int64_t some = keys - first < KEY_TILE ? keys - first : KEY_TILE;
        for (int64_t key = 0; key < some; ++key) {
            const uint8_t* head = walk.next();
            for (int64_t chunk = 0; chunk < width / 16; ++chunk)
                store(tile + key * width + 16 * chunk,
                      load_cached(job.values.kind, head, chunk, job.dim));
        }
        for (int q = 0; q < job.count; ++q) {
            const float* weights = scores + q * KEY_BLOCK + first;
            int64_t column = 0;
            for (; column + 64 <= width; column += 64)
                add_values<4>(tile + column, width, weights, some, sums + q * width + column);
            for (; column < width; column += 16)
                add_values<1>(tile + column, width, weights, some, sums + q * width + column);
        }
    }
}

}  // namespace
}  // namespace headroom

#include "delta_net.inl"

namespace headroom {
namespace {

constexpr Kernels make_kernels(const char* name) {
    return {name,     quantise,      sum_columns,   read_bytes, panel_int8, panel_float,
            rms_norm, silu_multiply, gelu_multiply, rope,       store_head, attend,
            convolve, delta_rows,    gated_norm};
}

}  // namespace
}  // namespace headroom
