// Gated DeltaNet row by row, for steps with few rows per sequence: `convolve`, then `recur`, then
// `gated_norm`. COLUMNS: columns of a head's values in one block of `recur`, 16 or 32.
#include "early.cuh"
#include "delta_net.cuh"

__device__ __forceinline__ void add(float4& to, float by, const float4& x) {
    to.x = fmaf(by, x.x, to.x);
    to.y = fmaf(by, x.y, to.y);
    to.z = fmaf(by, x.z, to.z);
    to.w = fmaf(by, x.w, to.w);
}

// A row of a step, and those of its four channels' inputs that were made before the step.
struct Before {
    int sequence, start, place;  // `place`: number of the row within its sequence's rows of this step
    float4 inputs[TAPS - 1];     // inputs for the first taps; those of later taps are rows of the step

    __device__ __forceinline__ void load(int row, int channel, const float* state, const int* sequences,
                                         const int* index, const int* starts, const int* slots) {
        sequence = sequences[row];
        if (sequence < 0) return;
        start = starts[sequence];
        place = index[row] - start;
        const float* from = state + static_cast<size_t>(slots[sequence]) * (TAPS - 1) * CHANNELS + channel;
#pragma unroll
        for (int j = 0; j < TAPS - 1; ++j)
            inputs[j] = start > 0 && place + j < TAPS - 1
                            ? *reinterpret_cast<const float4*>(from + (place + j) * CHANNELS)
                            : make_float4(0, 0, 0, 0);
    }
};

// Convolves the rows, applies silu, scales queries and keys to unit length, and computes the gates. A warp
// handles `each` rows of one head; blockIdx.x: four heads; blockIdx.y: a share of the rows.
// mixed [rows, channels]; gates [rows, heads, 2]: logarithm of the decay, update strength.
extern "C" __global__ void __launch_bounds__(128)
convolve(const float* qkv, const float* beta, const float* alpha, const float* conv, const float* decay,
         const float* dt_bias, const float* inputs, const int* sequence, const int* index, const int* starts,
         const int* slots, float* mixed, float2* gates, int rows, int each) {
    let_next_begin();
    const int mine = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = min(mine, 2 * KEY_HEADS + HEADS - 1);
    const int channel = unit * DIM + lane * 4, first = blockIdx.y * each;
    float taps[TAPS][4];
#pragma unroll
    for (int j = 0; j < TAPS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) taps[j][i] = conv[(channel + i) * TAPS + j];
    Before before;
    before.load(first, channel, inputs, sequence, index, starts, slots);
    wait_for_last();
    if (mine > unit) return;
    const int end = min(rows, first + each);
    for (int row = first; row < end; ++row) {
        if (row > first) before.load(row, channel, inputs, sequence, index, starts, slots);
        if (before.sequence < 0) continue;
        float y[4] = {};
#pragma unroll
        for (int j = 0; j < TAPS; ++j) {
            float4 x;
            if (j == TAPS - 1 || before.place + j >= TAPS - 1)
                x = *reinterpret_cast<const float4*>(
                    qkv + static_cast<size_t>(row - (TAPS - 1) + j) * CHANNELS + channel);
            else
                x = before.inputs[j % (TAPS - 1)];
            y[0] = fmaf(taps[j][0], x.x, y[0]);
            y[1] = fmaf(taps[j][1], x.y, y[1]);
            y[2] = fmaf(taps[j][2], x.z, y[2]);
            y[3] = fmaf(taps[j][3], x.w, y[3]);
        }
        float scale = 1.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y[i] = silu(y[i]);
            squares = fmaf(y[i], y[i], squares);
        }
        if (unit < 2 * KEY_HEADS) {
            scale = rsqrtf(sum_of_warp(squares) + 1e-6f);
            if (unit < KEY_HEADS) scale *= 0.08838834764831845f;  // 1 / sqrt(DIM), for queries
        } else if (lane == 0) {
            const int at = row * HEADS + unit - 2 * KEY_HEADS;
            const float x = alpha[at] + dt_bias[unit - 2 * KEY_HEADS];
            const float time = x > 20.0f ? x : log1pf(expf(x));
            gates[at] = make_float2(decay[unit - 2 * KEY_HEADS] * time, 1.0f / (1.0f + expf(-beta[at])));
        }
        *reinterpret_cast<float4*>(mixed + static_cast<size_t>(row) * CHANNELS + channel) =
            make_float4(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale);
    }
}

