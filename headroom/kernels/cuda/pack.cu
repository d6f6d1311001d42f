// Packs rows as a GGUF file has them into tiles (tiles.cuh): many rows, or many matrices, in one launch.
#include "tiles.cuh"

// The layout of GGUF blocks: byte offsets within a block.
constexpr int BLOCK_BYTES = KIND == Q4_0 || KIND == IQ4_NL ? 18 : KIND == Q4_1 ? 20 : KIND == Q5_0 ? 22
    : KIND == Q5_1 ? 24 : KIND == Q8_0 ? 34 : KIND == MXFP4 ? 17 : KIND == Q4_K ? 144 : KIND == Q5_K ? 176
    : KIND == Q6_K ? 210 : 2;
constexpr int BLOCKS = by_record(KIND) ? 1 : is_plain(KIND) ? 256 : 8;  // blocks of a record (256 columns)
constexpr int SCALE_BYTES = KIND == MXFP4 ? 1 : 2;
constexpr int SCALES_AT = KIND == Q6_K ? 208 : 0;
constexpr int HIGH_AT = KIND == Q5_K ? 16 : KIND == Q6_K ? 128 : has_min(KIND) ? 4 : 2;
constexpr int QUANTS_AT = KIND == Q6_K ? 0 : KIND == Q4_K ? 16 : KIND == Q5_K ? 48
    : one_high_bit(KIND) ? HIGH_AT + 4 : KIND == MXFP4 ? 1 : has_min(KIND) ? 4 : 2;

// Reads four bytes of a block, at a multiple of four from its quants or high bits, in the widest words that
// the size of a block allows.
__device__ __forceinline__ u32 read4(const u8* p) {
    if constexpr (BLOCK_BYTES % 4 == 0) return *reinterpret_cast<const u32*>(p);
    const u16* halves = reinterpret_cast<const u16*>(p);
    if constexpr (BLOCK_BYTES % 2 == 0) return halves[0] | static_cast<u32>(halves[1]) << 16;
    return p[0] | p[1] << 8 | p[2] << 16 | static_cast<u32>(p[3]) << 24;
}

// The 256 columns of a row that belong to a record; beyond the matrix all values are zero.
struct RowPart {
    const u8* at;  // null: the row is beyond the last
    int blocks;    // blocks of the file from `at` to the end of the row

    // Columns 32 b + c .. 32 b + c + 3, one byte each, with all their bits.
    __device__ __forceinline__ u32 quants(int b, int c) const {
        if (at == nullptr || (by_record(KIND) ? 0 : b) >= blocks) return 0;
        const u8* block = at + (by_record(KIND) ? 0 : b * BLOCK_BYTES);
        if constexpr (KIND == Q8_0) return read4(block + QUANTS_AT + c);
        if constexpr (KIND == Q6_K) {  // halves of 128 columns: low nibbles of 64 columns, then high nibbles
            const u32 low = read4(block + b / 4 * 64 + b % 2 * 32 + c) >> (b / 2 % 2 * 4);
            const u32 high = read4(block + HIGH_AT + b / 4 * 32 + c) >> (b % 4 * 2);
            return (low & 0x0F0F0F0Fu) | (high & 0x03030303u) << 4;
        }
        if constexpr (by_record(KIND)) {  // low nibbles are 32 columns, high nibbles the next 32
            u32 four = read4(block + QUANTS_AT + b / 2 * 32 + c) >> (b % 2 * 4) & 0x0F0F0F0Fu;
            if constexpr (KIND == Q5_K) four |= (read4(block + HIGH_AT + c) >> b & 0x01010101u) << 4;
            return four;
        }
        u32 four = read4(block + QUANTS_AT + c % 16) >> (c / 16 * 4) & 0x0F0F0F0Fu;
        if constexpr (one_high_bit(KIND)) {
            const u32 bits = read4(block + HIGH_AT) >> c;  // one bit per column
#pragma unroll
            for (int i = 0; i < 4; ++i) four |= (bits >> i & 1) << (8 * i + 4);
        }
        return four;
    }

    // Columns c .. c + 3 of a plain type; the length of a row is a multiple of four.
    __device__ __forceinline__ uint2 four(int c) const {
        return at == nullptr || c >= blocks ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(at + 2 * c);
    }

    // Byte i of block b.
    __device__ __forceinline__ u32 byte(int b, int i) const {
        return at == nullptr || b >= blocks ? 0 : at[b * BLOCK_BYTES + i];
    }

    // The 6-bit scale and min of group b (Q4_K, Q5_K).
    __device__ __forceinline__ u32 group_scale(int b) const {
        return b < 4 ? byte(0, 4 + b) & 63 : (byte(0, 8 + b) & 15) | byte(0, b) >> 6 << 4;
    }
    __device__ __forceinline__ u32 group_min(int b) const {
        return b < 4 ? byte(0, 8 + b) & 63 : byte(0, 8 + b) >> 4 | byte(0, 4 + b) >> 6 << 4;
    }
};

// Writes the words of one lane of a plain record; rows[h] is row g + 8 h.
__device__ __forceinline__ void pack_plain(const RowPart* rows, u8* record, int lane) {
    uint4* words = reinterpret_cast<uint4*>(record) + lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const uint2 first = rows[0].four(16 * i + 4 * (lane % 4)), second = rows[1].four(16 * i + 4 * (lane % 4));
        words[32 * i] = make_uint4(__byte_perm(first.x, first.y, 0x5410), __byte_perm(second.x, second.y, 0x5410),
                                   __byte_perm(first.x, first.y, 0x7632), __byte_perm(second.x, second.y, 0x7632));
    }
}

