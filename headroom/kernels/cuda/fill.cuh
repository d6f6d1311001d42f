// Fills: experts that cross the link into slots of GPU memory while a layer's kernels run.
//
// `resolve` (expert_cache.cu) lists them. Blocks of the experts' first kernel copy them in pieces and count the
// pieces of an expert's gate and up that have arrived; blocks that multiply with such an expert wait for these.
// The down matrix has arrived when the kernel ends.
typedef unsigned char u8;
#define FILL_THREADS 256
#define PIECE_OF_FILL 16384  // bytes that a block copies at a time
#define FILL_LOADS (PIECE_OF_FILL / (16 * FILL_THREADS))  // 16-byte loads of a thread that are in flight together
#define MOST_FILLS 1024
#define FILL_WAIT_MS 100  // the longest time that a block waits before it reads host memory itself

// The words of a step's fills in one layer: their number; by fill: expert, slot, and the pieces of gate and up
// that have arrived; by pick: 1 + the number of its fill, 0 if it waits for none.
enum FillWords {
    FILL_COUNT = 0,
    FILL_EXPERT = 4,
    FILL_SLOT = FILL_EXPERT + MOST_FILLS,
    FILL_ARRIVED = FILL_SLOT + MOST_FILLS,
    FILL_OF_PICK = FILL_ARRIVED + MOST_FILLS
};

struct Fills {
    u32* words;
    const u8* host;  // every expert of the layer, in the order of their numbers
    u8* slots;
    int count;  // of the slots
    int expert_bytes, front_bytes;  // of the whole expert; of its gate and up, which come first

    __device__ __forceinline__ int front_pieces() const { return (front_bytes + PIECE_OF_FILL - 1) / PIECE_OF_FILL; }
};

// Copies share `block` of `blocks` of all fills, expert after expert.
__device__ __forceinline__ void copy_fills(const Fills& fills, int block, int blocks) {
    const int each = (fills.expert_bytes + PIECE_OF_FILL - 1) / PIECE_OF_FILL;
    const int pieces = static_cast<int>(fills.words[FILL_COUNT]) * each, front = fills.front_pieces();
    for (int piece = block; piece < pieces; piece += blocks) {
        const int fill = piece / each, begin = piece % each * PIECE_OF_FILL;
        const size_t expert = fills.words[FILL_EXPERT + fill], slot = fills.words[FILL_SLOT + fill];
        const u8* from = fills.host + expert * fills.expert_bytes + begin;
        u8* to = fills.slots + slot * fills.expert_bytes + begin;
        const int size = min(PIECE_OF_FILL, fills.expert_bytes - begin);
        uint4 words[FILL_LOADS];
#pragma unroll
        for (int i = 0; i < FILL_LOADS; ++i)
            if (const int at = (i * FILL_THREADS + threadIdx.x) * 16; at < size)
                words[i] = __ldcs(reinterpret_cast<const uint4*>(from + at));
#pragma unroll
        for (int i = 0; i < FILL_LOADS; ++i)
            if (const int at = (i * FILL_THREADS + threadIdx.x) * 16; at < size)
                *reinterpret_cast<uint4*>(to + at) = words[i];
        if (piece % each >= front) continue;
        __threadfence();
        __syncthreads();  // all of the piece is written
        if (threadIdx.x == 0) atomicAdd(fills.words + FILL_ARRIVED + fill, 1u);
    }
}

// Waits until the gate and up of a pick's expert have arrived; returns whether they have. All threads of a
// block call this. They have not if the copying blocks do not run: then the caller reads host memory.
__device__ __forceinline__ bool has_arrived(const Fills& fills, int pick) {
    const u32 fill = fills.words[FILL_OF_PICK + pick];
    if (fill == 0) return true;
    __shared__ bool arrived;
    if (threadIdx.x == 0) {
        const u32* at = fills.words + FILL_ARRIVED + fill - 1;
        const u32 wanted = fills.front_pieces();
        const u64 start = now_ns();
        while (!(arrived = load_acquire(at) >= wanted) && now_ns() - start < FILL_WAIT_MS * 1000000ull) rest();
    }
    __syncthreads();
    return arrived;
}

// Return where an expert that a pick waits for begins: in host memory, and in its slot.
__device__ __forceinline__ const u8* in_host_memory(const Fills& fills, int pick) {
    const size_t expert = fills.words[FILL_EXPERT + fills.words[FILL_OF_PICK + pick] - 1];
    return fills.host + expert * fills.expert_bytes;
}
__device__ __forceinline__ const u8* in_slot(const Fills& fills, int pick) {
    const size_t slot = fills.words[FILL_SLOT + fills.words[FILL_OF_PICK + pick] - 1];
    return fills.slots + slot * fills.expert_bytes;
}
// Returns whether an address is one of a slot that no fill is on its way to.
__device__ __forceinline__ bool is_in_slot(const Fills& fills, int pick, const u8* at) {
    const size_t bytes = static_cast<size_t>(fills.count) * fills.expert_bytes;
    return fills.words[FILL_OF_PICK + pick] == 0 && at >= fills.slots && at < fills.slots + bytes;
}
