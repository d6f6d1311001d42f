// Grouped matrix products: rows sorted by expert times their expert's unpacked matrix, with sums in f32.
// ROWS: most rows of a tile, 64 or 128; STAGES: parts of a tile in shared memory; HALVES: 0: bf16 operands,
// bf16 results, for sm_80 and later; 1: f16 operands, f32 results, for all GPUs.
//
// A tile is up to ROWS rows of one expert and OUTPUTS outputs. Only the device knows where an expert's rows
// end: the grid is large enough for the most tiles there can be, and each block looks for its own. Tiles
// are multiplied in parts of 32 columns. Each of the four warps handles all rows of the tile and a quarter
// of its outputs, so that missing rows cost nothing. Sums run over the columns in one order, sixteen at a
// time: a row has the same bits in every tile.
#include "types.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include <cuda_bf16.h>

#define OUTPUTS 128
#define WARPS 4
#define THREADS (32 * WARPS)
#define PART 32                            // columns of a part
#define LINE (2 * PART)                    // bytes of a row of a part in shared memory
#define STAGE_BYTES ((ROWS + OUTPUTS) * LINE)
#define ANSWER 80                          // bytes from one row of a warp's results to the next: other banks

#if HALVES
typedef float Answer;
#else
typedef u16 Answer;
#endif

struct Tile {
    int expert, first, rows;  // first sorted row and number of rows; 0 rows: there is no such tile
};

// Finds the tile with a number; all lanes of a warp call it and get the same result. Each lane counts the
// tiles of its share of the experts; experts without rows have none.
__device__ __forceinline__ Tile find_tile(const int* ends, int experts, int number) {
    const int lane = threadIdx.x % 32, each = (experts + 31) / 32;
    const int begin = min(lane * each, experts), end = min(begin + each, experts);
    int tiles = 0, before = begin ? ends[begin - 1] : 0;
    for (int expert = begin; expert < end; ++expert) {
        tiles += (ends[expert] - before + ROWS - 1) / ROWS;
        before = ends[expert];
    }
    int after = tiles;  // tiles of this lane and of the lanes before it
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int others = __shfl_up_sync(~0u, after, by);
        if (lane >= by) after += others;
    }
    const u32 reached = __ballot_sync(~0u, after > number);
    if (!reached) return {0, 0, 0};
    const int owner = __ffs(reached) - 1;
    int left = number - __shfl_sync(~0u, after - tiles, owner);
    for (int expert = owner * each;; ++expert) {
        const int first = expert ? ends[expert - 1] : 0, rows = ends[expert] - first;
        if (left * ROWS < rows) return {expert, first + left * ROWS, min(ROWS, rows - left * ROWS)};
        left -= (rows + ROWS - 1) / ROWS;
    }
}

// The place of 16 bytes of a row in a stage, swizzled: the same columns of eight rows are in different
// banks, and so are all columns of two rows.
__device__ __forceinline__ int place_of(int row, int chunk) { return row * LINE + (chunk ^ row / 2 % 4) * 16; }

// The addresses of a thread's 16 bytes in each part of up to COUNT rows. Missing rows read the last row
// again.
template <int COUNT> struct Source {
    static constexpr int STEP = THREADS / 4, TURNS = (COUNT + STEP - 1) / STEP;
    const u16* next[TURNS];
    int to;

    __device__ __forceinline__ Source(const u16* from, int rows, int columns) {
        const int row = threadIdx.x / 4, chunk = threadIdx.x % 4;
        to = place_of(row, chunk);
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            next[i] = from + static_cast<size_t>(min(row + i * STEP, rows - 1)) * columns + chunk * 8;
    }
    __device__ __forceinline__ void ask(u8* stage, bool there) {
        ask_all<TURNS>(stage + to, STEP * LINE, next, there);
#pragma unroll
        for (int i = 0; i < TURNS; ++i) next[i] += PART;
    }
};

struct Product {  // the operands and the result of one tile
    const u16 *x, *weight;  // [rows, columns], [outputs, columns]
    Answer* out;            // [rows, outputs]; rows are `width` numbers apart
    int rows, outputs, columns, width;
};

