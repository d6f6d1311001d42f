// Vectors of sixteen lanes as two 256-bit halves, with AVX2, FMA and F16C; with AVX-VNNI if the file that
// includes this is compiled for it.
#include <immintrin.h>

namespace headroom {
namespace {

struct I { __m256i a, b; };  // 64 bytes, or 16 x int32
struct F { __m256 a, b; };   // 16 x float32

inline __m256i load_half_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline I load_bytes(const uint8_t* p) { return {load_half_bytes(p), load_half_bytes(p + 32)}; }
inline I zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Has the compiler finish a sum here. GCC else collects products in memory and adds them all at the end.
inline void finish(I& x) { asm volatile("" : "+x"(x.a), "+x"(x.b)); }
inline I set1_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I both_and(I x, __m256i mask) {
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline I low_nibbles(I x) { return both_and(x, _mm256_set1_epi8(15)); }
inline I high_nibbles(I x) {
    return both_and({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, _mm256_set1_epi8(15));
}
// Bits 2s and 2s+1 of each byte, moved to bits 4 and 5, added to `x`.
template <int s> inline I add_two_bits(I x, I bits) {
    I moved = bits;
    if constexpr (s == 0) moved = {_mm256_slli_epi16(bits.a, 4), _mm256_slli_epi16(bits.b, 4)};
    if constexpr (s == 1) moved = {_mm256_slli_epi16(bits.a, 2), _mm256_slli_epi16(bits.b, 2)};
    if constexpr (s == 3) moved = {_mm256_srli_epi16(bits.a, 2), _mm256_srli_epi16(bits.b, 2)};
    moved = both_and(moved, _mm256_set1_epi8(0x30));
    return {_mm256_or_si256(x.a, moved.a), _mm256_or_si256(x.b, moved.b)};
}
inline __m256i sixteen_where(const uint8_t* mask) {  // 32 bits to 32 bytes of 0 or 16
    uint32_t bits;
    __builtin_memcpy(&bits, mask, 4);
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(bits)),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i single = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, single), single);
    return _mm256_and_si256(set, _mm256_set1_epi8(16));
}
inline I add_sixteen_where(I x, const uint8_t* mask) {
    return {_mm256_add_epi8(x.a, sixteen_where(mask)),
            _mm256_add_epi8(x.b, sixteen_where(mask + 4))};
}
struct Table { __m256i v; };
inline Table make_table(const int8_t* values, int offset) {
    const __m128i table = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)),
                                       _mm_set1_epi8(static_cast<char>(offset)));
    return {_mm256_broadcastsi128_si256(table)};
}
inline I look_up(Table table, I index) {
    return {_mm256_shuffle_epi8(table.v, index.a), _mm256_shuffle_epi8(table.v, index.b)};
}

inline __m256i four_columns(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
// What dot_sixteen subtracts from bytes of up to 255 before it multiplies them.
#if defined(__AVXVNNI__)
constexpr int DOT_OFFSET = 0;
template <int MOST> inline I dot_sixteen(I sum, const I* w, const int8_t* x) {
    for (int t = 0; t < 4; ++t) {
        const __m256i four = four_columns(x + 4 * t);
        sum = {_mm256_dpbusd_avx_epi32(sum.a, w[t].a, four), _mm256_dpbusd_avx_epi32(sum.b, w[t].b, four)};
    }
    return sum;
}
#else
// vpmaddubsw adds pairs of products in 16 bits, and so many of such sums fit into 16 bits, too.
constexpr int fitting_sums(int most) { return 32767 / (2 * 127 * most); }
// Sums of two products of bytes fit into 16 bits if the bytes are signed.
constexpr int DOT_OFFSET = 128;
inline __m256i multiply_signed(__m256i w, __m256i x) {
    const __m256i value = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
}
// Adds, in each lane, the dot product of sixteen unsigned bytes of at most MOST (four of each vector), less
// DOT_OFFSET if MOST is 255, and the sixteen bytes of `x`. The bytes of `x` are at least -127.
template <int MOST> inline I dot_sixteen(I sum, const I* w, const int8_t* x) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int RUN = MOST == 255 ? 1 : fitting_sums(MOST) < 4 ? fitting_sums(MOST) : 4;
    static_assert(RUN > 0);
    for (int t = 0; t < 4; t += RUN) {
        I words;
        for (int i = 0; i < RUN; ++i) {
            const __m256i four = four_columns(x + 4 * (t + i));
            if constexpr (MOST == 255) {
                words = {multiply_signed(w[t].a, four), multiply_signed(w[t].b, four)};
            } else {
                const I one = {_mm256_maddubs_epi16(w[t + i].a, four),
                               _mm256_maddubs_epi16(w[t + i].b, four)};
                words = i == 0 ? one
                               : I{_mm256_add_epi16(words.a, one.a), _mm256_add_epi16(words.b, one.b)};
            }
        }
        sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(words.a, ones)),
               _mm256_add_epi32(sum.b, _mm256_madd_epi16(words.b, ones))};
    }
    return sum;
}
#endif
// Sums of products of four bytes of weights, of at most MOST, and four of activations. Where VNNI is missing
// they have 16 bits, of which BYTE_RUN fit together before `to_32_bits` makes sums of 32 bits of them;
// bytes of up to 255 do not fit at all and are multiplied as words (AS_WORDS).
#if defined(__AVXVNNI__)
template <int> constexpr bool AS_WORDS = false;
template <int> constexpr int BYTE_RUN = 8;
inline I dot_four(I sum, I w, const int8_t* x) {
    const __m256i four = four_columns(x);
    return {_mm256_dpbusd_avx_epi32(sum.a, w.a, four), _mm256_dpbusd_avx_epi32(sum.b, w.b, four)};
}
inline I to_32_bits(I x) { return x; }
#else
template <int MOST> constexpr bool AS_WORDS = MOST == 255;
template <int MOST> constexpr int BYTE_RUN = MOST > 31 ? 2 : MOST > 15 ? 4 : 8;
static_assert(8 * 2 * 128 * 15 <= 32767 && 4 * 2 * 128 * 31 <= 32767 && 2 * 2 * 128 * 63 <= 32767);
inline I dot_four(I sum, I w, const int8_t* x) {
    const __m256i four = four_columns(x);
    return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, four)),
            _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, four))};
}
inline I to_32_bits(I x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(x.a, ones), _mm256_madd_epi16(x.b, ones)};
}
#endif
inline I times_256(I x) { return {_mm256_slli_epi32(x.a, 8), _mm256_slli_epi32(x.b, 8)}; }
// Bytes 0 and 2, or 1 and 3, of each lane as two unsigned 16-bit words.
inline I even_bytes(I x) { return both_and(x, _mm256_set1_epi16(255)); }
inline I odd_bytes(I x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
// Adds, in each lane, the dot product of two words of `w` and the two values of `x`.
inline I dot_words(I sum, I w, const int16_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    const __m256i wide = _mm256_set1_epi32(two);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(w.a, wide)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.b, wide))};
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
template <int j> inline F byte_to_float(I x) {
    return to_float(both_and({_mm256_srli_epi32(x.a, 8 * j), _mm256_srli_epi32(x.b, 8 * j)},
                             _mm256_set1_epi32(255)));
}
// The four bytes of each lane as floats.
inline void bytes_to_floats(I x, F* out) {
    out[0] = byte_to_float<0>(x);
    out[1] = byte_to_float<1>(x);
    out[2] = byte_to_float<2>(x);
    out[3] = byte_to_float<3>(x);
}
// No table lookup of sixteen floats on this instruction set; the functions are never called.
constexpr bool HAS_NIBBLE_TABLE = false;
struct FloatTable {};
inline FloatTable make_float_table(const float*) { return {}; }
inline void nibbles_to_floats(I, FloatTable, F*) {}

