// Routed experts for a few rows: a pick is one expert chosen by one row.
// GATE, UP, DOWN: the types of an expert's matrices; GELU: the activation, else silu; WARPS: of a
// block, a multiple of four.
// table [experts][3]: the addresses of an expert's tiles, on this device or mapped host memory.
#include "dot.cuh"

__device__ __forceinline__ float activated(float x) {
#if GELU
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
#else
    return x / (1.0f + __expf(-x));
#endif
}

// act(gate x) * up x of 32 rows of an expert, rounded to 8 bits. blockIdx: rows, pick.
// inner_values [picks][records][t][block][2 words], inner_scales [picks][block].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
gate_up(const long long* table, const int* ids, const u8* values, const float* scales, int group, int used,
        int width, int records, u8* inner_values, float* inner_scales, int inner_records) {
    __shared__ float sums[WARPS][16];
    const int pick = blockIdx.y, expert = ids[pick];
    if (expert < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % 4, turn = warp / 4;
    // Parts of the warps: two tiles of the gate, two of up.
    const int tile = blockIdx.x * 2 + part % 2;
    float2 sum = make_float2(0, 0);
    if (tile * 16 < width) {
        const u8* matrix = reinterpret_cast<const u8*>(table[expert * 3 + part / 2]);
        const size_t at = static_cast<size_t>(tile) * records;
        const Row x = row_of(values, scales, pick / used, records, group);
        if (GATE == UP || part < 2) sum = dot_records<GATE>(matrix + at * Record<GATE>::bytes, x, turn, WARPS / 4, records);
        else sum = dot_records<UP>(matrix + at * Record<UP>::bytes, x, turn, WARPS / 4, records);
    }
    gather_lanes(sum, sums[warp]);
    __syncthreads();
    if (warp) return;
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
        gate += sums[w + lane / 16][lane % 16];
        up += sums[w + 2 + lane / 16][lane % 16];
    }
    const float y = static_cast<int>(blockIdx.x) * 32 + lane < width ? activated(gate) * up : 0.0f;
    float peak = fabsf(y);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, o));
    const int word = lane / 4, record = blockIdx.x / 8, block = blockIdx.x % 8;
    inner_values[(static_cast<size_t>(pick) * inner_records + record) * 256 + word % 4 * 64 + block * 8 +
                 word / 4 * 4 + lane % 4] = __float2int_rn(peak > 0 ? y * (127.0f / peak) : 0.0f);
    if (lane == 0) inner_scales[pick * inner_records * 8 + blockIdx.x] = peak / 127.0f;
}

// What every row gets besides its experts; null where there is none.
struct Others {
    const float* residual;  // [rows, hidden]
    const float* visited;   // [rows, hidden]: of the expert that every row visits
    const float* logits;    // of that expert's weight, `stride` apart
    int stride;

    __device__ __forceinline__ float add(float x, int row, size_t at) const {
        if (visited) x += visited[at] * (logits ? 1.0f / (1.0f + expf(-logits[row * stride])) : 1.0f);
        return residual ? residual[at] + x : x;
    }
};

// The weighted sum of a row's experts for sixteen columns of the output. blockIdx: tile, row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
down(const long long* table, const int* ids, const float* weights, const u8* values, const float* scales, int used,
     int hidden, int records, const float* residual, const float* visited, const float* logits, int stride,
     float* out) {
    __shared__ float sums[WARPS][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
    const size_t tile = static_cast<size_t>(blockIdx.x) * records;
    float2 sum = make_float2(0, 0);
    for (int unit = warp; unit < used * records; unit += WARPS) {
        const int pick = row * used + unit / records, r = unit % records, expert = ids[pick];
        if (expert < 0) continue;
        Share<DOWN> share;
        share.load(reinterpret_cast<const u8*>(table[expert * 3 + 2]) + (tile + r) * Record<DOWN>::bytes, lane);
        const float2 more = share.dot(row_of(values, scales, pick, records, 1), r, lane);
        sum = make_float2(fmaf(weights[pick], more.x, sum.x), fmaf(weights[pick], more.y, sum.y));
    }
    gather_lanes(sum, sums[warp]);
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

// act(gate) * up of rows [picks, 2 * width], gates first.
extern "C" __global__ void activate(const __nv_bfloat16* both, __nv_bfloat16* inner, int picks, int width) {
    const size_t pairs = static_cast<size_t>(picks) * (width / 2);
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
