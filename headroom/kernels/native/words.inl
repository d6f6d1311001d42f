// Products of 16-bit activations with panels: exact whole-number sums of 32 columns (Q6_K: 16), then scales.
//
// The only rounding of activations is that to 16 bits, at most 2^-16 of the largest of 32 values. A sum of
// 32 products of 16 by 8 bits fits into 29 bits. Scales are applied by multiplications and additions that are
// not fused, in one order: all instruction sets give the same bits, however many rows share a call.

namespace headroom {
namespace {

// a * b + c, rounded twice: the same on instruction sets without fma.
inline F multiply_add(F a, F b, F c) { return add(mul(a, b), c); }

// The whole-number sums of one cell, of columns 0..15 and 16..31 for Q6_K, else both in `first`.
struct WordSums { I first, second; };

template <Kind K> inline WordSums start_sums(const int32_t* counts) {
    // Stored weights are too large by an offset. The sums start at -offset * sum(activations), so that they
    // end as the exact product.
    if constexpr (K == Q6_K)
        return {set1_ints(-offset_of(K) * counts[0]), set1_ints(-offset_of(K) * counts[1])};
    return {set1_ints(-offset_of(K) * (counts[0] + counts[1])), zero_ints()};
}

// The sums of a row so far. For K types `inner` (values) and `low` (mins) are those of the current record.
struct WordTotals { F total, inner, low; };

// Scales the sums of a cell and adds them.
template <Kind K>
inline void add_cell(const WordSums& sums, const CellScales& s, float scale, const int32_t* counts,
                     WordTotals& totals) {
    const F by = set1(scale);
    F& to = by_record(K) ? totals.inner : totals.total;
    to = multiply_add(mul(to_float(sums.first), s.scale), by, to);
    if constexpr (K == Q6_K) to = multiply_add(mul(to_float(sums.second), s.scale2), by, to);
    if constexpr (has_min(K)) {
        F& under = by_record(K) ? totals.low : totals.total;
        under = multiply_add(s.low, set1(scale * static_cast<float>(counts[0] + counts[1])), under);
    }
}

// Applies the scale and min of a K type's block to the sums of its record.
template <Kind K> inline void add_record(const F& scale, const F& min, WordTotals& totals) {
    totals.total = multiply_add(scale, totals.inner, totals.total);
    if constexpr (has_min(K)) totals.total = sub(totals.total, mul(min, totals.low));
}

template <Kind K> using GroupsOf = std::conditional_t<has_groups(K), KGroups, NoGroups>;

// One row of activations times one panel: weights go from memory to registers and are used once.
template <Kind K> struct OneRow {
    const Unpacker<K> unpacker;
    const WordRows x;

    template <int i>
    inline void eight(const uint8_t* quants, const uint8_t* high, const int16_t* values, I& first,
                      I& second) const {
        if constexpr (has_plain_nibbles(K)) {
            I w[4];
            unpacker.template words<i>(quants, high, w);
            first = dot_words(first, w[0], values + 8 * i);
            second = dot_words(second, w[1], values + 8 * i + 2);
            first = dot_words(first, w[2], values + 8 * i + 4);
            second = dot_words(second, w[3], values + 8 * i + 6);
            finish(first);
            finish(second);
            return;
        }
        I bytes[2];
        unpacker.template eight<i>(quants, high, bytes);
        for (int t = 0; t < 2; ++t) {
            first = dot_words(first, even_bytes(bytes[t]), values + 8 * i + 4 * t);
            second = dot_words(second, odd_bytes(bytes[t]), values + 8 * i + 4 * t + 2);
            finish(first);
            finish(second);
        }
    }

    template <class Groups>
    inline void cell(const uint8_t* record, const RecordShape& shape, int c, int64_t column,
                     const Groups& groups, WordTotals& totals) const {
        constexpr KindInfo info = kind_info(K);
        const uint8_t* quants = record + c * info.quant_bytes;
        const uint8_t* high = record + shape.high + c * info.high_bytes;
        const int16_t* values = x.values + column * CELL;
        const int32_t* counts = x.sums + column * 2;
        prefetch_cell<1>(record, shape, c);
        WordSums sums = start_sums<K>(counts);
        I odd = zero_ints();  // a second sum hides the latency
        eight<0>(quants, high, values, sums.first, odd);
        eight<1>(quants, high, values, sums.first, odd);
        if constexpr (K == Q6_K) {
            sums.first = add_ints(sums.first, odd);
            odd = zero_ints();
        }
        I& last = K == Q6_K ? sums.second : sums.first;
        eight<2>(quants, high, values, last, odd);
        eight<3>(quants, high, values, last, odd);
        last = add_ints(last, odd);
        add_cell<K>(sums, read_scales<K>(record, shape, c, groups), x.scales[column], counts, totals);
    }

    void run(const uint8_t* panel, int64_t cells, float* out) const {
        constexpr RecordShape WHOLE = RecordShape::of(K, RECORD);
        WordTotals totals{zero(), zero(), zero()};
        int64_t column = 0;
        for (; column + RECORD <= cells; column += RECORD, panel += WHOLE.bytes) {
            const GroupsOf<K> groups(panel + WHOLE.groups);
            totals.inner = totals.low = zero();
            for (int c = 0; c < RECORD; ++c) cell(panel, WHOLE, c, column + c, groups, totals);
            if constexpr (by_record(K))
                add_record<K>(load_half(panel + WHOLE.scales), load_half(panel + WHOLE.mins), totals);
        }
        if constexpr (!by_record(K)) {  // the shorter last record; K types have full records only
            const int rest = static_cast<int>(cells - column);
            const RecordShape shape = RecordShape::of(K, rest);
            for (int c = 0; c < rest; ++c)
                cell(panel, shape, c, column + c, GroupsOf<K>(nullptr), totals);
        }
        store(out, totals.total);
    }
};

// A record of weights as 16-bit words with its scales, unpacked once for all rows.
template <Kind K> struct WordRecord {
    I words[RECORD][16];
    CellScales scales[RECORD];
    F scale, min;
    int cells;

    inline void read(const Unpacker<K>& unpacker, const uint8_t* record, int count) {
        constexpr KindInfo info = kind_info(K);
        const RecordShape shape = RecordShape::of(K, count);
        const GroupsOf<K> groups(record + shape.groups);
        cells = count;
        for (int c = 0; c < cells; ++c) {
            const uint8_t* quants = record + c * info.quant_bytes;
            const uint8_t* high = record + shape.high + c * info.high_bytes;
            unpacker.template words<0>(quants, high, words[c]);
            unpacker.template words<1>(quants, high, words[c] + 4);
            unpacker.template words<2>(quants, high, words[c] + 8);
            unpacker.template words<3>(quants, high, words[c] + 12);
            scales[c] = read_scales<K>(record, shape, c, groups);
        }
        if constexpr (by_record(K)) scale = load_half(record + shape.scales);
        if constexpr (by_record(K) && has_min(K)) min = load_half(record + shape.mins);
    }
};

// Adds the products of a record with R rows to out [R, 16]. `x` begins at the record's first cell; its rows
// are `cells` cells apart.
template <Kind K, int R>
inline void add_rows(const WordRecord<K>& record, WordRows x, int64_t cells, float* out) {
    WordTotals totals[R];
    for (int r = 0; r < R; ++r) totals[r] = {load(out + PANEL_ROWS * r), zero(), zero()};
    for (int c = 0; c < record.cells; ++c) {
        WordSums sums[R];
        for (int r = 0; r < R; ++r) sums[r] = start_sums<K>(x.sums + 2 * (r * cells + c));
        const int16_t* values = x.values + c * CELL;
#pragma GCC unroll 16
        for (int t = 0; t < (K == Q6_K ? 8 : 16); ++t) {
            const I w = record.words[c][t];
            for (int r = 0; r < R; ++r) {
                sums[r].first = dot_words(sums[r].first, w, values + r * cells * CELL + 2 * t);
                finish(sums[r].first);
            }
        }
        if constexpr (K == Q6_K)
#pragma GCC unroll 8
            for (int t = 8; t < 16; ++t) {
                const I w = record.words[c][t];
                for (int r = 0; r < R; ++r) {
                    sums[r].second = dot_words(sums[r].second, w, values + r * cells * CELL + 2 * t);
                    finish(sums[r].second);
                }
            }
        for (int r = 0; r < R; ++r) {
            const int64_t at = r * cells + c;
            add_cell<K>(sums[r], record.scales[c], x.scales[at], x.sums + 2 * at, totals[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        if constexpr (by_record(K)) add_record<K>(record.scale, record.min, totals[r]);
        store(out + PANEL_ROWS * r, totals[r].total);
    }
}

template <Kind K>
void word_panel(const uint8_t* panel, int64_t columns, WordRows x, int64_t rows, float* out) {
    const Unpacker<K> unpacker;
    const int64_t cells = columns / CELL;
    if (rows == 1) return OneRow<K>{{}, x}.run(panel, cells, out);
    constexpr int MOST = MANY_REGISTERS ? 16 : 4;  // rows whose sums fit into registers
    WordRecord<K> record;
    std::memset(out, 0, rows * PANEL_ROWS * sizeof(float));
    for (int64_t cell = 0; cell < cells; cell += RECORD) {
        const int count = static_cast<int>(cells - cell < RECORD ? cells - cell : RECORD);
        const RecordShape shape = RecordShape::of(K, count);
        prefetch_ahead<1>(panel, shape.bytes);
        record.read(unpacker, panel, count);
        panel += shape.bytes;
        const auto at = [&](int64_t row) {
            const int64_t first = row * cells + cell;
            return WordRows{x.values + first * CELL, x.scales + first, x.sums + first * 2};
        };
        int64_t row = 0;
        for (; row + MOST <= rows; row += MOST)
            add_rows<K, MOST>(record, at(row), cells, out + PANEL_ROWS * row);
        if constexpr (MOST > 4)
            for (; row + 4 <= rows; row += 4)
                add_rows<K, 4>(record, at(row), cells, out + PANEL_ROWS * row);
        for (; row + 2 <= rows; row += 2)
            add_rows<K, 2>(record, at(row), cells, out + PANEL_ROWS * row);
        for (; row < rows; ++row) add_rows<K, 1>(record, at(row), cells, out + PANEL_ROWS * row);
    }
}

void panel_int16(const Matrix& w, int64_t panel, WordRows x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * panel_size(w.kind, w.columns);
    switch (w.kind) {
#define CASE(K) case K: return word_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
#undef CASE
        default: return;
    }
}

}  // namespace
}  // namespace headroom
