// Preparation of activations for products of few rows: norm or gated activation, then f16 pieces
// (halves.cuh).
#include "halves.cuh"
#include "ring.cuh"
#include "common.cuh"

#ifndef GELU  // gate_rows: 1 for GELU, 0 for silu
#define GELU 0
#endif
#ifndef LANES  // lanes of a piece: four per row
#define LANES 32
#endif
#define RECORD_WARPS 4  // warps of a block of gate_rows and norm_heads; each writes one record
#define HEAD 128  // columns of a head of norm_heads

// Reads a lane's eight columns of a row (halves.cuh); columns after the end are zeros.
__device__ __forceinline__ void read_eight(const float* row, int column, int columns, float* v) {
    if (columns % 4 == 0) return read_fours(row, column, columns, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int from = column + i / 4 * UPPER + i % 4;
        v[i] = from < columns ? row[from] : 0.0f;
    }
}
__device__ __forceinline__ void write_eight(const float* v, float* row, int column, int columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* four = v + 4 * half;
        const int to = column + half * UPPER;
        if (columns % 4 == 0) {
            if (to < columns) *reinterpret_cast<float4*>(row + to) = make_float4(four[0], four[1], four[2], four[3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (to + i < columns) row[to + i] = four[i];
    }
}
__device__ __forceinline__ void write_record(const float* v, u8* pieces, int record, int row, int rows) {
    const size_t piece = static_cast<size_t>(record) * ((rows + 7) / 8) + row / 8;
    write_halves<LANES>(v, pieces + piece * Piece<LANES>::bytes, row % 8);
}
__device__ __forceinline__ float squares_of(const float* v) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    return sum;
}

// Writes rows as pieces: x itself, or with `weight` the norm weight * x / rms(x), which is also written to
// `normed` if given. With `weight` one block handles a row; else blockIdx.y is a share of its records.
extern "C" __global__ void __launch_bounds__(1024)
norm_rows(const float* x, const float* weight, float eps, float* normed, u8* pieces, int columns, int records) {
    __shared__ float partial[32];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float* from = x + static_cast<size_t>(row) * columns;
    const int own = blockIdx.y * warps + warp;  // the warp's first record; mostly it is the only one
    float kept[8], by[8], factor = 1.0f;
    let_next_begin();
    if (weight != nullptr) read_eight(weight, own * 256 + lane_column(), columns, by);
    wait_for_last();
    read_eight(from, own * 256 + lane_column(), columns, kept);
    if (weight != nullptr) {
        float squares = squares_of(kept), v[8];
        for (int record = own + warps; record < records; record += warps) {
            read_eight(from, record * 256 + lane_column(), columns, v);
            squares += squares_of(v);
        }
#pragma unroll
        for (int o = 16; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);
        if (lane == 0) partial[warp] = squares;
        __syncthreads();
        float total = lane < warps ? partial[lane] : 0.0f;
#pragma unroll
        for (int o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
        factor = rsqrtf(total / columns + eps);
    }
    for (int record = own; record < records; record += gridDim.y * warps) {
        const int column = record * 256 + lane_column();
        if (record != own) {
            read_eight(from, column, columns, kept);
            if (weight != nullptr) read_eight(weight, column, columns, by);
        }
        if (weight != nullptr)
#pragma unroll
            for (int i = 0; i < 8; ++i) kept[i] *= factor * by[i];
        if (normed != nullptr) write_eight(kept, normed + static_cast<size_t>(row) * columns, column, columns);
        write_record(kept, pieces, record, row, gridDim.x);
    }
}

// Writes act(gate) * up as pieces. blockIdx.x: the row; blockIdx.y: the share of its records.
extern "C" __global__ void __launch_bounds__(RECORD_WARPS * 32)
gate_rows(const float* gate, const float* up, u8* pieces, int columns, int records) {
    const int row = blockIdx.x, record = blockIdx.y * RECORD_WARPS + threadIdx.x / 32;
    let_next_begin();
    wait_for_last();
    if (record >= records) return;
    const size_t first = static_cast<size_t>(row) * columns;
    float v[8], by[8];
    read_eight(gate + first, record * 256 + lane_column(), columns, v);
    read_eight(up + first, record * 256 + lane_column(), columns, by);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = by[i] * (GELU ? gelu(v[i]) : silu(v[i]));
    write_record(v, pieces, record, row, gridDim.x);
}

// Writes weight * x / rms(x) * silu(gate) as pieces, normed over each head of HEAD columns; a record has
// two heads.
extern "C" __global__ void __launch_bounds__(RECORD_WARPS * 32)
norm_heads(const float* x, const float* gate, const float* weight, float eps, u8* pieces, int columns, int records) {
    const int row = blockIdx.x, record = blockIdx.y * RECORD_WARPS + threadIdx.x / 32;
    let_next_begin();
    wait_for_last();
    if (record >= records) return;
    const size_t first = static_cast<size_t>(row) * columns;
    float v[8], by[8], own[8];
    read_eight(x + first, record * 256 + lane_column(), columns, v);
    read_eight(gate + first, record * 256 + lane_column(), columns, by);
    read_eight(weight, lane_column() % HEAD, HEAD, own);
    float squares = squares_of(v);
#pragma unroll
    for (int o = 8; o; o /= 2) squares += __shfl_xor_sync(~0u, squares, o);  // over half a warp: one head
    const float factor = rsqrtf(squares / HEAD + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = own[i] * (v[i] * factor) * silu(by[i]);
    write_record(v, pieces, record, row, gridDim.x);
}
