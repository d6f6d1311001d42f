// Experts in tiles as plain rows in bf16, or in f16 with OUT_F16, for the products of many rows.
// GATE, UP, DOWN: the types of an expert's matrices; WARPS: of a block.
#include "unpack.cuh"

// Blocks that a matrix takes, a record for each warp.
__device__ __forceinline__ int blocks_of(int rows, int columns) {
    return (rows + 15) / 16 * (((columns + 255) / 256 + WARPS - 1) / WARPS);
}
template <int K> __device__ __forceinline__ size_t bytes_of(int rows, int columns) {
    return static_cast<size_t>((rows + 15) / 16) * ((columns + 255) / 256) * Record<K>::bytes;
}

// What block `block` of a matrix does.
template <int K>
__device__ __forceinline__ void unpack_matrix(const u8* weight, Narrow* out, int block, int rows, int columns) {
    const int records = (columns + 255) / 256, shares = (records + WARPS - 1) / WARPS;
    const int tile = block / shares, r = block % shares * WARPS + threadIdx.x / 32;
    if (r >= records) return;
    write_record<K>(weight + (static_cast<size_t>(tile) * records + r) * Record<K>::bytes, out, tile, r, rows, columns);
}

// Those of some experts of a group that have picks. blockIdx.y: the expert, which[blockIdx.y] of the group where
// `which` is given. blockIdx.x + first: the block, of the gate, of up, then of down. With `staged` experts lie
// there one after another, else where `table [all experts][3]` says, in which the group begins at `start`.
// ends [experts]: the pick after an expert's last, in sorted order. gates_and_ups is [experts, 2 * width, hidden], downs [experts, hidden, width].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
unpack(const int* which, const u8* staged, const long long* table, const int* ends, Narrow* gates_and_ups,
       Narrow* downs, int width, int hidden, int start, int first) {
    const int expert = which ? which[blockIdx.y] : blockIdx.y;
    if (ends[expert] == (expert ? ends[expert - 1] : 0)) return;
    const int wide = blocks_of(width, hidden), block = blockIdx.x + first, part = min(block / wide, 2);
    const size_t gate = bytes_of<GATE>(width, hidden), up = bytes_of<UP>(width, hidden);
    const size_t before = part == 0 ? 0 : part == 1 ? gate : gate + up;
    const u8* weight = staged ? staged + blockIdx.y * (gate + up + bytes_of<DOWN>(hidden, width)) + before
                              : reinterpret_cast<const u8*>(table[(start + expert) * 3 + part]);
    const size_t size = static_cast<size_t>(width) * hidden;
    if (part == 2) {
        unpack_matrix<DOWN>(weight, downs + expert * size, block - 2 * wide, hidden, width);
        return;
    }
    Narrow* out = gates_and_ups + (2 * expert + part) * size;
    if (GATE == UP || part == 0) unpack_matrix<GATE>(weight, out, block - part * wide, width, hidden);
    else unpack_matrix<UP>(weight, out, block - part * wide, width, hidden);
}
