// Routed experts of a decode step whose rows may choose the same experts: each distinct expert is read once,
// and multiplied with all rows that chose it. experts.cu reads it once for each row instead, with one kernel
// less; both give the same bits.
//
// A pick is one expert chosen by one row. The block of an expert's first pick works for all its rows; blocks
// of its other picks end at once. Three kernels: `gate_up` computes act(gate x) * up x, 16 columns per block;
// `down` multiplies this with the down matrix, record by record; `sum_products` adds up those of each row.
//
//   GATE, UP, DOWN             types of a routed expert's matrices
//   SHARED_GATE, SHARED_UP, SHARED_DOWN   types of the shared expert's matrices
//   GELU                       the activation is GELU, else silu
//   LANES                      lanes of a piece of activations (halves.cuh)
//   GROUPS                     groups of eight rows that may choose one expert
//   STAGES                     records of a warp's ring in gate_up
//   FILLS                      1: experts of this layer may cross the link into slots meanwhile (fill.cuh)
//
// ids [rows, used]: the picks, -1 for none. table [experts][3]: the addresses of an expert's tiles, in this
// GPU's memory or in mapped host memory. The shared expert, if there is one, is one more pick of all rows.
#define BULK 0  // no bulk copies: records may be in host memory
#include "plain.cuh"
#include "ring.cuh"
#include "experts.cuh"
#if FILLS
#include "mailbox.cuh"
#include "fill.cuh"
#else
struct Fills {};
#endif

#define ALL ~0u
#define TURNS 4   // warps of gate_up that divide the columns of a tile; as in experts.cu, for equal bits
#define WARPS 8   // of a block
#define TILES 16  // of a down matrix, which a block multiplies
#define ROWS 32   // most rows of a step
#define MOST_BLOCKS 2

// Lists the picks of a block's expert in the order of their rows, and returns their number; 0 if another block
// computes them, or if there is no expert. The shared expert has a pick of every row, numbered after all
// others. All threads of a block call this.
__device__ __forceinline__ int list_picks(const int* ids, int pick, int rows, int used, int& expert, int* list) {
    const int lane = threadIdx.x % 32;
    const bool is_shared = pick >= rows * used;
    expert = is_shared ? -1 : ids[pick];
    int own = -1;
    if (is_shared) own = rows * used + lane;
    else if (expert >= 0 && lane < rows)
        for (int at = lane * used; at < (lane + 1) * used; ++at)
            if (ids[at] == expert) own = at;
    const u32 choosers = __ballot_sync(ALL, lane < rows && own >= 0);
    if (!is_shared && __ffs(choosers) - 1 != pick / used) return 0;  // the same for all threads
    if (threadIdx.x < rows && own >= 0) list[__popc(choosers & ((1u << lane) - 1))] = own;
    __syncthreads();
    return __popc(choosers);
}

__device__ __forceinline__ int row_of(int pick, int rows, int used) {
    return pick < rows * used ? pick / used : pick - rows * used;
}

// Where a lane reads the activations of a group of eight rows that are anywhere in a step: offsets from the
// pieces of a record. For a missing row the last one is read: no row's sums depend on another row.
struct Places {
    int words, sums, scales[2];

    __device__ __forceinline__ void find(const int* list, int first, int count, int rows, int used) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int row = row_of(list[min(first + g, count - 1)], rows, used), slot = row % 8 * 4 + t;
        const int piece = row / 8 * Piece<LANES>::bytes;
        words = piece + slot * 16;
        sums = piece + Piece<LANES>::sums + slot * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int of = row_of(list[min(first + 2 * t + i, count - 1)], rows, used);
            scales[i] = of / 8 * Piece<LANES>::bytes + Piece<LANES>::scales + of % 8 * 4;
        }
    }
};

// The activations of such a group for one record, in the place of Rows (tensor.cuh).
struct ChosenRows {
    const u8* pieces;
    const Places& at;

