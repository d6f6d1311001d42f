// Products of 24-bit activations with panels: exact whole-number sums of 32 columns (Q6_K: 16), then scales.
//
// The only rounding of activations is that to 24 bits, less than 2^-22 of the largest of 32 values: about that
// of float32. A value is three signed bytes (DigitCell), so that instructions for products of bytes compute its
// products exactly. Scales are applied by multiplications and additions that are not fused, in one order: all
// instruction sets give the same bits, however many rows share a call.

namespace headroom {
namespace {

// a * b + c, rounded twice: the same on instruction sets without fma.
HEADROOM_INLINE F multiply_add(F a, F b, F c) { return add(mul(a, b), c); }

// The whole-number products of a cell's columns, without its scales: 256 * high + low.
struct DigitSums { I high, low; };

HEADROOM_INLINE F value_of(const DigitSums& sums) {  // 256 * high is exact, so that fma changes nothing
    return fma(to_float(sums.high), set1(256), to_float(sums.low));
}

// Stored weights are too large by an offset; `part` is the half of the cell that was summed, or 2 for both.
template <Kind K> HEADROOM_INLINE void subtract_offset(const DigitCell& x, int part, DigitSums& sums) {
    if constexpr (offset_of(K) == 0) return;
    const int32_t high = part == 2 ? x.high[0] + x.high[1] : x.high[part];
    const int32_t low = part == 2 ? x.low[0] + x.low[1] : x.low[part];
    sums.high = add_ints(sums.high, set1_ints(-offset_of(K) * high));
    sums.low = add_ints(sums.low, set1_ints(-offset_of(K) * low));
}

// The sums of a row so far. For K types `inner` (values) and `low` (mins) are those of the current record.
struct DigitTotals { F total, inner, low; };

// Scales the sums of a cell and adds them. Q6_K has two, of columns 0..15 and 16..31.
template <Kind K>
HEADROOM_INLINE void add_cell(DigitSums* sums, const CellScales& s, const DigitCell& x, DigitTotals& totals) {
    const F by = set1(x.scale);
    F& to = by_record(K) ? totals.inner : totals.total;
    subtract_offset<K>(x, K == Q6_K ? 0 : 2, sums[0]);
    to = multiply_add(mul(value_of(sums[0]), s.scale), by, to);
    if constexpr (K == Q6_K) {
        subtract_offset<K>(x, 1, sums[1]);
        to = multiply_add(mul(value_of(sums[1]), s.scale2), by, to);
    }
    if constexpr (has_min(K)) {
        F& under = by_record(K) ? totals.low : totals.total;
        under = multiply_add(s.low, set1(x.total), under);
    }
}

// Applies the scale and min of a K type's block to the sums of its record.
template <Kind K> HEADROOM_INLINE void add_record(const F& scale, const F& min, DigitTotals& totals) {
    totals.total = multiply_add(scale, totals.inner, totals.total);
    if constexpr (has_min(K)) totals.total = sub(totals.total, mul(min, totals.low));
}

template <Kind K> using GroupsOf = std::conditional_t<has_groups(K), KGroups, NoGroups>;

// Whether weights are multiplied as 16-bit words: bytes that are too large for products of bytes.
template <Kind K> constexpr bool as_words() { return AS_WORDS<most_of(K)>; }

// The digits of R rows times weights, from one vector (four columns) to the next: every RUN vectors are
// widened to 32 bits. The sums of Q6_K start anew after half of the cell.
template <Kind K, int R> struct ByteSums {
    static constexpr int FITTING = BYTE_RUN<most_of(K)>, RUN = K == Q6_K && FITTING > 4 ? 4 : FITTING;
    I part[R][3], sums[R][3];

    HEADROOM_INLINE void add(int t, const I& w, const DigitCell* x, int64_t stride) {
        for (int r = 0; r < R; ++r)
            for (int j = 0; j < 3; ++j) {
                I& to = part[r][j];
                to = dot_four(t % RUN == 0 ? zero_ints() : to, w, x[r * stride].digits[j] + 4 * t);
                finish(to);
            }
        const bool first = K == Q6_K ? t % 4 < RUN : t < RUN;
        if (t % RUN == RUN - 1)
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < 3; ++j) {
                    const I wide = to_32_bits(part[r][j]);
                    sums[r][j] = first ? wide : add_ints(sums[r][j], wide);
                }
    }
    HEADROOM_INLINE DigitSums of(int r) const {
        return {add_ints(times_256(sums[r][0]), sums[r][1]), sums[r][2]};
    }
};

// A cell of activations as words: [even or odd columns][16]. The upper two digits are one word.
struct WordCell {
    alignas(32) int16_t high[2][CELL / 2], low[2][CELL / 2];

