// Packing of GGUF blocks into panels, and unpacking of single rows; the layout is in panels.h.
#include "panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headroom {

const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
const int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    uint32_t exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
    uint32_t word;
    if (exponent == 31) {
        word = sign | 0x7F800000 | mantissa << 13;
    } else if (exponent != 0) {
        word = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        const float small = std::ldexp(static_cast<float>(mantissa), -24);
        return sign ? -small : small;
    }
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

uint16_t float_to_half(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000);
    const uint32_t size = word & 0x7FFFFFFF;
    if (size > 0x7F800000) return sign | 0x7E00;
    if (size >= 0x477FF000) return sign | 0x7C00;  // rounds to infinity
    if (size < 0x38800000) {                       // below the normal range
        const float scaled = std::fabs(value) * 16777216.0f;  // units of the smallest half
        return sign | static_cast<uint16_t>(std::nearbyint(scaled));
    }
    const uint32_t rounded = size + 0xFFF + (size >> 13 & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

size_t panel_bytes(Kind kind, int64_t rows, int64_t columns) {
    return panel_size(kind, columns) * ((rows + PANEL_ROWS - 1) / PANEL_ROWS);
}

namespace {

// Reads the 6-bit scale and min of group g (0..7) from the 12 bytes `s` of a Q4_K or Q5_K block.
void read_scale_min(const uint8_t* s, int g, int& scale, int& min) {
    if (g < 4) {
        scale = s[g] & 63;
        min = s[g + 4] & 63;
    } else {
        scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        min = s[g + 4] >> 4 | (s[g] >> 6) << 4;
    }
}

struct Block {  // one GGUF block, unpacked
    uint8_t quants[256];  // one value per byte, with the offset that panels store (Q8_0: + 128)
    uint8_t scales[16], mins[8];
    uint16_t d, m;
};

void read_nibbles(const uint8_t* qs, int count, uint8_t* out) {  // low nibbles first, then high ones
    for (int i = 0; i < count; ++i) {
        out[i] = qs[i] & 15;
        out[count + i] = qs[i] >> 4;
    }
}

uint16_t read16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

void add_high_bits(const uint8_t* qh, Block& b) {
    const uint32_t bits = qh[0] | qh[1] << 8 | qh[2] << 16 | static_cast<uint32_t>(qh[3]) << 24;
    for (int i = 0; i < 32; ++i) b.quants[i] |= (bits >> i & 1) << 4;
}

void read_k_block(Kind kind, const uint8_t* p, Block& b) {
    b.d = read16(p);
    b.m = read16(p + 2);
    for (int g = 0; g < 8; ++g) {
        int scale, min;
        read_scale_min(p + 4, g, scale, min);
        b.scales[g] = static_cast<uint8_t>(scale);
        b.mins[g] = static_cast<uint8_t>(min);
    }
    const uint8_t* qs = p + (kind == Q4_K ? 16 : 48);
    for (int c = 0; c < 4; ++c) read_nibbles(qs + 32 * c, 32, b.quants + 64 * c);
    if (kind == Q5_K)
        for (int g = 0; g < 8; ++g)
            for (int l = 0; l < 32; ++l) b.quants[32 * g + l] |= (p[16 + l] >> g & 1) << 4;
}

void read_q6_k(const uint8_t* p, Block& b) {
    for (int n = 0; n < 2; ++n)
        for (int l = 0; l < 32; ++l) {
            const uint8_t low = p[64 * n + l], high = p[64 * n + 32 + l], h = p[128 + 32 * n + l];
            uint8_t* out = b.quants + 128 * n + l;
            out[0] = (low & 15) | (h & 3) << 4;
            out[32] = (high & 15) | (h >> 2 & 3) << 4;
            out[64] = low >> 4 | (h >> 4 & 3) << 4;
            out[96] = high >> 4 | (h >> 6) << 4;
        }
    std::memcpy(b.scales, p + 192, 16);
    b.d = read16(p + 208);
}

void read_block(Kind kind, const uint8_t* p, Block& b) {
    switch (kind) {
        case Q4_0: case IQ4_NL:
            b.d = read16(p);
            read_nibbles(p + 2, 16, b.quants);
            break;
        case Q4_1:
            b.d = read16(p);
            b.m = read16(p + 2);
            read_nibbles(p + 4, 16, b.quants);
            break;
        case Q5_0:
            b.d = read16(p);
            read_nibbles(p + 6, 16, b.quants);
            add_high_bits(p + 2, b);
            break;
        case Q5_1:
            b.d = read16(p);
            b.m = read16(p + 2);
            read_nibbles(p + 8, 16, b.quants);
            add_high_bits(p + 4, b);
            break;
        case Q8_0:
            b.d = read16(p);
            for (int i = 0; i < 32; ++i) b.quants[i] = p[2 + i] ^ 0x80;
            break;
        case MXFP4:
            b.d = p[0];
            read_nibbles(p + 1, 16, b.quants);
            break;
        case Q4_K: case Q5_K: read_k_block(kind, p, b); break;
        case Q6_K: read_q6_k(p, b); break;
        default: break;
    }
}

void put16(uint8_t* p, uint16_t value) { std::memcpy(p, &value, 2); }

// Writes one row's 32 values of a cell into the quants plane, and bits above the fourth into `high`.
void put_cell(Kind kind, const uint8_t* q, int row, uint8_t* quants, uint8_t* high) {
    for (int k = 0; k < CELL; ++k) {
        const int step = k / 4, lane = 4 * row + k % 4;
        if (kind == Q8_0) {
            quants[64 * step + lane] = q[k];
            continue;
        }
        quants[64 * (step / 2) + lane] |= (q[k] & 15) << (step % 2 * 4);
        if (kind == Q6_K) high[64 * (step / 4) + lane] |= (q[k] >> 4) << (step % 4 * 2);
        else if (q[k] >> 4) high[8 * step + lane / 8] |= 1 << lane % 8;
    }
}

// Writes one row's scales and mins of a Q4_K or Q5_K block into the groups plane: for each of the eight
// groups sixteen bytes (one per row) of 6 bits scale and the low 2 bits of the min; then for each pair of
// groups sixteen bytes with the high 4 bits of both mins.
void put_k_groups(const Block& b, int row, uint8_t* groups) {
    for (int g = 0; g < 8; ++g) {
        groups[16 * g + row] = b.scales[g] | (b.mins[g] & 3) << 6;
        groups[128 + 16 * (g / 2) + row] |= (b.mins[g] >> 2) << (g % 2 * 4);
    }
}

void pack_plain(Kind kind, int64_t columns, const uint8_t* file, int row, uint8_t* panel) {
    const int size = kind_info(kind).block_bytes;
    for (int64_t k = 0; k < columns; ++k)
        std::memcpy(panel + (k * PANEL_ROWS + row) * size, file + k * size, size);
}

// Packs up to 256 columns of one row into row `row` of a record's planes.
void pack_record(Kind kind, int64_t cells, const uint8_t* file, int row, uint8_t* record) {
    const KindInfo info = kind_info(kind);
    const RecordShape shape = RecordShape::of(kind, cells);
    const int64_t block_cells = info.block / CELL;
    for (int64_t block = 0; block < cells / block_cells; ++block) {
        Block b{};
        read_block(kind, file + block * info.block_bytes, b);
        for (int64_t c = 0; c < block_cells; ++c) {
            const int64_t cell = block * block_cells + c;
            put_cell(kind, b.quants + CELL * c, row, record + cell * info.quant_bytes,
                     record + shape.high + cell * info.high_bytes);
        }
        uint8_t* groups = record + shape.groups + block * info.group_bytes;
        if (kind == Q6_K)
            for (int g = 0; g < 16; ++g) groups[16 * g + row] = b.scales[g];
        else if (info.group_bytes) put_k_groups(b, row, groups);
        uint8_t* scales = record + shape.scales + block * info.scale_bytes;
        if (kind == MXFP4) scales[row] = static_cast<uint8_t>(b.d);
        else put16(scales + 2 * row, b.d);
        if (info.min_bytes) put16(record + shape.mins + block * info.min_bytes + 2 * row, b.m);
    }
}

void pack_row(Kind kind, int64_t columns, const uint8_t* file, int row, uint8_t* panel) {
    if (is_plain(kind)) return pack_plain(kind, columns, file, row, panel);
    const KindInfo info = kind_info(kind);
    for (int64_t cell = 0; cell < columns / CELL; cell += RECORD) {
        const int64_t cells = std::min<int64_t>(RECORD, columns / CELL - cell);
        pack_record(kind, cells, file, row, panel);
        file += cells * CELL / info.block * info.block_bytes;
        panel += RecordShape::of(kind, cells).bytes;
    }
}

float plain_value(Kind kind, const uint8_t* p) {
    float value;
    if (kind == F32) {
        std::memcpy(&value, p, 4);
        return value;
    }
    if (kind == F16) return half_to_float(read16(p));
    const uint32_t word = static_cast<uint32_t>(read16(p)) << 16;
    std::memcpy(&value, &word, 4);
    return value;
}

// The quantised value of column k of a record, as a signed whole number without scale and min.
int stored_value(Kind kind, const uint8_t* record, const RecordShape& shape, int64_t k, int row) {
    const KindInfo info = kind_info(kind);
    const int64_t cell = k / CELL;
    const int step = static_cast<int>(k % CELL) / 4, lane = 4 * row + static_cast<int>(k % 4);
    const uint8_t* quants = record + cell * info.quant_bytes;
    if (kind == Q8_0) return quants[64 * step + lane] - 128;
    int q = quants[64 * (step / 2) + lane] >> (step % 2 * 4) & 15;
    const uint8_t* high = record + shape.high + cell * info.high_bytes;
    if (kind == Q6_K) return (q | (high[64 * (step / 4) + lane] >> (step % 4 * 2) & 3) << 4) - 32;
    if (info.high_bytes) q |= (high[8 * step + lane / 8] >> lane % 8 & 1) << 4;
    switch (kind) {
        case Q4_0: return q - 8;
        case Q5_0: return q - 16;
        case IQ4_NL: return IQ4_VALUES[q];
        case MXFP4: return MXFP4_VALUES[q];
        default: return q;
    }
}

float quantised_value(Kind kind, const uint8_t* record, const RecordShape& shape, int64_t k,
                      int row) {
    const KindInfo info = kind_info(kind);
    const int64_t block = k / info.block;
    const float q = static_cast<float>(stored_value(kind, record, shape, k, row));
    const uint8_t* scales = record + shape.scales + block * info.scale_bytes;
    if (kind == MXFP4) return q * std::ldexp(1.0f, scales[row] - 128);
    const float d = half_to_float(read16(scales + 2 * row));
    const uint8_t* groups = record + shape.groups + block * info.group_bytes;
    if (kind == Q6_K) {
        const int g = static_cast<int>(k % 256) / 16;
        return d * static_cast<float>(static_cast<int8_t>(groups[16 * g + row])) * q;
    }
    if (!info.min_bytes) return d * q;
    const float m = half_to_float(read16(record + shape.mins + block * info.min_bytes + 2 * row));
    if (!info.group_bytes) return d * q + m;
    const int g = static_cast<int>(k % 256) / 32;
    const uint8_t first = groups[16 * g + row];
    const int min = first >> 6 | (groups[128 + 16 * (g / 2) + row] >> (g % 2 * 4) & 15) << 2;
    return d * static_cast<float>(first & 63) * q - m * static_cast<float>(min);
}

}  // namespace

void pack_panels(Kind kind, int64_t rows, int64_t columns, const uint8_t* file, uint8_t* panels,
                 int64_t first, int64_t last) {
    const KindInfo info = kind_info(kind);
    const size_t bytes = panel_size(kind, columns);
    const size_t row_bytes = static_cast<size_t>(columns / info.block) * info.block_bytes;
    for (int64_t panel = first; panel < last; ++panel) {
        uint8_t* out = panels + panel * bytes;
        std::memset(out, 0, bytes);
        for (int row = 0; row < PANEL_ROWS && panel * PANEL_ROWS + row < rows; ++row)
            pack_row(kind, columns, file + (panel * PANEL_ROWS + row) * row_bytes, row, out);
    }
}

void unpack_row(const Matrix& matrix, int64_t row, float* out) {
    const Kind kind = matrix.kind;
    const int lane = static_cast<int>(row % PANEL_ROWS);
    const uint8_t* at = matrix.data + row / PANEL_ROWS * panel_size(kind, matrix.columns);
    if (is_plain(kind)) {
        const int size = kind_info(kind).block_bytes;
        for (int64_t k = 0; k < matrix.columns; ++k)
            out[k] = plain_value(kind, at + (k * PANEL_ROWS + lane) * size);
        return;
    }
    for (int64_t first = 0; first < matrix.columns; first += RECORD * CELL) {
        const int64_t columns = std::min<int64_t>(RECORD * CELL, matrix.columns - first);
        const RecordShape shape = RecordShape::of(kind, columns / CELL);
        for (int64_t k = 0; k < columns; ++k)
            out[first + k] = quantised_value(kind, at, shape, k, lane);
        at += shape.bytes;
    }
}

}  // namespace headroom