    __device__ __forceinline__ uint4 block(int b, int) const {
        return *reinterpret_cast<const uint4*>(pieces + at.words + b * LANES * 16);
    }
    __device__ __forceinline__ float2 powers(int) const {
        return make_float2(*reinterpret_cast<const float*>(pieces + at.scales[0]),
                           *reinterpret_cast<const float*>(pieces + at.scales[1]));
    }
    __device__ __forceinline__ uint2 sums(int) const { return *reinterpret_cast<const uint2*>(pieces + at.sums); }
};

// What a block of gate_up keeps in shared memory for each group of rows. The sums of a lane stay there between
// records: how many groups there are is known only when the kernel runs, and registers have no index.
struct Group {
    Places places[32];        // by lane
    float4 sums[WARPS * 32];  // by thread: its part of a product's result (mma.cuh)
};

// Multiplies records first, first + TURNS, ... of a tile with `sets` groups of rows. Pieces of a record are
// `apart` bytes from those of the next one. Packed records go through the warp's ring.
template <int K>
__device__ __forceinline__ void multiply(const u8* tile, const u8* pieces, size_t apart, Group* groups, int sets,
                                         int first, int records, u8* memory) {
    constexpr int BYTES = Record<K>::bytes;
    const int lane = threadIdx.x % 32;
    const auto add = [&](const Share<K>& share, int record) {
#pragma unroll 1
        for (int n = 0; n < sets; ++n) {
            float4& sums = groups[n].sums[threadIdx.x];
            float acc[1][1][4] = {{{sums.x, sums.y, sums.z, sums.w}}};
            add_any<K, 1, 1>(&share, ChosenRows{pieces + record * apart, groups[n].places[lane]}, acc);
            sums = make_float4(acc[0][0][0], acc[0][0][1], acc[0][0][2], acc[0][0][3]);
        }
    };
    if constexpr (is_plain(K)) {
        for (int r = first; r < records; r += TURNS) {
            Share<K> share;
            share.template load<true>(tile + static_cast<size_t>(r) * BYTES, lane);
            add(share, r);
        }
    } else {
        Ring<STAGES, 1, BYTES> ring{memory, nullptr, lane};
        int asked = first, stage = 0;
        for (; stage < STAGES; ++stage, asked += TURNS)
            ring.ask(stage, asked < records ? tile + static_cast<size_t>(asked) * BYTES : nullptr, 0);
        stage = 0;
        for (int r = first; r < records; r += TURNS, asked += TURNS) {
            Share<K> share;
            share.template load<false>(ring.wait(stage, 0), lane);
            add(share, r);
            ring.ask(stage, asked < records ? tile + static_cast<size_t>(asked) * BYTES : nullptr, 0);
            if (++stage == STAGES) stage = 0;
        }
    }
}

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
// Bytes of one stage of a warp's ring.
template <int K> __host__ __device__ constexpr int ring_bytes() { return is_plain(K) ? 0 : Record<K>::bytes; }