__device__ __forceinline__ float4 gated(float4 x, float4 gate, float4 weight, float eps) {
    const float squares = sum_of_warp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    const float scale = rsqrtf(squares / DIM + eps);
    return make_float4(weight.x * (x.x * scale) * silu(gate.x), weight.y * (x.y * scale) * silu(gate.y),
                       weight.z * (x.z * scale) * silu(gate.z), weight.w * (x.w * scale) * silu(gate.w));
}

#include <cuda_bf16.h>

// Writes weight * x / rms(x) * silu(gate) [heads of all rows, DIM] to `out` (f32) or, if that is null, to
// `narrow` (bf16). One warp per head of each row.
extern "C" __global__ void __launch_bounds__(128)
gated_norm(const float4* x, const float4* gate, const float4* weight, float4* out, uint2* narrow, float eps,
           int heads) {
    const int head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads) return;
    const size_t at = static_cast<size_t>(head) * (DIM / 4) + lane;
    const float4 y = gated(x[at], gate[at], weight[lane], eps);
    if (out) {
        out[at] = y;
        return;
    }
    __align__(8) const __nv_bfloat16 four[4] = {__float2bfloat16(y.x), __float2bfloat16(y.y), __float2bfloat16(y.z),
                                   __float2bfloat16(y.w)};
    narrow[at] = *reinterpret_cast<const uint2*>(four);
}

#define ACROSS (COLUMNS / 4)   // threads of a group: four columns each
#define THREADS (COLUMNS * 8)  // 32 groups; each thread holds four rows of the state
#define WARPS (THREADS / 32)

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// Adds up the sums of all warps, which are `apart` from each other: pairwise within every eight groups of
// threads, as the shuffles within a warp do, then these four one after another. The order does not depend
// on COLUMNS.
template <class T> __device__ __forceinline__ T sum_of_warps(const T* at, int apart) {
    constexpr int EIGHT = WARPS / 4;  // warps that hold eight groups
    T total;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        T sum[EIGHT];
#pragma unroll
        for (int w = 0; w < EIGHT; ++w) sum[w] = at[(i * EIGHT + w) * apart];
#pragma unroll
        for (int step = 1; step < EIGHT; step *= 2)
#pragma unroll
            for (int w = 0; w < EIGHT; w += 2 * step) sum[w] = plus(sum[w], sum[w + step]);
        total = i ? plus(total, sum[0]) : sum[0];
    }
    return total;
}

// What a thread reads of a row: four values of the query and the key, its four columns of the value, and
// the gates.
struct RecurrentRow {
    float query[4], key[4];
    float4 value;
    float2 gate;

    __device__ __forceinline__ void load(const float* mixed, const float2* gates, int row, int head, int group,
                                         int column) {
        const float* own = mixed + static_cast<size_t>(row) * CHANNELS;
        const float* queries = own + key_head(head) * DIM + group;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            query[i] = queries[i * 32];
            key[i] = queries[KEY_HEADS * DIM + i * 32];
        }
        value = *reinterpret_cast<const float4*>(own + (2 * KEY_HEADS + head) * DIM + column);
        gate = gates[row * HEADS + head];
    }
};

