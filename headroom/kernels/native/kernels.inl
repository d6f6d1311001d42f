// The kernels, written once over the sixteen-lane vectors of a simd_*.h file.
// Every row is computed by the same operations in the same order however many share a call.
#include "kernels.h"

#include <algorithm>
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
        const F inverse = set1(peak > 1e-35f ? 127 / peak : 0);  // finite
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

// The exponential ends at e^88: a gate far below that must come out as nothing all the same.
inline F closed(F x) { return max(x, set1(-104.0f)); }

inline F silu(F x) { return div(closed(x), add(set1(1.0f), exponential(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F gelu(F x) {
    const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(closed(x), add(set1(1.0f), exponential(mul(cubic, set1(-1.5957691216f)))));
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

// ---- cached keys and values ----

// To the nearest whole number, halves away from zero.
inline F round_away(F x) {
    const F whole = truncate(x);
    return add(whole, truncate(mul(set1(2), sub(x, whole))));
}

// Scales are stored as f16; what overflows there would come back as infinity.
inline void store_scale(float value, uint8_t* out) {
    const uint16_t half = float_to_half(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
    std::memcpy(out, &half, 2);
}

// A step so small that its inverse overflows is stored as zero anyway.
inline float inverse_of(float step) {
    const float inverse = 1 / step;
    return step == 0 || std::isinf(inverse) ? 0 : inverse;
}

void store_q8_0(const float* x, uint8_t* out) {
    const F a = load(x), b = load(x + 16);
    const float step = largest(max(max(a, sub(zero(), a)), max(b, sub(zero(), b)))) / 127;
    const F inverse = set1(inverse_of(step)), limit = set1(127);
    store_scale(step, out);
    const auto round = [&](F value) {
        return max(min(round_away(mul(value, inverse)), limit), sub(zero(), limit));
    };
    store_int8(reinterpret_cast<int8_t*>(out + 2), round(a));
    store_int8(reinterpret_cast<int8_t*>(out + 18), round(b));
}

// Four or five bits of 32 values: low halves of the bytes first, fifth bits in a word before them.
template <Kind K> void store_quants(const int* quants, uint8_t* out) {
    if constexpr (has_high_bit(K)) {
        uint32_t high = 0;
        for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(quants[i] >> 4) << i;
        std::memcpy(out, &high, 4);
        out += 4;
    }
    for (int i = 0; i < 16; ++i)
        out[i] = static_cast<uint8_t>((quants[i] & 15) | (quants[i + 16] & 15) << 4);
}

// Q4_0, Q5_0: the value that is largest in size becomes the lowest number, -8 or -16.
template <Kind K> void store_signed(const float* x, uint8_t* out) {
    constexpr int zero_point = offset_of(K);
    float peak = 0, value = x[0];
    for (int i = 0; i < 32; ++i)
        if (std::fabs(x[i]) > peak) {
            peak = std::fabs(x[i]);
            value = x[i];
        }
    const float step = value / -zero_point;
    const double inverse = inverse_of(step);
    int quants[32];
    for (int i = 0; i < 32; ++i) {
        // Rounded once, as a fused product and sum would be, on any CPU.
        const float raised = static_cast<float>(static_cast<double>(x[i]) * inverse + (zero_point + 0.5));
        quants[i] = static_cast<int>(raised < 2 * zero_point - 1 ? raised : 2 * zero_point - 1);
    }
    store_scale(step, out);
    store_quants<K>(quants, out + 2);
}

// Q4_1, Q5_1: equal steps from the lowest value to the highest.
template <Kind K> void store_ranged(const float* x, uint8_t* out) {
    constexpr int top = K == Q4_1 ? 15 : 31;
    float low = x[0], high = x[0];
    for (int i = 1; i < 32; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float step = (high - low) / top, inverse = inverse_of(step);
    int quants[32];
    for (int i = 0; i < 32; ++i) {
        const float raised = (x[i] - low) * inverse + 0.5f;
        quants[i] = static_cast<int>(raised < top ? raised : top);
    }
    store_scale(step, out);
    store_scale(low, out + 2);
    store_quants<K>(quants, out + 4);
}

void store_block(Kind kind, const float* x, uint8_t* out) {
    switch (kind) {
        case Q4_0: return store_signed<Q4_0>(x, out);
        case Q5_0: return store_signed<Q5_0>(x, out);
        case Q4_1: return store_ranged<Q4_1>(x, out);
        case Q5_1: return store_ranged<Q5_1>(x, out);
        default: return store_q8_0(x, out);
    }
}

void store_head(Kind kind, const float* x, int64_t dim, uint8_t* out) {
    if (kind == F32) {
        std::memcpy(out, x, dim * sizeof(float));
        return;
    }
    if (!is_plain(kind)) {
        const KindInfo info = kind_info(kind);
        for (int64_t block = 0; block < dim / info.block; ++block)
            store_block(kind, x + block * info.block, out + block * info.block_bytes);
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

// The 32 values of a packed block.
template <Kind K> inline void load_block(const uint8_t* block, F& a, F& b) {
    const F scale = set1(read_half(block));
    if constexpr (K == Q8_0) {
        a = mul(scale, load_int8(block + 2));
        b = mul(scale, load_int8(block + 18));
        return;
    }
    const uint8_t* quants = block + (has_min(K) ? 4 : 2);
    F low, high;
    load_nibbles(quants + (has_high_bit(K) ? 4 : 0), low, high);
    if constexpr (has_high_bit(K)) {
        low = add(low, sixteens(quants));
        high = add(high, sixteens(quants + 2));
    }
    if constexpr (has_min(K)) {
        const F min = set1(read_half(block + 2));
        a = fma(scale, low, min);
        b = fma(scale, high, min);
    } else {
        const F offset = set1(static_cast<float>(offset_of(K)));
        a = mul(scale, sub(low, offset));
        b = mul(scale, sub(high, offset));
    }
}

// One cached head as floats, filled up with zeros to whole vectors.
template <Kind K> inline void load_head(const uint8_t* head, int64_t dim, float* out) {
    if constexpr (is_plain(K)) {
        constexpr int size = kind_info(K).block_bytes;
        const auto vector = [](const uint8_t* from) {
            if constexpr (K == F32) return load(reinterpret_cast<const float*>(from));
            else if constexpr (K == F16) return load_half(from);
            else return load_bf16(from);
        };
        int64_t i = 0;
        for (; i + 16 <= dim; i += 16) store(out + i, vector(head + i * size));
        if (i == dim) return;
        alignas(64) uint8_t tail[64] = {};
        std::memcpy(tail, head + i * size, (dim - i) * size);
        store(out + i, vector(tail));
    } else {
        for (int64_t block = 0; block < dim / 32; ++block) {
            F a, b;
            load_block<K>(head + block * kind_info(K).block_bytes, a, b);
            store(out + 32 * block, a);
            store(out + 32 * block + 16, b);
        }
    }
}

// ---- attention ----

// Where the heads of some keys begin; null for keys that are not to be read.
struct Tile {
    const uint8_t* heads[KEY_TILE];
};

// Finds the keys [from, from + KEY_TILE) that lie in [first, to), and asks memory for them: all
// heads of a job lie side by side.
void open_tile(const AttentionJob& job, const KvPlane& plane, int64_t from, int64_t first, int64_t to,
               Tile& tile) {
    const int64_t low = first > from ? first : from;
    int64_t page = low / job.page_size, offset = low % job.page_size;
    for (int64_t key = from; key < from + KEY_TILE; ++key) {
        tile.heads[key - from] = nullptr;
        if (key < low || key >= to) continue;
        const int64_t slot = job.pages[page] * job.page_size + offset;
        const uint8_t* heads = plane.data + slot * plane.slot_bytes + job.head * plane.head_bytes;
        prefetch(heads, job.heads * plane.head_bytes);
        tile.heads[key - from] = heads;
        if (++offset == job.page_size) {  // a division per key would cost more than the key does
            offset = 0;
            ++page;
        }
    }
}

// One head of a tile's keys as floats, in `memory` where they are not floats already.
template <Kind K>
void read_tile(const Tile& tile, int64_t offset, int64_t dim, float* memory, const uint8_t** rows) {
    const int64_t width = padded_dim(dim);
    for (int64_t key = 0; key < KEY_TILE; ++key) {
        float* row = memory + key * width;
        rows[key] = reinterpret_cast<const uint8_t*>(tile.heads[key] ? row : memory + KEY_TILE * width);
        if (!tile.heads[key]) continue;  // zeros
        if (K == F32 && dim == width) rows[key] = tile.heads[key] + offset;
        else load_head<K>(tile.heads[key] + offset, dim, row);
    }
}

void read_tile(Kind kind, const Tile& tile, int64_t offset, int64_t dim, float* memory,
               const uint8_t** rows) {
    switch (kind) {
        case F32: return read_tile<F32>(tile, offset, dim, memory, rows);
        case F16: return read_tile<F16>(tile, offset, dim, memory, rows);
        case BF16: return read_tile<BF16>(tile, offset, dim, memory, rows);
        case Q8_0: return read_tile<Q8_0>(tile, offset, dim, memory, rows);
        case Q5_1: return read_tile<Q5_1>(tile, offset, dim, memory, rows);
        case Q5_0: return read_tile<Q5_0>(tile, offset, dim, memory, rows);
        case Q4_1: return read_tile<Q4_1>(tile, offset, dim, memory, rows);
        default: return read_tile<Q4_0>(tile, offset, dim, memory, rows);
    }
}

// Scores of Q queries with N keys of plain type K, at most sixteen in all. Each is summed along its
// own lanes in the same order, however many are summed together.
template <Kind K, int Q, int N>
inline void score(const float* queries, int64_t width, const uint8_t* const* rows, float* scores) {
    constexpr int size = kind_info(K).block_bytes;
    constexpr int B = MANY_REGISTERS ? Q : Q % 2 ? 1 : 2;  // queries and keys whose sums fit into
    constexpr int C = MANY_REGISTERS ? N : 4 / B;          // registers
    F sums[16];
    for (int i = Q * N; i < 16; ++i) sums[i] = zero();
    for (int q = 0; q < Q; q += B)
        for (int key = 0; key < N; key += C) {
            F some[B][C];
            for (int i = 0; i < B; ++i)
                for (int j = 0; j < C; ++j) some[i][j] = zero();
            for (int64_t d = 0; d < width; d += 16) {
                F keys[C];
                for (int j = 0; j < C; ++j) keys[j] = load_plain<K>(rows[key + j] + d * size);
                for (int i = 0; i < B; ++i) {
                    const F query = load(queries + (q + i) * width + d);
                    for (int j = 0; j < C; ++j) some[i][j] = fma(query, keys[j], some[i][j]);
                }
            }
            for (int i = 0; i < B; ++i)
                for (int j = 0; j < C; ++j) sums[(q + i) * N + key + j] = some[i][j];
        }
    float lanes[16];
    store(lanes, sum_each(sums));
    for (int q = 0; q < Q; ++q) std::memcpy(scores + q * KEY_BLOCK, lanes + q * N, N * sizeof(float));
}

template <Kind K, int Q, int N>
inline void score_tile(const float* queries, int64_t width, const uint8_t* const* rows,
                       float* scores) {
    for (int key = 0; key < KEY_TILE; key += N)
        score<K, Q, N>(queries, width, rows + key, scores + key);
}

template <Kind K>
void score_all(const float* queries, int count, int64_t width, const uint8_t* const* rows,
               float* scores) {
    int q = 0;
    for (; q + 4 <= count; q += 4)
        score_tile<K, 4, 4>(queries + q * width, width, rows, scores + q * KEY_BLOCK);
    const float* rest = queries + q * width;
    if (count - q == 3) score_tile<K, 3, 4>(rest, width, rows, scores + q * KEY_BLOCK);
    if (count - q == 2) score_tile<K, 2, 8>(rest, width, rows, scores + q * KEY_BLOCK);
    if (count - q == 1) score_tile<K, 1, 16>(rest, width, rows, scores + q * KEY_BLOCK);
}

// Adds a tile's values, weighted, to C vectors of the sums of Q queries.
template <Kind K, int Q, int C>
inline void add_columns(const uint8_t* const* rows, int64_t column, const float* weights,
                        int64_t width, float* sums) {
    constexpr int size = kind_info(K).block_bytes;
    F totals[Q][C];
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) totals[q][c] = load(sums + q * width + column + 16 * c);
    for (int64_t key = 0; key < KEY_TILE; ++key) {
        F values[C];
        for (int c = 0; c < C; ++c) values[c] = load_plain<K>(rows[key] + (column + 16 * c) * size);
        for (int q = 0; q < Q; ++q) {
            const F weight = set1(weights[q * KEY_BLOCK + key]);
            for (int c = 0; c < C; ++c) totals[q][c] = fma(weight, values[c], totals[q][c]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) store(sums + q * width + column + 16 * c, totals[q][c]);
}

template <Kind K, int Q>
inline void add_tile(const uint8_t* const* rows, const float* weights, int64_t width, float* sums) {
    constexpr int C = MANY_REGISTERS || Q == 1 ? 4 : Q == 2 ? 2 : 1;
    int64_t column = 0;
    for (; column + 16 * C <= width; column += 16 * C)
        add_columns<K, Q, C>(rows, column, weights, width, sums);
    for (; column < width; column += 16) add_columns<K, Q, 1>(rows, column, weights, width, sums);
}

template <Kind K>
void add_all(const uint8_t* const* rows, const float* weights, int count, int64_t width,
             float* sums) {
    int q = 0;
    for (; q + 4 <= count; q += 4)
        add_tile<K, 4>(rows, weights + q * KEY_BLOCK, width, sums + q * width);
    weights += q * KEY_BLOCK;
    if (count - q == 3) add_tile<K, 3>(rows, weights, width, sums + q * width);
    if (count - q == 2) add_tile<K, 2>(rows, weights, width, sums + q * width);
    if (count - q == 1) add_tile<K, 1>(rows, weights, width, sums + q * width);
}

// Scores of one head's queries with a tile's keys or, where `add`, its weighted values.
template <Kind K>
inline void use_rows(bool add, const uint8_t* const* rows, const float* queries, int count,
                     int64_t width, float* scores, float* sums) {
    if (add) add_all<K>(rows, scores, count, width, sums);
    else score_all<K>(queries, count, width, rows, scores);
}

// The same from the cache itself. Few queries take half floats as they lie: memory that is read
// once is not worth unpacking to another place first.
void use_tile(bool add, Kind kind, const Tile& tile, int64_t offset, int dim, float* memory,
              const float* queries, int count, float* scores, float* sums) {
    const int64_t width = padded_dim(dim);
    const uint8_t* rows[KEY_TILE];
    if (count > 4 || dim != width || (kind != F16 && kind != BF16)) {
        read_tile(kind, tile, offset, dim, memory, rows);
        return use_rows<F32>(add, rows, queries, count, width, scores, sums);
    }
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(memory + KEY_TILE * width);
    for (int64_t key = 0; key < KEY_TILE; ++key)
        rows[key] = tile.heads[key] ? tile.heads[key] + offset : zeros;
    if (kind == F16) use_rows<F16>(add, rows, queries, count, width, scores, sums);
    else use_rows<BF16>(add, rows, queries, count, width, scores, sums);
}

inline int64_t clamped(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

// Writes `value` for those of the keys [from, from + count) that a query does not see.
void hide(const AttentionJob& job, int query, int64_t from, int64_t count, float value, float* scores) {
    const int64_t low = clamped(job.first[query] - from, 0, count);
    const int64_t high = clamped(job.last[query] - from, 0, count);
    for (int64_t i = 0; i < low; ++i) scores[i] = value;
    for (int64_t i = high; i < count; ++i) scores[i] = value;
    const uint8_t* tree = job.tree[query];
    if (!tree) return;
    int64_t depth = 0;  // of the next key that is seen: ancestors come in the order of their depth
    for (int64_t key = job.start; key < from + high; ++key) {
        const bool seen = tree[key - job.start] && depth >= job.shallowest[query];
        depth += tree[key - job.start];
        if (!seen && key >= from) scores[key - from] = value;
    }
}

// Turns one query's scores into weights: keys it does not see get none.
Partial weigh(const AttentionJob& job, int query, int64_t from, int64_t count, float* scores) {
    hide(job, query, from, count, -INFINITY, scores);
    F peaks = set1(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) peaks = max(peaks, load(scores + i));
    const float peak = largest(peaks);
    if (peak == -INFINITY) {
        std::memset(scores, 0, count * sizeof(float));
        return {peak, 0};
    }
    for (int64_t i = 0; i < count; i += 16)
        store(scores + i, exponential(sub(load(scores + i), set1(peak))));
    hide(job, query, from, count, 0, scores);
    F totals = zero();
    for (int64_t i = 0; i < count; i += 16) totals = add(totals, load(scores + i));
    return {peak, sum(totals)};
}

void attend(const AttentionJob& job, int64_t from, int64_t to, Partial* partials, float* sums,
            float* scratch) {
    const int queries = job.heads * job.count;
    const int64_t width = padded_dim(job.dim), tiles = (to - from + KEY_TILE - 1) / KEY_TILE;
    float* scores = scratch;  // [queries, KEY_BLOCK]
    float* memory = scratch + queries * KEY_BLOCK;  // [KEY_TILE + 1, width]; the last row is zero
    std::memset(memory + KEY_TILE * width, 0, width * sizeof(float));
    std::memset(sums, 0, queries * width * sizeof(float));
    int64_t first = to;
    for (int q = 0; q < queries; ++q) first = job.first[q] < first ? job.first[q] : first;
    const auto plane = [&](int64_t i) -> const KvPlane& { return i < tiles ? job.keys : job.values; };
    // Keys tile by tile, then values; each is asked for while the one before it is computed.
    Tile opened[2];
    open_tile(job, job.keys, from, first, to, opened[0]);
    for (int64_t i = 0; i < 2 * tiles; ++i) {
        if (i + 1 < 2 * tiles)
            open_tile(job, plane(i + 1), from + (i + 1) % tiles * KEY_TILE, first, to,
                      opened[(i + 1) % 2]);
        if (i == tiles)
            for (int q = 0; q < queries; ++q)
                partials[q] = weigh(job, q, from, tiles * KEY_TILE, scores + q * KEY_BLOCK);
        float* block = scores + i % tiles * KEY_TILE;
        for (int head = 0; head < job.heads; ++head) {
            const int q = head * job.count;
            use_tile(i >= tiles, plane(i).kind, opened[i % 2], head * plane(i).head_bytes, job.dim,
                     memory, job.queries + q * width, job.count, block + q * KEY_BLOCK,
                     sums + q * width);
        }
    }
}

}  // namespace
}  // namespace headroom

#include "delta_net.inl"
#include "tiles.inl"

namespace headroom {
namespace {

constexpr Kernels make_kernels(const char* name) {
    return {name,          quantise, sum_columns,   read_bytes,    panel_int8, panel_float,
            tile_to_panel, rms_norm, silu_multiply, gelu_multiply, rope,       store_head,
            attend,        convolve, delta_rows,    gated_norm};
}

}  // namespace
}  // namespace headroom
