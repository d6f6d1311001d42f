// Unpacking of experts in tiles to plain bf16 rows (f16 with OUT_F16), for products of many rows.
// GATE, UP, DOWN: the types of an expert's matrices; WARPS: warps of a block.
#include "unpack.cuh"

// How many thread blocks a matrix takes: one record per warp.
__device__ __forceinline__ int blocks_of(int rows, int columns) {
    return (rows + 15) / 16 * (((columns + 255) / 256 + WARPS - 1) / WARPS);
}
template <int K> __device__ __forceinline__ size_t bytes_of(int rows, int columns) {
    return static_cast<size_t>((rows + 15) / 16) * ((columns + 255) / 256) * Record<K>::bytes;
}

// Unpacks the records of thread block number `block` of a matrix.
template <int K>
__device__ __forceinline__ void unpack_matrix(const u8* weight, Narrow* out, int block, int rows, int columns) {
    const int records = (columns + 255) / 256, shares = (records + WARPS - 1) / WARPS;
    const int tile = block / shares, r = block % shares * WARPS + threadIdx.x / 32;
    if (r >= records) return;
    write_record<K>(weight + (static_cast<size_t>(tile) * records + r) * Record<K>::bytes, out, tile, r, rows, columns);
}

// Unpacks those experts of a group that have picks.
//   blockIdx.y         the expert of the group, or which[blockIdx.y] if `which` is given
//   blockIdx.x + first the thread block: those of the gate matrix, then of up, then of down
//   staged             address of the experts one after another; null: their addresses are in `table [all
//                      experts][3]`, in which the group begins at `start`
//   ends [experts]     one past an expert's last pick, in sorted order
//   gates_and_ups      [experts, 2 * width, hidden]; downs [experts, hidden, width]
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
