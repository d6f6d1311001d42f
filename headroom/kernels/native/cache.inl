// Writing and reading of cached keys and values, one head at a time, in all cache types.

namespace headroom {
namespace {

// Rounds to the nearest whole number, halves away from zero.
inline F round_away(F x) {
    const F whole = truncate(x);
    return add(whole, truncate(mul(set1(2), sub(x, whole))));
}

// Stores a scale as f16. A larger one is stored as the largest f16, not as infinity.
inline void store_scale(float value, uint8_t* out) {
    const uint16_t half = float_to_half(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
    std::memcpy(out, &half, 2);
}

// Returns 1 / step, or 0 if that overflows: f16 stores such a small step as zero anyway.
inline float inverse_of(float step) {
    const float inverse = 1 / step;
    return step == 0 || std::isinf(inverse) ? 0 : inverse;
}

void store_q8_0(const float* x, uint8_t* out) {
    const F a = load(x), b = load(x + 16);
    const float step = largest(max(max(a, sub(zero(), a)), max(b, sub(zero(), b)))) / 127;
    const F inverse = set1(inverse_of(step)), limit = set1(127);
    store_scale(step, out);
    const auto round = [&](F value) {
        return max(min(round_away(mul(value, inverse)), limit), sub(zero(), limit));
    };
    store_int8(reinterpret_cast<int8_t*>(out + 2), round(a));
    store_int8(reinterpret_cast<int8_t*>(out + 18), round(b));
}

// Stores 32 values of four or five bits: first a word of the fifth bits, then bytes whose low nibbles are
// values 0..15 and whose high nibbles are values 16..31.
template <Kind K> void store_quants(const int* quants, uint8_t* out) {
    if constexpr (has_high_bit(K)) {
        uint32_t high = 0;
        for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(quants[i] >> 4) << i;
        std::memcpy(out, &high, 4);
        out += 4;
    }
    for (int i = 0; i < 16; ++i)
        out[i] = static_cast<uint8_t>((quants[i] & 15) | (quants[i + 16] & 15) << 4);
}

// Q4_0, Q5_0: the value of largest magnitude becomes the lowest code, -8 or -16.
template <Kind K> void store_signed(const float* x, uint8_t* out) {
    constexpr int zero_point = offset_of(K);
    float peak = 0, value = x[0];
    for (int i = 0; i < 32; ++i)
        if (std::fabs(x[i]) > peak) {
            peak = std::fabs(x[i]);
            value = x[i];
        }
    const float step = value / -zero_point;
    const double inverse = inverse_of(step);
    int quants[32];
    for (int i = 0; i < 32; ++i) {
        // Computed in double and rounded once: the result of an fma, on CPUs without one, too.
        const float raised = static_cast<float>(static_cast<double>(x[i]) * inverse + (zero_point + 0.5));
        quants[i] = static_cast<int>(raised < 2 * zero_point - 1 ? raised : 2 * zero_point - 1);
    }
    store_scale(step, out);
    store_quants<K>(quants, out + 2);
}

// Q4_1, Q5_1: equal steps from the lowest value to the highest.
template <Kind K> void store_ranged(const float* x, uint8_t* out) {
    constexpr int top = K == Q4_1 ? 15 : 31;
    float low = x[0], high = x[0];
    for (int i = 1; i < 32; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float step = (high - low) / top, inverse = inverse_of(step);
    int quants[32];
    for (int i = 0; i < 32; ++i) {
        const float raised = (x[i] - low) * inverse + 0.5f;
        quants[i] = static_cast<int>(raised < top ? raised : top);
    }
    store_scale(step, out);
    store_scale(low, out + 2);
    store_quants<K>(quants, out + 4);
}

void store_block(Kind kind, const float* x, uint8_t* out) {
    switch (kind) {
        case Q4_0: return store_signed<Q4_0>(x, out);
        case Q5_0: return store_signed<Q5_0>(x, out);
        case Q4_1: return store_ranged<Q4_1>(x, out);
        case Q5_1: return store_ranged<Q5_1>(x, out);
        default: return store_q8_0(x, out);
    }
}

void store_head(Kind kind, const float* x, int64_t dim, uint8_t* out) {
    if (kind == F32) {
        std::memcpy(out, x, dim * sizeof(float));
        return;
    }
    if (!is_plain(kind)) {
        const KindInfo info = kind_info(kind);
        for (int64_t block = 0; block < dim / info.block; ++block)
            store_block(kind, x + block * info.block, out + block * info.block_bytes);
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

// Reads the 32 values of a packed block.
template <Kind K> inline void load_block(const uint8_t* block, F& a, F& b) {
    const F scale = set1(read_half(block));
    if constexpr (K == Q8_0) {
        a = mul(scale, load_int8(block + 2));
        b = mul(scale, load_int8(block + 18));
        return;
    }
    const uint8_t* quants = block + (has_min(K) ? 4 : 2);
    F low, high;
    load_nibbles(quants + (has_high_bit(K) ? 4 : 0), low, high);
    if constexpr (has_high_bit(K)) {
        low = add(low, sixteens(quants));
        high = add(high, sixteens(quants + 2));
    }
    if constexpr (has_min(K)) {
        const F min = set1(read_half(block + 2));
        a = fma(scale, low, min);
        b = fma(scale, high, min);
    } else {
        const F offset = set1(static_cast<float>(offset_of(K)));
        a = mul(scale, sub(low, offset));
        b = mul(scale, sub(high, offset));
    }
}

// Reads one cached head as floats; the last vector is filled up with zeros.
template <Kind K> inline void load_head(const uint8_t* head, int64_t dim, float* out) {
    if constexpr (is_plain(K)) {
        constexpr int size = kind_info(K).block_bytes;
        const auto vector = [](const uint8_t* from) {
            if constexpr (K == F32) return load(reinterpret_cast<const float*>(from));
            else if constexpr (K == F16) return load_half(from);
            else return load_bf16(from);
        };
        int64_t i = 0;
        for (; i + 16 <= dim; i += 16) store(out + i, vector(head + i * size));
        if (i == dim) return;
        alignas(64) uint8_t tail[64] = {};
        std::memcpy(tail, head + i * size, (dim - i) * size);
        store(out + i, vector(tail));
    } else {
        for (int64_t block = 0; block < dim / 32; ++block) {
            F a, b;
            load_block<K>(head + block * kind_info(K).block_bytes, a, b);
            store(out + 32 * block, a);
            store(out + 32 * block + 16, b);
        }
    }
}

}  // namespace
}  // namespace headroom
