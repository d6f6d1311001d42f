#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace headroom {
namespace {

constexpr int64_t ROW_BATCH = 256;   // rows of one panel's product kept on the stack
constexpr int MAX_QUERIES = 32;      // queries that share one pass over the keys
constexpr int64_t MAX_DIM = 512;     // of a head
constexpr int64_t QUERY_ROWS = 8;    // tokens of a prompt that share a pass, at most

int64_t blocks_of(int64_t length) { return (length + KEY_BLOCK - 1) / KEY_BLOCK; }

// Memory for what each block of keys gives each query of a span.
int64_t partial_floats(const AttentionShape& shape, const SpanView& span) {
    return blocks_of(span.start + span.rows) * shape.heads * span.rows *
           (padded_dim(shape.dim) + 2);
}

// The running result of attention for one query.
struct Running {
    Partial state{-INFINITY, 0};
    float* sums;

    void merge(Partial other, const float* other_sums, int64_t width) {
        if (other.total == 0) return;
        const float peak = std::max(state.peak, other.peak);
        const float keep = std::exp(state.peak - peak), take = std::exp(other.peak - peak);
        state = {peak, state.total * keep + other.total * take};
        for (int64_t i = 0; i < width; ++i) sums[i] = sums[i] * keep + other_sums[i] * take;
    }
};

// Panels that a thread takes at a time: enough to be worth the taking, few enough that no thread
// waits long for the last one.
int64_t panel_grain(const Matrix& w, int threads) {
    const int64_t bytes = static_cast<int64_t>(panel_size(w.kind, w.columns));
    const int64_t worth = std::max<int64_t>(1, (64 << 10) / bytes);
    return std::clamp<int64_t>(w.panels() / (4 * threads), 1, worth);
}

int64_t first_key(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

}  // namespace

template <class T> T* Scratch::fail() {
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
    std::atomic<float> result{0};  // kept, so that the reads are not left out
    pool_.parallel((bytes + PIECE - 1) / PIECE, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i)
            result.store(kernels_.read_bytes(data + i * PIECE, std::min(PIECE, bytes - i * PIECE)),
                         std::memory_order_relaxed);
    });
    return result;
}

// ---- matrix products ----

size_t Ops::matmul_scratch(int64_t rows, int64_t columns) {
    return Scratch::size(rows * columns) + Scratch::size(rows * (columns / CELL) * 4) +
           Scratch::size(rows * (columns / 16) * 4);
}

Ops::Input Ops::prepare(const float* x, int64_t rows, int64_t columns, bool int8, Scratch& scratch) {
    Input input{int8, {}, {x, nullptr}, rows, columns};
    if (int8) {
        input.quantised.values = scratch.take<int8_t>(rows * columns);
        input.quantised.scales = scratch.take<float>(rows * (columns / CELL));
        input.quantised.sums = scratch.take<int32_t>(rows * (columns / 16));
    } else {
        input.floats.sums = scratch.take<float>(rows * (columns / 16));
    }
    return input;
}

void Ops::prepare_row(const Input& input, int64_t row) {
    const float* x = input.floats.values + row * input.columns;
    if (input.int8)
        kernels_.quantise(x, input.columns, input.quantised.values + row * input.columns,
                          input.quantised.scales + row * (input.columns / CELL),
                          input.quantised.sums + row * (input.columns / 16));
    else
        kernels_.sum_columns(x, input.columns,
                             const_cast<float*>(input.floats.sums) + row * (input.columns / 16));
}

void Ops::panel(const Matrix& w, int64_t index, const Input& input, float* out) {
    if (w.tiles) {
        thread_local std::vector<uint8_t> memory;  // of one panel, aligned below
        memory.resize(panel_size(w.kind, w.columns) + 64);
        uint8_t* turned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        const size_t at = static_cast<size_t>(index) * tile_size(w.kind, w.columns);
        kernels_.tile_to_panel(w.kind, w.columns, w.data + at, turned);
        return panel({turned, w.kind, PANEL_ROWS, w.columns}, 0, input, out);
    }
    if (input.int8) kernels_.panel_int8(w, index, input.quantised, input.rows, out);
    else kernels_.panel_float(w, index, input.floats, input.rows, out);
}

