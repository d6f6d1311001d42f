// Routed experts for short prompts: rows sorted by expert (sorted.cuh) are multiplied directly with the
// packed tiles of their expert; no weights are unpacked to memory.
// GATED: 1: gate and up matrices, 0: down; A_KIND, B_KIND: the types of the two weight tiles of a pair:
// gate and up, or twice down; GELU: the activation is GELU, else silu; WARPS: warps of a block; STAGES:
// pairs of records in a warp's ring.
//
// A warp multiplies a pair of weight tiles with a tile of rows, record after record. The order of the sums
// does not depend on the tile of rows, so a row has the same bits in every tile.
#include "plain.cuh"
#include "ring.cuh"
#include "sorted.cuh"
#include "experts.cuh"

// Warps per multiprocessor. With 16 a thread has 128 registers; 25 to 32 rows would use a few more, but
// with half the warps less of the latency of loads would be hidden.
#define MOST_WARPS 16

struct Pair {
    const u8 *first, *second;  // addresses of two records; null: none
};

// A warp's ring of pairs of records of FIRST and SECOND bytes.
template <int FIRST, int SECOND> struct PairRing {
    Ring<STAGES, 1, FIRST> first;
    Ring<STAGES, 1, SECOND> second;

    __device__ __forceinline__ PairRing(u8* memory, u64* barriers, int lane)
        : first{memory, barriers, lane}, second{memory + STAGES * FIRST, barriers + STAGES, lane} {
        first.begin();
        second.begin();
    }
    __device__ __forceinline__ void ask(int stage, const Pair& from) {
        first.ask(stage, from.first, 0);
        second.ask(stage, from.second, 0);
    }
    __device__ __forceinline__ Pair wait(int stage, int turn) const {
        return {first.wait(stage, turn), second.wait(stage, turn)};
    }
};
// If both records have the same size, a stage holds both.
template <int BYTES> struct PairRing<BYTES, BYTES> {
    Ring<STAGES, 2, BYTES> both;

    __device__ __forceinline__ PairRing(u8* memory, u64* barriers, int lane) : both{memory, barriers, lane} {
        both.begin();
    }
    __device__ __forceinline__ void ask(int stage, const Pair& from) {
        both.ask(stage, from.first, static_cast<size_t>(from.second - from.first));
    }
    __device__ __forceinline__ Pair wait(int stage, int turn) const {
        const u8* at = both.wait(stage, turn);
        return {at, at + BYTES};
    }
};

// What a warp multiplies with a tile of rows: pairs first, first + step, ... of weight tiles.
struct Work {
    int first, step, pairs, records, rows;
    const u8* pieces;  // the rows' activations for the first record
    size_t apart;      // bytes to those of the next record
};

// Multiplies the pairs of `work` with N groups of rows. find(pair) returns the addresses of both tiles of a
// pair; put(pair, sums) receives their products.
template <int A, int B, int N, class Find, class Put>
__device__ __forceinline__ void multiply_pairs(const Work& work, u8* memory, u64* barriers, Find find, Put put) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    PairRing<Record<A>::bytes, Record<B>::bytes> ring(memory, barriers, lane);
    int ahead = work.first, record = 0;
    const auto next = [&]() -> Pair {
        if (ahead >= work.pairs) return {nullptr, nullptr};
        Pair at = find(ahead);
        at.first += static_cast<size_t>(record) * Record<A>::bytes;
        at.second += static_cast<size_t>(record) * Record<B>::bytes;
        if (++record == work.records) {
            record = 0;
            ahead += work.step;
        }
        return at;
    };
    for (int i = 0; i < STAGES; ++i) ring.ask(i, next());
    Slot slots[N];
#pragma unroll
    for (int n = 0; n < N; ++n) slots[n] = Slot{n * 8 + g < work.rows ? lane : t, {2 * t, 2 * t + 1}};
    int stage = 0, turn = 0;
    for (int pair = work.first; pair < work.pairs; pair += work.step) {
        float acc[2][N][4] = {};
        const u8* pieces = work.pieces;
        for (int r = 0; r < work.records; ++r, pieces += work.apart) {
            Rows<LANES, N, N == 1> rows;
            rows.load(pieces, slots);
            const Pair here = ring.wait(stage, turn);
            if constexpr (A == B) {
                typename SharedShare<A>::Type share[2];
                share[0].template load<false>(here.first, lane);
                share[1].template load<false>(here.second, lane);
                add_any<A, 2, N>(share, rows, acc);
            } else {
                typename SharedShare<A>::Type first;
                first.template load<false>(here.first, lane);
                add_any<A, 1, N>(&first, rows, acc);
                typename SharedShare<B>::Type second;
                second.template load<false>(here.second, lane);
                add_any<B, 1, N>(&second, rows, acc + 1);
            }
            ring.ask(stage, next());
            if (++stage == STAGES) {
                stage = 0;
                ++turn;
            }
        }
        put(pair, acc);
    }
}