// Writes the quants and high bits of one lane of a packed record.
__device__ __forceinline__ void pack_quants(const RowPart* rows, u8* record, int lane) {
    const int t = lane % 4;
    u32 high[8] = {};
    uint4* words = reinterpret_cast<uint4*>(record) + lane;
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        u32 four[2][2];  // [h][half of the block]
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i / 2][i % 2] = rows[i / 2].quants(b, i % 2 * 16 + 4 * t);
        if constexpr (KIND == Q8_0) {
            words[32 * b] = make_uint4(four[0][0], four[0][1], four[1][0], four[1][1]);
            continue;
        }
        u32* pair = reinterpret_cast<u32*>(words + 32 * (b / 2)) + b % 2 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) pair[h] = (four[h][0] & 0x0F0F0F0Fu) | (four[h][1] & 0x0F0F0F0Fu) << 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 bits = four[i / 2][i % 2] >> 4;
            if constexpr (one_high_bit(KIND)) high[b / 2] |= (bits & 0x01010101u) << (b % 2 * 4 + i);
            if constexpr (KIND == Q6_K) high[b] |= (bits & 0x03030303u) << 2 * i;
        }
    }
    constexpr int HIGH_WORDS = one_high_bit(KIND) ? 4 : KIND == Q6_K ? 8 : 0;
    u32* plane = reinterpret_cast<u32*>(record + Record<KIND>::high) + lane * HIGH_WORDS;
#pragma unroll
    for (int i = 0; i < HIGH_WORDS; ++i) plane[i] = high[i];
}

// Writes the scales and mins of rows g and g + 8; the four lanes t divide the blocks.
__device__ __forceinline__ void pack_scales(const RowPart* rows, u8* record, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int h = 0; h < 2; ++h) {
        const RowPart& row = rows[h];
        for (int b = t; b < BLOCKS; b += 4) {
            for (int i = 0; i < SCALE_BYTES; ++i) {
                const int at = ((g * BLOCKS + b) * 2 + h) * SCALE_BYTES + i;
                record[Record<KIND>::scales + at] = row.byte(b, SCALES_AT + i);
                if constexpr (has_min(KIND)) record[Record<KIND>::mins + at] = row.byte(b, 2 + i);
            }
        }
        if constexpr (has_groups(KIND)) {
            u8* groups = record + Record<KIND>::groups + 16 * g;
            for (int b = 2 * t; b < 2 * t + 2; ++b)
                groups[2 * b + h] = row.group_scale(b) | (row.group_min(b) & 3) << 6;
            record[Record<KIND>::lows + 8 * g + 2 * t + h] =
                row.group_min(2 * t) >> 2 | row.group_min(2 * t + 1) >> 2 << 4;
        }
        if constexpr (KIND == Q6_K)
            for (int i = t; i < 16; i += 4)
                record[Record<KIND>::groups + 32 * g + 2 * i + h] = row.byte(0, 192 + i);
    }
}

// Packs tile blockIdx.x of matrix blockIdx.z; each warp packs every (gridDim.y * WARPS)-th record.
// source [matrices * rows][row bytes]; order [rows], if given (for a single matrix): which row of `source`
// becomes row i; blocks: blocks of a row.
__device__ __forceinline__ void pack_tile(const u8* source, const int* order, u8* tile, int rows, int blocks, int records) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const size_t row_bytes = static_cast<size_t>(blocks) * BLOCK_BYTES;
    const u8* starts[2];
    for (int h = 0; h < 2; ++h) {
        const int row = blockIdx.x * 16 + g + 8 * h;
        const size_t from = row >= rows ? 0 : order ? order[row] : static_cast<size_t>(blockIdx.z) * rows + row;
        starts[h] = row >= rows ? nullptr : source + from * row_bytes;
    }
    for (int r = blockIdx.y * WARPS + warp; r < records; r += gridDim.y * WARPS) {
        RowPart parts[2];
        for (int h = 0; h < 2; ++h) {
            parts[h].at = starts[h] ? starts[h] + static_cast<size_t>(r) * BLOCKS * BLOCK_BYTES : nullptr;
            parts[h].blocks = blocks - r * BLOCKS;
        }
        u8* record = tile + static_cast<size_t>(r) * Record<KIND>::bytes;
        if constexpr (is_plain(KIND)) {
            pack_plain(parts, record, lane);
        } else {
            pack_quants(parts, record, lane);
            pack_scales(parts, record, lane);
        }
    }
}

// Packs matrices whose tiles follow one another in memory.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
pack(const u8* source, const int* order, u8* tiles, int rows, int blocks, int records) {
    u8* tile = tiles + (static_cast<size_t>(blockIdx.z) * gridDim.x + blockIdx.x) * records * Record<KIND>::bytes;
    pack_tile(source, order, tile, rows, blocks, records);
}

// Packs each matrix to its own address, from tile `first_tile` on. The addresses are `apart` entries from
// each other; a matrix with address 0 is skipped. The addresses may be in host memory.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
pack_at(const u8* source, const long long* addresses, int apart, int first_tile, int rows, int blocks, int records) {
    u8* matrix = reinterpret_cast<u8*>(addresses[static_cast<size_t>(blockIdx.z) * apart]);
    if (matrix == nullptr) return;
    const size_t tile = first_tile + blockIdx.x;
    pack_tile(source, nullptr, matrix + tile * records * Record<KIND>::bytes, rows, blocks, records);
}
