// Attention of a step: divides rows, heads and blocks of keys among threads.
//
// Two ways give the same numbers. For few rows of a span (decode) threads divide its keys in blocks of
// KEY_BLOCK and the partial softmaxes are merged in order (attend_split). For many rows (prefill) threads
// divide the rows; each thread goes over all keys of its rows, block after block (attend_whole).
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace headroom {
namespace {

constexpr int MAX_QUERIES = 32;      // most queries that share one pass over the keys
constexpr int64_t MAX_DIM = 512;     // most values of a head
constexpr int64_t QUERY_ROWS = 8;    // most rows of a prompt that share one pass over the keys

int64_t blocks_of(int64_t length) { return (length + KEY_BLOCK - 1) / KEY_BLOCK; }

// Floats for the partial results of a span: a Partial and `padded_dim` sums per block of keys and query.
int64_t partial_floats(const AttentionShape& shape, const SpanView& span) {
    return blocks_of(span.start + span.rows) * shape.heads * span.rows *
           (padded_dim(shape.dim) + 2);
}

// One query's softmax over the blocks of keys so far, and its weighted sum of values.
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

int64_t first_key(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

}  // namespace

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

// The queries of one job, scaled and padded, with what each of them sees.
struct Ops::Queries {
    alignas(64) float values[MAX_QUERIES * MAX_DIM];
    int64_t first[MAX_QUERIES], last[MAX_QUERIES], shallowest[MAX_QUERIES];
    const uint8_t* tree[MAX_QUERIES];

    // Fills in rows [row, row + rows) of a span, for the query heads of `kv_heads` KV heads from `kv_head`.
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
        if (mask) {  // in a block of masked tokens, rows see later rows, too
            depth = -1;
            for (int64_t i = 0; i < span.rows; ++i) depth += mask[i];
        }
        first[query] = first_key(span.start + depth, shape.window);
        if (mask) first[query] = std::min(first[query], span.start);
        last[query] = span.start + (mask ? span.rows : row + 1);
        shallowest[query] = first_key(depth, shape.window);
        tree[query] = mask;
    }
};

// Attends from some rows of a span for one KV head, one block of keys after another.
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

// Attends to one block of keys from all rows of a span; writes partial results [heads * rows, width + 2].
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

// Few rows: threads divide the keys in blocks, and the results are merged in the order of the blocks. Heads
// that are adjacent in memory are read together.
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

// How many rows' queries share one pass over the keys.
int64_t Ops::rows_together(const AttentionShape& shape) {
    return std::clamp<int64_t>(MAX_QUERIES * shape.kv_heads / shape.heads, 1, QUERY_ROWS);
}

// Many rows: threads divide the rows; each pass over the keys serves `rows_together` of them.
void Ops::attend_whole(const AttentionShape& shape, const KvCache& cache, const float* queries,
                       const SpanView& span, float* out) {
    const int64_t tile = rows_together(shape), tiles = (span.rows + tile - 1) / tile;
    pool_.parallel(tiles * shape.kv_heads, 1, [&](int64_t first, int64_t last) {
        for (int64_t job = first; job < last; ++job) {
            // Later rows see more keys. Starting with them leaves the small jobs for the end.
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
        Scratch own = scratch;  // spans run one after another in the same memory
        const int64_t needed = partial_floats(shape, span);
        // Both ways give the same numbers. The plan counts scratch for spans of one row; spans of a few
        // rows, such as those of a draft tree, are split too if the scratch suffices.
        const bool few = span.rows <= rows_together(shape) && own.has<float>(needed);
        if (span.rows == 1 || few)
            attend_split(shape, cache, queries, span, own.take<float>(needed), out);
        else attend_whole(shape, cache, queries, span, out);
    }
}

}  // namespace headroom