// inner = act(gate x) * up x: [rows * used, width] of the routed picks, then [rows, shared_width] of the shared
// expert. blockIdx: 16 columns, pick; the first `copying` rows of blocks copy fills instead. They come first,
// so that blocks that wait for a fill find the copying blocks on the GPU.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MOST_BLOCKS)
gate_up(const int* ids, const long long* table, const u8* pieces, int groups, int rows, int used, int width,
        int records, const u8* shared_gate, const u8* shared_up, int shared_width, float* inner, u32* words,
        const u8* host, u8* slots, int count, int expert_bytes, int front_bytes, int copying) {
    begin_after_last();
#if FILLS
    const Fills fills{words, host, slots, count, expert_bytes, front_bytes};
    if (blockIdx.y < copying) {
        copy_fills(fills, blockIdx.y * gridDim.x + blockIdx.x, copying * gridDim.x);
        return;
    }
#endif
    extern __shared__ uint4 memory[];
    __shared__ Group own[GROUPS];
    __shared__ int list[ROWS];
    const int tile = blockIdx.x, warp = threadIdx.x / 32, part = warp % 2, turn = warp / 2;
    const int pick = blockIdx.y - copying, picks = rows * used, lane = threadIdx.x % 32;
    const bool is_shared = pick >= picks;
    const int columns = is_shared ? shared_width : width;
    if (tile * 16 >= columns) return;
    int expert;
    const int choosers = list_picks(ids, pick, rows, used, expert, list), sets = (choosers + 7) / 8;
    if (choosers == 0) return;
    const u8* matrix = part ? shared_up : shared_gate;
    if (!is_shared) {
        matrix = reinterpret_cast<const u8*>(table[expert * 3 + part]);
#if FILLS
        // Its place in host memory is as far from the expert's begin as its place in the slot.
        if (!has_arrived(fills, pick)) matrix = in_host_memory(fills, pick) + (matrix - in_slot(fills, pick));
#endif
    }
    for (int n = warp; n < sets; n += WARPS) own[n].places[lane].find(list, 8 * n, choosers, rows, used);
    for (int n = 0; n < sets; ++n) own[n].sums[threadIdx.x] = make_float4(0, 0, 0, 0);
    __syncthreads();
    const size_t at = static_cast<size_t>(tile) * records, apart = static_cast<size_t>(groups) * Piece<LANES>::bytes;
    constexpr int most = max_of(max_of(ring_bytes<GATE>(), ring_bytes<UP>()),
                                max_of(ring_bytes<SHARED_GATE>(), ring_bytes<SHARED_UP>()));
    u8* mine = reinterpret_cast<u8*>(memory) + warp * STAGES * most;
    if (!is_shared || (GATE == SHARED_GATE && UP == SHARED_UP)) {
        if (GATE == UP || part == 0)
            multiply<GATE>(matrix + at * Record<GATE>::bytes, pieces, apart, own, sets, turn, records, mine);
        else
            multiply<UP>(matrix + at * Record<UP>::bytes, pieces, apart, own, sets, turn, records, mine);
    } else if (SHARED_GATE == SHARED_UP || part == 0) {
        multiply<SHARED_GATE>(matrix + at * Record<SHARED_GATE>::bytes, pieces, apart, own, sets, turn, records,
                              mine);
    } else {
        multiply<SHARED_UP>(matrix + at * Record<SHARED_UP>::bytes, pieces, apart, own, sets, turn, records, mine);
    }
    __syncthreads();
    // Column k of chooser c is one of four sums of lane 4 (k % 8) + c / 2 in each warp.
    const int c = threadIdx.x / 16, k = threadIdx.x % 16, from = (k % 8 * 4 + c / 2) * 4 + c % 2 + k / 8 * 2;
    const int column = tile * 16 + k;
    if (c >= 8 || column >= columns) return;
    for (int n = 0; 8 * n + c < choosers; ++n) {
        const float* sums = reinterpret_cast<const float*>(own[n].sums) + from;
        float gate = 0, up = 0;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            gate += sums[2 * i * 128];
            up += sums[(2 * i + 1) * 128];
        }
        const int at = list[8 * n + c];
        const size_t begin = is_shared
                                 ? static_cast<size_t>(picks) * width + static_cast<size_t>(at - picks) * shared_width
                                 : static_cast<size_t>(at) * width;
        inner[begin + column] = activated(gate) * up;
    }
}

// Multiplies one record of a tile with the groups of a block's piece, and puts the weighted sums of each row.
template <int K, class Put>
__device__ __forceinline__ void multiply_record(const u8* record, const u8* piece, int choosers, Put put) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Share<K> share;
    share.template load<true>(record, lane);
#pragma unroll 1
    for (int n = 0; 8 * n < choosers; ++n) {
        const Slot slot{8 * n + g < choosers ? lane : t, {2 * t, 2 * t + 1}};
        Rows<32, 1, false> rows;
        rows.load(piece + n * Piece<32>::bytes, &slot);
        float acc[1][1][4] = {};
        add_any<K, 1, 1>(&share, rows, acc);
#pragma unroll
        for (int i = 0; i < 4; ++i) put(8 * n + 2 * t + i % 2, g + i / 2 * 8, acc[0][0][i]);
    }
}

// Puts the sums of one tile, weighted as their picks are, to the products of one record.
struct PutProducts {
    const int* list;
    const float* weight_of;  // by place in the list
    float* products;         // of the first pick's record
    size_t apart;            // from those of a pick to those of the next pick
    int first_pick, choosers, column, hidden;

