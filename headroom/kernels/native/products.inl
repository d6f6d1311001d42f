// Products of activations with panels: 8-bit or float activations, weights of all types.
//
// The innermost step multiplies one cell (32 columns of 16 weight rows) with R rows of activations. Each
// lane of a vector is one weight row, so that no sum crosses lanes.

namespace headroom {
namespace {

// Prefetch distances in bytes, used for few rows (R <= 2), where memory is the bound: far ahead into L2,
// which can have many requests in flight, and shortly before use into L1.
constexpr int64_t FAR_AHEAD = 8192, NEAR_AHEAD = 512;

template <int R> inline void prefetch_ahead(const uint8_t* data, int64_t bytes) {
    if constexpr (R <= 2)
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(data + FAR_AHEAD + i, 0, 2);
            __builtin_prefetch(data + NEAR_AHEAD + i, 0, 3);
        }
}
// Prefetches an eighth of a record for cell c, counted from the cell's place plus both distances.
template <int R> inline void prefetch_cell(const uint8_t* record, const RecordShape& shape, int c) {
    const int64_t share = static_cast<int64_t>(shape.bytes + 511) / 512 * 64;
    prefetch_ahead<R>(record + c * share, share);
}

// The sums of R rows. For K types `inner` (values) and `low` (mins) are sums within the current record,
// to which the block's scale and min are applied once.
template <int R> struct Sums {
    F total[R], inner[R], low[R];
};

// R rows of 8-bit activations times one panel, record after record.
template <Kind K, int R> struct Int8Product {
    const Unpacker<K> unpacker;
    const QuantisedRows x;
    const int64_t cells;  // cells of a row

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
            // Stored weights are too large by an offset. The sums start at -offset * sum(activations), so
            // that they end as the exact integer product.
            constexpr int offset = offset_of(K) - (most_of(K) == 255 ? DOT_OFFSET : 0);
            I first = set1_ints(-offset * (K == Q6_K ? counts[0] : both));
            I second = K == Q6_K ? set1_ints(-offset * counts[1]) : zero_ints();
            first = dot_sixteen<most_of(K)>(first, w, values);
            second = dot_sixteen<most_of(K)>(second, w + 4, values + 16);
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
    const int64_t cells;  // cells of a row

    // Converts columns 8i .. 8i+7 of a cell to floats: one vector of sixteen weight rows per column.
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
                    for (int j = 0; j < 8; ++j)  // two independent sums hide the latency of fma
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

// Runs over all records of a panel. Full records have a size that the compiler knows.
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
    if constexpr (!by_record(K)) {  // the shorter last record; K types have full records only
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

// R rows of float activations times a panel of a plain type. Four independent sums hide the latency of fma.
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

}  // namespace
}  // namespace headroom
