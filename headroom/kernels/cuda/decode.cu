// Attention of few rows per sequence over cached keys and values, on the tensor cores.
// DIM: values of a head; GROUP: query heads per KV head; K_KIND, V_KIND: types of the cache (not F32);
// PAGE: slots of a page; TILES: groups of eight queries in a block; PARTS: warps that divide a tile's keys
// (this fixes the order of the sums).
//
// A block handles one item: one piece of one sequence's context, for one KV head and 8 * TILES queries.
// Keys and values are loaded in tiles of 16 * PARTS keys. A warp handles eight queries and sixteen keys of
// each tile; at the end the results of the PARTS warps of the same queries are merged in order.
//
//            tile of keys (16 * PARTS)              warps of a block: [TILES][PARTS]
//            | 16 keys | 16 keys | ...              warp (tile, part) multiplies its 8 queries with
//   8 queries| part 0  | part 1  | ...              the 16 keys `part` of every tile
//
// Products are transposed (keys x queries, dims x queries): eight queries are exactly the n of m16n8k16,
// and all sums of a lane belong to the same two queries. Queries and probabilities are split into two
// 16-bit numbers each, a rounded value and the rest, so that only the type of the cache limits the
// accuracy.
#include "early.cuh"
#include "attention.cuh"
#include "matrices.cuh"

#define KEYS (16 * PARTS)
#define THREADS (32 * PARTS * TILES)
#define STRIDE (DIM + 8)  // values from one row in shared memory to the next: rows begin 4 banks apart
#define LOG2E 1.4426950408889634f
#define HIDDEN __int_as_float(0xff800000)  // minus infinity: the score of a key that the row does not see

// A bf16 cache is multiplied in bf16 if the tensor cores can, else it is converted to f16.
#define K_BF16 (K_KIND == BF16 && HAS_BF16)
#define V_BF16 (V_KIND == BF16 && HAS_BF16)

struct Place {  // the keys (or values) [low, end) of a sequence and KV head that a block reads
    const Step& step;
    int s, kv, kv_heads, low, end;
};

// Loads KEYS rows of the cache to shared memory in 16 bits. Outside [low, end) it writes zeros: slots that
// were never written could hold NaN, and NaN times a probability of zero is NaN.
template <int K> __device__ __forceinline__ void load_tile(u16* to, const u8* cache, const Place& in, int first) {
    constexpr int chunks = DIM / 8;
#pragma unroll 8
    for (int i = threadIdx.x; i < KEYS * chunks; i += THREADS) {
        const int key = i / chunks, at = i % chunks * 8;
        const bool there = first + key >= in.low && first + key < in.end;
        const size_t slot = in.step.slot(in.s, there ? first + key : in.end - 1);
        const u8* row = cache + (slot * in.kv_heads + in.kv) * row_bytes(K, DIM);
        u16* place = to + key * STRIDE + at;
        if constexpr (K == F16 || (K == BF16 && HAS_BF16)) {
            copy16(place, row + 2 * at, there);
        } else {
            float x[8] = {};
            if constexpr (K == BF16) eight_of_bf16(row + 2 * at, there, x);
            else if (there) eight_values<K>(row, at, x);
            *reinterpret_cast<uint4*>(place) = make_uint4(pack<false>(x[0], x[1]), pack<false>(x[2], x[3]),
                                                          pack<false>(x[4], x[5]), pack<false>(x[6], x[7]));
        }
    }
    end_copies();
}

// What a block works on: one piece of one sequence's context, for one KV head and 8 * TILES queries.
struct Item {
    int s, first_row, count, start;  // the sequence, its rows in the step, tokens cached before the step
    int piece, kv, first_query;
};

// Finds the item with a number; returns false if there are fewer items. Only pieces that some row sees are
// numbered: a captured step is launched for the longest context and the most sequences, and empty blocks
// would take longer than all others. The last pieces of a sequence, which are the longest, come first.
// Every warp does this itself, with one lane per row: a step has at most 32 rows.
__device__ __forceinline__ bool find_item(const Step& step, int number, int kv_heads, int window, Item& item) {
    const int lane = threadIdx.x % 32, s = lane < step.rows ? step.sequence[lane] : -1;
    const u32 same = __match_any_sync(~0u, s);
    const int count = __popc(same);
    const bool leads = s >= 0 && __ffs(same) - 1 == lane;  // the first row of a sequence counts its items
    const int start = leads ? step.starts[s] : 0;
    const int last = piece_of(start + count - 1), seen = last - piece_of(first_seen(start, window)) + 1;
    const int items = leads ? seen * kv_heads * ((count * GROUP + 8 * TILES - 1) / (8 * TILES)) : 0;
    int end = items;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(~0u, end, by);
        if (lane >= by) end += before;
    }
    const u32 later = __ballot_sync(~0u, end > number);
    if (!later) return false;
    const int row = __ffs(later) - 1;
    const int at = number - __shfl_sync(~0u, end - items, row), pieces = __shfl_sync(~0u, seen, row);
    item.s = __shfl_sync(~0u, s, row);
    item.first_row = row;
    item.count = __shfl_sync(~0u, count, row);
    item.start = __shfl_sync(~0u, start, row);
    item.piece = __shfl_sync(~0u, last, row) - at % pieces;
    item.kv = at / pieces % kv_heads;
    item.first_query = at / pieces / kv_heads * 8 * TILES;
    return true;
}

