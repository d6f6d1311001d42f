// Attention of few rows per sequence in float32: for exact runs, and for GPUs without the tensor-core
// products of decode.cu. It has the same defines (but TILES and PARTS), pieces and scratch as decode.cu.
//
// A block handles one piece of one sequence's context, for one KV head and eight queries. For each tile of
// KEYS keys it computes the scores, the softmax weights with a running maximum, and the weighted sums.
#include "attention.cuh"

#define KEYS (DIM > 256 ? 16 : 32)
#define THREADS 128
#define STRIDE (DIM + 1)  // floats from one row in shared memory to the next: keys begin one bank apart
#define MINE ((DIM + THREADS - 1) / THREADS)
#define HIDDEN __int_as_float(0xff800000)  // minus infinity: the score of a key that the row does not see

// Loads KEYS rows of the cache to shared memory; zeros outside [low, end).
template <int K> __device__ __forceinline__ void load_tile(float* to, const u8* cache, const Step& step, int s,
                                                           int kv, int kv_heads, int first, int low, int end) {
    for (int i = threadIdx.x; i < KEYS * DIM; i += THREADS) {
        const int key = first + i / DIM;
        float x = 0;
        if (key >= low && key < end)
            x = value_at<K>(cache + (step.slot(s, key) * kv_heads + kv) * row_bytes(K, DIM), i % DIM);
        to[i / DIM * STRIDE + i % DIM] = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_exact(const float* queries, const u8* keys, const u8* values, const int* sequence, const int* index,
             const int* starts, const int* pages, const long long* trees, float* parts, float2* stats, int rows,
             int kv_heads, int max_pages, int groups, int window, int pieces) {
    extern __shared__ float shared[];
    float* tile = shared;                   // [KEYS][STRIDE]
    float* query = tile + KEYS * STRIDE;    // [8][DIM]
    float* weight = query + 8 * DIM;        // [8][KEYS]
    float* peak = weight + 8 * KEYS;        // [8]
    float* total = peak + 8;                // [8]
    float* decay = total + 8;               // [8]
    const Step step{sequence, index, starts, pages, trees, rows, max_pages};
    const int piece = pieces - 1 - blockIdx.x, kv = blockIdx.y, s = blockIdx.z / groups;
    const int first_query = blockIdx.z % groups * 8, heads = kv_heads * GROUP;
    int first_row, count, first, end;
    find_rows(step, s, first_row, count);
    piece_bounds(piece, first, end);
    if (count * GROUP <= first_query) return;
    const int start = starts[s], from = first_seen(start, window);
    end = min(end, start + count);
    if (first >= end || from >= end) return;
    first = max(first, from / KEYS * KEYS);

    const int used = min(8, count * GROUP - first_query);
    for (int i = threadIdx.x; i < 8 * DIM; i += THREADS) {
        const int q = first_query + min(i / DIM, used - 1);
        query[i] = queries[(static_cast<size_t>(first_row + q / GROUP) * heads + kv * GROUP + q % GROUP) * DIM + i % DIM];
    }
    if (threadIdx.x < 8) {
        peak[threadIdx.x] = LOWEST;
        total[threadIdx.x] = 0;
    }
    float sums[8][MINE] = {};
    for (; first < end; first += KEYS) {
        __syncthreads();
        load_tile<K_KIND>(tile, keys, step, s, kv, kv_heads, first, from, end);
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * KEYS; i += THREADS) {
            const int at = i / KEYS, key = i % KEYS, q = first_query + min(at, used - 1);
            float score = 0;
            for (int d = 0; d < DIM; ++d) score = fmaf(query[at * DIM + d], tile[key * STRIDE + d], score);
            const View view(step, first_row + q / GROUP, start, window);
            weight[i] = first + key < end && view.sees(first + key) ? score : HIDDEN;
        }
        __syncthreads();
        load_tile<V_KIND>(tile, values, step, s, kv, kv_heads, first, from, end);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int at = warp; at < 8; at += THREADS / 32) {
            const float score = lane < KEYS ? weight[at * KEYS + lane] : HIDDEN, old = peak[at];
            const float top = fmaxf(old, warp_max(score)), x = expf(score - top), sum = warp_sum(x);
            __syncwarp();
            if (lane < KEYS) weight[at * KEYS + lane] = x;
            if (lane == 0) {
                decay[at] = expf(old - top);
                total[at] = total[at] * decay[at] + sum;
                peak[at] = top;
            }
        }
        __syncthreads();
#pragma unroll
        for (int at = 0; at < 8; ++at)
#pragma unroll
            for (int m = 0; m < MINE; ++m) sums[at][m] *= decay[at];
        for (int key = 0; key < KEYS; ++key)
#pragma unroll
            for (int m = 0; m < MINE; ++m) {
                const int d = m * THREADS + threadIdx.x;
                if (DIM % THREADS && d >= DIM) break;
                const float x = tile[key * STRIDE + d];
#pragma unroll
                for (int at = 0; at < 8; ++at) sums[at][m] = fmaf(weight[at * KEYS + key], x, sums[at][m]);
            }
    }
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        const int q = first_query + at;
        if (at >= used) break;
        const size_t row = first_row + q / GROUP, head = kv * GROUP + q % GROUP;
        const size_t place = (row * heads + head) * pieces + piece;
        if (threadIdx.x == 0) stats[place] = make_float2(peak[at], total[at]);
#pragma unroll
        for (int m = 0; m < MINE; ++m)
            if (m * THREADS + threadIdx.x < DIM) parts[place * DIM + m * THREADS + threadIdx.x] = sums[at][m];
    }
}
