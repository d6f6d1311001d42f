// Panels: the memory layout of packed weights that the CPU kernels read.
//
// Sixteen rows of a matrix form a panel. Inside a panel the values of the sixteen rows are interleaved:
// each 32-bit lane of a 512-bit vector holds four consecutive columns of one row, which is the operand
// of one dot-product instruction (VNNI).
//
//   vector t of a cell:  | row 0: columns 4t..4t+3 | row 1: 4t..4t+3 | ... | row 15: 4t..4t+3 |
//
//   panel  = record record ... record    a record has 256 columns; the last one may be shorter
//   record = planes, one after another   so that a product reads memory in one direction only
//   cell   = 32 columns of a record      the unit of one step of the kernels
//
// The planes of a record, in this order:
//
//   quants   per 32 columns: 4-bit 256 bytes, 8-bit 512 bytes (signed values stored + 128)
//   high     5-bit types: per 32 columns 8 masks of 64 bits; 6-bit: per 32 columns 128 bytes
//   groups   K types: the 6-bit scales and mins (192 bytes), or Q6_K's int8 scales (256 bytes)
//   scales   per block 16 x f16 (MXFP4: 16 x u8 exponents)
//   mins     per block 16 x f16, where the type has mins
//
// Plain types (f32, f16, bf16) have no records: a panel holds 16 values for each column. Packing rounds
// nothing: a panel holds exactly the numbers of the file, in as many bytes.
#pragma once

#include <cstddef>
#include <cstdint>

// The same headers are compiled once per instruction set. Shared functions must always be inlined:
// otherwise the linker would keep one copy of each, perhaps one that an older CPU cannot run.
#define HEADROOM_INLINE inline __attribute__((always_inline))

namespace headroom {

enum Kind : int {  // numbered as in GGUF
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, BF16 = 30, MXFP4 = 39,
};

constexpr int PANEL_ROWS = 16;
constexpr int CELL = 32;  // columns of a cell, the unit of one step of the kernels

struct KindInfo {
    int block;        // columns of one block
    int block_bytes;  // bytes of one block in a file
    int quant_bytes;  // per 32 columns of a panel
    int high_bytes;   // per 32 columns of a panel
    int group_bytes;  // per block of a panel
    int scale_bytes;  // per block of a panel
    int min_bytes;    // per block of a panel
};

HEADROOM_INLINE constexpr KindInfo kind_info(Kind kind) {
    switch (kind) {
        case F32: return {1, 4, 0, 0, 0, 0, 0};
        case F16: return {1, 2, 0, 0, 0, 0, 0};
        case BF16: return {1, 2, 0, 0, 0, 0, 0};
        case Q4_0: return {32, 18, 256, 0, 0, 32, 0};
        case Q4_1: return {32, 20, 256, 0, 0, 32, 32};
        case Q5_0: return {32, 22, 256, 64, 0, 32, 0};
        case Q5_1: return {32, 24, 256, 64, 0, 32, 32};
        case Q8_0: return {32, 34, 512, 0, 0, 32, 0};
        case IQ4_NL: return {32, 18, 256, 0, 0, 32, 0};
        case MXFP4: return {32, 17, 256, 0, 0, 16, 0};
        case Q4_K: return {256, 144, 256, 0, 192, 32, 32};
        case Q5_K: return {256, 176, 256, 64, 192, 32, 32};
        case Q6_K: return {256, 210, 256, 128, 256, 32, 0};
    }
    return {0, 0, 0, 0, 0, 0, 0};
}

HEADROOM_INLINE constexpr bool is_plain(Kind kind) { return kind == F32 || kind == F16 || kind == BF16; }

constexpr int RECORD = 8;  // cells of a full record

// The byte offset of each plane in a record of `cells` cells, and the size of the record.
struct RecordShape {
    size_t high, groups, scales, mins, bytes;

    HEADROOM_INLINE static constexpr RecordShape of(Kind kind, int64_t cells) {
        const KindInfo info = kind_info(kind);
        const size_t count = static_cast<size_t>(cells), blocks = count * CELL / info.block;
        const size_t high = count * info.quant_bytes;
        const size_t groups = high + count * info.high_bytes;
        const size_t scales = groups + blocks * info.group_bytes;
        const size_t mins = scales + blocks * info.scale_bytes;
        return {high, groups, scales, mins, mins + blocks * info.min_bytes};
    }
};

// Bytes of one panel, a multiple of 64.
HEADROOM_INLINE constexpr size_t panel_size(Kind kind, int64_t columns) {
    const KindInfo info = kind_info(kind);
    const size_t blocks = static_cast<size_t>(columns) / info.block;
    return (blocks * info.block_bytes * PANEL_ROWS + 63) / 64 * 64;
}

// Bytes of sixteen rows in the GPU's tile layout, where the last record is filled up to 256 columns.
HEADROOM_INLINE constexpr size_t tile_size(Kind kind, int64_t columns) {
    const KindInfo info = kind_info(kind);
    return static_cast<size_t>((columns + 255) / 256) * (256 / info.block * info.block_bytes) * PANEL_ROWS;
}

// A matrix in panels or in GPU tiles.
struct Matrix {
    const uint8_t* data;  // aligned to 64 bytes
    Kind kind;
    int64_t rows, columns;
    bool tiles = false;  // the data is in GPU tiles (gpu_tiles.inl), not in panels

    HEADROOM_INLINE int64_t panels() const { return (rows + PANEL_ROWS - 1) / PANEL_ROWS; }
};

// Bytes of a matrix in panels. The last panel is filled up with rows of zeros.
size_t panel_bytes(Kind kind, int64_t rows, int64_t columns);

// Packs the rows of a GGUF tensor into panels [first, last).
void pack_panels(Kind kind, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* panels,
                 int64_t first, int64_t last);

// Writes row `row` of a matrix as floats.
void unpack_row(const Matrix& matrix, int64_t row, float* out);

float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);

extern const int8_t IQ4_VALUES[16];    // the values of IQ4_NL's sixteen codes
extern const int8_t MXFP4_VALUES[16];  // the values of MXFP4's codes times two: whole numbers

}  // namespace headroom