// out [rows, w.rows] = input times w, or += where `add`.
void Ops::project(const Matrix& w, const Input& input, float* out, bool add) {
    const int64_t panels = w.panels();
    const int64_t grain = panel_grain(w, threads());
    pool_.parallel(panels, grain, [&](int64_t first, int64_t last) {
        float result[ROW_BATCH * PANEL_ROWS];
        for (int64_t index = first; index < last; ++index) {
            const int64_t column = index * PANEL_ROWS;
            const int64_t width = std::min<int64_t>(PANEL_ROWS, w.rows - column);
            for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
                const int64_t rows = std::min(ROW_BATCH, input.rows - row);
                panel(w, index, rows_of(input, row, rows), result);
                for (int64_t r = 0; r < rows; ++r) {
                    float* to = out + (row + r) * w.rows + column;
                    const float* from = result + r * PANEL_ROWS;
                    if (add) for (int64_t i = 0; i < width; ++i) to[i] += from[i];
                    else std::memcpy(to, from, width * sizeof(float));
                }
            }
        }
    });
}

Ops::Input Ops::rows_of(const Input& input, int64_t row, int64_t rows) {
    Input part = input;
    part.rows = rows;
    part.floats.values += row * input.columns;
    if (input.int8) {
        part.quantised.values += row * input.columns;
        part.quantised.scales += row * (input.columns / CELL);
        part.quantised.sums += row * (input.columns / 16);
    } else {
        part.floats.sums += row * (input.columns / 16);
    }
    return part;
}

void Ops::matmul(const Matrix& w, const float* x, int64_t rows, bool int8, float* out,
                 Scratch scratch) {
    const Input input = prepare(x, rows, w.columns, int8 && !is_plain(w.kind), scratch);
    prepare_rows(input);
    project(w, input, out, false);
}

// ---- attention ----

void Ops::write_kv(const KvCache& cache, int64_t kv_heads, int64_t dim, const int64_t* slots,
                   const float* keys, const float* values, int64_t rows) {
    pool_.parallel(rows, 8, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            for (int64_t head = 0; head < kv_heads; ++head)
                for (const auto& [plane, x] : {std::pair{&cache.keys, keys}, {&cache.values, values}})
                    kernels_.store_head(plane->kind, x + (row * kv_heads + head) * dim, dim,
                                        plane->data + slots[row] * plane->slot_bytes +
                                            head * plane->head_bytes);
    });
}

size_t Ops::attention_scratch(const AttentionShape& shape, const SpanView* spans,
                              int64_t span_count) {
    size_t bytes = 0;
    for (int64_t i = 0; i < span_count; ++i)
        if (spans[i].rows == 1) bytes += Scratch::size(partial_floats(shape, spans[i]) * 4);
    return bytes;
}

size_t Ops::split_scratch(const AttentionShape& shape, const SpanView* spans, int64_t span_count) {
    size_t bytes = 0;
    for (int64_t i = 0; i < span_count; ++i)
        if (spans[i].rows <= rows_together(shape))
            bytes = std::max(bytes, Scratch::size(partial_floats(shape, spans[i]) * 4));
    return bytes;
}

// The queries of one job, ready for the kernels.
struct Ops::Queries {
    alignas(64) float values[MAX_QUERIES * MAX_DIM];
    int64_t first[MAX_QUERIES], last[MAX_QUERIES], shallowest[MAX_QUERIES];
    const uint8_t* tree[MAX_QUERIES];

    // Rows [row, row + rows) of a span and the query heads of some key-value heads.
    AttentionJob fill(const AttentionShape& shape, const KvCache& cache, const float* queries,
                      const SpanView& span, int64_t row, int64_t rows, int64_t kv_head,
                      int64_t kv_heads) {
        const int64_t group = shape.heads / shape.kv_heads, width = padded_dim(shape.dim);
        int count = 0;
        for (int64_t kv = kv_head; kv < kv_head + kv_heads; ++kv)
            for (int64_t r = row; r < row + rows; ++r)
                for (int64_t head = kv * group; head < (kv + 1) * group; ++head, ++count) {
                    const float* from = queries + ((span.first_row + r) * shape.heads + head) * shape.dim;
                    float* to = values + count * width;
                    for (int64_t i = 0; i < shape.dim; ++i) to[i] = from[i] * shape.scale;
                    for (int64_t i = shape.dim; i < width; ++i) to[i] = 0;
                    see(shape, span, r, count);
                }
        return {values, first, last, tree, shallowest, span.start, static_cast<int>(rows * group),
                static_cast<int>(shape.dim), static_cast<int>(kv_head), static_cast<int>(kv_heads),
                cache.keys, cache.values, span.pages, cache.page_size};
    }

