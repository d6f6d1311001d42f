// Unpacking of a weight in tiles to plain bf16 rows (f16 with OUT_F16), for products of many rows;
// embedding rows.
#include "unpack.cuh"

// Unpacks a weight to `out [rows, columns]`. blockIdx.x: the tile; blockIdx.y: a share of its records. Each
// warp takes every (gridDim.y * WARPS)-th record.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
dequantise(const u8* weight, Narrow* out, int rows, int columns, int records) {
    const u8* tile = weight + static_cast<size_t>(blockIdx.x) * records * Record<KIND>::bytes;
    for (int r = blockIdx.y * WARPS + threadIdx.x / 32; r < records; r += gridDim.y * WARPS)
        write_record<KIND>(tile + static_cast<size_t>(r) * Record<KIND>::bytes, out, blockIdx.x, r, rows, columns);
}

// out [rows, columns] = by * the rows `ids` of a table in tiles. blockIdx.x: the row; blockIdx.y: WARPS
// records. In a warp only the four lanes that hold the wanted row have work.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
embed_tiles(const u8* table, const long long* ids, float* out, int columns, int records, float by) {
    const int r = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const long long id = ids[blockIdx.x];
    if (r >= records || lane / 4 != id % 8) return;
    const u8* record = table + (static_cast<size_t>(id / 16) * records + r) * Record<KIND>::bytes;
    float* row = out + static_cast<size_t>(blockIdx.x) * columns;
    unpack_record<KIND>(record, lane, [&](int b, int i, const float* four) {
        const int column = r * 256 + b * 32 + i / 2 * 16 + 4 * t;
        if (i % 2 != id % 16 / 8 || column >= columns) return;
#pragma unroll
        for (int j = 0; j < 4; ++j) row[column + j] = four[j] * by;
    });
}
