// Routed experts for a few rows: a pick is one expert chosen by one row.
// GATE, UP, DOWN: the types of an expert's matrices; GELU: the activation, else silu; WARPS: of a
// block, a multiple of four; LANES: of a piece of activations.
// table [experts][3]: the addresses of an expert's tiles, on this device or mapped host memory.
#include "early.cuh"
#include "plain.cuh"
#include "experts.cuh"

// Records `first`, first + step, ... of a tile times one row of activations, row % 8 of its pieces, which lie
// `apart`; the next record is asked for before the work on one begins.
template <int K>
__device__ __forceinline__ void add_row(const u8* tile, const u8* pieces, size_t apart, int row, int first,
                                        int step, int records, float (*acc)[2]) {
    const int lane = threadIdx.x % 32;
    Share<K> share, next;
    if (first < records) next.template load<true>(tile + static_cast<size_t>(first) * Record<K>::bytes, lane);
    for (int r = first; r < records; r += step) {
        SingleRow<K, LANES> x;
        x.load(pieces + r * apart, row % 8, lane);
        share = next;
        if (r + step < records)
            next.template load<true>(tile + static_cast<size_t>(r + step) * Record<K>::bytes, lane);
        x.template add<1>(&share, acc);
    }
}

// The sums of rows g and g + 8 to `out [16]`.
__device__ __forceinline__ void write_column(const float* acc, float* out) {
    const int lane = threadIdx.x % 32;
    if (lane % 4) return;
    out[lane / 4] = acc[0];
    out[lane / 4 + 8] = acc[1];
}

// inner [picks, width] = act(gate x) * up x, 32 columns a block. blockIdx: columns, pick.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
gate_up(const long long* table, const int* ids, const u8* pieces, int groups, int used, int width, int records,
        float* inner) {
    begin_after_last();
    __shared__ float sums[WARPS][16];
    const int pick = blockIdx.y, row = pick / used, expert = ids[pick];
    if (expert < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % 4, turn = warp / 4;
    // Parts of the warps: two tiles of the gate, two of up.
    const int tile = blockIdx.x * 2 + part % 2;
    float acc[1][2] = {};
    if (tile * 16 < width) {
        const u8* matrix = reinterpret_cast<const u8*>(table[expert * 3 + part / 2]);
        const u8* x = pieces + row / 8 * Piece<LANES>::bytes;
        const size_t at = static_cast<size_t>(tile) * records, apart = static_cast<size_t>(groups) * Piece<LANES>::bytes;
        if (GATE == UP || part < 2)
            add_row<GATE>(matrix + at * Record<GATE>::bytes, x, apart, row, turn, WARPS / 4, records, acc);
        else
            add_row<UP>(matrix + at * Record<UP>::bytes, x, apart, row, turn, WARPS / 4, records, acc);
    }
    write_column(acc[0], sums[warp]);
    __syncthreads();
    const int column = blockIdx.x * 32 + lane;
    if (warp || column >= width) return;
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
        gate += sums[w + lane / 16][lane % 16];
        up += sums[w + 2 + lane / 16][lane % 16];
    }
    inner[static_cast<size_t>(pick) * width + column] = activated(gate) * up;
}

// The weighted sum of a row's experts for sixteen columns of the output. blockIdx: tile, row. Each warp
// makes its part of an expert's inner values ready for the product by itself.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
down(const long long* table, const int* ids, const float* weights, const float* inner, int used, int width,
     int hidden, int records, const float* residual, const float* visited, const float* logits, int stride,
     float* out) {
    begin_after_last();
    __shared__ float sums[WARPS][16];
    __shared__ uint4 pieces[WARPS][Piece<4>::bytes / 16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
    const size_t tile = static_cast<size_t>(blockIdx.x) * records;
    u8* piece = reinterpret_cast<u8*>(pieces[warp]);
    float sum[2] = {};
    for (int unit = warp; unit < used * records; unit += WARPS) {
        const int pick = row * used + unit / records, r = unit % records, expert = ids[pick];
        if (expert < 0) continue;
        Share<DOWN> share;
        share.template load<true>(
            reinterpret_cast<const u8*>(table[expert * 3 + 2]) + (tile + r) * Record<DOWN>::bytes, lane);
        float v[8], acc[1][2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int column = r * 256 + lane * 8 + i;
            v[i] = column < width ? inner[static_cast<size_t>(pick) * width + column] : 0.0f;
        }
        __syncwarp();  // the piece before has been read
        write_halves<4>(v, piece, 0);
        __syncwarp();
        SingleRow<DOWN, 4> x;
        x.load(piece, 0, lane);
        x.template add<1>(&share, acc);
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = fmaf(weights[pick], acc[0][i], sum[i]);
    }
    write_column(sum, sums[warp]);
    __syncthreads();
    const int column = blockIdx.x * 16 + threadIdx.x;
    if (threadIdx.x >= 16 || column >= hidden) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += sums[w][threadIdx.x];
    const size_t at = static_cast<size_t>(row) * hidden + column;
    out[at] = Others{residual, visited, logits, stride}.add(total, row, at);
}

#include <cuda_bf16.h>

// act(gate) * up of rows [ends[last], 2 * width], gates first.
extern "C" __global__ void activate(const __nv_bfloat16* both, __nv_bfloat16* inner, const int* ends, int last,
                                    int width) {
    const size_t pairs = static_cast<size_t>(ends[last]) * (width / 2);
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs;
         i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        const size_t row = i / (width / 2), column = i % (width / 2) * 2;
        const __nv_bfloat16* from = both + row * 2 * width + column;
        const float2 gate = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
        const float2 up = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + width));
        *reinterpret_cast<__nv_bfloat162*>(inner + row * width + column) =
            __floats2bfloat162_rn(activated(gate.x) * up.x, activated(gate.y) * up.y);
    }
}

// The weighted sum of each row's answers [picks, hidden], the best expert first; blockIdx.x: row.
// places [rows, used]: where a pick's answer stands among all, `start` the place of the first one here;
// picks of experts before `first` or after `last` have theirs elsewhere.
extern "C" __global__ void combine(const __nv_bfloat16* answers, const long long* places, const int* start,
                                   const int* ids, int first, int last, const float* weights, int used, int hidden,
                                   const float* residual, const float* visited, const float* logits, int stride,
                                   float* out) {
    const int row = blockIdx.x;
    const long long before = start ? *start : 0;
    const Others others{residual, visited, logits, stride};
    for (int column = threadIdx.x * 2; column < hidden; column += blockDim.x * 2) {
        float2 sum = make_float2(0, 0);
        for (int j = 0; j < used; ++j) {
            const int pick = row * used + j;
            if (ids[pick] < first || ids[pick] > last) continue;
            const float2 answer = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
                answers + (places[pick] - before) * hidden + column));
            sum = make_float2(fmaf(weights[pick], answer.x, sum.x), fmaf(weights[pick], answer.y, sum.y));
        }
        const size_t at = static_cast<size_t>(row) * hidden + column;
        out[at] = others.add(sum.x, row, at);
        out[at + 1] = others.add(sum.y, row, at + 1);
    }
}