  private:
    void see(const AttentionShape& shape, const SpanView& span, int64_t row, int query) {
        const uint8_t* mask = span.tree ? span.tree + row * span.rows : nullptr;
        int64_t depth = row;
        if (mask) {
            depth = -1;
            for (int64_t i = 0; i <= row; ++i) depth += mask[i];
        }
        first[query] = first_key(span.start + depth, shape.window);
        if (mask) first[query] = std::min(first[query], span.start);
        last[query] = span.start + row + 1;
        shallowest[query] = first_key(depth, shape.window);
        tree[query] = mask;
    }
};

// Some rows of one span and one key-value head, block after block.
void Ops::attend_rows(const AttentionShape& shape, const KvCache& cache, const float* queries,
                      const SpanView& span, int64_t row, int64_t rows, int64_t kv_head, float* out) {
    const int64_t group = shape.heads / shape.kv_heads, width = padded_dim(shape.dim);
    Queries some;
    alignas(64) float sums[MAX_QUERIES * MAX_DIM], merged[MAX_QUERIES * MAX_DIM];
    alignas(64) float scratch[attend_scratch(MAX_QUERIES, MAX_DIM)];
    Partial partials[MAX_QUERIES];
    Running running[MAX_QUERIES];
    const AttentionJob job = some.fill(shape, cache, queries, span, row, rows, kv_head, 1);
    for (int q = 0; q < job.count; ++q) running[q].sums = merged + q * width;
    std::memset(merged, 0, job.count * width * sizeof(float));
    const int64_t end = job.last[job.count - 1];
    const int64_t first = *std::min_element(job.first, job.first + job.count);
    for (int64_t from = first / KEY_BLOCK * KEY_BLOCK; from < end; from += KEY_BLOCK) {
        kernels_.attend(job, from, std::min(from + KEY_BLOCK, end), partials, sums, scratch);
        for (int q = 0; q < job.count; ++q) running[q].merge(partials[q], sums + q * width, width);
    }
    for (int q = 0; q < job.count; ++q) {
        const int64_t r = row + q / group, head = kv_head * group + q % group;
        float* to = out + ((span.first_row + r) * shape.heads + head) * shape.dim;
        for (int64_t i = 0; i < shape.dim; ++i) to[i] = running[q].sums[i] / running[q].state.total;
    }
}

// One block of keys of a span: the partial results of some heads [heads * rows, width + 2].
void Ops::attend_block(const AttentionShape& shape, const KvCache& cache, const float* queries,
                       const SpanView& span, int64_t kv_head, int64_t kv_heads, int64_t block,
                       float* out) {
    const int64_t width = padded_dim(shape.dim), from = block * KEY_BLOCK;
    Queries some;
    alignas(64) float sums[MAX_QUERIES * MAX_DIM];
    alignas(64) float scratch[attend_scratch(MAX_QUERIES, MAX_DIM)];
    Partial partials[MAX_QUERIES];
    const AttentionJob job = some.fill(shape, cache, queries, span, 0, span.rows, kv_head, kv_heads);
    kernels_.attend(job, from, std::min(from + KEY_BLOCK, span.start + span.rows), partials, sums,
                    scratch);
    for (int64_t q = 0; q < job.count * kv_heads; ++q, out += width + 2) {
        out[0] = partials[q].peak;
        out[1] = partials[q].total;
        std::memcpy(out + 2, sums + q * width, width * sizeof(float));
    }
}

