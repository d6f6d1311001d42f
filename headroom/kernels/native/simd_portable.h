// Vectors of sixteen lanes as plain loops, which the compiler vectorises as it can.
//
// simd_portable.h, simd_avx2.h and simd_avx512.h define the same functions on the types I (64 bytes or
// 16 x int32) and F (16 x float32); the kernels are written once over them.
#include <cmath>

namespace headroom {
namespace {

struct I {
    union {
        uint8_t bytes[64];
        uint16_t words[32];
        int32_t lanes[16];
    };
};
struct F { float v[16]; };

#define EACH(n) for (int i = 0; i < n; ++i)

inline I load_bytes(const uint8_t* p) {
    I a;
    __builtin_memcpy(a.bytes, p, 64);
    return a;
}
inline I zero_ints() {
    I a;
    EACH(16) a.lanes[i] = 0;
    return a;
}
inline void finish(I&) {}  // as in simd_avx2.h; the sums of plain loops stay in order
inline I set1_ints(int32_t value) {
    I a;
    EACH(16) a.lanes[i] = value;
    return a;
}
inline I low_nibbles(I a) {
    EACH(64) a.bytes[i] &= 15;
    return a;
}
inline I high_nibbles(I a) {
    EACH(64) a.bytes[i] >>= 4;
    return a;
}
// Bits 2s and 2s+1 of each byte, moved to bits 4 and 5, added to `a`.
template <int s> inline I add_two_bits(I a, I bits) {
    EACH(64) a.bytes[i] |= (bits.bytes[i] >> 2 * s & 3) << 4;
    return a;
}
inline I add_sixteen_where(I a, const uint8_t* mask) {
    EACH(64) a.bytes[i] += (mask[i / 8] >> i % 8 & 1) << 4;
    return a;
}
struct Table { uint8_t v[16]; };
inline Table make_table(const int8_t* values, int offset) {
    Table table;
    EACH(16) table.v[i] = static_cast<uint8_t>(values[i] + offset);
    return table;
}
inline I look_up(Table table, I index) {
    EACH(64) index.bytes[i] = table.v[index.bytes[i]];
    return index;
}

// Adds, in each lane, the dot product of four unsigned bytes of `w` and the four bytes of `x`.
inline I dot(I sum, I w, const int8_t* x) {
    EACH(16) for (int j = 0; j < 4; ++j) sum.lanes[i] += w.bytes[4 * i + j] * x[j];
    return sum;
}
constexpr int DOT_OFFSET = 0;  // as in simd_avx2.h
// Adds the dot product of sixteen bytes, four of each vector.
template <int> inline I dot_sixteen(I sum, const I* w, const int8_t* x) {
    for (int t = 0; t < 4; ++t) sum = dot(sum, w[t], x + 4 * t);
    return sum;
}
// As in simd_avx2.h. Sums of products of bytes have 32 bits; words are used for the same types.
template <int MOST> constexpr bool AS_WORDS = MOST == 255;
template <int> constexpr int BYTE_RUN = 8;
inline I dot_four(I sum, I w, const int8_t* x) { return dot(sum, w, x); }
inline I to_32_bits(I a) { return a; }
inline I times_256(I a) {
    EACH(16) a.lanes[i] *= 256;
    return a;
}
// Bytes 0 and 2, or 1 and 3, of each lane as two unsigned 16-bit words.
inline I even_bytes(I a) {
    EACH(32) a.words[i] &= 255;
    return a;
}
inline I odd_bytes(I a) {
    EACH(32) a.words[i] >>= 8;
    return a;
}
// Adds, in each lane, the dot product of two words of `w` and the two values of `x`.
inline I dot_words(I sum, I w, const int16_t* x) {
    EACH(16) sum.lanes[i] += w.words[2 * i] * x[0] + w.words[2 * i + 1] * x[1];
    return sum;
}
inline I add_ints(I a, I b) {
    EACH(16) a.lanes[i] += b.lanes[i];
    return a;
}
inline F to_float(I a) {
    F f;
    EACH(16) f.v[i] = static_cast<float>(a.lanes[i]);
    return f;
}
// The four bytes of each lane as floats.
inline void bytes_to_floats(I a, F* out) {
    for (int j = 0; j < 4; ++j) EACH(16) out[j].v[i] = static_cast<float>(a.bytes[4 * i + j]);
}
// No table lookup of sixteen floats on this instruction set; the functions are never called.
constexpr bool HAS_NIBBLE_TABLE = false;
struct FloatTable {};
inline FloatTable make_float_table(const float*) { return {}; }
inline void nibbles_to_floats(I, FloatTable, F*) {}

inline F set1(float a) {
    F f;
    EACH(16) f.v[i] = a;
    return f;
}
inline F zero() { return set1(0); }
inline F load(const float* p) {
    F f;
    __builtin_memcpy(f.v, p, 64);
    return f;
}
inline void store(float* p, F a) { __builtin_memcpy(p, a.v, 64); }
inline F add(F a, F b) {
    EACH(16) a.v[i] += b.v[i];
    return a;
}
inline F sub(F a, F b) {
    EACH(16) a.v[i] -= b.v[i];
    return a;
}
inline F mul(F a, F b) {
    EACH(16) a.v[i] *= b.v[i];
    return a;
}
inline F div(F a, F b) {
    EACH(16) a.v[i] /= b.v[i];
    return a;
}
inline F fma(F a, F b, F c) {
    EACH(16) c.v[i] += a.v[i] * b.v[i];
    return c;
}
inline F max(F a, F b) {
    EACH(16) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline F min(F a, F b) {
    EACH(16) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline float sum(F a) {
    for (int width = 8; width; width /= 2) EACH(width) a.v[i] += a.v[i + width];
    return a.v[0];
}
inline float largest(F a) {
    for (int width = 8; width; width /= 2)
        EACH(width) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}
inline F load_half(const uint8_t* p) {
    F f;
    uint16_t words[16];
    __builtin_memcpy(words, p, 32);
    EACH(16) f.v[i] = half_to_float(words[i]);
    return f;
}
inline void store_half(uint8_t* p, F a) {
    uint16_t words[16];
    EACH(16) words[i] = float_to_half(a.v[i]);
    __builtin_memcpy(p, words, 32);
}
inline void store_int8(int8_t* p, F a) {
    EACH(16) p[i] = static_cast<int8_t>(a.v[i]);
}
inline F load_bf16(const uint8_t* p) {
    F f;
    uint16_t words[16];
    __builtin_memcpy(words, p, 32);
    EACH(16) {
        const uint32_t word = static_cast<uint32_t>(words[i]) << 16;
        __builtin_memcpy(&f.v[i], &word, 4);
    }
    return f;
}
inline F load_int8(const uint8_t* p) {
    F f;
    EACH(16) f.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
    return f;
}
inline F load_uint8(const uint8_t* p) {
    F f;
    EACH(16) f.v[i] = static_cast<float>(p[i]);
    return f;
}
inline F powers_of_two(const uint8_t* p) {  // 2^(p - 128)
    F f;
    EACH(16) f.v[i] = std::ldexp(1.0f, p[i] - 128);
    return f;
}
inline F round_even(F a) {
    EACH(16) a.v[i] = std::nearbyint(a.v[i]);
    return a;
}
inline F truncate(F a) {
    EACH(16) a.v[i] = std::trunc(a.v[i]);
    return a;
}
inline float read_half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return half_to_float(bits);
}
// The low and the high nibbles of sixteen bytes, as floats.
inline void load_nibbles(const uint8_t* p, F& low, F& high) {
    EACH(16) {
        low.v[i] = static_cast<float>(p[i] & 15);
        high.v[i] = static_cast<float>(p[i] >> 4);
    }
}
inline F sixteens(const uint8_t* p) {  // lane i: 16 if bit i of the two bytes is set, else 0
    F f;
    EACH(16) f.v[i] = p[i / 8] >> i % 8 & 1 ? 16.0f : 0.0f;
    return f;
}
inline F sum_each(const F* x) {  // lane i is the sum of vector i
    F f;
    EACH(16) f.v[i] = sum(x[i]);
    return f;
}
constexpr bool MANY_REGISTERS = false;
inline F scale_by_power(F a, F power) {
    EACH(16) a.v[i] = std::ldexp(a.v[i], static_cast<int>(power.v[i]));
    return a;
}

#undef EACH

}  // namespace
}  // namespace headroom
