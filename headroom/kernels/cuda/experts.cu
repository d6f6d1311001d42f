// Routed experts for few rows (decode path). A pick is one expert chosen by one row; the shared expert, if
// there is one, is one more pick per row, numbered after all routed picks.
//
// Two kernels: `gate_up` computes act(gate x) * up x of each pick, 16 columns per block; `down` computes
// the weighted sum of each row's experts, 16 output columns per block.
//
//   GATE, UP, DOWN             types of a routed expert's matrices
//   SHARED_GATE, SHARED_UP, SHARED_DOWN   types of the shared expert's matrices
//   GELU                       the activation is GELU, else silu
//   LANES                      lanes of a piece of activations (halves.cuh)
//   AHEAD                      gate_up prefetches the down matrices into L2
//   EXPERTS, SIGMOID           defined if gate_up also chooses the experts (route.cuh)
//   FILLS                      1: experts of this layer may cross the link into slots meanwhile (fill.cuh)
//
// table [experts][3]: the addresses of an expert's tiles, in this GPU's memory or in mapped host memory.
#define BULK 0  // no bulk copies: records may be in host memory
#include "plain.cuh"
#include "ring.cuh"
#include "experts.cuh"
#ifdef EXPERTS
#include "route.cuh"
#endif
#ifndef FILLS
#define FILLS 0
#endif
#if FILLS
#include "mailbox.cuh"
#include "fill.cuh"
#else
struct Fills {};
#endif

#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef STAGES  // gate_up: records of a warp's ring
#define STAGES 1
#endif
#define TURNS 4  // warps that divide the columns of a tile; this fixes the order of the sums
#define MOST_WARPS 20  // most warps of a block of `down`

// Multiplies records first, first + step, ... of a tile with one row of activations: row % 8 of pieces that
// are `apart` bytes from each other. Packed records go through the warp's ring of STAGES stages in shared
// memory, so that several are in flight without registers. Plain records are long; they are loaded to
// registers, one ahead.
template <int K>
__device__ __forceinline__ void add_row(const u8* tile, const u8* pieces, size_t apart, int row, int first,
                                        int step, int records, u8* memory, float (*acc)[2]) {
    constexpr int BYTES = Record<K>::bytes;
    const int lane = threadIdx.x % 32;
    SingleRow<K, LANES> x;
    if constexpr (is_plain(K)) {
        Share<K> share, next;
        if (first < records) next.template load<true>(tile + static_cast<size_t>(first) * BYTES, lane);
        for (int r = first; r < records; r += step) {
            x.load(pieces + r * apart, row % 8, lane);
            share = next;
            if (r + step < records) next.template load<true>(tile + static_cast<size_t>(r + step) * BYTES, lane);
            x.template add<1>(&share, acc);
        }
    } else {
        Ring<STAGES, 1, BYTES> ring{memory, nullptr, lane};
        int asked = first, stage = 0;
        for (; stage < STAGES; ++stage, asked += step)
            ring.ask(stage, asked < records ? tile + static_cast<size_t>(asked) * BYTES : nullptr, 0);
        stage = 0;
        for (int r = first; r < records; r += step, asked += step) {
            Share<K> share;
            x.load(pieces + r * apart, row % 8, lane);
            share.template load<false>(ring.wait(stage, 0), lane);
            x.template add<1>(&share, acc);
            ring.ask(stage, asked < records ? tile + static_cast<size_t>(asked) * BYTES : nullptr, 0);
            if (++stage == STAGES) stage = 0;
        }
    }
}

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
// Bytes of one stage of a warp's ring.
template <int K> __host__ __device__ constexpr int ring_bytes() { return is_plain(K) ? 0 : Record<K>::bytes; }

// Writes the sums of weight rows g and g + 8 to `out [16]`.
__device__ __forceinline__ void write_column(const float* acc, float* out) {
    const int lane = threadIdx.x % 32;
    if (lane % 4) return;
    out[lane / 4] = acc[0];
    out[lane / 4 + 8] = acc[1];
}

