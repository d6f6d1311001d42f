// Around the products of sorted.cu: sort the picks by expert, convert rows to pieces, and sum up the
// answers. X_F16: rows are f16 times a power of two, else bf16.
#include "early.cuh"
#include "halves.cuh"
#include "sorted.cuh"
#define GELU 0  // nothing here has an activation
#include "experts.cuh"

#define SORT_WARPS 16

// Where the groups and row tiles of an expert begin. Each earlier expert may have one group and one tile
// that are not full; the places follow from how many picks the earlier experts have in all.
struct Begin {
    int group, tile;

    __device__ __forceinline__ Begin(int expert, int picks_before)
        : group(picks_before / 8 + expert), tile(picks_before / ROWS + expert) {}
};

// Writes order [8 * groups]: the pick at each place, -1 for padding; the picks of an expert keep their
// order. Also writes the row tiles. blockIdx.x: the expert. Every block counts the picks of earlier experts
// itself.
extern "C" __global__ void __launch_bounds__(SORT_WARPS * 32)
sort_picks(const int* ids, const long long* table, int* order, RowTile* tiles, int picks, int groups, int most_tiles) {
    begin_after_last();
    __shared__ int own[SORT_WARPS], earlier[SORT_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x;
    const int each = (picks + SORT_WARPS * 32 - 1) / (SORT_WARPS * 32) * 32;  // picks of a warp
    const int begin = warp * each, end = min(begin + each, picks);
    int mine = 0, less = 0;
    for (int i = begin + lane; i < end; i += 32) {
        mine += ids[i] == expert;
        less += ids[i] >= 0 && ids[i] < expert;
    }
#pragma unroll
    for (int by = 16; by; by /= 2) {
        mine += __shfl_xor_sync(~0u, mine, by);
        less += __shfl_xor_sync(~0u, less, by);
    }
    if (lane == 0) {
        own[warp] = mine;
        earlier[warp] = less;
    }
    __syncthreads();
    int before = 0, count = 0, place = 0;
    for (int w = 0; w < SORT_WARPS; ++w) {
        if (w == warp) place = count;
        before += earlier[w];
        count += own[w];
    }
    const Begin first(expert, before), next(expert + 1, before + count);
    const bool last = expert + 1 == static_cast<int>(gridDim.x);
    place += first.group * 8;
    for (int i = begin; i < end && mine; i += 32) {
        const bool found = i + lane < end && ids[i + lane] == expert;
        const u32 all = __ballot_sync(~0u, found);
        if (found) order[place + __popc(all & ((1u << lane) - 1))] = i + lane;
        place += __popc(all);
    }
    const int after = (last ? groups : next.group) * 8;
    for (int i = first.group * 8 + count + threadIdx.x; i < after; i += SORT_WARPS * 32) order[i] = -1;
    const int ends = last ? most_tiles : next.tile;
    for (int i = threadIdx.x; first.tile + i < ends; i += SORT_WARPS * 32) {
        RowTile tile;
#pragma unroll
        for (int part = 0; part < 3; ++part) tile.matrices[part] = reinterpret_cast<const u8*>(table[expert * 3 + part]);
        tile.first = first.group * 8 + i * ROWS;
        tile.rows = max(0, min(ROWS, count - i * ROWS));
        tiles[first.tile + i] = tile;
    }
}

// The place and the record that a warp handles; the warps of the grid divide all of them.
struct Unit {
    int place, record, column;  // `column`: the lane's first column (halves.cuh)

    __device__ __forceinline__ explicit Unit(int records) {
        const int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        place = number / records;
        record = number % records;
        column = record * 256 + lane_column();
    }
    __device__ __forceinline__ u8* piece(u8* pieces, int groups) const {
        return pieces + (static_cast<size_t>(record) * groups + place / 8) * Piece<LANES>::bytes;
    }
};

// Writes pieces [record][group] of the rows at all places. x [rows, columns]; columns is a multiple of 8.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const u16* x, const float* powers, const int* order, u8* pieces, int used, int columns, int records,
            int groups) {
    begin_after_last();
    const Unit unit(records);
    const int pick = unit.place < groups * 8 ? order[unit.place] : -1;
    if (pick < 0) return;
    const int row = pick / used;
    float v[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = unit.column + half * UPPER;
        if (column >= columns) continue;
        const uint2 words = *reinterpret_cast<const uint2*>(x + static_cast<size_t>(row) * columns + column);
        const u32 each[2] = {words.x, words.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float* to = v + 4 * half + 2 * i;
#if X_F16
            const float2 both = __half22float2(as_halves(each[i]));
            to[0] = both.x * powers[row];
            to[1] = both.y * powers[row];
#else
            to[0] = __uint_as_float(each[i] << 16);
            to[1] = __uint_as_float(each[i] & 0xFFFF0000u);
#endif
        }
    }
    write_halves<LANES>(v, unit.piece(pieces, groups), unit.place % 8);
}

// Writes pieces of the experts' inner values, which are in the order of places: inner [8 * groups, width].
extern "C" __global__ void __launch_bounds__(256)
halve_inner(const float* inner, const int* order, u8* pieces, int width, int records, int groups) {
    begin_after_last();
    const Unit unit(records);
    if (unit.place >= groups * 8 || order[unit.place] < 0) return;
    float v[8];
    read_fours(inner + static_cast<size_t>(unit.place) * width, unit.column, width, v);
    write_halves<LANES>(v, unit.piece(pieces, groups), unit.place % 8);
}

// The weighted sum of each row's answers, the best expert first. blockIdx.x: the row.
extern "C" __global__ void __launch_bounds__(256)
sum_answers(const float* answers, const int* ids, const float* weights, int used, int hidden, const float* residual,
            const float* shared_out, const float* logits, int stride, float* out) {
    begin_after_last();
    const int row = blockIdx.x;
    const Addends addends{residual, shared_out, logits, stride};
    for (int column = threadIdx.x * 4; column < hidden; column += 1024) {
        float sums[4] = {};
        for (int pick = row * used; pick < row * used + used; ++pick) {
            if (ids[pick] < 0) continue;
            const float by = weights[pick];
            const float4 answer =
                *reinterpret_cast<const float4*>(answers + static_cast<size_t>(pick) * hidden + column);
            sums[0] = fmaf(by, answer.x, sums[0]);
            sums[1] = fmaf(by, answer.y, sums[1]);
            sums[2] = fmaf(by, answer.z, sums[2]);
            sums[3] = fmaf(by, answer.w, sums[3]);
        }
        const size_t at = static_cast<size_t>(row) * hidden + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[at + i] = addends.add(sums[i], row, at + i);
    }
}
