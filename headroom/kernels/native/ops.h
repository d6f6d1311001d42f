// Ops: the operations that Python calls; each divides its work among all threads of one pool.
#pragma once

#include "kernels.h"
#include "threads.h"

namespace headroom {

constexpr int64_t ROW_BATCH = 256;  // most rows of one panel's product, which are kept on the stack

// Scratch memory of one call: hands out pieces aligned to 64 bytes, and throws when none is left.
class Scratch {
  public:
    Scratch(uint8_t* data, size_t bytes) : next_(data), end_(data + bytes) {}

    template <class T> T* take(int64_t count) {
        uint8_t* piece = next_;
        next_ += size(count * static_cast<int64_t>(sizeof(T)));
        if (next_ > end_) fail();
        return reinterpret_cast<T*>(piece);
    }
    template <class T> bool has(int64_t count) const {
        return size(count * static_cast<int64_t>(sizeof(T))) <= static_cast<size_t>(end_ - next_);
    }
    static size_t size(int64_t bytes) { return (static_cast<size_t>(bytes) + 63) / 64 * 64; }

  private:
    [[noreturn]] static void fail();

    uint8_t *next_, *end_;
};

// The rows of one sequence in a step: `rows` tokens, the first of them cached as token `start`.
struct SpanView {
    int64_t first_row, rows, start;
    const int64_t* pages;
    const uint8_t* tree;  // [rows, rows]: row i sees row j; null: row i sees rows 0 .. i
};

struct AttentionShape {
    int64_t heads, kv_heads, dim, window;
    float scale;
};

enum class Gate { silu, gelu };

// What the activations of a product with packed weights are rounded to. Plain weights multiply floats.
enum class Products : int { floats, int24, int8 };

// A decoder layer's weights and sizes. The pointers must stay valid as long as the layer is used.
struct LayerWeights {
    Matrix q, k, v, out, gate, up, down;
    const float *attention_norm, *ffn_norm;
    float eps;
    AttentionShape attention;
};

struct KvCache {
    KvPlane keys, values;
    int page_size;
};

// One step of a layer: rows with their rotary tables and cache slots.
struct StepView {
    int64_t rows, half;  // `half` angles per row
    const float *cos, *sin;
    const int64_t* slots;
    const SpanView* spans;
    int64_t span_count;
};

// The addresses of an expert's three matrices.
struct ExpertWeights {
    const uint8_t *gate, *up, *down;
};

// How a router's logits become the ids and weights of the picked experts.
struct RouterRule {
    int64_t used;  // experts that a row visits
    bool sigmoid;  // scores are sigmoid(logits), else softmax(logits)
    bool normalise;  // weights are divided by their sum
    float scale;  // factor of the weights, applied last
    float softcap;  // logits become softcap * tanh(logits / softcap); 0: no cap
};

class Ops {
  public:
    Ops(const Kernels& kernels, int threads, bool pin) : kernels_(kernels), pool_(threads, pin) {}

    const Kernels& kernels() const { return kernels_; }
    int threads() const { return pool_.size(); }
    // Wakes sleeping threads, so that the next operation finds them spinning.
    void wake() { pool_.parallel(threads(), 1, [](int64_t, int64_t) {}); }

    void pack(Kind kind, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* panels);
    void unpack(const Matrix& w, const int64_t* rows, int64_t count, float* out);

    // Reads `bytes` bytes with all threads, to measure memory bandwidth.
    float read_bytes(const uint8_t* data, int64_t bytes);

    // out [rows, w.rows] = x times the transpose of w.
    void matmul(const Matrix& w, const float* x, int64_t rows, Products products, float* out, Scratch scratch);
    static size_t matmul_scratch(int64_t rows, int64_t columns);

    // `queries` are unscaled; attention multiplies them by shape.scale.
    void attention(const AttentionShape& shape, const KvCache& cache, const float* queries,
                   const SpanView* spans, int64_t span_count, float* out, Scratch scratch);
    size_t attention_scratch(const AttentionShape& shape, const SpanView* spans, int64_t span_count);
    // Scratch with which spans of a few rows are split over their keys, too; attention runs with less.
    size_t split_scratch(const AttentionShape& shape, const SpanView* spans, int64_t span_count);

    void write_kv(const KvCache& cache, int64_t kv_heads, int64_t dim, const int64_t* slots,
                  const float* keys, const float* values, int64_t rows);

    // Runs a whole decoder layer on the residual stream x [rows, hidden], in place.
    void layer(const LayerWeights& w, const KvCache& cache, const StepView& step, Products products,
               float* x, Scratch scratch);
    size_t layer_scratch(const LayerWeights& w, const StepView& step);

