// Products of few rows with weights in tiles, packed or plain, on the tensor cores.
//
// A block has WAYS * SIDE warps. WAYS warps divide the records (columns) of the same tiles among them; SIDE
// such teams work on different tiles. Each warp keeps STAGES records in flight in its ring (ring.cuh).
//
// Compile-time settings:
//   KIND    the weight's type
//   GROUPS  groups of eight rows of activations
//   SPLIT   partial sums over a tile's columns; it fixes the order of summation, whatever WAYS is
//   WAYS    warps that divide the columns: SPLIT or SPLIT / 2
//   HEIGHT  tiles that a warp multiplies at a time
//   SIDE    teams of warps of a block
//   STAGES  records of a warp's ring
//   LANES   lanes of a piece of activations; 32 if there are several groups
//   SHARED  activation pieces that the SIDE warps with the same columns prefetch together; 0: each warp reads
//           the activations itself
#include "plain.cuh"
#include "ring.cuh"

#define PARTS (SPLIT / WAYS)   // partial sums of a warp: one or two
#define WARPS (WAYS * SIDE)
#define TILES (SIDE * HEIGHT)  // tiles that a block works on at a time
#define SINGLE (LANES == 4)    // there is a single row
#ifndef SHARED
#define SHARED 0
#endif
#define PITCH 20               // floats from one row of sums to the next: avoids bank conflicts

// Up to four matrices of one type that share their input are stored one after another; each has its own
// output. All columns of a tile belong to one output: all matrices but the last consist of whole tiles.
struct Outputs {
    float* out[4];
    int end[4];  // one past the last column of each, counted over all matrices

    __device__ __forceinline__ void write(int tile, int row, int i, float value, const float* add) const {
        const int first = tile * 16, column = first + i;
        const int which = (first >= end[0]) + (first >= end[1]) + (first >= end[2]);
        const int begin = which == 0 ? 0 : which == 1 ? end[0] : which == 2 ? end[1] : end[2];
        const int last = which == 0 ? end[0] : which == 1 ? end[1] : which == 2 ? end[2] : end[3];
        float* to = which == 0 ? out[0] : which == 1 ? out[1] : which == 2 ? out[2] : out[3];
        if (column >= last) return;
        const size_t at = static_cast<size_t>(row) * (last - begin) + column - begin;
        to[at] = value + (add ? add[at] : 0.0f);
    }
};

// The records that one warp reads: every WAYS-th record of its tiles, tile after tile.
struct Walk {
    const u8* weight;
    int first, tiles, stride, side, record, way, records;

    // The address of the next record; null after the last.
    __device__ __forceinline__ const u8* next() {
        if (first >= tiles || way >= records) return nullptr;
        // If the last HEIGHT tiles reach beyond the end, read the last ones of the weight instead.
        const int from = max(0, min(first + side * HEIGHT, tiles - HEIGHT));
        const u8* at = weight + (static_cast<size_t>(from) * records + record) * Record<KIND>::bytes;
        record += WAYS;
        if (record >= records) {
            record = way;
            first += stride;
        }
        return at;
    }
};

#if SHARED && BULK
#define TOGETHER 1
// Activation pieces in shared memory, for the SIDE warps that work on the same columns. One lane (`leads`)
// fills the SHARED stages; `full` says that a stage has arrived, `empty` that all SIDE warps have used it.
struct Pieces {
    static constexpr int size = GROUPS * Piece<LANES>::bytes;
    u8* memory;         // [SHARED][size]
    u64 *full, *empty;  // [SHARED] barriers
    const u8* x;
    int way, own, left;  // first record, records of a tile, pieces still to be copied
    int next;            // number of the next one among the records of a tile

    __device__ __forceinline__ void begin() {
        for (int i = 0; i < SHARED; ++i) {
            set_barrier(full + i, 1);
            set_barrier(empty + i, SIDE);
        }
        show_barriers();
    }
    __device__ __forceinline__ void ask(int stage) {
        if (left == 0) return;
        --left;
        expect(full + stage, size);
        copy_bulk(memory + stage * size, x + static_cast<size_t>(way + next * WAYS) * size, size, full + stage);
        next = next + 1 == own ? 0 : next + 1;
    }
};
#else
#define TOGETHER 0
#endif

// Adds the partial sums of all warps in an order that depends on SPLIT only: partial sum w plus partial sum
// w + SPLIT / 2, then these one after another. A warp with two partial sums has added its two already.
__device__ __forceinline__ float total_of(const float* part) {
    constexpr int apart = HEIGHT * 8 * GROUPS * PITCH, half = PARTS > 1 || SPLIT == 1 ? WAYS : WAYS / 2;
    float total = 0;
#pragma unroll
    for (int w = 0; w < half; ++w) {
        float sum = part[w * apart];
        if constexpr (half < WAYS) sum += part[(w + half) * apart];
        total = w ? total + sum : sum;
    }
    return total;
}

