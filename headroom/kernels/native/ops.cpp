// Packing of weights, whole decoder layers and small operations, divided among threads.
#include "ops.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace headroom {

void Scratch::fail() {
    throw std::length_error("the scratch memory of a kernel is smaller than it needs");
}

// ---- weights ----

void Ops::pack(Kind kind, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* panels) {
    const int64_t count = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    pool_.parallel(count, 1, [&](int64_t first, int64_t last) {
        pack_panels(kind, rows, columns, file, panels, first, last);
    });
}

void Ops::unpack(const Matrix& w, const int64_t* rows, int64_t count, float* out) {
    pool_.parallel(count, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) unpack_row(w, rows[i], out + i * w.columns);
    });
}

float Ops::read_bytes(const uint8_t* data, int64_t bytes) {
    constexpr int64_t PIECE = 1 << 20;
    std::atomic<float> result{0};  // returned, so that the compiler cannot drop the reads
    pool_.parallel((bytes + PIECE - 1) / PIECE, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
            result.store(kernels_.read_bytes(data + i * PIECE, std::min(PIECE, bytes - i * PIECE)),
                         std::memory_order_relaxed);
    });
    return result;
}

// ---- a whole layer ----

size_t Ops::layer_scratch(const LayerWeights& w, const StepView& step) {
    const int64_t hidden = w.q.columns, width = w.gate.rows, rows = step.rows;
    const auto floats = [](int64_t count) { return Scratch::size(count * 4); };
    return floats(rows * hidden) + 2 * floats(rows * w.q.rows) + floats(rows * w.k.rows) +
           floats(rows * w.v.rows) + floats(rows * width) + 2 * matmul_scratch(rows, hidden) +
           matmul_scratch(rows, w.q.rows) + matmul_scratch(rows, width) +
           attention_scratch(w.attention, step.spans, step.span_count);
}

void Ops::layer(const LayerWeights& w, const KvCache& cache, const StepView& step, Products products,
                float* x, Scratch scratch) {
    const int64_t hidden = w.q.columns, rows = step.rows, width = w.gate.rows;
    const AttentionShape& shape = w.attention;
    float* normed = scratch.take<float>(rows * hidden);
    float* queries = scratch.take<float>(rows * w.q.rows);
    float* keys = scratch.take<float>(rows * w.k.rows);
    float* values = scratch.take<float>(rows * w.v.rows);
    float* mixed = scratch.take<float>(rows * w.q.rows);
    float* inner = scratch.take<float>(rows * width);

    const Input attention_in = prepare(normed, rows, hidden, form_of(products, !is_plain(w.q.kind)), scratch);
    norm_rows(x, w.attention_norm, w.eps, normed, attention_in);
    const Matrix* projections[3] = {&w.q, &w.k, &w.v};
    float* outputs[3] = {queries, keys, values};
    project_several(projections, outputs, 3, attention_in);

    pool_.parallel(rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float *cos = step.cos + row * step.half, *sin = step.sin + row * step.half;
            float *q = queries + row * w.q.rows, *k = keys + row * w.k.rows;
            kernels_.rope(q, shape.heads, shape.dim, cos, sin, step.half, q);
            kernels_.rope(k, shape.kv_heads, shape.dim, cos, sin, step.half, k);
        }
    });
    write_kv(cache, shape.kv_heads, shape.dim, step.slots, keys, values, rows);
    attention(shape, cache, queries, step.spans, step.span_count, mixed, scratch);

    const Input mixed_in = prepare(mixed, rows, w.q.rows, form_of(products, !is_plain(w.out.kind)), scratch);
    prepare_rows(mixed_in);
    project(w.out, mixed_in, x, true);

    const Input ffn_in = prepare(normed, rows, hidden, form_of(products, !is_plain(w.gate.kind)), scratch);
    norm_rows(x, w.ffn_norm, w.eps, normed, ffn_in);
    gate_up(w.gate, w.up, ffn_in, Gate::silu, inner);
    const Input inner_in = prepare(inner, rows, width, form_of(products, !is_plain(w.down.kind)), scratch);
    prepare_rows(inner_in);
    project(w.down, inner_in, x, true);
}

// ---- small operations ----

void Ops::rms_norm(const float* x, const float* weight, int64_t rows, int64_t columns, float eps,
                   float* out) {
    pool_.parallel(rows, 16, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            kernels_.rms_norm(x + row * columns, weight, columns, eps, out + row * columns);
    });
}

void Ops::rope(const float* x, int64_t rows, int64_t heads, int64_t dim, const float* cos,
               const float* sin, int64_t half, float* out) {
    pool_.parallel(rows, 16, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            kernels_.rope(x + row * heads * dim, heads, dim, cos + row * half, sin + row * half, half,
                          out + row * heads * dim);
    });
}

void Ops::gated(Gate act, const float* gate, const float* up, int64_t count, float* out) {
    const auto multiply = act == Gate::silu ? kernels_.silu_multiply : kernels_.gelu_multiply;
    pool_.parallel((count + 4095) / 4096, 1, [&](int64_t first, int64_t last) {
        const int64_t from = first * 4096, to = std::min(count, last * 4096);
        multiply(gate + from, up + from, to - from, out + from);
    });
}

}  // namespace headroom
