// Products of 16-bit activations with weights in GPU tiles (gpu_tiles.inl), without conversion to panels.
//
// A 512-bit vector of weights has sixteen lanes [t][block][h] of four columns each: t = 0..3 says which
// four columns of a half block, block which of two neighbouring blocks of 32 columns, and h whether the
// lane belongs to weight row g or g + 8 of the tile. The products of a vector therefore sum up in even
// lanes to row g and in odd lanes to row g + 8 (sum_lanes).
//
// The activations of 256 columns are rounded to 16-bit whole numbers times one scale (WideRecord in
// kernels.h). Each number is two 8-bit digits, so that VNNI computes the products exactly. The only
// rounding is that of the activations: at most 2^-16 of the largest of the 256 values.

namespace headroom {
namespace {

#if defined(__AVX512VNNI__)

constexpr float WIDEST = 127 * 256;  // largest whole number of a row: both of its digits fit into 8 bits

// Spreads sixteen digits of each of two blocks over the lanes [t][block][h]; both h get the same.
inline __m512i to_lanes(const int8_t* first, const int8_t* second) {
    const __m512i order = _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    const __m256i both = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1);
    return _mm512_permutexvar_epi32(order, _mm512_castsi256_si512(both));
}

void widen(const float* x, int64_t columns, WideRecord* out) {
    for (int64_t begin = 0; begin < columns; begin += RECORD * CELL, ++out) {
        const int vectors = static_cast<int>(std::min<int64_t>(RECORD * CELL, columns - begin) / 16);
        F values[16], peaks = zero(), finite = zero();  // `finite`: 0, or NaN after a NaN or inf
        for (int i = 0; i < 16; ++i) {
            values[i] = i < vectors ? load(x + begin + 16 * i) : zero();
            finite = fma(values[i], zero(), finite);
            peaks = max(peaks, max(values[i], sub(zero(), values[i])));
        }
        const float peak = largest(peaks);
        out->scale = peak / WIDEST + sum(finite);
        const F inverse = set1(peak > 1e-30f ? WIDEST / peak : 0);  // finite
        alignas(64) int8_t high[RECORD * CELL], low[RECORD * CELL];
        for (int i = 0; i < 16; ++i) {
            values[i] = round_even(mul(values[i], inverse));
            const __m512i whole = _mm512_cvtps_epi32(values[i].v);
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
            _mm_store_si128(reinterpret_cast<__m128i*>(high + 16 * i), _mm512_cvtepi32_epi8(upper));
            _mm_store_si128(reinterpret_cast<__m128i*>(low + 16 * i), _mm512_cvtepi32_epi8(lower));
        }
        for (int i = 0; i < 16; ++i)  // sums of whole numbers: exact
            out->sums[i % 2][i / 2 * 2] = out->sums[i % 2][i / 2 * 2 + 1] = sum(values[i]);
        for (int pair = 0; pair < RECORD / 2; ++pair)
            for (int half = 0; half < 2; ++half) {
                const int at = 64 * pair + 16 * half;
                _mm512_store_si512(out->high[pair][half], to_lanes(high + at, high + at + 32));
                _mm512_store_si512(out->low[pair][half], to_lanes(low + at, low + at + 32));
            }
    }
}

// Shifts the word of each lane [t][block][h] right by first + of_block * block + of_row * h bits, which
// brings the high bits of the lane's block and row to the bottom.
inline __m512i shifted(__m512i words, int first, int of_block, int of_row) {
    const __m512i by = _mm512_add_epi32(
        _mm512_set1_epi32(first),
        _mm512_add_epi32(
            _mm512_mullo_epi32(_mm512_set1_epi32(of_block),
                               _mm512_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1)),
            _mm512_mullo_epi32(_mm512_set1_epi32(of_row),
                               _mm512_setr_epi32(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1))));
    return _mm512_srlv_epi32(words, by);
}

