// Routers: logits of all experts (`score`), and the choice of each row's experts (`route`).
#include "early.cuh"
#include "route.cuh"

// logits [rows, outputs] = x [rows, hidden] times the transpose of weight [outputs, hidden]; hidden is a
// multiple of 4. blockIdx.x: the output; blockIdx.y: ROWS rows, for which each weight is read once.
#ifndef ROWS
#define ROWS 1
#endif
extern "C" __global__ void __launch_bounds__(128)
score(const float* x, const float* weight, float* logits, int rows, int outputs, int hidden) {
    begin_after_last();
    __shared__ float part[4][ROWS];
    const int output = blockIdx.x, first = blockIdx.y * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float4* w = reinterpret_cast<const float4*>(weight + static_cast<size_t>(output) * hidden);
    float sum[ROWS] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < hidden / 4; i += 128) {
        const float4 by = w[i];
#pragma unroll
        for (int n = 0; n < ROWS; ++n) {
            const int row = min(first + n, rows - 1);
            const float4 v = reinterpret_cast<const float4*>(x + static_cast<size_t>(row) * hidden)[i];
            sum[n] = fmaf(by.x, v.x, fmaf(by.y, v.y, fmaf(by.z, v.z, fmaf(by.w, v.w, sum[n]))));
        }
    }
#pragma unroll
    for (int n = 0; n < ROWS; ++n) {
        const float total = sum_of_warp(sum[n]);
        if (lane == 0) part[warp][n] = total;
    }
    __syncthreads();
    const int n = threadIdx.x;
    if (n < ROWS && first + n < rows)
        logits[static_cast<size_t>(first + n) * outputs + output] =
            (part[0][n] + part[1][n]) + (part[2][n] + part[3][n]);
}

// Writes ids and weights [rows, used], the best expert first and the lower id first on ties, and counts the
// picks. A warp per row. Padding rows (negative `sequence`, which may be null) choose none: their ids are
// -1, their weights 0.
extern "C" __global__ void __launch_bounds__(128)
route(const float* logits, int stride, const float* bias, const int* sequence, int* ids, float* weights,
      unsigned long long* counts, int rows, int used, int normalise, float scale, float softcap) {
    begin_after_last();
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    if (sequence && sequence[row] < 0) {
        if (lane < used) ids[row * used + lane] = -1, weights[row * used + lane] = 0.0f;
        return;
    }
    int chosen;
    const float weight = choose(logits + static_cast<size_t>(row) * stride, bias,
                                Rule{used, normalise, scale, softcap}, lane, chosen);
    if (lane >= used) return;
    ids[row * used + lane] = chosen;
    weights[row * used + lane] = weight;
    atomicAdd(counts + chosen, 1ull);
}