    HEADROOM_INLINE void read(const DigitCell& x) {
        int16_t pairs[3][CELL / 2];  // two digits each
        std::memcpy(pairs, x.digits, sizeof pairs);
        for (int i = 0; i < CELL / 2; ++i) {
            const auto even = [&](int j) {
                return static_cast<int16_t>(static_cast<uint16_t>(pairs[j][i]) << 8);
            };
            const auto odd = [&](int j) { return static_cast<int16_t>(pairs[j][i] & -256); };
            high[0][i] = static_cast<int16_t>(even(0) + (even(1) >> 8));
            high[1][i] = static_cast<int16_t>(odd(0) + (odd(1) >> 8));
            low[0][i] = static_cast<int16_t>(even(2) >> 8);
            low[1][i] = static_cast<int16_t>(odd(2) >> 8);
        }
    }
};

// Reads the cells of a record some time before they are used: a load soon after a wider store is slow.
inline void read_words(const DigitCell* x, int cells, WordCell* out) {
    for (int c = 0; c < cells; ++c) out[c].read(x[c]);
}

// The same as ByteSums with weights that are multiplied as words, of even and of odd columns.
template <int R> struct WordSums {
    DigitSums sums[R];

    HEADROOM_INLINE void add_words(int t, const I& even, const I& odd, const WordCell* x) {
        for (int r = 0; r < R; ++r) {
            I &high = sums[r].high, &low = sums[r].low;
            if (t == 0) high = low = zero_ints();
            high = dot_words(dot_words(high, even, x[r].high[0] + 2 * t), odd, x[r].high[1] + 2 * t);
            low = dot_words(dot_words(low, even, x[r].low[0] + 2 * t), odd, x[r].low[1] + 2 * t);
            finish(high);
            finish(low);
        }
    }
    HEADROOM_INLINE void add(int t, const I& w, const WordCell* x, int64_t) {
        add_words(t, even_bytes(w), odd_bytes(w), x);
    }
};

// One row of activations times one panel: weights go from memory to registers and are used once.
template <Kind K> struct OneRow {
    const Unpacker<K> unpacker;
    const DigitCell* const x;

    template <int i, class Sums, class Row>
    HEADROOM_INLINE void eight(const uint8_t* quants, const uint8_t* high, const Row& row, Sums& sums) const {
        I w[2];
        unpacker.template eight<i>(quants, high, w);
        sums.add(2 * i, w[0], &row, 0);
        sums.add(2 * i + 1, w[1], &row, 0);
    }

    template <class Groups>
    HEADROOM_INLINE void cell(const uint8_t* record, const RecordShape& shape, int c, int64_t column,
                              const WordCell& row, const Groups& groups, DigitTotals& totals) const {
        constexpr KindInfo info = kind_info(K);
        const uint8_t* quants = record + c * info.quant_bytes;
        const uint8_t* high = record + shape.high + c * info.high_bytes;
        prefetch_cell<1>(record, shape, c);
        DigitSums sums[2];
        if constexpr (as_words<K>()) {
            WordSums<1> some;
            eight<0>(quants, high, row, some);
            eight<1>(quants, high, row, some);
            eight<2>(quants, high, row, some);
            eight<3>(quants, high, row, some);
            sums[0] = some.sums[0];
        } else {
            ByteSums<K, 1> bytes;
            eight<0>(quants, high, x[column], bytes);
            eight<1>(quants, high, x[column], bytes);
            if constexpr (K == Q6_K) sums[0] = bytes.of(0);
            eight<2>(quants, high, x[column], bytes);
            eight<3>(quants, high, x[column], bytes);
            sums[K == Q6_K] = bytes.of(0);
        }
        add_cell<K>(sums, read_scales<K>(record, shape, c, groups), x[column], totals);
    }

    void run(const uint8_t* panel, int64_t cells, float* out) const {
        constexpr RecordShape WHOLE = RecordShape::of(K, RECORD);
        DigitTotals totals{zero(), zero(), zero()};
        WordCell rows[RECORD];
        int64_t column = 0;
        for (; column + RECORD <= cells; column += RECORD, panel += WHOLE.bytes) {
            const GroupsOf<K> groups(panel + WHOLE.groups);
            totals.inner = totals.low = zero();
            if constexpr (as_words<K>()) read_words(x + column, RECORD, rows);
            for (int c = 0; c < RECORD; ++c) cell(panel, WHOLE, c, column + c, rows[c], groups, totals);
            if constexpr (by_record(K))
                add_record<K>(load_half(panel + WHOLE.scales), load_half(panel + WHOLE.mins), totals);
        }
        if constexpr (!by_record(K)) {  // the shorter last record; K types have full records only
            const int rest = static_cast<int>(cells - column);
            const RecordShape shape = RecordShape::of(K, rest);
            if constexpr (as_words<K>()) read_words(x + column, rest, rows);
            for (int c = 0; c < rest; ++c)
                cell(panel, shape, c, column + c, rows[c], GroupsOf<K>(nullptr), totals);
        }
        store(out, totals.total);
    }
};

// A record of weights as bytes or words with its scales, unpacked once for all rows.
template <Kind K> struct OpenRecord {
    static constexpr int VECTORS = as_words<K>() ? 16 : 8;  // of a cell
    I weights[RECORD][VECTORS];
    CellScales scales[RECORD];
    F scale, min;
    int cells;

    HEADROOM_INLINE void read(const Unpacker<K>& unpacker, const uint8_t* record, int count) {
        constexpr KindInfo info = kind_info(K);
        const RecordShape shape = RecordShape::of(K, count);
        const GroupsOf<K> groups(record + shape.groups);
        cells = count;
        for (int c = 0; c < cells; ++c) {
            I bytes[8];
            unpacker.cell(record + c * info.quant_bytes, record + shape.high + c * info.high_bytes, bytes);
            for (int t = 0; t < 8; ++t) put(bytes[t], t, weights[c]);
            scales[c] = read_scales<K>(record, shape, c, groups);
        }
        if constexpr (by_record(K)) scale = load_half(record + shape.scales);
        if constexpr (by_record(K) && has_min(K)) min = load_half(record + shape.mins);
    }

  private:
    static HEADROOM_INLINE void put(const I& bytes, int t, I* to) {
        if constexpr (as_words<K>()) {
            to[2 * t] = even_bytes(bytes);
            to[2 * t + 1] = odd_bytes(bytes);
        } else {
            to[t] = bytes;
        }
    }
};

// Adds the products of a record with R rows to out [R, 16]. `x` begins at the record's first cell; its rows
// are `cells` cells apart.
template <Kind K, int R>
HEADROOM_INLINE void add_rows(const OpenRecord<K>& record, const DigitCell* x, int64_t cells, float* out) {
    DigitTotals totals[R];
    for (int r = 0; r < R; ++r) totals[r] = {load(out + PANEL_ROWS * r), zero(), zero()};
    [[maybe_unused]] WordCell words[RECORD][R];
    if constexpr (as_words<K>())
        for (int c = 0; c < record.cells; ++c)
            for (int r = 0; r < R; ++r) words[c][r].read(x[r * cells + c]);
    for (int c = 0; c < record.cells; ++c, ++x) {
        DigitSums sums[R][2];
        const I* w = record.weights[c];
        if constexpr (as_words<K>()) {
            WordSums<R> some;
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t) some.add_words(t, w[2 * t], w[2 * t + 1], words[c]);
            for (int r = 0; r < R; ++r) sums[r][0] = some.sums[r];
        } else {
            ByteSums<K, R> bytes;
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) bytes.add(t, w[t], x, cells);
            if constexpr (K == Q6_K)
                for (int r = 0; r < R; ++r) sums[r][0] = bytes.of(r);
#pragma GCC unroll 4
            for (int t = 4; t < 8; ++t) bytes.add(t, w[t], x, cells);
            for (int r = 0; r < R; ++r) sums[r][K == Q6_K] = bytes.of(r);
        }
        for (int r = 0; r < R; ++r) add_cell<K>(sums[r], record.scales[c], x[r * cells], totals[r]);
    }
    for (int r = 0; r < R; ++r) {
        if constexpr (by_record(K)) add_record<K>(record.scale, record.min, totals[r]);
        store(out + PANEL_ROWS * r, totals[r].total);
    }
}