// Reads one record of a tile: values as unsigned bytes, scales and mins for the lanes [block][h].
template <Kind K> struct WideTile {
    using At = TileShape<K>;
    Unpacker<K> unpacker;
    alignas(64) uint8_t scales[RECORD * PANEL_ROWS], mins[RECORD * PANEL_ROWS];  // [g][block][h]

    // Unpacks a K record's 6-bit scales and mins to a byte each. A byte of `lows` has the high bits of the
    // mins of two blocks.
    inline void begin([[maybe_unused]] const uint8_t* record) {
        if constexpr (has_groups(K))
            for (int i = 0; i < 2; ++i) {
                const __m512i groups = _mm512_loadu_si512(record + At::groups + 64 * i);
                const __m512i lows = _mm512_cvtepu16_epi32(_mm256_loadu_si256(
                    reinterpret_cast<const __m256i*>(record + At::lows + 32 * i)));
                const __m512i upper = _mm512_or_si512(
                    _mm512_and_si512(_mm512_slli_epi32(lows, 2), _mm512_set1_epi32(0x3C3C)),
                    _mm512_and_si512(_mm512_slli_epi32(lows, 14), _mm512_set1_epi32(0x3C3C0000)));
                const __m512i under = _mm512_and_si512(_mm512_srli_epi16(groups, 6), _mm512_set1_epi8(3));
                _mm512_store_si512(scales + 64 * i, _mm512_and_si512(groups, _mm512_set1_epi8(63)));
                _mm512_store_si512(mins + 64 * i, _mm512_or_si512(upper, under));
            }
    }

    // Unpacks rows g and g + 8 of blocks 2p and 2p + 1: columns 0..15 to `first`, 16..31 to `second`.
    inline void pair(const uint8_t* record, int p, int g, __m512i& first, __m512i& second) const {
        if constexpr (K == Q8_0) {  // the tile has lanes [t][h][half] and one block per vector
            const __m512i a = _mm512_loadu_si512(record + 1024 * p + 64 * g);
            const __m512i b = _mm512_loadu_si512(record + 1024 * p + 512 + 64 * g);
            const __m512i order = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
            const __m512i sign = _mm512_set1_epi8(-128);
            first = _mm512_xor_si512(_mm512_permutex2var_epi32(a, order, b), sign);
            second = _mm512_xor_si512(
                _mm512_permutex2var_epi32(a, _mm512_add_epi32(order, _mm512_set1_epi32(1)), b), sign);
            return;
        }
        const I both = load_bytes(record + 512 * p + 64 * g);
        I low = low_nibbles(both), high = high_nibbles(both);
        if constexpr (has_table(K)) {
            low = look_up(unpacker.table, low);
            high = look_up(unpacker.table, high);
        }
        first = low.v;
        second = high.v;
        if constexpr (has_high_bit(K)) {  // words [t][pair]: bits [block][h][half]
            const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
            const __m512i words = _mm512_permutexvar_epi32(
                _mm512_add_epi32(order, _mm512_set1_epi32(p)), _mm512_loadu_si512(record + At::high + 64 * g));
            const __m512i moved = shifted(words, 0, 4, 2), one = _mm512_set1_epi8(16);
            first = _mm512_or_si512(first, _mm512_and_si512(_mm512_slli_epi32(moved, 4), one));
            second = _mm512_or_si512(second, _mm512_and_si512(_mm512_slli_epi32(moved, 3), one));
        }
        if constexpr (K == Q6_K) {  // words [t][block]: two bits [h][half]
            const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 8, 8, 9, 9, 16, 16, 17, 17, 24, 24, 25, 25);
            const uint8_t* high_bits = record + At::high + 128 * g;
            const __m512i words = _mm512_permutex2var_epi32(
                _mm512_loadu_si512(high_bits), _mm512_add_epi32(order, _mm512_set1_epi32(2 * p)),
                _mm512_loadu_si512(high_bits + 64));
            const __m512i moved = shifted(words, 0, 0, 4), two = _mm512_set1_epi8(48);
            first = _mm512_or_si512(first, _mm512_and_si512(_mm512_slli_epi32(moved, 4), two));
            second = _mm512_or_si512(second, _mm512_and_si512(_mm512_slli_epi32(moved, 2), two));
        }
    }

    // The block scale or min of a K type, alternating between rows g and g + 8.
    static inline __m512 of_record(const uint8_t* plane, int g) {
        uint32_t two;
        std::memcpy(&two, plane + 4 * g, 4);
        return _mm512_cvtph_ps(_mm256_set1_epi32(static_cast<int>(two)));
    }

    // The scales for lanes [block][h]: of columns 0..15 and of 16..31 (`second` is set for Q6_K only).
    inline void scales_of(const uint8_t* record, int g, __m512& first, __m512& second) const {
        if constexpr (has_groups(K)) {
            first = _mm512_mul_ps(load_uint8(scales + 16 * g).v, of_record(record + At::scales, g));
        } else if constexpr (K == Q6_K) {
            const __m256i groups = _mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(record + At::groups + 32 * g));
            const auto floats = [](__m256i words) {
                return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_cvtepi32_epi16(words)));
            };
            const __m512 by = of_record(record + At::scales, g);
            first = _mm512_mul_ps(floats(groups), by);
            second = _mm512_mul_ps(floats(_mm256_srli_epi32(groups, 16)), by);
        } else if constexpr (K == MXFP4) {
            first = powers_of_two(record + At::scales + 16 * g).v;
        } else {
            first = load_half(record + At::scales + 32 * g).v;
        }
    }

    // The mins for lanes [block][h], to be multiplied by the sum of a block's activations and added.
    inline __m512 mins_of(const uint8_t* record, int g) const {
        if constexpr (has_groups(K))
            return _mm512_mul_ps(load_uint8(mins + 16 * g).v,
                                 _mm512_sub_ps(_mm512_setzero_ps(), of_record(record + At::mins, g)));
        else
            return load_half(record + At::mins + 32 * g).v;
    }
};

// The dot products of a row's high and low digits with two blocks of weight rows g and g + 8.
struct WideSum {
    __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();

    inline void add(__m512i w, const WideRecord& row, int p, int half) {
        high = _mm512_dpbusd_epi32(high, w, _mm512_load_si512(row.high[p][half]));
        low = _mm512_dpbusd_epi32(low, w, _mm512_load_si512(row.low[p][half]));
    }
    inline __m512 value() const {
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    }
};