// A few rows: their keys are shared out in blocks and the results merged in order. Heads that lie
// side by side in memory are read together.
void Ops::attend_split(const AttentionShape& shape, const KvCache& cache, const float* queries,
                       const SpanView& span, float* partials, float* out) {
    const int64_t group = shape.heads / shape.kv_heads, width = padded_dim(shape.dim);
    const int64_t own = group * span.rows, all = shape.heads * span.rows;  // queries
    const int64_t together = std::clamp<int64_t>(MAX_QUERIES / own, 1, shape.kv_heads);
    const int64_t parts = (shape.kv_heads + together - 1) / together;
    const int64_t skipped = first_key(span.start, shape.window) / KEY_BLOCK;
    const int64_t blocks = blocks_of(span.start + span.rows) - skipped;
    pool_.parallel(blocks * parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t job = first; job < last; ++job) {
            const int64_t block = job / parts, head = job % parts * together;
            attend_block(shape, cache, queries, span, head,
                         std::min(together, shape.kv_heads - head), skipped + block,
                         partials + (block * all + head * own) * (width + 2));
        }
    });
    for (int64_t query = 0; query < all; ++query) {
        alignas(64) float sums[MAX_DIM] = {};
        Running running;
        running.sums = sums;
        for (int64_t block = 0; block < blocks; ++block) {
            const float* from = partials + (block * all + query) * (width + 2);
            running.merge({from[0], from[1]}, from + 2, width);
        }
        const int64_t row = span.first_row + query % own / group;
        const int64_t head = query / own * group + query % group;
        float* to = out + (row * shape.heads + head) * shape.dim;
        for (int64_t d = 0; d < shape.dim; ++d) to[d] = sums[d] / running.state.total;
    }
}

// Rows whose queries share one pass over the keys.
int64_t Ops::rows_together(const AttentionShape& shape) {
    return std::clamp<int64_t>(MAX_QUERIES * shape.kv_heads / shape.heads, 1, QUERY_ROWS);
}

// A piece of a prompt: its rows are shared out, each pass over the keys serving a few.
void Ops::attend_whole(const AttentionShape& shape, const KvCache& cache, const float* queries,
                       const SpanView& span, float* out) {
    const int64_t tile = rows_together(shape), tiles = (span.rows + tile - 1) / tile;
    pool_.parallel(tiles * shape.kv_heads, 1, [&](int64_t first, int64_t last) {
        for (int64_t job = first; job < last; ++job) {
            // Later rows see more keys; taking them first leaves small jobs for the end.
            const int64_t row = (tiles - 1 - job / shape.kv_heads) * tile;
            attend_rows(shape, cache, queries, span, row, std::min(tile, span.rows - row),
                        job % shape.kv_heads, out);
        }
    });
}

void Ops::attention(const AttentionShape& shape, const KvCache& cache, const float* queries,
                    const SpanView* spans, int64_t span_count, float* out, Scratch scratch) {
    if (shape.heads / shape.kv_heads > MAX_QUERIES || shape.dim > MAX_DIM)
        throw std::invalid_argument("attention heads of this size are not supported");
    for (int64_t i = 0; i < span_count; ++i) {
        const SpanView& span = spans[i];
        Scratch own = scratch;  // spans come one after another and use the same memory
        const int64_t needed = partial_floats(shape, span);
        // Either way comes to the same numbers. Memory is planned for single rows; a few more,
        // such as those of a tree, are shared out where there is enough of it.
        const bool few = span.rows <= rows_together(shape) && own.has<float>(needed);
        if (span.rows == 1 || few)
            attend_split(shape, cache, queries, span, own.take<float>(needed), out);
        else attend_whole(shape, cache, queries, span, out);
    }
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

void Ops::layer(const LayerWeights& w, const KvCache& cache, const StepView& step, bool int8,
                float* x, Scratch scratch) {
    const int64_t hidden = w.q.columns, rows = step.rows, width = w.gate.rows;
    const AttentionShape& shape = w.attention;
    float* normed = scratch.take<float>(rows * hidden);
    float* queries = scratch.take<float>(rows * w.q.rows);
    float* keys = scratch.take<float>(rows * w.k.rows);
    float* values = scratch.take<float>(rows * w.v.rows);
    float* mixed = scratch.take<float>(rows * w.q.rows);
    float* inner = scratch.take<float>(rows * width);

    const Input attention_in = prepare(normed, rows, hidden, int8 && !is_plain(w.q.kind), scratch);
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

    const Input mixed_in = prepare(mixed, rows, w.q.rows, int8 && !is_plain(w.out.kind), scratch);
    prepare_rows(mixed_in);
    project(w.out, mixed_in, x, true);

    const Input ffn_in = prepare(normed, rows, hidden, int8 && !is_plain(w.gate.kind), scratch);
    norm_rows(x, w.ffn_norm, w.eps, normed, ffn_in);
    gate_up(w.gate, w.up, ffn_in, Gate::silu, inner);
    const Input inner_in = prepare(inner, rows, width, int8 && !is_plain(w.down.kind), scratch);
    prepare_rows(inner_in);
    project(w.down, inner_in, x, true);
}

void Ops::norm_rows(const float* x, const float* weight, float eps, float* normed,
                    const Input& input) {
    const int64_t columns = input.columns;
    pool_.parallel(input.rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            kernels_.rms_norm(x + row * columns, weight, columns, eps, normed + row * columns);
            prepare_row(input, row);
        }
    });
}

