// How packed weights lie in memory for the CPU kernels.
//
// Sixteen rows of a matrix form a panel. Inside a panel the values of the sixteen rows lie side by
// side, four consecutive columns of one row in each 32-bit lane: what one dot-product instruction
// takes. A panel is a run of records of 256 columns (the last may be shorter), so that a product
// reads memory in one direction only. A record is several planes, one after another:
//
//   quants   per 32 columns: 4-bit 256 bytes, 8-bit 512 bytes (signed values stored + 128)
//   high     5-bit types: per 32 columns 8 masks of 64 bits; 6-bit: per 32 columns 128 bytes
//   groups   K types: the 6-bit scales and mins (192 bytes) or int8 scales (256)
//   scales   per block 16 x f16 (MXFP4: 16 x u8 exponents)
//   mins     per block 16 x f16, where the type has mins
//
// Plain types have no records: 16 values for each column. Nothing is rounded: a panel holds exactly
// the numbers of the file, in as many bytes.
#pragma once

#include <cstddef>
#include <cstdint>

// These files are compiled for several instruction sets; what they share must never become a
// function of its own, or the linker may keep the one that an older CPU cannot run.
#define HEADROOM_INLINE inline __attribute__((always_inline))

namespace headroom {

enum Kind : int {  // GGUF's numbers
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, BF16 = 30, MXFP4 = 39,
};

constexpr int PANEL_ROWS = 16;
constexpr int CELL = 32;  // columns that share a step of the kernels

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

constexpr int RECORD = 8;  // cells of a whole record

// Where the planes of one record begin.
struct RecordShape {
    size_t high, groups, scales, mins, bytes;  // offsets; all bytes of the record

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

// Bytes of the same sixteen rows where they lie as a GPU reads them: records are all whole.
HEADROOM_INLINE constexpr size_t tile_size(Kind kind, int64_t columns) {
    const KindInfo info = kind_info(kind);
    return static_cast<size_t>((columns + 255) / 256) * (256 / info.block * info.block_bytes) * PANEL_ROWS;
}

// A matrix in panels, or in tiles.
struct Matrix {
    const uint8_t* data;  // aligned to 64 bytes
    Kind kind;
    int64_t rows, columns;
    bool tiles = false;  // it lies as a GPU reads it, see gpu_tiles.inl

    HEADROOM_INLINE int64_t panels() const { return (rows + PANEL_ROWS - 1) / PANEL_ROWS; }
};

// Bytes of a matrix in panels; rows are filled up to whole panels with zeros.
size_t panel_bytes(Kind kind, int64_t rows, int64_t columns);

// Turns rows as a file has them into panels [first, last).
void pack_panels(Kind kind, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* panels,
                 int64_t first, int64_t last);

// Writes row `row` of a matrix as floats.
void unpack_row(const Matrix& matrix, int64_t row, float* out);

float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);

extern const int8_t IQ4_VALUES[16];    // of IQ4_NL
extern const int8_t MXFP4_VALUES[16];  // twice the value, so that all are whole numbers

}  // namespace headroom
