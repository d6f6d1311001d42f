// AMX: products of at least 16 rows of 8-bit activations with tile registers; all else is AVX-512.
//
// One tile product multiplies sixteen rows of activations with the sixteen rows of a panel, over the
// columns that share one scale. Its sums are integers and therefore exact. Scales and mins are applied by
// the same operations in the same order as in products.inl, so AMX and AVX-512 give the same bits.
#include "panels.h"

#include "simd_avx512.h"

#include "quants.inl"

namespace headroom {
namespace {

constexpr int TILE_ROWS = 16;

// How many runs of columns of one cell have a scale of their own: Q6_K has one scale per 16 columns.
constexpr int parts_of(Kind k) { return k == Q6_K ? 2 : 1; }

// The AMX configuration of three tile registers: 0 holds the sums, 1 the activations, 2 the weights.
struct TileShapes {
    alignas(64) uint8_t bytes[64] = {1};  // palette 1; bytes 16..: widths in bytes, bytes 48..: rows

    explicit TileShapes(int columns) {
        shape(0, TILE_ROWS, PANEL_ROWS * 4);
        shape(1, TILE_ROWS, columns);
        shape(2, columns / 4, PANEL_ROWS * 4);
    }

  private:
    void shape(int tile, int rows, int width) {
        bytes[16 + 2 * tile] = static_cast<uint8_t>(width);
        bytes[48 + tile] = static_cast<uint8_t>(rows);
    }
};

// Configures this thread's tile registers, and releases them when it goes out of scope.
struct Tiles {
    explicit Tiles(int columns) {
        const TileShapes shapes(columns);
        _tile_loadconfig(shapes.bytes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// A record of weights as signed bytes with its scales, unpacked once for all rows.
template <Kind K> struct UnpackedRecord {
    static constexpr int PARTS = parts_of(K), WIDTH = CELL / PARTS;
    using Groups = std::conditional_t<has_groups(K), KGroups, NoGroups>;

    alignas(64) uint8_t values[RECORD * CELL * PANEL_ROWS];
    F scales[RECORD * PARTS], lows[RECORD], scale, min;
    int cells;

    inline void read(const Unpacker<K>& unpacker, const uint8_t* record, int count) {
        constexpr KindInfo info = kind_info(K);
        const RecordShape shape = RecordShape::of(K, count);
        const Groups groups(record + shape.groups);
        const I offset = {_mm512_set1_epi8(static_cast<char>(offset_of(K)))};
        cells = count;
        for (int c = 0; c < cells; ++c) {
            I w[8];
            unpacker.cell(record + c * info.quant_bytes, record + shape.high + c * info.high_bytes, w);
            for (int t = 0; t < 8; ++t)
                _mm512_store_si512(values + 512 * c + 64 * t, _mm512_sub_epi8(w[t].v, offset.v));
            const CellScales s = read_scales<K>(record, shape, c, groups);
            scales[c * PARTS] = s.scale;
            if constexpr (PARTS == 2) scales[c * PARTS + 1] = s.scale2;
            if constexpr (has_min(K)) lows[c] = s.low;
        }
        if constexpr (by_record(K)) scale = load_half(record + shape.scales);
        if constexpr (by_record(K) && has_min(K)) min = load_half(record + shape.mins);
    }
};

// Multiplies sixteen rows of activations with a record: integer sums [parts, 16 rows, 16 weight rows].
template <Kind K>
inline void multiply_tiles(const UnpackedRecord<K>& record, const int8_t* x, int64_t columns,
                           int32_t* sums) {
    using Record = UnpackedRecord<K>;
    for (int part = 0; part < record.cells * Record::PARTS; ++part) {
        _tile_zero(0);
        _tile_loadd(1, x + part * Record::WIDTH, columns);
        _tile_loadd(2, record.values + part * Record::WIDTH * PANEL_ROWS, PANEL_ROWS * 4);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, sums + part * TILE_ROWS * PANEL_ROWS, PANEL_ROWS * 4);
    }
}

// The sum of each cell's activations as a float (scale * sum of its two halves), for up to eight cells.
inline void scale_counts(const float* scales, const int32_t* counts, int cells, float* out) {
    const __mmask8 some = static_cast<__mmask8>((1 << cells) - 1);
    const __m512i pairs = _mm512_maskz_loadu_epi64(some, counts);
    const __m512i both = _mm512_add_epi32(pairs, _mm512_srli_epi64(pairs, 32));
    const __m256 sums = _mm256_cvtepi32_ps(_mm512_cvtepi64_epi32(both));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_maskz_loadu_ps(some, scales), sums));
}

// Scales the integer sums of sixteen rows and adds them to `out`, as Int8Product (products.inl) does after
// its dot products. `scales` and `counts` point to the record's first cell; rows are `cells` cells apart.
template <Kind K, bool WHOLE>
inline void add_rows(const UnpackedRecord<K>& record, const int32_t* sums, const float* scales,
                     const int32_t* counts, int64_t cells, float* out) {
    constexpr int PARTS = UnpackedRecord<K>::PARTS;
    const int count = WHOLE ? RECORD : record.cells;
    F by_part[RECORD * PARTS], lows[RECORD];  // local copies, so that the compiler keeps them in registers
    for (int part = 0; part < count * PARTS; ++part) by_part[part] = record.scales[part];
    if constexpr (has_min(K))
        for (int c = 0; c < count; ++c) lows[c] = record.lows[c];
    for (int r = 0; r < TILE_ROWS; ++r, sums += PANEL_ROWS, out += PANEL_ROWS) {
        const float* by = scales + r * cells;
        float under[RECORD];
        if constexpr (has_min(K)) scale_counts(by, counts + r * cells * 2, count, under);
        F total = load(out), inner = zero(), low = zero();
        F &to = by_record(K) ? inner : total, &least = by_record(K) ? low : total;
        for (int c = 0; c < count; ++c) {
            for (int part = c * PARTS; part < (c + 1) * PARTS; ++part) {
                const I ints = {_mm512_load_si512(sums + part * TILE_ROWS * PANEL_ROWS)};
                to = fma(mul(to_float(ints), by_part[part]), set1(by[c]), to);
            }
            if constexpr (has_min(K)) least = fma(lows[c], set1(under[c]), least);
        }
        if constexpr (by_record(K)) total = fma(record.scale, inner, total);
        if constexpr (by_record(K) && has_min(K)) total = fma(sub(zero(), record.min), low, total);
        store(out, total);
    }
}

// `rows` is a multiple of TILE_ROWS.
template <Kind K>
void tiled_panel(const uint8_t* panel, int64_t columns, QuantisedRows x, int64_t rows, float* out) {
    const Tiles tiles(UnpackedRecord<K>::WIDTH);
    const Unpacker<K> unpacker;
    const int64_t cells = columns / CELL;
    UnpackedRecord<K> record;
    alignas(64) int32_t sums[RECORD * parts_of(K) * TILE_ROWS * PANEL_ROWS];
    std::memset(out, 0, rows * PANEL_ROWS * sizeof(float));
    for (int64_t cell = 0; cell < cells; cell += RECORD) {
        const int count = static_cast<int>(cells - cell < RECORD ? cells - cell : RECORD);
        record.read(unpacker, panel, count);
        panel += RecordShape::of(K, count).bytes;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int64_t at = row * cells + cell;
            multiply_tiles(record, x.values + at * CELL, columns, sums);
            const auto add = count == RECORD ? add_rows<K, true> : add_rows<K, false>;
            add(record, sums, x.scales + at, x.sums + at * 2, cells, out + row * PANEL_ROWS);
        }
    }
}

void panel_tiled(const Matrix& w, int64_t panel, QuantisedRows x, int64_t rows, float* out) {
    const uint8_t* data = w.data + panel * panel_size(w.kind, w.columns);
    const int64_t whole = rows / TILE_ROWS * TILE_ROWS;
    if (whole > 0) {
        switch (w.kind) {
#define CASE(K) case K: tiled_panel<K>(data, w.columns, x, whole, out); break;
            HEADROOM_QUANT_KINDS(CASE)
#undef CASE
            default: return;
        }
    }
    AVX512_KERNELS.panel_int8(w, panel, rows_from(x, whole, w.columns), rows - whole,
                              out + whole * PANEL_ROWS);
}

}  // namespace

const Kernels& amx_kernels() {
    static const Kernels kernels = [] {
        Kernels own = AVX512_KERNELS;
        own.name = "amx";
        own.panel_int8 = panel_tiled;
        return own;
    }();
    return kernels;
}

}  // namespace headroom
