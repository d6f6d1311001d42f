// Norm, router logits and f16 pieces of few rows in one pass over the residual stream (decode path of
// routed experts). EACH: float4 values of a row that a thread holds (a row has up to 1024 * EACH values);
// ROWS: rows of a block, for which each weight is read once; LANES: lanes of a piece of activations.
#include "early.cuh"
#include "halves.cuh"
#include "common.cuh"

#define WARPS 8
#define KEPT ((EACH + 1) / 2)  // records that a warp holds of a row

__device__ __forceinline__ float squares_of(float4 v) {
    return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
}
// The sum of the warps' parts, in order.
__device__ __forceinline__ float sum_of_block(const float* parts) {
    float total = parts[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) total += parts[i];
    return total;
}

// Writes one row of x * norm / rms(x) as pieces, and as f32 to `normed` if given: a warp per 256 columns.
__device__ __forceinline__ void write_row(const float* x, const float* norm, float eps, float* normed, u8* pieces,
                                          int row, int rows, int hidden) {
    __shared__ float parts[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 kept[KEPT][2], by[KEPT][2];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = (i * WARPS + warp) * 256 + lane_column() + half * UPPER;
            by[i][half] =
                column < hidden ? *reinterpret_cast<const float4*>(norm + column) : make_float4(0, 0, 0, 0);
        }
    }
    wait_for_last();
    float squares = 0;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = (i * WARPS + warp) * 256 + lane_column() + half * UPPER;
            kept[i][half] = column < hidden
                                ? *reinterpret_cast<const float4*>(x + static_cast<size_t>(row) * hidden + column)
                                : make_float4(0, 0, 0, 0);
            squares += squares_of(kept[i][half]);
        }
    }
    squares = sum_of_warp(squares);
    if (lane == 0) parts[warp] = squares;
    __syncthreads();
    const float factor = rsqrtf(sum_of_block(parts) / hidden + eps);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const int record = i * WARPS + warp;
        if (record * 256 >= hidden) return;
        float v[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = record * 256 + lane_column() + half * UPPER;
            const float4 a = kept[i][half], b = by[i][half];
            v[4 * half] = a.x * (factor * b.x);
            v[4 * half + 1] = a.y * (factor * b.y);
            v[4 * half + 2] = a.z * (factor * b.z);
            v[4 * half + 3] = a.w * (factor * b.w);
            if (normed != nullptr && column < hidden)
                *reinterpret_cast<float4*>(normed + static_cast<size_t>(row) * hidden + column) =
                    make_float4(v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]);
        }
        const size_t piece = static_cast<size_t>(record) * ((rows + 7) / 8) + row / 8;
        write_halves<LANES>(v, pieces + piece * Piece<LANES>::bytes, row % 8);
    }
}

// logits [rows, outputs] = x * seen / rms(x) times the transpose of weight [outputs, hidden]; `seen` is the
// norm weight that the router sees. Also writes the normed rows (write_row), which may have another norm
// weight. blockIdx.x: the output; the last ROWS blocks write rows instead. blockIdx.y: ROWS rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
score_rows(const float* x, const float* weight, const float* seen, const float* norm, float eps, float* logits,
           float* normed, u8* pieces, int rows, int outputs, int hidden) {
    __shared__ float dots[ROWS][WARPS], squares[ROWS][WARPS];
    const int output = blockIdx.x, first = blockIdx.y * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_begin();
    if (output >= outputs) {
        const int row = first + output - outputs;
        if (row < rows) write_row(x, norm, eps, normed, pieces, row, rows, hidden);
        else wait_for_last();  // no block may finish before the previous kernel has finished
        return;
    }
    float4 by[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * WARPS * 32 + threadIdx.x;
        by[e] = make_float4(0, 0, 0, 0);
        if (i < hidden / 4) {
            const float4 w = reinterpret_cast<const float4*>(weight + static_cast<size_t>(output) * hidden)[i];
            const float4 n = reinterpret_cast<const float4*>(seen)[i];
            by[e] = make_float4(w.x * n.x, w.y * n.y, w.z * n.z, w.w * n.w);
        }
    }
    wait_for_last();
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
        const float4* from = reinterpret_cast<const float4*>(x + static_cast<size_t>(min(first + n, rows - 1)) * hidden);
        float dot = 0, own = 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = e * WARPS * 32 + threadIdx.x;
            const float4 v = i < hidden / 4 ? from[i] : make_float4(0, 0, 0, 0);
            dot = fmaf(by[e].x, v.x, fmaf(by[e].y, v.y, fmaf(by[e].z, v.z, fmaf(by[e].w, v.w, dot))));
            own += squares_of(v);
        }
        dot = sum_of_warp(dot);
        own = sum_of_warp(own);
        if (lane == 0) dots[n][warp] = dot, squares[n][warp] = own;
    }
    __syncthreads();
    const int n = threadIdx.x;
    if (n < ROWS && first + n < rows)
        logits[static_cast<size_t>(first + n) * outputs + output] =
            sum_of_block(dots[n]) * rsqrtf(sum_of_block(squares[n]) / hidden + eps);
}
