// Gated linear attention, written once over the sixteen-lane vectors of a simd_*.h file.

namespace headroom {
namespace {

// Each channel's last inputs, weighted. Plain loops: taps lie side by side, and compilers know
// how to take four apart. Products are summed from the oldest on.
void weigh_inputs(const DeltaShape& shape, const float* conv, const float* const* inputs,
                  float* out) {
    const int64_t channels = shape.channels();
    if (shape.taps == 4) {
        const float *a = inputs[0], *b = inputs[1], *c = inputs[2], *d = inputs[3];
        for (int64_t i = 0; i < channels; ++i) {
            const float* w = conv + 4 * i;
            out[i] = w[0] * a[i] + w[1] * b[i] + w[2] * c[i] + w[3] * d[i];
        }
        return;
    }
    for (int64_t i = 0; i < channels; ++i) {
        float total = conv[shape.taps * i] * inputs[0][i];
        for (int64_t j = 1; j < shape.taps; ++j) total += conv[shape.taps * i + j] * inputs[j][i];
        out[i] = total;
    }
}

void scale_to_unit(float* x, int64_t dim, float factor) {
    F squares = zero();
    int64_t k = 0;
    for (; k + 16 <= dim; k += 16) squares = fma(load(x + k), load(x + k), squares);
    float total = sum(squares);
    for (int64_t i = k; i < dim; ++i) total += x[i] * x[i];
    const float scale = factor / std::sqrt(total + 1e-6f);
    for (k = 0; k + 16 <= dim; k += 16) store(x + k, mul(load(x + k), set1(scale)));
    for (; k < dim; ++k) x[k] *= scale;
}

void convolve(const DeltaShape& shape, const float* conv, const float* const* inputs, float* out) {
    const int64_t channels = shape.channels();
    weigh_inputs(shape, conv, inputs, out);
    int64_t k = 0;
    for (; k + 16 <= channels; k += 16) store(out + k, silu(load(out + k)));
    if (k < channels) {
        float tail[16] = {};
        std::memcpy(tail, out + k, (channels - k) * sizeof(float));
        store(tail, silu(load(tail)));
        std::memcpy(out + k, tail, (channels - k) * sizeof(float));
    }
    const float query_scale = 1 / std::sqrt(static_cast<float>(shape.dim));
    for (int64_t head = 0; head < 2 * shape.key_heads; ++head)
        scale_to_unit(out + head * shape.dim, shape.dim, head < shape.key_heads ? query_scale : 1);
}

// The sum over i of x[i] times row i of a block, in four runs that do not wait for each other.
inline void weigh_rows(const float* x, const float* block, int64_t dim, F& low, F& high) {
    F lows[4], highs[4];
    for (int j = 0; j < 4; ++j) lows[j] = highs[j] = zero();
    int64_t i = 0;
    for (; i + 4 <= dim; i += 4)
        for (int j = 0; j < 4; ++j) {
            const float* row = block + (i + j) * DELTA_COLUMNS;
            lows[j] = fma(set1(x[i + j]), load(row), lows[j]);
            highs[j] = fma(set1(x[i + j]), load(row + 16), highs[j]);
        }
    for (; i < dim; ++i) {
        lows[0] = fma(set1(x[i]), load(block + i * DELTA_COLUMNS), lows[0]);
        highs[0] = fma(set1(x[i]), load(block + i * DELTA_COLUMNS + 16), highs[0]);
    }
    low = add(add(lows[0], lows[1]), add(lows[2], lows[3]));
    high = add(add(highs[0], highs[1]), add(highs[2], highs[3]));
}

// One row: the memory fades, takes in what it did not know of the value, and is asked.
inline void delta_row(const DeltaJob& job, int64_t row, float* block) {
    const float* keys = job.keys + row * job.channels;
    const float* queries = job.queries + row * job.channels;
    float value[DELTA_COLUMNS] = {};
    std::memcpy(value, job.values + row * job.channels + job.column, job.width * sizeof(float));
    F low, high;
    weigh_rows(keys, block, job.dim, low, high);
    const F decay = set1(job.decays[row * job.heads]), beta = set1(job.betas[row * job.heads]);
    low = mul(beta, sub(load(value), mul(decay, low)));
    high = mul(beta, sub(load(value + 16), mul(decay, high)));
    F lows[4], highs[4];
    for (int j = 0; j < 4; ++j) lows[j] = highs[j] = zero();
    const auto change = [&](int64_t i, F& a_sum, F& b_sum) {
        float* to = block + i * DELTA_COLUMNS;
        const F key = set1(keys[i]), query = set1(queries[i]);
        const F a = fma(key, low, mul(decay, load(to)));
        const F b = fma(key, high, mul(decay, load(to + 16)));
        store(to, a);
        store(to + 16, b);
        a_sum = fma(query, a, a_sum);
        b_sum = fma(query, b, b_sum);
    };
    int64_t i = 0;
    for (; i + 4 <= job.dim; i += 4)
        for (int j = 0; j < 4; ++j) change(i + j, lows[j], highs[j]);
    for (; i < job.dim; ++i) change(i, lows[0], highs[0]);
    store(value, add(add(lows[0], lows[1]), add(lows[2], lows[3])));
    store(value + 16, add(add(highs[0], highs[1]), add(highs[2], highs[3])));
    std::memcpy(job.out + row * job.heads * job.dim + job.column, value, job.width * sizeof(float));
}

// block [dim, DELTA_COLUMNS]: the columns side by side, small enough for the nearest cache.
void delta_rows(const DeltaJob& job, float* block) {
    std::memset(block, 0, job.dim * DELTA_COLUMNS * sizeof(float));
    float* memory = job.memory + job.column;
    const size_t bytes = job.width * sizeof(float);
    for (int64_t i = 0; i < job.dim && !job.fresh; ++i)
        std::memcpy(block + i * DELTA_COLUMNS, memory + i * job.dim, bytes);
    for (int64_t row = 0; row < job.rows; ++row) delta_row(job, row, block);
    for (int64_t i = 0; i < job.dim; ++i)
        std::memcpy(memory + i * job.dim, block + i * DELTA_COLUMNS, bytes);
}

void gated_norm(const float* x, const float* gate, const float* weight, int64_t columns, float eps,
                float* out) {
    rms_norm(x, weight, columns, eps, out);
    silu_multiply(gate, out, columns, out);
}

}  // namespace
}  // namespace headroom
