// Operations on single rows: rounding to 8 and 24 bits, sums, norms, gated activations and rotary embedding.

namespace headroom {
namespace {

// Returns 0, or NaN if any of 32 values is NaN or infinite: then the result of the row is NaN.
inline float spoiled(F a, F b) { return sum(fma(a, zero(), mul(b, zero()))); }
inline float largest_of(F a, F b) { return largest(max(max(a, sub(zero(), a)), max(b, sub(zero(), b)))); }
// The factor that takes values of at most `peak` to whole numbers of at most `most`; always finite.
inline F inverse_scale(float peak, float most) { return set1(peak > most * 3e-39f ? most / peak : 0); }

// Rounds a row to whole numbers of at most 127, with one scale per 32 columns.
void quantise(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums) {
    for (int64_t cell = 0; cell < columns / CELL; ++cell, values += CELL, sums += 2) {
        F a = load(x + cell * CELL), b = load(x + cell * CELL + 16);
        const float peak = largest_of(a, b);
        if (std::isnan(spoiled(a, b))) {
            std::memset(values, 0, CELL);
            scales[cell] = NAN;
            sums[0] = sums[1] = 0;
            continue;
        }
        const F inverse = inverse_scale(peak, 127);
        a = round_even(mul(a, inverse));
        b = round_even(mul(b, inverse));
        store_int8(values, a);
        store_int8(values + 16, b);
        scales[cell] = peak / 127;
        sums[0] = static_cast<int32_t>(sum(a));  // whole numbers: exact
        sums[1] = static_cast<int32_t>(sum(b));
    }
}

// Rounds a row to 24 bits, in three signed digits of 8 bits.
void split(const float* x, int64_t columns, DigitCell* out) {
    // Three digits hold numbers of up to 8355711. The largest value may become one more than MOST.
    constexpr float MOST = 127 * 65536;
    for (int64_t cell = 0; cell < columns / CELL; ++cell, ++out) {
        const F halves[2] = {load(x + cell * CELL), load(x + cell * CELL + 16)};
        const float peak = largest_of(halves[0], halves[1]), spoil = spoiled(halves[0], halves[1]);
        if (std::isnan(spoil)) {
            std::memset(out, 0, sizeof *out);
            out->scale = out->total = spoil;
            continue;
        }
        const F inverse = inverse_scale(peak, MOST);
        out->scale = peak / MOST;
        for (int h = 0; h < 2; ++h) {
            // The digits are -128 .. 127. Adding a half before a division makes no quotient end in .5.
            const F value = round_even(mul(halves[h], inverse));
            const F first = round_even(mul(add(value, set1(128.5f)), set1(1.0f / 65536)));
            const F rest = sub(value, mul(first, set1(65536)));
            const F second = round_even(mul(add(rest, set1(0.5f)), set1(1.0f / 256)));
            const F third = sub(rest, mul(second, set1(256)));
            store_int8(out->digits[0] + 16 * h, first);
            store_int8(out->digits[1] + 16 * h, second);
            store_int8(out->digits[2] + 16 * h, third);
            out->high[h] = static_cast<int32_t>(sum(add(mul(first, set1(256)), second)));  // exact
            out->low[h] = static_cast<int32_t>(sum(third));
        }
        const int32_t all = 256 * (out->high[0] + out->high[1]) + out->low[0] + out->low[1];
        out->total = out->scale * static_cast<float>(all);
    }
}

void sum_columns(const float* x, int64_t columns, float* sums) {
    for (int64_t i = 0; i < columns / 16; ++i) sums[i] = sum(load(x + 16 * i));
}

// Reads memory and does almost nothing else: measures the bandwidth that other kernels are compared with.
float read_bytes(const uint8_t* data, int64_t bytes) {
    I sums[4] = {zero_ints(), zero_ints(), zero_ints(), zero_ints()};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int j = 0; j < 4; ++j) sums[j] = add_ints(sums[j], load_bytes(data + i + 64 * j));
    return sum(to_float(add_ints(add_ints(sums[0], sums[1]), add_ints(sums[2], sums[3]))));
}

void rms_norm(const float* x, const float* weight, int64_t columns, float eps, float* out) {
    F squares = zero();
    int64_t k = 0;
    for (; k + 16 <= columns; k += 16) squares = fma(load(x + k), load(x + k), squares);
    float total = sum(squares);
    for (int64_t i = k; i < columns; ++i) total += x[i] * x[i];
    const float scale = 1 / std::sqrt(total / static_cast<float>(columns) + eps);
    for (k = 0; k + 16 <= columns; k += 16)
        store(out + k, mul(load(weight + k), mul(load(x + k), set1(scale))));
    for (; k < columns; ++k) out[k] = weight[k] * (x[k] * scale);
}

// e^x to about one unit in the last place; x is clamped to [-104, 88.7].
inline F exponential(F x) {
    x = min(max(x, set1(-104.0f)), set1(88.7f));
    const F power = round_even(mul(x, set1(1.44269504f)));
    F rest = fma(power, set1(-0.693359375f), x);
    rest = fma(power, set1(2.12194440e-4f), rest);
    F value = set1(1.9875691500e-4f);
    value = fma(value, rest, set1(1.3981999507e-3f));
    value = fma(value, rest, set1(8.3334519073e-3f));
    value = fma(value, rest, set1(4.1665795894e-2f));
    value = fma(value, rest, set1(1.6666665459e-1f));
    value = fma(value, rest, set1(5.0000001201e-1f));
    value = fma(mul(rest, rest), value, add(rest, set1(1.0f)));
    return scale_by_power(value, power);
}

// Clamps the numerator of a gate. `exponential` never exceeds e^88.7, so that a very negative x divided by
// it would not come out as 0.
inline F closed(F x) { return max(x, set1(-104.0f)); }

inline F silu(F x) { return div(closed(x), add(set1(1.0f), exponential(sub(zero(), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F gelu(F x) {
    const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(closed(x), add(set1(1.0f), exponential(mul(cubic, set1(-1.5957691216f)))));
}

template <class Function>
inline void gated(const float* gate, const float* up, int64_t count, float* out, Function act) {
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) store(out + k, mul(act(load(gate + k)), load(up + k)));
    if (k == count) return;
    float g[16] = {}, u[16] = {};
    std::memcpy(g, gate + k, (count - k) * sizeof(float));
    std::memcpy(u, up + k, (count - k) * sizeof(float));
    store(g, mul(act(load(g)), load(u)));
    std::memcpy(out + k, g, (count - k) * sizeof(float));
}

void silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    gated(gate, up, count, out, [](F x) { return silu(x); });
}

void gelu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    gated(gate, up, count, out, [](F x) { return gelu(x); });
}

void rope(const float* x, int64_t heads, int64_t dim, const float* cos, const float* sin,
          int64_t half, float* out) {
    for (int64_t head = 0; head < heads; ++head, x += dim, out += dim) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            out[i] = a * cos[i] - b * sin[i];
            out[half + i] = b * cos[i] + a * sin[i];
        }
        for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
    }
}

}  // namespace
}  // namespace headroom
