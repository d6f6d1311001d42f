// Vectors of sixteen lanes with AVX-512 and VNNI.
#include <immintrin.h>

namespace headroom {
namespace {

struct I { __m512i v; };  // 64 bytes, or 16 x int32
struct F { __m512 v; };   // 16 x float32

inline I load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline I zero_ints() { return {_mm512_setzero_si512()}; }
// Has the compiler finish a sum here. GCC else collects products in memory and adds them all at the end.
inline void finish(I& a) { asm volatile("" : "+v"(a.v)); }
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
constexpr int DOT_OFFSET = 0;  // as in simd_avx2.h
// Adds the dot product of sixteen bytes, four of each vector.
template <int> inline I dot_sixteen(I sum, const I* w, const int8_t* x) {
    for (int t = 0; t < 4; ++t) sum = dot(sum, w[t], x + 4 * t);
    return sum;
}
// As in simd_avx2.h: sums of products of bytes have 32 bits.
template <int> constexpr bool AS_WORDS = false;
template <int> constexpr int BYTE_RUN = 8;
inline I dot_four(I sum, I w, const int8_t* x) { return dot(sum, w, x); }
inline I to_32_bits(I a) { return a; }
inline I even_bytes(I a) { return a; }  // words are never used
inline I odd_bytes(I a) { return a; }
inline I dot_words(I sum, I, const int16_t*) { return sum; }
inline I times_256(I a) { return {_mm512_slli_epi32(a.v, 8)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
// The four bytes of each lane as floats.
inline void bytes_to_floats(I a, F* out) {
    const __m512i byte = _mm512_set1_epi32(255);
    out[0] = {_mm512_cvtepi32_ps(_mm512_and_si512(a.v, byte))};
    out[1] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a.v, 8), byte))};
    out[2] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(a.v, 16), byte))};
    out[3] = {_mm512_cvtepi32_ps(_mm512_srli_epi32(a.v, 24))};
}
// Looks up the eight nibbles of each lane in a table of floats: out[0..3] low nibbles, out[4..7] high.
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
inline F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
inline F truncate(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_ZERO)}; }
inline float read_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}
// The low and the high nibbles of sixteen bytes, as floats.
inline void load_nibbles(const uint8_t* p, F& low, F& high) {
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    low.v = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
    high.v = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}
inline F sixteens(const uint8_t* p) {  // lane i: 16 if bit i of the two bytes is set, else 0
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return {_mm512_maskz_mov_ps(bits, _mm512_set1_ps(16.0f))};
}
// Lane i is the sum of vector i.
inline F sum_each(const F* x) {
    const auto halves = [&](int i) {  // eight lanes of x[i], eight of x[i + 1]
        return _mm512_add_ps(_mm512_shuffle_f32x4(x[i].v, x[i + 1].v, 0x44),
                             _mm512_shuffle_f32x4(x[i].v, x[i + 1].v, 0xEE));
    };
    __m512 four[4];  // four lanes each of four vectors
    for (int i = 0; i < 4; ++i) {
        const __m512 a = halves(4 * i), b = halves(4 * i + 2);
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    const auto join = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    };
    const __m512 a = join(four[0], four[1]), b = join(four[2], four[3]);
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    return {_mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all)};
}
constexpr bool MANY_REGISTERS = true;  // thirty-two registers of sixteen floats
inline F scale_by_power(F a, F power) { return {_mm512_scalef_ps(a.v, power.v)}; }

}  // namespace
}  // namespace headroom
