// The table of functions that each instruction set provides.
//
// A `Kernels` holds the single-threaded inner loops: one panel of a product, one row of a norm, one
// block of keys. The operations (matmul.cpp, attention.cpp, experts.cpp, delta_net.cpp, ops.cpp) divide
// their work into such pieces, give the pieces to threads, and call the table of the instruction set that
// was chosen at run time (isas.cpp).
#pragma once

#include "delta_net.h"
#include "panels.h"

namespace headroom {

// Rows of activations, rounded to 8 bits with one scale per 32 columns.
struct QuantisedRows {
    int8_t* values;  // [rows, columns]
    float* scales;   // [rows, columns / 32]
    int32_t* sums;   // [rows, columns / 16]: sums of the rounded values
};

// 32 columns of a row of activations, rounded to 24 bits: each value is
// (65536 * digits[0] + 256 * digits[1] + digits[2]) * scale.
struct alignas(64) DigitCell {
    int8_t digits[3][CELL];
    float scale, total;       // `total`: the sum of the 32 values
    int32_t high[2], low[2];  // of 16 columns: sums of 256 * digits[0] + digits[1], and of digits[2]
};
static_assert(sizeof(DigitCell) == 128);

struct FloatRows {
    const float* values;  // [rows, columns]
    const float* sums;    // [rows, columns / 16]: sums of the values
};

// 256 columns of a row of activations, rounded to 16 bits, in the order that wide.inl multiplies with
// GPU tiles. A 16-bit number is split into two 8-bit digits: value = (256 * high + low) * scale.
struct alignas(64) WideRecord {
    int8_t high[4][2][64], low[4][2][64];  // [pair of blocks][half of a block][t][block][h][4 columns]
    float sums[2][16];                     // [half][block][h]: sums of the rounded values of a half block
    float scale;
};
HEADROOM_INLINE constexpr int64_t wide_records(int64_t columns) { return (columns + 255) / 256; }
using Widen = void (*)(const float* x, int64_t columns, WideRecord* out);
using TileWide = void (*)(const Matrix& w, int64_t tile, const WideRecord* const* x, int64_t rows,
                          float* out);

// One layer's cached keys or values. A slot holds one token; each head of a slot takes `head_bytes`.
struct KvPlane {
    uint8_t* data;
    Kind kind;
    int64_t slot_bytes, head_bytes;
};

constexpr int64_t KEY_BLOCK = 256;  // keys per partial softmax; the partial results are merged afterwards
constexpr int64_t KEY_TILE = 32;    // keys that are unpacked to floats at a time

// The running softmax of one query: the largest score so far, and the sum of exp(score - peak).
struct Partial {
    float peak, total;
};

// Queries that read the same keys: `count` queries for each of `heads` neighbouring KV heads.
struct AttentionJob {
    const float* queries;        // [heads * count, padded dim], scaled, zeros beyond `dim`
    const int64_t* first;        // per query: the first key that it sees
    const int64_t* last;         // per query: one past the last key that it sees
    const uint8_t* const* tree;  // per query: byte i is 1 if it sees key `start + i`; null: it sees all
    const int64_t* shallowest;   // per query: tree keys of smaller depth are outside its window
    int64_t start;               // first key of the tree: the number of tokens cached before this step
    int count, dim, head, heads;
    KvPlane keys, values;
    const int64_t* pages;
    int page_size;
};

struct Kernels {
    const char* name;
    void (*quantise)(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums);
    void (*split)(const float* x, int64_t columns, DigitCell* out);  // rounds a row to 24 bits
    void (*sum_columns)(const float* x, int64_t columns, float* sums);
    float (*read_bytes)(const uint8_t* data, int64_t bytes);
    // The product of all rows with one panel of 16 weight rows: out [rows, 16].
    void (*panel_int8)(const Matrix& w, int64_t panel, QuantisedRows x, int64_t rows, float* out);
    void (*panel_int24)(const Matrix& w, int64_t panel, const DigitCell* x, int64_t rows, float* out);
    void (*panel_float)(const Matrix& w, int64_t panel, FloatRows x, int64_t rows, float* out);
    // Converts 16 weight rows from the GPU's tile layout (gpu_tiles.inl) into a panel.
    void (*tile_to_panel)(Kind kind, int64_t columns, const uint8_t* tile, uint8_t* panel);
    // `widen` rounds a row to WideRecords; `tile_wide` multiplies such rows with one GPU tile: out [rows,
    // 16]. Both are null on instruction sets without VNNI, which convert tiles to panels instead.
    Widen widen;
    TileWide tile_wide;
    void (*rms_norm)(const float* x, const float* weight, int64_t columns, float eps, float* out);
    void (*silu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*gelu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*rope)(const float* x, int64_t heads, int64_t dim, const float* cos, const float* sin,
                 int64_t half, float* out);
    void (*store_head)(Kind kind, const float* x, int64_t dim, uint8_t* out);
    // Attends to keys [from, to), at most KEY_BLOCK of them. Writes one Partial per query and the weighted
    // sums of the values [queries, padded dim].
    void (*attend)(const AttentionJob& job, int64_t from, int64_t to, Partial* partials,
                   float* sums, float* scratch);
    // Convolves `taps` rows of inputs into one row of channels, applies silu, and scales each query and
    // key head to unit length.
    void (*convolve)(const DeltaShape& shape, const float* conv, const float* const* inputs,
                     float* out);
    void (*delta_rows)(const DeltaJob& job, float* block);
    void (*gated_norm)(const float* x, const float* gate, const float* weight, int64_t columns,
                       float eps, float* out);
};

HEADROOM_INLINE int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }
// Scratch of `attend` in floats, for heads of `width` values (a padded dim).
constexpr int64_t attend_scratch(int64_t queries, int64_t width) {
    return queries * KEY_BLOCK + (KEY_TILE + 1) * width;
}

extern const Kernels PORTABLE_KERNELS;
#if defined(HEADROOM_X86)
extern const Kernels AVX2_KERNELS;
extern const Kernels AVX512_KERNELS;
#endif
#if defined(HEADROOM_AVXVNNI)
extern const Kernels AVXVNNI_KERNELS;
#endif
#if defined(HEADROOM_AMX)
const Kernels& amx_kernels();  // AVX512_KERNELS with another panel_int8
#endif

}  // namespace headroom