// out [rows, its columns] = x times the weight's transpose, for each output; plus `add` of the same shape,
// if given (then there is one output). A block computes tiles blockIdx.x * TILES .., and then every
// gridDim.x-th such batch. x: pieces [record][group of eight rows].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
product(const u8* weight, const u8* x, const float* add, float* out0, float* out1, float* out2, float* out3,
        int end0, int end1, int end2, int end3, int rows, int records) {
    extern __shared__ __align__(16) float shared[];
    __shared__ u64 barriers[WARPS][STAGES];
    constexpr int BYTES = Record<KIND>::bytes, OWN = STAGES * HEIGHT * BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int way = warp % WAYS, side = warp / WAYS, tiles = (end3 + 15) / 16;
    float* sums = shared + WARPS * OWN / 4;  // [warp][HEIGHT][8 * GROUPS][PITCH]
    Ring<STAGES, HEIGHT, BYTES> ring{reinterpret_cast<u8*>(shared) + warp * OWN, barriers[warp], lane};
    const size_t apart = tiles >= HEIGHT ? static_cast<size_t>(records) * BYTES : 0;
    Walk ahead{weight, static_cast<int>(blockIdx.x) * TILES, tiles, static_cast<int>(gridDim.x) * TILES,
               side, way, way, records};
    ring.begin();
    for (int i = 0; i < STAGES; ++i) ring.ask(i, ahead.next(), apart);
#if TOGETHER
    __shared__ u64 gates[WAYS][2 * SHARED];
    const int own = (records - way + WAYS - 1) / WAYS;
    const int units = (tiles - static_cast<int>(blockIdx.x) * TILES + gridDim.x * TILES - 1) / (gridDim.x * TILES);
    u8* room = reinterpret_cast<u8*>(sums + WARPS * HEIGHT * 8 * GROUPS * PITCH);
    Pieces together{room + way * SHARED * Pieces::size, gates[way], gates[way] + SHARED, x, way, own,
                    own * units, 0};
    const bool leads = side == 0 && lane == 0;
    if (leads) together.begin();
    __syncthreads();
#endif
    let_next_begin();
    wait_for_last();
#if TOGETHER
    if (leads)
        for (int i = 0; i < SHARED; ++i) together.ask(i);
    int place = 0, round = 0;
#endif

    Slot slots[GROUPS];
    constexpr int last = LANES / 4 - 1;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
        slots[n] = Slot{n * 8 + g < rows ? lane : t, {min(2 * t, last), min(2 * t + 1, last)}};
    int stage = 0, turn = 0;
    for (int first = blockIdx.x * TILES; first < tiles; first += gridDim.x * TILES) {
        float acc[PARTS][HEIGHT][GROUPS][4] = {}, single[HEIGHT][2] = {};
        for (int r = way; r < records;) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (r >= records) break;
                // Read the activations before waiting for the record; one group all at once.
#if TOGETHER
                wait_barrier(together.full + place, round);
                const u8* pieces = together.memory + place * Pieces::size;
#else
                const u8* pieces = x + static_cast<size_t>(r) * GROUPS * Piece<LANES>::bytes;
#endif
                SingleRow<KIND, LANES> row;
                Rows<LANES, GROUPS, !TOGETHER && GROUPS == 1> many;
                if constexpr (SINGLE) row.load(pieces, 0, lane);
                else many.load(pieces, slots);
                const u8* record = ring.wait(stage, turn);
                typename SharedShare<KIND>::Type share[HEIGHT];
#pragma unroll
                for (int m = 0; m < HEIGHT; ++m) share[m].template load<false>(record + m * BYTES, lane);
                if constexpr (SINGLE) row.template add<HEIGHT>(share, single);
                else add_any<KIND, HEIGHT, GROUPS>(share, many, acc[part]);
                ring.ask(stage, ahead.next(), apart);
#if TOGETHER
                if (lane == 0) arrive(together.empty + place);
                if (leads) {
                    wait_barrier(together.empty + place, round);
                    together.ask(place);
                }
                if (++place == SHARED) {
                    place = 0;
                    ++round;
                }
#endif
                if (++stage == STAGES) {
                    stage = 0;
                    ++turn;
                }
                r += WAYS;
            }
        }
        float* mine = sums + warp * HEIGHT * 8 * GROUPS * PITCH;
#pragma unroll
        for (int m = 0; m < HEIGHT; ++m) {
            if constexpr (SINGLE) {
                if (t < 2) mine[m * 8 * PITCH + g + t * 8] = t ? single[m][1] : single[m][0];
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4 * GROUPS; ++i) {
                float sum = acc[0][m][i / 4][i % 4];
                if constexpr (PARTS > 1) sum += acc[PARTS - 1][m][i / 4][i % 4];
                mine[((m * GROUPS + i / 4) * 8 + 2 * t + i % 2) * PITCH + g + i % 4 / 2 * 8] = sum;
            }
        }
        __syncthreads();
        const Outputs outputs{{out0, out1, out2, out3}, {end0, end1, end2, end3}};
        for (int i = threadIdx.x; i < TILES * GROUPS * 128; i += WARPS * 32) {
            const int of_block = i / (GROUPS * 128), own = of_block / HEIGHT;
            const int row = i / 16 % (GROUPS * 8), wanted = first + of_block;
            if (row >= rows || wanted >= tiles) continue;
            // The place of the tile among those that its warp has read (see Walk::next).
            const int from = max(0, min(first + own * HEIGHT, tiles - HEIGHT));
            const int at = wanted - from;
            const float* part = sums + ((own * WAYS * HEIGHT + at) * 8 * GROUPS + row) * PITCH + i % 16;
            outputs.write(wanted, row, i % 16, total_of(part), add);
        }
        __syncthreads();
    }
}