// multiply_pairs with as many groups as the tile of rows has.
template <int A, int B, class Find, class Put>
__device__ __forceinline__ void multiply_any(const Work& work, Find find, Put put) {
    extern __shared__ __align__(16) float shared[];
    __shared__ u64 barriers[WARPS][2 * STAGES];
    const int warp = threadIdx.x / 32;
    u8* memory = reinterpret_cast<u8*>(shared) + warp * STAGES * (Record<A>::bytes + Record<B>::bytes);
    switch ((work.rows + 7) / 8) {
    case 1: return multiply_pairs<A, B, 1>(work, memory, barriers[warp], find, put);
    case 2: return multiply_pairs<A, B, 2>(work, memory, barriers[warp], find, put);
    case 3: return multiply_pairs<A, B, 3>(work, memory, barriers[warp], find, put);
    default: return multiply_pairs<A, B, 4>(work, memory, barriers[warp], find, put);
    }
}

__device__ __forceinline__ Work work_on(const RowTile& tile, const u8* pieces, int pairs, int records, int groups) {
    const int warp = threadIdx.x / 32;
    const size_t piece = Piece<LANES>::bytes;
    return {static_cast<int>(blockIdx.x) * WARPS + warp, static_cast<int>(gridDim.x) * WARPS, pairs, records, tile.rows,
            pieces + tile.first / 8 * piece, groups * piece};
}

// Structs instead of generic lambdas, which compilers before CUDA 13.4 refuse here.
#if GATED
struct GatesAndUps {
    RowTile tile;
    size_t gate, up;  // bytes of a tile of the gate and the up matrix

    __device__ __forceinline__ Pair operator()(int pair) const {
        return {tile.matrices[0] + pair * gate, tile.matrices[1] + pair * up};
    }
};

struct PutInner {
    RowTile tile;
    float* inner;
    int width;

    template <int N> __device__ __forceinline__ void operator()(int pair, const float (&sums)[2][N][4]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4 * N; ++i) {
            const int row = i / 4 * 8 + 2 * t + i % 2, column = pair * 16 + g + i % 4 / 2 * 8;
            if (row < tile.rows && column < width)
                inner[static_cast<size_t>(tile.first + row) * width + column] =
                    activated(sums[0][i / 4][i % 4]) * sums[1][i / 4][i % 4];
        }
    }
};

// inner [8 * groups, width] = act(gate x) * up x, in the order of places. blockIdx.x: the first pairs of a
// gate tile and an up tile (then every gridDim.x-th batch); blockIdx.y: the tile of rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MOST_WARPS / WARPS)
gate_up(const RowTile* tiles, const u8* pieces, float* inner, int width, int records, int groups) {
    begin_after_last();
    const RowTile tile = tiles[blockIdx.y];
    if (tile.rows == 0) return;
    const GatesAndUps find{tile, static_cast<size_t>(records) * Record<A_KIND>::bytes,
                           static_cast<size_t>(records) * Record<B_KIND>::bytes};
    multiply_any<A_KIND, B_KIND>(work_on(tile, pieces, (width + 15) / 16, records, groups), find,
                                 PutInner{tile, inner, width});
}

#else
struct Neighbours {
    const u8* matrix;
    size_t each;  // bytes of a tile
    int last;

    // If the number of tiles is odd, the last one is paired with itself.
    __device__ __forceinline__ Pair operator()(int pair) const {
        return {matrix + 2 * pair * each, matrix + min(2 * pair + 1, last) * each};
    }
};

struct PutAnswers {
    RowTile tile;
    const int* order;
    float* answers;
    int hidden;

    template <int N> __device__ __forceinline__ void operator()(int pair, const float (&sums)[2][N][4]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            const int row = i / 2 * 8 + 2 * t + i % 2;
            if (row >= tile.rows) continue;
            float* to = answers + static_cast<size_t>(order[tile.first + row]) * hidden;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (const int column = pair * 32 + j * 8 + g; column < hidden)
                    to[column] = sums[j / 2][i / 2][i % 2 + j % 2 * 2];
        }
    }
};

// answers [picks, hidden]: the output of each pick's expert. A pair is two adjacent tiles of the down
// matrix.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MOST_WARPS / WARPS)
down(const RowTile* tiles, const u8* pieces, const int* order, float* answers, int hidden, int records, int groups) {
    begin_after_last();
    const RowTile tile = tiles[blockIdx.y];
    if (tile.rows == 0) return;
    const int last = (hidden - 1) / 16;
    const Neighbours find{tile.matrices[2], static_cast<size_t>(records) * Record<A_KIND>::bytes, last};
    multiply_any<A_KIND, A_KIND>(work_on(tile, pieces, last / 2 + 1, records, groups), find,
                                 PutAnswers{tile, order, answers, hidden});
}
#endif