// Picks from a record's scales [block][h] those of blocks 2p and 2p + 1, for lanes [t][block][h].
inline __m512 of_pair(__m512 scales, int p) {
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(order, _mm512_set1_epi32(4 * p)), scales);
}

// Multiplies weight rows g and g + 8 of a record with R activation rows. The caller applies the scale of
// each activation row.
template <Kind K, int R>
inline void wide_lanes(const WideTile<K>& weights, const uint8_t* record, int g,
                       const WideRecord* const* x, __m512* inner) {
    __m512 scale, scale2;
    weights.scales_of(record, g, scale, scale2);
    if constexpr (K != Q6_K) scale2 = scale;
    for (int r = 0; r < R; ++r) {  // start with the mins, or with minus the offset of the stored values
        const __m512 first = _mm512_load_ps(x[r]->sums[0]), second = _mm512_load_ps(x[r]->sums[1]);
        if constexpr (has_min(K))
            inner[r] = _mm512_mul_ps(weights.mins_of(record, g), _mm512_add_ps(first, second));
        else
            inner[r] = _mm512_mul_ps(_mm512_set1_ps(-offset_of(K)),
                                     _mm512_fmadd_ps(first, scale, _mm512_mul_ps(second, scale2)));
    }
#pragma GCC unroll 4
    for (int p = 0; p < RECORD / 2; ++p) {
        __m512i first, second;
        weights.pair(record, p, g, first, second);
        for (int r = 0; r < R; ++r) {
            WideSum sum;
            sum.add(first, *x[r], p, 0);
            if constexpr (K == Q6_K) {
                inner[r] = _mm512_fmadd_ps(sum.value(), of_pair(scale, p), inner[r]);
                sum = {};
            }
            sum.add(second, *x[r], p, 1);
            inner[r] = _mm512_fmadd_ps(sum.value(), of_pair(scale2, p), inner[r]);
        }
    }
}

// Sums the even lanes, which belong to row g, and the odd lanes, row g + 8: out [h][g].
inline void sum_lanes(const __m512* totals, int stride, float* out) {
    alignas(16) float sums[8][4];
    for (int g = 0; g < 8; ++g) {
        const __m512 all = totals[g * stride];
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
        const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
        _mm_store_ps(sums[g], _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter)));
    }
    for (int g = 0; g < 8; ++g) {
        out[g] = sums[g][0];
        out[g + 8] = sums[g][1];
    }
}

template <Kind K, int R>
void wide_rows(const uint8_t* tile, int64_t columns, const WideRecord* const* x, float* out) {
    constexpr int64_t SHARE = TileShape<K>::bytes / 8;
    WideTile<K> weights;
    __m512 totals[8][R];
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
        for (int r = 0; r < R; ++r) totals[g][r] = _mm512_setzero_ps();
    for (int64_t record = 0; record < wide_records(columns); ++record, tile += TileShape<K>::bytes) {
        const WideRecord* rows[R];
        for (int r = 0; r < R; ++r) rows[r] = x[r] + record;
        weights.begin(tile);
        for (int g = 0; g < 8; ++g) {
            // Prefetch an eighth of the next record into L1 and of a later one into L2.
            for (int64_t i = g * SHARE; i < (g + 1) * SHARE; i += 64) {
                __builtin_prefetch(tile + FAR_AHEAD + i, 0, 2);
                __builtin_prefetch(tile + TileShape<K>::bytes + i, 0, 3);
            }
            __m512 inner[R];
            wide_lanes<K, R>(weights, tile, g, rows, inner);
            for (int r = 0; r < R; ++r)
                totals[g][r] = _mm512_fmadd_ps(inner[r], _mm512_set1_ps(rows[r]->scale), totals[g][r]);
        }
    }
    for (int r = 0; r < R; ++r) sum_lanes(&totals[0][r], R, out + PANEL_ROWS * r);
}

template <Kind K>
void wide_tile(const uint8_t* tile, int64_t columns, const WideRecord* const* x, int64_t rows, float* out) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) wide_rows<K, 4>(tile, columns, x + row, out + PANEL_ROWS * row);
    for (; row < rows; ++row) wide_rows<K, 1>(tile, columns, x + row, out + PANEL_ROWS * row);
}

void tile_wide(const Matrix& w, int64_t index, const WideRecord* const* x, int64_t rows, float* out) {
    const uint8_t* tile = w.data + index * tile_size(w.kind, w.columns);
    switch (w.kind) {
#define CASE(K) case K: return wide_tile<K>(tile, w.columns, x, rows, out);
        HEADROOM_QUANT_KINDS(CASE)
#undef CASE
        default: return;
    }
}

constexpr auto WIDEN = widen;
constexpr auto TILE_WIDE = tile_wide;
#else
constexpr Widen WIDEN = nullptr;  // without VNNI: tiles are converted to panels, rows stay floats
constexpr TileWide TILE_WIDE = nullptr;
#endif

}  // namespace
}  // namespace headroom
