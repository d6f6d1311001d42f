// The kernels, written once over the sixteen-lane vectors of a simd_*.h file.
// Every row is computed by the same operations in the same order however many share a call.
#include "kernels.h"

#include <cmath>
#include <cstring>

namespace headroom {
namespace {

constexpr bool has_min(Kind k) { return k == Q4_1 || k == Q5_1 || k == Q4_K || k == Q5_K; }
constexpr bool has_groups(Kind k) { return k == Q4_K || k == Q5_K; }
constexpr bool has_high_bit(Kind k) { return k == Q5_0 || k == Q5_1 || k == Q5_K; }
constexpr bool has_table(Kind k) { return k == IQ4_NL || k == MXFP4; }

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

    Unpacker() {
        if constexpr (K == IQ4_NL) table = make_table(IQ4_VALUES, offset_of(K));
        if constexpr (K == MXFP4) table = make_table(MXFP4_VALUES, offset_of(K));
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

// A real value is scale * stored + shift; the second pair is for columns 16..31 of Q6_K.
struct CellScales { F scale, shift, scale2, shift2; };

template <Kind K>
inline CellScales read_scales(const uint8_t* panel, const PanelShape& shape, int64_t cell) {
    constexpr KindInfo info = kind_info(K);
    constexpr int cells = info.block / CELL;
    const int64_t block = cell / cells;
    const uint8_t* scales = panel + shape.scales + block * info.scale_bytes;
    const uint8_t* groups = panel + shape.groups + block * info.group_bytes;
    const int g = static_cast<int>(cell % cells);
    const F offset = set1(-static_cast<float>(offset_of(K)));
    CellScales out;
    if constexpr (K == MXFP4) out.scale = powers_of_two(scales);
    else out.scale = load_half(scales);
    if constexpr (K == Q6_K) {
        out.scale2 = mul(out.scale, load_int8(groups + 32 * g + 16));
        out.scale = mul(out.scale, load_int8(groups + 32 * g));
        out.shift2 = mul(out.scale2, offset);
    }
    if constexpr (has_min(K)) {
        out.shift = load_half(panel + shape.mins + block * info.min_bytes);
        if constexpr (has_groups(K)) {
            F scale, min;
            k_group(groups, g, scale, min);
            out.scale = mul(out.scale, scale);
            out.shift = sub(zero(), mul(out.shift, min));
        }
    } else {
        out.shift = mul(out.scale, offset);
    }
    return out;
}

inline void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
}

constexpr int64_t AHEAD = 12;  // cells asked for before they are needed, where memory is the bound

// R rows of 8-bit activations times one panel.
template <Kind K, int R>
void int8_rows(const uint8_t* panel, int64_t columns, QuantisedRows x, float* out) {
    constexpr KindInfo info = kind_info(K);
    const PanelShape shape = PanelShape::of(K, columns);
    const Unpacker<K> unpacker;
    const int64_t cells = columns / CELL;
    F totals[R];
    for (int r = 0; r < R; ++r) totals[r] = zero();
    for (int64_t cell = 0; cell < cells; ++cell) {
        I w[8];
        if constexpr (R <= 2) prefetch(panel + (cell + AHEAD) * info.quant_bytes, info.quant_bytes);
        unpacker.cell(panel + cell * info.quant_bytes, panel + shape.high + cell * info.high_bytes, w);
        const CellScales s = read_scales<K>(panel, shape, cell);
        for (int r = 0; r < R; ++r) {
            const int8_t* values = x.values + r * columns + cell * CELL;
            const float* sums = x.sums + (r * cells + cell) * 2;
            I first = zero_ints(), second = zero_ints();
            for (int t = 0; t < 4; ++t) first = dot(first, w[t], values + 4 * t);
            F value;
            if constexpr (K == Q6_K) {
                for (int t = 4; t < 8; ++t) second = dot(second, w[t], values + 4 * t);
                value = fma(to_float(second), s.scale2, mul(to_float(first), s.scale));
                totals[r] = fma(s.shift, set1(sums[0]), totals[r]);
                totals[r] = fma(s.shift2, set1(sums[1]), totals[r]);
            } else {
                for (int t = 4; t < 8; ++t) first = dot(first, w[t], values + 4 * t);
                value = mul(to_float(first), s.scale);
                totals[r] = fma(s.shift, set1(sums[0] + sums[1]), totals[r]);
            }
            totals[r] = fma(value, set1(x.scales[r * cells + cell]), totals[r]);
        }
    }
    for (int r = 0; r < R; ++r) store(out + PANEL_ROWS * r, totals[r]);
}

template <int R, int t> inline void float_step(const I* w, const float* x, int64_t stride, F* sums) {
    const F columns[4] = {byte_to_float<0>(w[t]), byte_to_float<1>(w[t]), byte_to_float<2>(w[t]),
                          byte_to_float<3>(w[t])};
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j)
            sums[r] = fma(columns[j], set1(x[r * stride + 4 * t + j]), sums[r]);
}

// R rows of float activations times one panel.
template <Kind K, int R>
void float_rows(const uint8_t* panel, int64_t columns, FloatRows x, float* out) {
    constexpr KindInfo info = kind_info(K);
    const PanelShape shape = PanelShape::of(K, columns);
    const Unpacker<K> unpacker;
    const int64_t cells = columns / CELL;
    F totals[R];
    for (int r = 0; r < R; ++r) totals[r] = zero();
    for (int64_t cell = 0; cell < cells; ++cell) {
        I w[8];
        if constexpr (R <= 2) prefetch(panel + (cell + AHEAD) * info.quant_bytes, info.quant_bytes);
        unpacker.cell(panel + cell * info.quant_bytes, panel + shape.high + cell * info.high_bytes, w);
        const CellScales s = read_scales<K>(panel, shape, cell);
        const float* values = x.values + cell * CELL;
        F cell_sums[R];
        for (int r = 0; r < R; ++r) cell_sums[r] = zero();
        float_step<R, 0>(w, values, columns, cell_sums);
        float_step<R, 1>(w, values, columns, cell_sums);
        float_step<R, 2>(w, values, columns, cell_sums);
        float_step<R, 3>(w, values, columns, cell_sums);
        if constexpr (K == Q6_K)
            for (int r = 0; r < R; ++r) {
                totals[r] = fma(cell_sums[r], s.scale, totals[r]);
                cell_sums[r] = zero();
            }
        float_step<R, 4>(w, values, columns, cell_sums);
        float_step<R, 5>(w, values, columns, cell_sums);
        float_step<R, 6>(w, values, columns, cell_sums);
        float_step<R, 7>(w, values, columns, cell_sums);
        for (int r = 0; r < R; ++r) {
            const float* sums = x.sums + (r * cells + cell) * 2;
            if constexpr (K == Q6_K) {
                totals[r] = fma(cell_sums[r], s.scale2, totals[r]);
                totals[r] = fma(s.shift, set1(sums[0]), totals[r]);
                totals[r] = fma(s.shift2, set1(sums[1]), totals[r]);
            } else {
                totals[r] = fma(cell_sums[r], s.scale, totals[r]);
                totals[r] = fma(s.shift, set1(sums[0] + sums[1]), totals[r]);
            }
        }
    }
    for (int r = 0; r < R; ++r) store(out + PANEL_ROWS * r, totals[r]);
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
    for (; k + 4 <= columns; k += 4)
        for (int j = 0; j < 4; ++j) {
            const F w = load_plain<K>(panel + (k + j) * bytes);
            for (int r = 0; r < R; ++r)
                totals[r][j] = fma(w, set1(x.values[r * columns + k + j]), totals[r][j]);
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
    const uint8_t* data = w.data + panel * PanelShape::of(w.kind, w.columns).bytes;
    switch (w.kind) {
#define CASE(K) case K: return int8_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
#undef CASE
        default: return;
    }
}

void panel_float(const Matrix& w, int64_t panel, FloatRows x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * PanelShape::of(w.kind, w.columns).bytes;
    switch (w.kind) {
#define CASE(K) case K: return float_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
        CASE(F32) CASE(F16) CASE(BF16)
#undef CASE
        default: return;
    }
}

void quantise(const float* x, int64_t columns, int8_t* values, float* scales, float* sums) {
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
        sums[2 * cell] = scale * sum(a);  // whole numbers: exact
        sums[2 * cell + 1] = scale * sum(b);
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