// Prefetches this block's share of some bytes into L2.
__device__ __forceinline__ void ask_ahead(const u8* from, int bytes, int share, int shares) {
#if AHEAD && !defined(HEADROOM_ON_CPU)
    for (int i = (share * blockDim.x + threadIdx.x) * 128; i < bytes; i += shares * blockDim.x * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
#endif
}

// A choice of experts that another kernel (route.cu) has made.
struct Given {
    const int* ids;

    __device__ __forceinline__ int expert_of(int, int pick, int, bool) const { return ids[pick]; }
};

// The body of gate_up and choose_gate_up for one pick; `choice` tells each warp the expert of the pick.
template <class Choice>
__device__ __forceinline__ void run_pick(const Choice& choice, int pick, const Fills& fills, const long long* table,
                                         const u8* pieces, int groups, int used, int picks, int width, int records,
                                         const u8* shared_gate, const u8* shared_up, int shared_width,
                                         int down_bytes, float* inner, long long* downs) {
    extern __shared__ uint4 memory[];
    __shared__ float sums[2][TURNS][16];  // [gate, up]
    const int tile = blockIdx.x, warp = threadIdx.x / 32, part = warp % 2, turn = warp / 2;
    const bool is_shared = pick >= picks;
    const int row = is_shared ? pick - picks : pick / used, columns = is_shared ? shared_width : width;
    if (tile * 16 >= columns) return;
    const u8* matrix = part ? shared_up : shared_gate;
    const u8* last = nullptr;
    if (!is_shared) {
        const int expert = choice.expert_of(row, pick, used, tile == 0 && warp == 0);
        if (expert >= 0) {
            matrix = reinterpret_cast<const u8*>(table[expert * 3 + part]);
            last = reinterpret_cast<const u8*>(table[expert * 3 + 2]);
        }
        if (tile == 0 && threadIdx.x == 0) downs[pick] = reinterpret_cast<long long>(last);
        if (expert < 0) return;
#if FILLS
        // Its place in host memory is as far from the expert's begin as its place in the slot.
        if (!has_arrived(fills, pick)) matrix = in_host_memory(fills, pick) + (matrix - in_slot(fills, pick));
#endif
    }
    const u8* x = pieces + row / 8 * Piece<LANES>::bytes;
    const size_t at = static_cast<size_t>(tile) * records, apart = static_cast<size_t>(groups) * Piece<LANES>::bytes;
    float acc[1][2] = {};
    constexpr int most = max_of(max_of(ring_bytes<GATE>(), ring_bytes<UP>()),
                                max_of(ring_bytes<SHARED_GATE>(), ring_bytes<SHARED_UP>()));
    u8* mine = reinterpret_cast<u8*>(memory) + warp * STAGES * most;
    if (!is_shared || (GATE == SHARED_GATE && UP == SHARED_UP)) {
        if (GATE == UP || part == 0)
            add_row<GATE>(matrix + at * Record<GATE>::bytes, x, apart, row, turn, TURNS, records, mine, acc);
        else
            add_row<UP>(matrix + at * Record<UP>::bytes, x, apart, row, turn, TURNS, records, mine, acc);
    } else if (SHARED_GATE == SHARED_UP || part == 0) {
        add_row<SHARED_GATE>(matrix + at * Record<SHARED_GATE>::bytes, x, apart, row, turn, TURNS, records, mine,
                             acc);
    } else {
        add_row<SHARED_UP>(matrix + at * Record<SHARED_UP>::bytes, x, apart, row, turn, TURNS, records, mine,
                           acc);
    }
#if FILLS
    if (!is_shared && is_in_slot(fills, pick, last)) ask_ahead(last, down_bytes, tile, gridDim.x);
#else
    if (!is_shared) ask_ahead(last, down_bytes, tile, gridDim.x);
#endif
    write_column(acc[0], sums[part][turn]);
    __syncthreads();
    const int column = tile * 16 + threadIdx.x;
    if (threadIdx.x >= 16 || column >= columns) return;
    float gate = 0, up = 0;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        gate += sums[0][i][threadIdx.x];
        up += sums[1][i][threadIdx.x];
    }
    const size_t first = is_shared
                             ? static_cast<size_t>(picks) * width + static_cast<size_t>(row) * shared_width
                             : static_cast<size_t>(pick) * width;
    inner[first + column] = activated(gate) * up;
}

// inner = act(gate x) * up x: [picks, width] of the routed picks, then [rows, shared_width] of the shared
// expert. downs [picks]: the addresses of the picks' down matrices, 0 where there is no expert. blockIdx:
// 16 columns, pick.
extern "C" __global__ void __launch_bounds__(2 * TURNS * 32)
gate_up(const int* ids, const long long* table, const u8* pieces, int groups, int used, int picks, int width,
        int records, const u8* shared_gate, const u8* shared_up, int shared_width, int down_bytes, float* inner,
        long long* downs) {
    begin_after_last();
    run_pick(Given{ids}, blockIdx.y, Fills{}, table, pieces, groups, used, picks, width, records, shared_gate,
             shared_up, shared_width, down_bytes, inner, downs);
}

#if FILLS
// As gate_up, after `resolve`. The first `copying` rows of blocks copy fills; they come first, so that blocks
// that wait for a fill find the copying blocks on the GPU.
extern "C" __global__ void __launch_bounds__(2 * TURNS * 32)
fill_gate_up(const int* ids, const long long* table, const u8* pieces, int groups, int used, int picks, int width,
             int records, const u8* shared_gate, const u8* shared_up, int shared_width, int down_bytes, float* inner,
             long long* downs, u32* words, const u8* host, u8* slots, int count, int expert_bytes, int front_bytes,
             int copying) {
    begin_after_last();
    const Fills fills{words, host, slots, count, expert_bytes, front_bytes};
    const int row = blockIdx.y;
    if (row < copying) copy_fills(fills, row * gridDim.x + blockIdx.x, copying * gridDim.x);
    else
        run_pick(Given{ids}, row - copying, fills, table, pieces, groups, used, picks, width, records, shared_gate,
                 shared_up, shared_width, down_bytes, inner, downs);
}
#endif