    // out [tokens, hidden] = sum over each token's experts of weight * down(act(gate x) * up x).
    // Picks with a negative id are skipped. Where the instruction set multiplies with GPU tiles, products
    // of 24 bits with tiles have 16 bits (WideRecord).
    void experts(const Matrix& gate, const Matrix& up, const Matrix& down, const ExpertWeights* table,
                 int64_t expert_count, const int32_t* ids, const float* weights, int64_t per_token,
                 const float* x, int64_t tokens, Gate act, Products products, float* out, Scratch scratch);
    static size_t experts_scratch(int64_t tokens, int64_t per_token, int64_t hidden, int64_t width,
                                  int64_t experts, bool tiles);

    // Writes ids and weights [rows, used] for logits [rows, experts], the best first, and adds the picks to
    // counts [experts].
    void route(const RouterRule& rule, const float* logits, int64_t rows, int64_t experts,
               const float* bias, int64_t* counts, int32_t* ids, float* weights);
    // Spans cover all rows. `parents` are the rows that guessed rows follow, by span. Scratch: mixed [rows, channels], gates [2, rows, value heads].
    void delta_net(const DeltaShape& shape, const DeltaWeights& w, const DeltaState& state,
                   const DeltaSpan* spans, int64_t span_count, const int64_t* parents,
                   const float* qkv, const float* beta, const float* alpha, float* mixed,
                   float* gates, float* out);
    void gated_norm(const float* x, const float* gate, const float* weight, int64_t rows,
                    int64_t columns, float eps, float* out);

    void rms_norm(const float* x, const float* weight, int64_t rows, int64_t columns, float eps,
                  float* out);
    void rope(const float* x, int64_t rows, int64_t heads, int64_t dim, const float* cos,
              const float* sin, int64_t half, float* out);
    void gated(Gate act, const float* gate, const float* up, int64_t count, float* out);

  private:
    enum class Form { floats, int24, int8, wide };  // how the values of a row are represented

    // Rows of activations in the form that a product reads.
    struct Input {
        Form form;
        DigitCell* digits;  // [rows, columns / 32]
        QuantisedRows quantised;
        const WideRecord** wide;  // the first record of each row
        FloatRows floats;
        int64_t rows, columns;
    };

    // Picks sorted by expert: order[i] is the number of the i-th among all picks [tokens, per_token].
    struct Picks {
        const int32_t* order;
        int64_t count, per_token;
        int64_t token(int64_t i) const { return order[i] / per_token; }
    };

    int64_t panel_grain(const Matrix& w) const;
    Input gather_picks(const float* x, int64_t hidden, const Picks& picks, Form form, Scratch& scratch);
    Input wide_picks(const float* x, int64_t tokens, int64_t hidden, const Picks& picks, Scratch& scratch);
    Input prepare(const float* x, int64_t rows, int64_t columns, Form form, Scratch& scratch);
    static Form form_of(Products products, bool packed) {
        if (!packed || products == Products::floats) return Form::floats;
        return products == Products::int24 ? Form::int24 : Form::int8;
    }
    void prepare_row(const Input& input, int64_t row);
    void prepare_rows(const Input& input);
    void norm_rows(const float* x, const float* weight, float eps, float* normed, const Input& input);
    static Input rows_of(const Input& input, int64_t row, int64_t rows);
    void panel(const Matrix& w, int64_t index, const Input& input, float* out);
    void panel_into(const Matrix& w, int64_t index, const Input& input, float* out);
    void project(const Matrix& w, const Input& input, float* out, bool add);
    void project_several(const Matrix* const* matrices, float* const* outputs, int count,
                         const Input& input);
    void gate_up(const Matrix& gate, const Matrix& up, const Input& input, Gate act, float* inner);
    void gate_up_panel(const Matrix& gate, const Matrix& up, int64_t index, const Input& input,
                       Gate act, float* inner);
    struct Queries;
    static int64_t rows_together(const AttentionShape& shape);
    void attend_rows(const AttentionShape& shape, const KvCache& cache, const float* queries,
                     const SpanView& span, int64_t row, int64_t rows, int64_t kv_head, float* out);
    void attend_block(const AttentionShape& shape, const KvCache& cache, const float* queries,
                      const SpanView& span, int64_t kv_head, int64_t kv_heads, int64_t block,
                      float* out);
    void attend_split(const AttentionShape& shape, const KvCache& cache, const float* queries,
                      const SpanView& span, float* partials, float* out);
    void attend_whole(const AttentionShape& shape, const KvCache& cache, const float* queries,
                      const SpanView& span, float* out);

    const Kernels& kernels_;
    ThreadPool pool_;
};

constexpr const char* ISAS[] = {"amx", "avx512", "avxvnni", "avx2", "portable"};  // in order of preference
const Kernels& best_kernels();
const Kernels* find_kernels(const char* name);  // nullptr if this CPU cannot run them

}  // namespace headroom