void Ops::prepare_rows(const Input& input) {
    pool_.parallel(input.rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) prepare_row(input, row);
    });
}

// Several matrices of the same input, shared out together so that small ones do not wait.
void Ops::project_several(const Matrix* const* matrices, float* const* outputs, int count,
                          const Input& input) {
    int64_t total = 0;
    for (int m = 0; m < count; ++m) total += matrices[m]->panels();
    const int64_t grain = std::max<int64_t>(1, total / (4 * threads()));
    pool_.parallel(total, grain, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last; ++index) {
            int m = 0;
            int64_t local = index;
            for (; local >= matrices[m]->panels(); ++m) local -= matrices[m]->panels();
            panel_into(*matrices[m], local, input, outputs[m]);
        }
    });
}

void Ops::panel_into(const Matrix& w, int64_t index, const Input& input, float* out) {
    float result[ROW_BATCH * PANEL_ROWS];
    const int64_t column = index * PANEL_ROWS;
    const int64_t width = std::min<int64_t>(PANEL_ROWS, w.rows - column);
    for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
        const int64_t rows = std::min(ROW_BATCH, input.rows - row);
        panel(w, index, rows_of(input, row, rows), result);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(out + (row + r) * w.rows + column, result + r * PANEL_ROWS,
                        width * sizeof(float));
    }
}

// inner [rows, width] = act(gate x) * up x, panel by panel.
void Ops::gate_up(const Matrix& gate, const Matrix& up, const Input& input, Gate act, float* inner) {
    const int64_t panels = gate.panels();
    const int64_t grain = panel_grain(gate, threads());
    pool_.parallel(panels, grain, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last; ++index)
            gate_up_panel(gate, up, index, input, act, inner);
    });
}

void Ops::gate_up_panel(const Matrix& gate, const Matrix& up, int64_t index, const Input& input,
                        Gate act, float* inner) {
    float gates[ROW_BATCH * PANEL_ROWS], ups[ROW_BATCH * PANEL_ROWS];
    const int64_t column = index * PANEL_ROWS;
    const int64_t width = std::min<int64_t>(PANEL_ROWS, gate.rows - column);
    const auto multiply = act == Gate::silu ? kernels_.silu_multiply : kernels_.gelu_multiply;
    for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
        const int64_t rows = std::min(ROW_BATCH, input.rows - row);
        const Input part = rows_of(input, row, rows);
        panel(gate, index, part, gates);
        panel(up, index, part, ups);
        multiply(gates, ups, rows * PANEL_ROWS, gates);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(inner + (row + r) * gate.rows + column, gates + r * PANEL_ROWS,
                        width * sizeof(float));
    }
}

// ---- experts ----

size_t Ops::experts_scratch(int64_t tokens, int64_t per_token, int64_t hidden, int64_t width,
                            int64_t experts) {
    const int64_t picks = tokens * per_token;
    return Scratch::size((experts + 1) * 4) + 2 * Scratch::size(picks * 4) +
           Scratch::size(picks * hidden * 4) + Scratch::size(picks * width * 4) +
           matmul_scratch(picks, hidden) + matmul_scratch(picks, width);
}