#ifdef EXPERTS
// A choice of experts that every warp computes for itself from the logits (route.cuh): this takes less time
// than to wait for a separate kernel. One warp per pick writes the weight for `down` and counts the pick.
struct Chosen {
    const float* logits;  // rows are `stride` floats apart
    const float* bias;
    const int* sequence;
    float* weights;
    unsigned long long* counts;
    int stride;
    Rule rule;

    __device__ __forceinline__ int expert_of(int row, int pick, int used, bool first) const {
        const int lane = threadIdx.x % 32;
        if (sequence[row] < 0) {
            if (first && lane == 0) weights[pick] = 0.0f;
            return -1;
        }
        int chosen;
        const float weight = choose(logits + static_cast<size_t>(row) * stride, bias, rule, lane, chosen);
        if (first && lane == pick % used) {
            weights[pick] = weight;
            atomicAdd(counts + chosen, 1ull);
        }
        return __shfl_sync(ALL, chosen, pick % used);
    }
};

extern "C" __global__ void __launch_bounds__(2 * TURNS * 32)
choose_gate_up(const float* logits, const float* bias, const int* sequence, float* weights, unsigned long long* counts,
               int stride, int normalise, float scale, float softcap, const long long* table, const u8* pieces,
               int groups, int used, int picks, int width, int records, const u8* shared_gate, const u8* shared_up,
               int shared_width, int down_bytes, float* inner, long long* downs) {
    begin_after_last();
    const Chosen choice{logits, bias, sequence, weights, counts, stride, Rule{used, normalise, scale, softcap}};
    run_pick(choice, blockIdx.y, Fills{}, table, pieces, groups, used, picks, width, records, shared_gate, shared_up,
             shared_width, down_bytes, inner, downs);
}
#endif

// Multiplies one record with 256 columns of an expert's inner values, of which `count` exist: sums of
// weight rows g and g + 8. Each warp converts the values to a piece itself.
template <int K>
__device__ __forceinline__ void add_inner(const u8* record, const float* values, int count, u8* piece, float* sum) {
    const int lane = threadIdx.x % 32;
    Share<K> share;
    share.template load<true>(record, lane);
    float v[8], acc[1][2] = {};
    read_fours(values, lane_column(), count, v);  // widths are multiples of eight
    __syncwarp();  // all lanes have read the previous piece
    write_halves<4>(v, piece, 0);
    __syncwarp();
    SingleRow<K, 4> x;
    x.load(piece, 0, lane);
    x.template add<1>(&share, acc);
    sum[0] = acc[0][0];
    sum[1] = acc[0][1];
}

// The weighted sum of a row's experts for sixteen columns of the output. blockIdx: tile, row. A unit is one
// record of one expert; warps divide the units, and their sums are added in the order of the units, however
// many warps.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32)
down(const long long* downs, const float* weights, const float* inner, int used, int picks, int width, int hidden,
     int records, const u8* shared_down, int shared_width, int shared_records, const float* residual,
     const float* shared_out, const float* logits, int stride, float* out) {
    begin_after_last();
    extern __shared__ uint4 memory[];
    const int warp = threadIdx.x / 32, row = blockIdx.y, routed = used * records;
    const int units = routed + shared_records;
    float* sums = reinterpret_cast<float*>(memory);  // [units][16]
    u8* piece = reinterpret_cast<u8*>(memory) + units * 64 + warp * Piece<4>::bytes;
    for (int unit = warp; unit < units; unit += blockDim.x / 32) {
        const bool is_shared = unit >= routed;
        const int pick = is_shared ? picks : row * used + unit / records;
        const int r = is_shared ? unit - routed : unit % records;
        const u8* matrix = is_shared ? shared_down : reinterpret_cast<const u8*>(downs[pick]);
        float sum[2] = {}, weight = 1.0f;
        if (!is_shared) weight = weights[pick];
        else if (logits) weight = 1.0f / (1.0f + expf(-logits[row * stride]));
        const size_t record = static_cast<size_t>(blockIdx.x) * (is_shared ? shared_records : records) + r;
        const float* values =
            inner + static_cast<size_t>(pick) * width + r * 256 + (is_shared ? row * shared_width : 0);
        const int count = (is_shared ? shared_width : width) - r * 256;
        if (matrix == nullptr) weight = 0.0f;
        else if (!is_shared || DOWN == SHARED_DOWN)
            add_inner<DOWN>(matrix + record * Record<DOWN>::bytes, values, count, piece, sum);
        else
            add_inner<SHARED_DOWN>(matrix + record * Record<SHARED_DOWN>::bytes, values, count, piece, sum);
        sum[0] *= weight;
        sum[1] *= weight;
        write_column(sum, sums + unit * 16);
    }
    __syncthreads();
    const int column = blockIdx.x * 16 + threadIdx.x;
    if (threadIdx.x >= 16 || column >= hidden) return;
    float total = 0;
#pragma unroll 8
    for (int unit = 0; unit < units; ++unit) total += sums[unit * 16 + threadIdx.x];
    const size_t at = static_cast<size_t>(row) * hidden + column;
    out[at] = Addends{residual, shared_out, logits, stride}.add(total, row, at);
}
