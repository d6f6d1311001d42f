// The arithmetic of one instruction set: small pieces that the operations share out over threads.
#pragma once

#include "delta_net.h"
#include "panels.h"

namespace headroom {

// Rows of activations, rounded to 8 bits with a scale per 32 columns.
struct QuantisedRows {
    int8_t* values;  // [rows, columns]
    float* scales;   // [rows, columns / 32]
    int32_t* sums;   // [rows, columns / 16], of the rounded values
};

struct FloatRows {
    const float* values;  // [rows, columns]
    const float* sums;    // [rows, columns / 16]
};

// 256 columns of a row of activations in 16 bits, as the products with tiles want them: see wide.inl.
struct alignas(64) WideRecord {
    int8_t high[4][2][64], low[4][2][64];  // digits of pairs of blocks and halves of them: [t][block][h][4]
    float sums[2][16];                     // of halves of blocks: [block][h]
    float scale;
};
HEADROOM_INLINE constexpr int64_t wide_records(int64_t columns) { return (columns + 255) / 256; }
using Widen = void (*)(const float* x, int64_t columns, WideRecord* out);
using TileWide = void (*)(const Matrix& w, int64_t tile, const WideRecord* const* x, int64_t rows,
                          float* out);

// One layer's cached keys or values; a head of a slot is `head_bytes` long.
struct KvPlane {
    uint8_t* data;
    Kind kind;
    int64_t slot_bytes, head_bytes;
};

constexpr int64_t KEY_BLOCK = 256;  // keys whose softmax is summed up before it is merged
constexpr int64_t KEY_TILE = 32;    // keys that are unpacked together

// What attention has gathered for one query: a maximum, and sums relative to it.
struct Partial {
    float peak, total;
};

// Queries of some neighbouring key-value heads, `count` for each, and the keys that they see.
struct AttentionJob {
    const float* queries;        // [heads * count, padded dim], scaled, zeros beyond `dim`
    const int64_t* first;        // first key that each query sees
    const int64_t* last;         // one past the last
    const uint8_t* const* tree;  // which keys from `start` on each query sees; null: all
    const int64_t* shallowest;   // of a tree's keys, those above this depth are out of the window
    int64_t start;
    int count, dim, head, heads;
    KvPlane keys, values;
    const int64_t* pages;
    int page_size;
};

struct Kernels {
    const char* name;
    void (*quantise)(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums);
    void (*sum_columns)(const float* x, int64_t columns, float* sums);
    float (*read_bytes)(const uint8_t* data, int64_t bytes);
    // One panel times all rows: out [rows, 16].
    void (*panel_int8)(const Matrix& w, int64_t panel, QuantisedRows x, int64_t rows, float* out);
    void (*panel_float)(const Matrix& w, int64_t panel, FloatRows x, int64_t rows, float* out);
    // Sixteen rows from a GPU's layout into a panel.
    void (*tile_to_panel)(Kind kind, int64_t columns, const uint8_t* tile, uint8_t* panel);
    // Rows in 16 bits and one such tile times all of them: out [rows, 16]; null where rows stay floats.
    Widen widen;
    TileWide tile_wide;
    void (*rms_norm)(const float* x, const float* weight, int64_t columns, float eps, float* out);
    void (*silu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*gelu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*rope)(const float* x, int64_t heads, int64_t dim, const float* cos, const float* sin,
                 int64_t half, float* out);
    void (*store_head)(Kind kind, const float* x, int64_t dim, uint8_t* out);
    // Keys [from, to) of at most KEY_BLOCK: sums [queries, padded dim] and a Partial per query.
    void (*attend)(const AttentionJob& job, int64_t from, int64_t to, Partial* partials,
                   float* sums, float* scratch);
    // One row's channels, from `taps` rows of inputs: activated, queries and keys of unit length.
    void (*convolve)(const DeltaShape& shape, const float* conv, const float* const* inputs,
                     float* out);
    void (*delta_rows)(const DeltaJob& job, float* block);
    void (*gated_norm)(const float* x, const float* gate, const float* weight, int64_t columns,
                       float eps, float* out);
};

HEADROOM_INLINE int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }
// Floats of scratch that `attend` needs for heads of `width` values, padded.
constexpr int64_t attend_scratch(int64_t queries, int64_t width) {
    return queries * KEY_BLOCK + (KEY_TILE + 1) * width;
}

extern const Kernels PORTABLE_KERNELS;
#if defined(HEADROOM_X86)
extern const Kernels AVX2_KERNELS;
extern const Kernels AVX512_KERNELS;
#endif
#if defined(HEADROOM_AMX)
const Kernels& amx_kernels();  // AVX512_KERNELS, but for products of many rows
#endif

}  // namespace headroom