void Ops::experts(const Matrix& gate, const Matrix& up, const Matrix& down,
                  const ExpertWeights* table, int64_t expert_count, const int32_t* ids,
                  const float* weights, int64_t per_token, const float* x, int64_t tokens, Gate act,
                  bool int8, float* out, Scratch scratch) {
    const int64_t hidden = gate.columns, width = gate.rows, asked = tokens * per_token;
    // Sort the picks by expert: starts[e] .. starts[e + 1] are those of expert e, tokens in order.
    int32_t* starts = scratch.take<int32_t>(expert_count + 1);
    int32_t* order = scratch.take<int32_t>(asked);   // pick at each sorted place
    std::memset(starts, 0, (expert_count + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < asked; ++i) {
        if (ids[i] >= expert_count) throw std::out_of_range("no such expert");
        if (ids[i] >= 0) ++starts[ids[i] + 1];
    }
    for (int64_t e = 0; e < expert_count; ++e) starts[e + 1] += starts[e];
    int32_t* chosen = scratch.take<int32_t>(asked);  // experts with any pick, in order
    int64_t chosen_count = 0;
    for (int32_t e = 0; e < expert_count; ++e)
        if (starts[e + 1] > starts[e]) chosen[chosen_count++] = e;
    const int64_t picks = starts[expert_count];
    for (int64_t i = asked - 1; i >= 0; --i)
        if (ids[i] >= 0) order[--starts[ids[i] + 1]] = static_cast<int32_t>(i);
    // The loop above left starts[e + 1] at the first pick of e; shift back.
    for (int64_t e = 0; e < expert_count; ++e) starts[e] = starts[e + 1];
    starts[expert_count] = static_cast<int32_t>(picks);

    float* rows = scratch.take<float>(picks * hidden);
    float* inner = scratch.take<float>(picks * width);
    const bool packed = !is_plain(gate.kind) && !is_plain(up.kind);  // one input serves both
    const Input in = prepare(rows, picks, hidden, int8 && packed, scratch);
    const Input inner_in = prepare(inner, picks, width, int8 && !is_plain(down.kind), scratch);
    pool_.parallel(picks, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            std::memcpy(rows + i * hidden, x + order[i] / per_token * hidden, hidden * sizeof(float));
            prepare_row(in, i);
        }
    });
    const auto matrix_of = [](const Matrix& like, const uint8_t* data) {
        return Matrix{data, like.kind, like.rows, like.columns, like.tiles};
    };
    const int64_t gate_panels = gate.panels();
    pool_.parallel(chosen_count * gate_panels, panel_grain(gate, threads()),
                   [&](int64_t first, int64_t last) {
        for (int64_t job = first; job < last; ++job) {
            const int32_t e = chosen[job / gate_panels];
            const Input part = rows_of(in, starts[e], starts[e + 1] - starts[e]);
            gate_up_panel(matrix_of(gate, table[e].gate), matrix_of(up, table[e].up),
                          job % gate_panels, part, act, inner + starts[e] * width);
        }
    });
    prepare_rows(inner_in);
    pool_.parallel(down.panels(), panel_grain(down, threads()),
                   [&](int64_t first, int64_t last) {
        // Expert after expert, so that each one's panels are read in a run.
        float result[ROW_BATCH * PANEL_ROWS];
        const int64_t begin = first * PANEL_ROWS, end = std::min(hidden, last * PANEL_ROWS);
        for (int64_t t = 0; t < tokens; ++t)
            std::memset(out + t * hidden + begin, 0, (end - begin) * sizeof(float));
        for (int64_t c = 0; c < chosen_count; ++c) {
            const int32_t e = chosen[c];
            const Matrix w = matrix_of(down, table[e].down);
            for (int64_t index = first; index < last; ++index) {
                const int64_t column = index * PANEL_ROWS;
                const int64_t count = std::min<int64_t>(PANEL_ROWS, hidden - column);
                for (int64_t row = starts[e]; row < starts[e + 1]; row += ROW_BATCH) {
                    const int64_t n = std::min<int64_t>(ROW_BATCH, starts[e + 1] - row);
                    panel(w, index, rows_of(inner_in, row, n), result);
                    for (int64_t r = 0; r < n; ++r) {
                        const int32_t pick = order[row + r];
                        float* to = out + pick / per_token * hidden + column;
                        for (int64_t i = 0; i < count; ++i)
                            to[i] += weights[pick] * result[r * PANEL_ROWS + i];
                    }
                }
            }
        }
    });
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

// ---- instruction sets ----

const Kernels* find_kernels(const char* name) {
#if defined(HEADROOM_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512 && !std::strcmp(name, "avx512")) return &AVX512_KERNELS;
    if (avx2 && !std::strcmp(name, "avx2")) return &AVX2_KERNELS;
#endif
    return std::strcmp(name, "portable") ? nullptr : &PORTABLE_KERNELS;
}

const Kernels& best_kernels() {
    for (const char* name : {"avx512", "avx2"})
        if (const Kernels* kernels = find_kernels(name)) return *kernels;
    return PORTABLE_KERNELS;
}

}  // namespace headroom
