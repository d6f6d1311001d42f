// The kernels of gated DeltaNet. For each row and value head, with a state S [key dim, value dim]:
//
//   S = decay * S;  S += key^T * beta * (value - key S);  out = query S

namespace headroom {
namespace {

// The causal convolution of each channel, summed from the oldest input on. A channel's taps are adjacent in
// memory; compilers vectorise the loop over four taps well.
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

// Vectors of a row of the memory that are computed together: few enough for their sums to stay in
// registers, and enough to hide the latency of fma.
constexpr int DELTA_VECTORS = MANY_REGISTERS ? 4 : 2;
constexpr int64_t DELTA_WIDTH = 16 * DELTA_VECTORS;

// DELTA_WIDTH columns of a head's memory: row i begins at data + i * stride.
struct DeltaBlock {
    float* data;
    int64_t stride;
};

// answer = key S, for the first row.
inline void ask(const DeltaBlock& block, const float* key, int64_t dim, F* answer) {
    F sums[DELTA_VECTORS];
    for (F& one : sums) one = zero();
    for (int64_t i = 0; i < dim; ++i) {
        const float* row = block.data + i * block.stride;
        for (int v = 0; v < DELTA_VECTORS; ++v) {
            __builtin_prefetch(row + 16 * block.stride + 16 * v);
            sums[v] = fma(set1(key[i]), load(row + 16 * v), sums[v]);
        }
    }
    for (int v = 0; v < DELTA_VECTORS; ++v) answer[v] = sums[v];
}

// One row in a single pass over S: decays and updates S, and computes query S and the next row's key S.
// `answer` holds this row's key S (before decay) on entry and the next row's on return.
template <bool last>
inline void delta_row(const DeltaJob& job, int64_t row, int64_t column, const DeltaBlock& block,
                      F* answer) {
    const float* key = job.keys + row * job.channels;
    const float* query = job.queries + row * job.channels;
    const float* next = last ? key : key + job.channels;
    const float* values = job.values + row * job.channels + column;
    float value[DELTA_WIDTH] = {};
    const int64_t width = job.column + job.width - column;
    const size_t bytes = (width < DELTA_WIDTH ? width : DELTA_WIDTH) * sizeof(float);
    std::memcpy(value, values, bytes);
    const F decay = set1(job.decays[row * job.heads]), beta = set1(job.betas[row * job.heads]);
    F change[DELTA_VECTORS], sums[DELTA_VECTORS], nexts[DELTA_VECTORS];
    for (int v = 0; v < DELTA_VECTORS; ++v) {
        change[v] = mul(beta, sub(load(value + 16 * v), mul(decay, answer[v])));
        sums[v] = nexts[v] = zero();
    }
    for (int64_t i = 0; i < job.dim; ++i) {
        float* to = block.data + i * block.stride;
        const F k = set1(key[i]), q = set1(query[i]), n = set1(next[i]);
        for (int v = 0; v < DELTA_VECTORS; ++v) {
            const F one = fma(k, change[v], mul(decay, load(to + 16 * v)));
            store(to + 16 * v, one);
            sums[v] = fma(q, one, sums[v]);
            if constexpr (!last) nexts[v] = fma(n, one, nexts[v]);
        }
    }
    for (int v = 0; v < DELTA_VECTORS; ++v) {
        store(value + 16 * v, sums[v]);
        answer[v] = nexts[v];
    }
    std::memcpy(job.out + row * job.heads * job.dim + column, value, bytes);
}

inline void delta_block(const DeltaJob& job, int64_t column, const DeltaBlock& block) {
    F answer[DELTA_VECTORS];
    ask(block, job.keys, job.dim, answer);
    for (int64_t row = 0; row + 1 < job.rows; ++row)
        delta_row<false>(job, row, column, block, answer);
    delta_row<true>(job, job.rows - 1, column, block, answer);
}

// Copies columns of a job's memory to `copy` [dim, DELTA_WIDTH], with zeros beyond the last one.
inline void copy_columns(const DeltaJob& job, int64_t column, size_t bytes, float* copy) {
    std::memset(copy, 0, job.dim * DELTA_WIDTH * sizeof(float));
    for (int64_t i = 0; i < job.dim && !job.fresh; ++i)
        std::memcpy(copy + i * DELTA_WIDTH, job.memory + column + i * job.dim, bytes);
}

// Runs guessed rows: each goes on from the memory after the row that it follows, with the same operations
// as plain rows, so that its bits are those of its path as plain text. `copy` is followed by the places.
void delta_guesses(const DeltaJob& job, int64_t column, size_t bytes, float* copy) {
    const int64_t size = job.dim * DELTA_WIDTH;
    const DeltaBlock block = {copy, DELTA_WIDTH};
    F answer[DELTA_VECTORS];
    for (int64_t row = 0; row < job.rows; ++row) {
        const int64_t parent = job.parents[row];
        if (parent < 0) copy_columns(job, column, bytes, copy);
        else if (parent < row - 1)
            std::memcpy(copy, copy + (1 + job.places[parent]) * size, size * sizeof(float));
        if (row == 0 || parent != row - 1) ask(block, job.keys + row * job.channels, job.dim, answer);
        if (row + 1 < job.rows && job.parents[row + 1] == row)
            delta_row<false>(job, row, column, block, answer);
        else
            delta_row<true>(job, row, column, block, answer);
        if (job.places[row] >= 0)
            std::memcpy(copy + (1 + job.places[row]) * size, copy, size * sizeof(float));
    }
}

// Runs a job over its columns, DELTA_WIDTH at a time. For several rows the columns are first copied to
// `copy` [dim, DELTA_WIDTH], which stays in L1.
void delta_rows(const DeltaJob& job, float* copy) {
    for (int64_t column = job.column; column < job.column + job.width; column += DELTA_WIDTH) {
        float* memory = job.memory + column;
        const int64_t left = job.column + job.width - column;
        const size_t bytes = (left < DELTA_WIDTH ? left : DELTA_WIDTH) * sizeof(float);
        if (job.parents) {
            delta_guesses(job, column, bytes, copy);
            continue;
        }
        if (job.rows == 1 && !job.fresh && left >= DELTA_WIDTH) {
            delta_block(job, column, {memory, job.dim});
            continue;
        }
        copy_columns(job, column, bytes, copy);
        delta_block(job, column, {copy, DELTA_WIDTH});
        for (int64_t i = 0; i < job.dim; ++i)
            std::memcpy(memory + i * job.dim, copy + i * DELTA_WIDTH, bytes);
    }
}

void gated_norm(const float* x, const float* gate, const float* weight, int64_t columns, float eps,
                float* out) {
    rms_norm(x, weight, columns, eps, out);
    silu_multiply(gate, out, columns, out);
}

}  // namespace
}  // namespace headroom
