// Gated DeltaNet of a step, divided among threads: first the convolution by rows, then the recurrence by
// span, value head and block of columns.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace headroom {

namespace {

// Finds the last `taps` inputs up to row `row` of a span, oldest first. They come from this step, from the
// sequence's state, or are zeros before the sequence begins. `parents`: of a span of guesses, else null.
void find_inputs(const DeltaShape& shape, const DeltaSpan& span, const int64_t* parents,
                 const float* qkv, const float* kept, const float* zeros, int64_t row,
                 const float** inputs) {
    int64_t at = row;
    for (int64_t j = shape.taps - 1; j >= 0; --j) {
        if (at >= 0) {
            inputs[j] = qkv + (span.first_row + at) * shape.channels();
            at = parents ? parents[at] : at - 1;
        } else {
            inputs[j] = span.start ? kept + (shape.taps - 1 + at) * shape.channels() : zeros;
            --at;
        }
    }
}

// Finds a place for the memory after each guessed row that a later row follows, but for a row that only the
// next one follows. Returns how many places there are.
int64_t find_places(const DeltaSpan& span, const int64_t* parents, int64_t* places) {
    int64_t count = 0;
    for (int64_t row = 0; row < span.rows; ++row) places[row] = -1;
    for (int64_t row = 0; row < span.rows; ++row) {
        const int64_t parent = parents[row];
        if (parent >= 0 && parent < row - 1 && places[parent] < 0) places[parent] = count++;
    }
    return count;
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Stores the last inputs of a span in the sequence's state, for the convolution of its next step.
void keep_inputs(const DeltaShape& shape, const DeltaSpan& span, const float* qkv, float* kept) {
    const int64_t count = shape.taps - 1, channels = shape.channels();
    const int64_t fresh = std::min(count, span.rows), old = count - fresh;
    if (span.start) {
        std::memmove(kept, kept + fresh * channels, old * channels * sizeof(float));
    } else {
        std::memset(kept, 0, old * channels * sizeof(float));
    }
    std::memcpy(kept + old * channels, qkv + (span.first_row + span.rows - fresh) * channels,
                fresh * channels * sizeof(float));
}

}  // namespace

void Ops::delta_net(const DeltaShape& shape, const DeltaWeights& w, const DeltaState& state,
                    const DeltaSpan* spans, int64_t span_count, const int64_t* parents,
                    const float* qkv, const float* beta, const float* alpha, float* mixed,
                    float* gates, float* out) {
    const int64_t channels = shape.channels(), heads = shape.value_heads, dim = shape.dim;
    int64_t rows = 0;
    std::vector<int64_t> span_of;
    for (int64_t s = 0; s < span_count; rows += spans[s++].rows)
        span_of.insert(span_of.end(), static_cast<size_t>(spans[s].rows), s);
    const std::vector<float> zeros(static_cast<size_t>(channels));
    float *decays = gates, *betas = gates + rows * heads;
    const auto parents_of = [&](const DeltaSpan& span) {
        return span.guesses < 0 ? nullptr : parents + span.guesses;
    };
    std::vector<int64_t> places(static_cast<size_t>(rows));
    int64_t most_places = 0;
    for (int64_t s = 0; s < span_count; ++s) {
        if (spans[s].guesses < 0) continue;
        int64_t* own = places.data() + spans[s].first_row;
        most_places = std::max(most_places, find_places(spans[s], parents_of(spans[s]), own));
    }
    const auto kept = [&](const DeltaSpan& span) {
        return state.inputs + span.slot * (shape.taps - 1) * channels;
    };
    pool_.parallel(rows, 1, [&](int64_t first, int64_t last) {
        std::vector<const float*> inputs(static_cast<size_t>(shape.taps));
        for (int64_t i = first; i < last; ++i) {
            const DeltaSpan& span = spans[span_of[static_cast<size_t>(i)]];
            find_inputs(shape, span, parents_of(span), qkv, kept(span), zeros.data(),
                        i - span.first_row, inputs.data());
            kernels_.convolve(shape, w.conv, inputs.data(), mixed + i * channels);
            for (int64_t h = i * heads; h < (i + 1) * heads; ++h) {
                const int64_t head = h - i * heads;
                decays[h] = std::exp(w.decay[head] * softplus(alpha[h] + w.dt_bias[head]));
                betas[h] = 1 / (1 + std::exp(-beta[h]));
            }
        }
    });
    for (int64_t s = 0; s < span_count; ++s)
        if (spans[s].guesses < 0) keep_inputs(shape, spans[s], qkv, kept(spans[s]));
    const int64_t blocks = (dim + DELTA_COLUMNS - 1) / DELTA_COLUMNS, jobs = heads * blocks;
    pool_.parallel(span_count * jobs, 1, [&](int64_t first, int64_t last) {
        std::vector<float> block(static_cast<size_t>((1 + most_places) * dim * DELTA_COLUMNS));
        for (int64_t i = first; i < last; ++i) {
            const DeltaSpan& span = spans[i / jobs];
            const int64_t head = i % jobs / blocks, column = i % blocks * DELTA_COLUMNS;
            const int64_t key = shape.key_head(head) * dim, row = span.first_row;
            const float* at = mixed + row * channels;
            kernels_.delta_rows({at + key, at + shape.key_heads * dim + key,
                                 at + (2 * shape.key_heads + head) * dim, decays + row * heads + head,
                                 betas + row * heads + head, out + (row * heads + head) * dim,
                                 state.memory + (span.slot * heads + head) * dim * dim, span.rows,
                                 dim, channels, heads, column, std::min(DELTA_COLUMNS, dim - column),
                                 span.start == 0, parents_of(span), places.data() + row},
                                block.data());
        }
    });
}

void Ops::gated_norm(const float* x, const float* gate, const float* weight, int64_t rows,
                     int64_t columns, float eps, float* out) {
    pool_.parallel(rows, 16, [&](int64_t first, int64_t last) {
        for (int64_t i = first * columns; i < last * columns; i += columns)
            kernels_.gated_norm(x + i, gate + i, weight, columns, eps, out + i);
    });
}

}  // namespace headroom