template <Kind K>
void digit_panel(const uint8_t* panel, int64_t columns, const DigitCell* x, int64_t rows, float* out) {
    const Unpacker<K> unpacker;
    const int64_t cells = columns / CELL;
    if (rows == 1) return OneRow<K>{{}, x}.run(panel, cells, out);
    constexpr int MOST = MANY_REGISTERS ? 8 : as_words<K>() ? 3 : 2;  // rows whose sums fit into registers
    OpenRecord<K> record;
    std::memset(out, 0, rows * PANEL_ROWS * sizeof(float));
    for (int64_t cell = 0; cell < cells; cell += RECORD) {
        const int count = static_cast<int>(cells - cell < RECORD ? cells - cell : RECORD);
        const RecordShape shape = RecordShape::of(K, count);
        prefetch_ahead<1>(panel, shape.bytes);
        record.read(unpacker, panel, count);
        panel += shape.bytes;
        const DigitCell* from = x + cell;
        int64_t row = 0;
        for (; row + MOST <= rows; row += MOST)
            add_rows<K, MOST>(record, from + row * cells, cells, out + PANEL_ROWS * row);
        if constexpr (MOST > 2)
            for (; row + 2 <= rows; row += 2)
                add_rows<K, 2>(record, from + row * cells, cells, out + PANEL_ROWS * row);
        for (; row < rows; ++row) add_rows<K, 1>(record, from + row * cells, cells, out + PANEL_ROWS * row);
    }
}

void panel_int24(const Matrix& w, int64_t panel, const DigitCell* x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * panel_size(w.kind, w.columns);
    switch (w.kind) {
#define CASE(K) case K: return digit_panel<K>(data, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
#undef CASE
        default: return;
    }
}

}  // namespace
}  // namespace headroom