// Writes the warp's sums; shared memory is free by now. A lane has rows g and g + 8 and columns 2t and 2t +
// 1 of every sixteen rows and eight outputs.
template <int LIVE>
__device__ __forceinline__ void write_answers(const Product& p, const float (&sums)[LIVE][4][4], u8* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if HALVES
#pragma unroll
    for (int i = 0; i < 2 * LIVE; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = i * 8 + lane / 4, column = 32 * warp + j * 8 + lane % 4 * 2;
            const float* pair = sums[i / 2][j] + i % 2 * 2;
            if (row < p.rows && column < p.outputs)
                *reinterpret_cast<float2*>(p.out + static_cast<size_t>(row) * p.width + column) =
                    make_float2(pair[0], pair[1]);
        }
#else
    u8* own = memory + warp * ROWS * ANSWER;
#pragma unroll
    for (int i = 0; i < LIVE; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float* pair = sums[i][j / 2] + j % 2 * 2;
            u8* to = own + (i * 16 + j % 2 * 8 + lane / 4) * ANSWER + j / 2 * 16 + lane % 4 * 4;
            *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(pair[0], pair[1]);
        }
    __syncwarp();
    const int column = 32 * warp + lane % 4 * 8;
    for (int row = lane / 4; row < p.rows && column < p.outputs; row += 8)
        *reinterpret_cast<uint4*>(p.out + static_cast<size_t>(row) * p.width + column) =
            *reinterpret_cast<const uint4*>(own + row * ANSWER + lane % 4 * 16);
#endif
}

// Multiplies 16 * LIVE rows of a tile with the warp's 32 outputs.
template <int LIVE> __device__ __forceinline__ void multiply_tile(const Product& p, u8* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = (p.columns + PART - 1) / PART;
    Source<16 * LIVE> of_x(p.x, p.rows, p.columns);
    Source<OUTPUTS> of_weight(p.weight, p.outputs, p.columns);
    const auto ask = [&](int stage, int part) {
        if (part < parts) {
            const bool there = part * PART + static_cast<int>(threadIdx.x) % 4 * 8 < p.columns;  // else zeros
            of_x.ask(memory + stage * STAGE_BYTES, there);
            of_weight.ask(memory + stage * STAGE_BYTES + ROWS * LINE, there);
        }
        end_group();  // even if empty: await_groups counts groups
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) ask(stage, stage);
    // The addresses that each lane gives to `load_four`: 16 rows x 16 columns of x, and 16 outputs x 16
    // columns.
    const int of_rows = place_of(lane % 16, lane / 16);
    const int of_outputs = (ROWS + 32 * warp) * LINE + place_of(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float sums[LIVE][4][4] = {};
    for (int part = 0, stage = 0; part < parts; ++part, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        await_groups<STAGES - 2>();
        __syncthreads();  // the part has arrived for all threads, and all are done with the part before it
        ask(stage ? stage - 1 : STAGES - 1, part + STAGES - 1);
        const u8* here = memory + stage * STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b[4][2];
            load_four(b[0], here + (of_outputs ^ half * 32));
            load_four(b[2], here + (of_outputs ^ half * 32) + 16 * LINE);
#pragma unroll
            for (int i = 0; i < LIVE; ++i) {
                u32 a[4];
                load_four(a, here + (of_rows ^ half * 32) + i * 16 * LINE);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#if HALVES
                    mma(sums[i][j], a, b[j][0], b[j][1]);
#else
                    mma_bf16(sums[i][j], a, b[j]);
#endif
            }
        }
    }
    __syncthreads();  // all threads are done with the last part
    write_answers<LIVE>(p, sums, memory);
}

// x [picks, columns], weights [experts, width, columns], out [picks, width]; ends [experts]: one past an
// expert's last row. Columns and width are multiples of 8. blockIdx.y: the number of the tile's rows;
// blockIdx.z * gridDim.x + blockIdx.x: its OUTPUTS outputs. Blocks that run at the same time share rows and
// an expert's outputs, so that L2 serves most of their reads.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 64 ? 3 : 2)
grouped(const u16* x, const u16* weights, const int* ends, Answer* out, int experts, int width, int columns) {
    extern __shared__ __align__(128) float shared[];
    const int first = (blockIdx.z * gridDim.x + blockIdx.x) * OUTPUTS, outputs = min(OUTPUTS, width - first);
    if (outputs <= 0) return;
    const Tile tile = find_tile(ends, experts, blockIdx.y);
    if (tile.rows == 0) return;
    const size_t row = tile.first, output = static_cast<size_t>(tile.expert) * width + first;
    const Product p{x + row * columns, weights + output * columns, out + row * width + first,
                    tile.rows, outputs, columns, width};
    u8* memory = reinterpret_cast<u8*>(shared);
    constexpr int QUARTER = ROWS / 64;  // a quarter of a tile's rows, in units of sixteen rows
    if (p.rows <= ROWS / 4) multiply_tile<QUARTER>(p, memory);
    else if (p.rows <= ROWS / 2) multiply_tile<2 * QUARTER>(p, memory);
    else if (p.rows <= ROWS / 4 * 3) multiply_tile<3 * QUARTER>(p, memory);
    else multiply_tile<4 * QUARTER>(p, memory);
}
