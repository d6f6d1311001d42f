// Vectors of sixteen lanes with AVX-512 and VNNI.
#include <immintrin.h>

namespace headroom {
namespace {

struct I { __m512i v; };  // 64 bytes, or 16 x int32
struct F { __m512 v; };   // 16 x float32

inline I load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline I zero_ints() { return {_mm512_setzero_si512()}; }
inline I set1_ints(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline I low_nibbles(I a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline I high_nibbles(I a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Bits 2s and 2s+1 of each byte, moved to bits 4 and 5, added to `a`.
template <int s> inline I add_two_bits(I a, I bits) {
    __m512i moved = bits.v;
    if constexpr (s == 0) moved = _mm512_slli_epi16(moved, 4);
    if constexpr (s == 1) moved = _mm512_slli_epi16(moved, 2);
    if constexpr (s == 3) moved = _mm512_srli_epi16(moved, 2);
    return {_mm512_or_si512(a.v, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)))};
}
inline I add_sixteen_where(I a, const uint8_t* mask) {
    uint64_t bits;
    __builtin_memcpy(&bits, mask, 8);
    return {_mm512_mask_add_epi8(a.v, bits, a.v, _mm512_set1_epi8(16))};
}
struct Table { __m512i v; };
inline Table make_table(const int8_t* values, int offset) {
    const __m128i table = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)),
                                       _mm_set1_epi8(static_cast<char>(offset)));
    return {_mm512_broadcast_i32x4(table)};
}
inline I look_up(Table table, I index) { return {_mm512_shuffle_epi8(table.v, index.v)}; }

// Adds, in each lane, the dot product of four unsigned bytes of `w` and the four bytes of `x`.
inline I dot(I sum, I w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(four))};
}
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
// The four bytes of each lane as floats.
inline void bytes_to_floats(I a, F* out) {
    const __m512i byte = _mm512_set1_epi32(255);
    out[0] = {_mm512_cvtepi32_ps(_mm512_and_si512(a.v, byte))};
    out[1] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a.v, 8), byte))};
    out[2] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a.v, 16), byte))};
    out[3] = {_mm512_cvtepi32_ps(_mm512_srli_epi32(a.v, 24))};
}
// The eight nibbles of each lane as the floats that a table has for them: low ones, then high ones.
constexpr bool HAS_NIBBLE_TABLE = true;
struct FloatTable { __m512 v; };
inline FloatTable make_float_table(const float* values) { return {_mm512_loadu_ps(values)}; }
template <int shift> inline F nibble_to_float(I a, FloatTable table) {
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(a.v, shift), table.v)};
}
inline void nibbles_to_floats(I a, FloatTable table, F* out) {
    out[0] = {_mm512_permutexvar_ps(a.v, table.v)};
    out[1] = nibble_to_float<8>(a, table);
    out[2] = nibble_to_float<16>(a, table);
    out[3] = nibble_to_float<24>(a, table);
    out[4] = nibble_to_float<4>(a, table);
    out[5] = nibble_to_float<12>(a, table);
    out[6] = nibble_to_float<20>(a, table);
    out[7] = nibble_to_float<28>(a, table);
}

inline I add_ints(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float a) { return {_mm512_set1_ps(a)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
inline F load_half(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint8_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_int8(int8_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline F load_bf16(const uint8_t* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
inline F load_int8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F load_uint8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F powers_of_two(const uint8_t* p) {  // 2^(p - 128)
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_scalef_ps(_mm512_set1_ps(1.0f),
                             _mm512_cvtepi32_ps(_mm512_sub_epi32(e, _mm512_set1_epi32(128))))};
}
inline void transpose(F* r) {  // sixteen vectors of sixteen lanes
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        const auto low = [&](int a, int b) {
            return _mm512_castpd_ps(
                _mm512_unpacklo_pd(_mm512_castps_pd(t[i + a]), _mm512_castps_pd(t[i + b])));
        };
        const auto high = [&](int a, int b) {
            return _mm512_castpd_ps(
                _mm512_unpackhi_pd(_mm512_castps_pd(t[i + a]), _mm512_castps_pd(t[i + b])));
        };
        r[i].v = low(0, 2);
        r[i + 1].v = high(0, 2);
        r[i + 2].v = low(1, 3);
        r[i + 3].v = high(1, 3);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i].v, r[i + 4].v, 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i].v, r[i + 4].v, 0xDD);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8].v, r[i + 12].v, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8].v, r[i + 12].v, 0xDD);
    }
    for (int i = 0; i < 4; ++i) {
        r[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
        r[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
    }
}
inline F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
inline F scale_by_power(F a, F power) { return {_mm512_scalef_ps(a.v, power.v)}; }

}  // namespace
}  // namespace headroom