// Runs the recurrence over the rows of each sequence. The state stays in registers between rows; the next
// row is loaded while one is computed. blockIdx: value head, group of columns, sequence.
extern "C" __global__ void __launch_bounds__(THREADS)
recur(const float* qkv, const float* mixed, const float2* gates, float* memory, float* inputs,
      const int* sequence, const int* starts, const int* slots, float* out, int rows) {
    let_next_begin();
    // Double buffered: a row's sums are written while other threads may still read those of the row before.
    __shared__ float4 part[2][WARPS][2][ACROSS];
    __shared__ float products[2][WARPS];
    __shared__ int first, count;
    const int head = blockIdx.x, s = blockIdx.z, thread = threadIdx.x;
    const int lane = thread % 32, warp = thread / 32, group = thread / ACROSS;
    const int four = thread % ACROSS * 4, column = blockIdx.y * COLUMNS + four;
    if (thread == 0) first = rows, count = 0;
    // A sequence without rows may have no slot (-1). Any slot will do for it, since nothing is written.
    const int slot = max(slots[s], 0);
    const bool fresh = starts[s] == 0;
    float* mine = memory + ((static_cast<size_t>(slot) * HEADS + head) * DIM + group) * DIM + column;
    float4 state[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        state[i] = fresh ? make_float4(0, 0, 0, 0)
                         : *reinterpret_cast<const float4*>(mine + i * 32 * DIM);
    __syncthreads();
    for (int row = thread; row < rows; row += THREADS)
        if (sequence[row] == s) {
            atomicMin(&first, row);
            atomicAdd(&count, 1);
        }
    __syncthreads();
    wait_for_last();
    if (count == 0) return;

    const int channel = (head * gridDim.y + blockIdx.y) * THREADS + thread;
    if (channel < CHANNELS)
        keep_inputs(qkv, inputs + static_cast<size_t>(slot) * (TAPS - 1) * CHANNELS, channel, first, count,
                    fresh);
    const int end = first + count;
    RecurrentRow next;
    next.load(mixed, gates, first, head, group, column);
    for (int row = first; row < end; ++row) {
        const RecurrentRow now = next;
        if (row + 1 < end) next.load(mixed, gates, row + 1, head, group, column);
        const float2 gate = now.gate;
        const float4 value = now.value;
        float both = 0.0f;
        float4 known = make_float4(0, 0, 0, 0), seen = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            add(known, now.key[i], state[i]);
            add(seen, now.query[i], state[i]);
            both = fmaf(now.key[i], now.query[i], both);
        }
#pragma unroll
        for (int o = ACROSS; o < 32; o <<= 1) {
            float* all[9] = {&known.x, &known.y, &known.z, &known.w, &seen.x, &seen.y, &seen.z, &seen.w, &both};
#pragma unroll
            for (int i = 0; i < 9; ++i) *all[i] += __shfl_xor_sync(0xFFFFFFFFu, *all[i], o);
        }
        const int turn = (row - first) % 2, side = thread % ACROSS;
        if (lane < ACROSS) {
            part[turn][warp][0][side] = known;
            part[turn][warp][1][side] = seen;
        }
        if (lane == 0) products[turn][warp] = both;
        __syncthreads();
        both = sum_of_warps(products[turn], 1);
        known = sum_of_warps(&part[turn][0][0][side], 2 * ACROSS);
        seen = sum_of_warps(&part[turn][0][1][side], 2 * ACROSS);
        const float keep = expf(gate.x);
        const float4 change =
            make_float4(gate.y * (value.x - keep * known.x), gate.y * (value.y - keep * known.y),
                        gate.y * (value.z - keep * known.z), gate.y * (value.w - keep * known.w));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            state[i] = make_float4(keep * state[i].x, keep * state[i].y, keep * state[i].z, keep * state[i].w);
            add(state[i], now.key[i], change);
        }
        if (group == 0) {
            // query * new state, computed from query * old state: keep * seen + (query . key) * change.
            float4 answer = make_float4(keep * seen.x, keep * seen.y, keep * seen.z, keep * seen.w);
            add(answer, both, change);
            *reinterpret_cast<float4*>(out + (static_cast<size_t>(row) * HEADS + head) * DIM + column) = answer;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<float4*>(mine + i * 32 * DIM) = state[i];
}