struct Sums {  // results per piece, which `merge` in attention.cu combines
    float* parts;   // [rows, heads, pieces, DIM]: weighted sums of values, not divided by the sum of weights
    float2* stats;  // [rows, heads, pieces]: the largest score, times log2(e), and the sum of weights
    int pieces;
};

__device__ __forceinline__ void attend(const Step& step, const Item& item, const float* queries, const u8* keys,
                                       const u8* values, const Sums& out, int kv_heads, int window, u16* key_tile) {
    u16* value_tile = key_tile + KEYS * STRIDE;
    u16* query_tile = value_tile + KEYS * STRIDE;  // [TILES][2][8][STRIDE]: rounded values, then the rests
    const int s = item.s, kv = item.kv, start = item.start, count = item.count;
    const int first_row = item.first_row, first_query = item.first_query;
    const int from = first_seen(start, window);
    int first, end;
    piece_bounds(item.piece, first, end);
    end = min(end, start + count);
    first = max(first, from / KEYS * KEYS);

    const Place in{step, s, kv, kv_heads, from, end};
    load_tile<K_KIND>(key_tile, keys, in, first);
    load_tile<V_KIND>(value_tile, values, in, first);
    const int heads = kv_heads * GROUP;
    for (int i = threadIdx.x; i < 8 * TILES * DIM / 2; i += THREADS) {
        const int query = i / (DIM / 2), at = i % (DIM / 2) * 2, q = first_query + query;
        float2 x = make_float2(0, 0);
        if (q < count * GROUP)
            x = *reinterpret_cast<const float2*>(
                queries + (static_cast<size_t>(first_row + q / GROUP) * heads + kv * GROUP + q % GROUP) * DIM + at);
        u16* place = query_tile + (query / 8 * 16 + query % 8) * STRIDE + at;
        const u32 whole = pack<K_BF16>(x.x, x.y);
        const float2 rounded = unpack<K_BF16>(whole);
        *reinterpret_cast<u32*>(place) = whole;
        *reinterpret_cast<u32*>(place + 8 * STRIDE) = pack<K_BF16>(x.x - rounded.x, x.y - rounded.y);
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int part = warp % PARTS, tile = warp / PARTS, mine = first_query + 8 * tile + 2 * t;
    const bool busy = first_query + 8 * tile < count * GROUP;
    const int last_row = first_row + count - 1;  // lanes without a query see what the last row sees
    const View views[2] = {{step, min(first_row + mine / GROUP, last_row), start, window},
                           {step, min(first_row + (mine + 1) / GROUP, last_row), start, window}};
    const u16* key_from = key_tile + (16 * part + lane % 16) * STRIDE + lane / 16 * 8;
    const u16* value_from = value_tile + (16 * part + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
    const u16* query_from = query_tile + (16 * tile + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
    float sums[DIM / 16][4], peak[2] = {LOWEST, LOWEST}, total[2] = {0, 0};
#pragma unroll
    for (int d = 0; d < DIM / 16; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[d][i] = 0;

    for (; first < end; first += KEYS) {
        await_copies<1>();
        __syncthreads();
        u32 weight[2] = {0, 0}, rest[2] = {0, 0};
        if (busy) {
            float score[4] = {0, 0, 0, 0}, small[4] = {0, 0, 0, 0};
#pragma unroll 8
            for (int d = 0; d < DIM / 16; ++d) {
                u32 a[4], b[4];
                load_matrices<false>(a, key_from + 16 * d);
                load_matrices<false>(b, query_from + 16 * d);
                multiply<K_BF16>(score, a, b[0], b[1]);
                multiply<K_BF16>(small, a, b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) score[i] += small[i];
            float decay[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int key = first + 16 * part + g;
                const float low = views[j].sees(key) && key < end ? score[j] * LOG2E : HIDDEN;
                const float high = views[j].sees(key + 8) && key + 8 < end ? score[2 + j] * LOG2E : HIDDEN;
                float top = fmaxf(low, high);
#pragma unroll
                for (int by = 4; by < 32; by *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
                top = fmaxf(top, peak[j]);
                decay[j] = exp2f(peak[j] - top);
                peak[j] = top;
                score[j] = exp2f(low - top);
                score[2 + j] = exp2f(high - top);
                total[j] = total[j] * decay[j] + (score[j] + score[2 + j]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 whole = pack<V_BF16>(score[2 * i], score[2 * i + 1]);
                const float2 rounded = unpack<V_BF16>(whole);
                weight[i] = turn(whole);
                rest[i] = turn(pack<V_BF16>(score[2 * i] - rounded.x, score[2 * i + 1] - rounded.y));
            }
            if (__any_sync(~0u, decay[0] != 1 || decay[1] != 1))
#pragma unroll
                for (int d = 0; d < DIM / 16; ++d)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[d][i] *= decay[i % 2];
        }
        __syncthreads();
        if (first + KEYS < end) load_tile<K_KIND>(key_tile, keys, in, first + KEYS);
        else end_copies();
        await_copies<1>();
        __syncthreads();
        if (busy) {
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d) {
                u32 a[4];
                load_matrices<true>(a, value_from + 16 * d);
                multiply<V_BF16>(sums[d], a, weight[0], weight[1]);
                multiply<V_BF16>(sums[d], a, rest[0], rest[1]);
            }
        }
        __syncthreads();
        if (first + KEYS < end) load_tile<V_KIND>(value_tile, values, in, first + KEYS);
        else end_copies();
    }

#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int by = 4; by < 32; by *= 2) total[j] += __shfl_xor_sync(~0u, total[j], by);
    // Merge the parts in order: one after another hands its sums to part 0 through shared memory.
    await_copies<0>();
    __syncthreads();
    float* memory = reinterpret_cast<float*>(key_tile);
    float* handed = memory + tile * (8 * DIM + 16);
    for (int from_part = 1; from_part < PARTS; ++from_part) {
        if (part == from_part) {
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) handed[(d * 4 + i) * 32 + lane] = sums[d][i];
            if (g == 0)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    handed[8 * DIM + 2 * t + j] = peak[j];
                    handed[8 * DIM + 8 + 2 * t + j] = total[j];
                }
        }
        __syncthreads();
        if (part == 0) {
            float mine_by[2], other_by[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float other = handed[8 * DIM + 2 * t + j], top = fmaxf(peak[j], other);
                mine_by[j] = exp2f(peak[j] - top);
                other_by[j] = exp2f(other - top);
                total[j] = total[j] * mine_by[j] + handed[8 * DIM + 8 + 2 * t + j] * other_by[j];
                peak[j] = top;
            }
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[d][i] = sums[d][i] * mine_by[i % 2] + handed[(d * 4 + i) * 32 + lane] * other_by[i % 2];
        }
        __syncthreads();
    }
    // Transpose in shared memory, so that each head is written as one row.
    if (part == 0)
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) handed[(2 * t + i % 2) * DIM + 16 * d + g + i / 2 * 8] = sums[d][i];
    if (part == 0 && g == 0)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (mine + j < item.count * GROUP) {
                const size_t row = item.first_row + (mine + j) / GROUP, head = item.kv * GROUP + (mine + j) % GROUP;
                out.stats[(row * heads + head) * out.pieces + item.piece] = make_float2(peak[j], total[j]);
            }
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * TILES * DIM; i += THREADS) {
        const int query = i / DIM, q = item.first_query + query;
        if (q >= item.count * GROUP) continue;
        const size_t row = item.first_row + q / GROUP, head = item.kv * GROUP + q % GROUP;
        out.parts[((row * heads + head) * out.pieces + item.piece) * DIM + i % DIM] =
            memory[query / 8 * (8 * DIM + 16) + query % 8 * DIM + i % DIM];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode(const float* queries, const u8* keys, const u8* values, const int* sequence, const int* index,
       const int* starts, const int* pages, const long long* trees, float* parts, float2* stats, int rows,
       int kv_heads, int max_pages, int window, int pieces) {
    let_next_begin();
    extern __shared__ uint4 memory[];
    const Step step{sequence, index, starts, pages, trees, rows, max_pages};
    const Sums out{parts, stats, pieces};
    Item item;
    bool found = find_item(step, blockIdx.x, kv_heads, window, item);
    wait_for_last();
    for (int number = blockIdx.x; found; found = find_item(step, number += gridDim.x, kv_heads, window, item)) {
        attend(step, item, queries, keys, values, out, kv_heads, window, reinterpret_cast<u16*>(memory));
        __syncthreads();  // the next item overwrites shared memory
    }
}