inline I add_ints(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline float sum(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline __m128i load_sixteen_bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline F load_half(const uint8_t* p) {
    return {_mm256_cvtph_ps(load_sixteen_bytes(p)), _mm256_cvtph_ps(load_sixteen_bytes(p + 16))};
}
inline void store_half(uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(x.b, 0));
}
inline void store_int8(int8_t* p, F x) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline __m256 bf16_to_float(__m128i words) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
inline F load_bf16(const uint8_t* p) {
    return {bf16_to_float(load_sixteen_bytes(p)), bf16_to_float(load_sixteen_bytes(p + 16))};
}
inline F load_int8(const uint8_t* p) {
    const __m128i bytes = load_sixteen_bytes(p);
    return to_float({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline I bytes_to_ints(const uint8_t* p) {
    const __m128i bytes = load_sixteen_bytes(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline F load_uint8(const uint8_t* p) { return to_float(bytes_to_ints(p)); }
inline __m256 power_of_two(__m256i e) {  // 2^(e - 128), also where that is subnormal
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);  // used where e is 0 or 1
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}
inline F powers_of_two(const uint8_t* p) {
    const I e = bytes_to_ints(p);
    return {power_of_two(e.a), power_of_two(e.b)};
}
inline F round_even(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 scale_half(__m256 x, __m256 power) {  // x * 2^power in two steps: 2^-140 is no normal float
    const __m256i n = _mm256_cvtps_epi32(power), first = _mm256_srai_epi32(n, 1);
    const auto factor = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return _mm256_mul_ps(_mm256_mul_ps(x, factor(first)), factor(_mm256_sub_epi32(n, first)));
}
inline F truncate(F x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_ZERO), _mm256_round_ps(x.b, _MM_FROUND_TO_ZERO)};
}
inline float read_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}
// The low and the high nibbles of sixteen bytes, as floats.
inline void load_nibbles(const uint8_t* p, F& low, F& high) {
    const __m128i both = load_sixteen_bytes(p), mask = _mm_set1_epi8(15);
    const auto floats = [](__m128i bytes) -> F {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
    };
    low = floats(_mm_and_si128(both, mask));
    high = floats(_mm_and_si128(_mm_srli_epi16(both, 4), mask));
}
inline F sixteens(const uint8_t* p) {  // lane i: 16 if bit i of the two bytes is set, else 0
    const __m256i single = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const auto eight = [&](int bits) {
        const __m256i set =
            _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), single), single);
        return _mm256_and_ps(_mm256_castsi256_ps(set), _mm256_set1_ps(16.0f));
    };
    return {eight(p[0]), eight(p[1])};
}
// Lane i is the sum of vector i.
inline F sum_each(const F* x) {
    const auto four = [&](int i) {  // four lanes each of x[i] and x[i + 4]
        const __m256 a = _mm256_add_ps(x[i].a, x[i].b), b = _mm256_add_ps(x[i + 4].a, x[i + 4].b);
        return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    };
    const auto join = [](__m256 a, __m256 b) {
        return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    };
    const auto eight = [&](int i) {
        const __m256 a = join(four(i), four(i + 1)), b = join(four(i + 2), four(i + 3));
        return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
    };
    return {eight(0), eight(8)};
}
constexpr bool MANY_REGISTERS = false;  // sixteen registers of eight floats
inline F scale_by_power(F x, F power) {
    return {scale_half(x.a, power.a), scale_half(x.b, power.b)};
}

}  // namespace
}  // namespace headroom