    __device__ __forceinline__ void operator()(int chooser, int row, float sum) const {
        if (chooser >= choosers || column + row >= hidden) return;
        products[(list[chooser] - first_pick) * apart + column + row] = sum * weight_of[chooser];
    }
};

// products [rows * used][records][hidden], then [rows][shared_records][hidden]: what each record of a pick's down
// matrix adds to its row. blockIdx: TILES tiles, pick, record.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MOST_BLOCKS)
down(const int* ids, const long long* table, const float* weights, const float* inner, int rows, int used, int width,
     int hidden, int records, const u8* shared_down, int shared_width, int shared_records, const float* logits,
     int stride, float* products) {
    begin_after_last();
    __shared__ __align__(16) u8 piece[GROUPS * Piece<32>::bytes];
    __shared__ int list[ROWS];
    __shared__ float weight_of[ROWS];
    const int pick = blockIdx.y, picks = rows * used, record = blockIdx.z, warp = threadIdx.x / 32;
    const bool is_shared = pick >= picks;
    const int own_records = is_shared ? shared_records : records, own_width = is_shared ? shared_width : width;
    if (record >= own_records) return;
    int expert;
    const int choosers = list_picks(ids, pick, rows, used, expert, list);
    if (choosers == 0) return;
    const u8* matrix = is_shared ? shared_down : reinterpret_cast<const u8*>(table[expert * 3 + 2]);
    const int first_pick = is_shared ? picks : 0;
    const float* values = inner + (is_shared ? static_cast<size_t>(picks) * width : 0) + record * 256;
    for (int i = warp; i < choosers; i += WARPS) {
        float v[8];
        read_fours(values + static_cast<size_t>(list[i] - first_pick) * own_width, lane_column(),
                   own_width - record * 256, v);  // widths are multiples of eight
        write_halves<32>(v, piece + i / 8 * Piece<32>::bytes, i % 8);
    }
    if (threadIdx.x < choosers) {
        float weight = 1.0f;
        if (!is_shared) weight = weights[list[threadIdx.x]];
        else if (logits) weight = 1.0f / (1.0f + expf(-logits[(list[threadIdx.x] - picks) * stride]));
        weight_of[threadIdx.x] = weight;
    }
    __syncthreads();
    float* to = products + (is_shared ? static_cast<size_t>(picks) * records * hidden : 0) +
                static_cast<size_t>(record) * hidden;
    const int end = min(TILES * (static_cast<int>(blockIdx.x) + 1), (hidden + 15) / 16);
    for (int tile = TILES * blockIdx.x + warp; tile < end; tile += WARPS) {
        const PutProducts put{list, weight_of, to, static_cast<size_t>(own_records) * hidden, first_pick, choosers,
                              tile * 16, hidden};
        const size_t at = static_cast<size_t>(tile) * own_records + record;
        if (!is_shared || DOWN == SHARED_DOWN)
            multiply_record<DOWN>(matrix + at * Record<DOWN>::bytes, piece, choosers, put);
        else
            multiply_record<SHARED_DOWN>(matrix + at * Record<SHARED_DOWN>::bytes, piece, choosers, put);
    }
}

// The sum of each row's products in the order of its picks and their records. blockIdx: columns, row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
sum_products(const int* ids, const float* products, int rows, int used, int hidden, int records, int shared_records,
    const float* residual, const float* shared_out, const float* logits, int stride, float* out) {
    begin_after_last();
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= hidden) return;
    float total = 0;
    for (int pick = row * used; pick < (row + 1) * used; ++pick) {
        if (ids[pick] < 0) continue;
        const float* from = products + static_cast<size_t>(pick) * records * hidden + column;
        for (int r = 0; r < records; ++r) total += from[static_cast<size_t>(r) * hidden];
    }
    const float* from = products + (static_cast<size_t>(rows) * used * records +
                                    static_cast<size_t>(row) * shared_records) * hidden + column;
    for (int r = 0; r < shared_records; ++r) total += from[static_cast<size_t>(r) * hidden];
    const size_t at = static_cast<size_t>(row) * hidden + column;
    out[at] = Addends{residual, shared_out, logits, stride}.add(total, row, at);
}
