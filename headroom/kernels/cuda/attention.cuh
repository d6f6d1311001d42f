// What the attention kernels share: the pieces of a context, the tables of a step, and which keys a row
// sees.
//
// A context is cut into pieces by absolute position, so that a row's sums run in the same order whatever
// else is in its step: pieces of 128 keys up to key 4096, of 256 up to 16384, then 32 pieces per doubling.
// attention_scratch.py counts them in the same way.
#ifndef HEADROOM_ATTENTION
#define HEADROOM_ATTENTION
#include "rows.cuh"

#define LOWEST -1e30f  // start of a running maximum; finite, so that LOWEST - LOWEST is 0 and not NaN

__device__ __forceinline__ int piece_of(int key) {
    if (key < 4096) return key / 128;
    if (key < 16384) return 32 + (key - 4096) / 256;
    const int octave = 31 - __clz(key / 16384);
    return 80 + 32 * octave + (key - (16384 << octave)) / (512 << octave);
}
__device__ __forceinline__ void piece_bounds(int piece, int& first, int& end) {
    int size = 128;
    if (piece < 32) {
        first = piece * size;
    } else if (piece < 80) {
        size = 256;
        first = 4096 + (piece - 32) * size;
    } else {
        const int octave = (piece - 80) / 32;
        size = 512 << octave;
        first = (16384 << octave) + (piece - 80) % 32 * size;
    }
    end = first + size;
}

// The tables of a step; see StepTables in kernels/ops.py.
struct Step {
    const int* sequence;
    const int* index;
    const int* starts;
    const int* pages;
    const long long* trees;  // null: plain causal
    int rows, max_pages;

    __device__ __forceinline__ size_t slot(int s, int key) const {
        return static_cast<size_t>(pages[static_cast<size_t>(s) * max_pages + key / PAGE]) * PAGE + key % PAGE;
    }
};

// Finds the rows of one sequence, which are adjacent. Every warp of a block does this itself.
__device__ __forceinline__ void find_rows(const Step& step, int s, int& first, int& count) {
    const int lane = threadIdx.x % 32;
    first = -1;
    count = 0;
    for (int base = 0; base < step.rows; base += 32) {
        const bool mine = base + lane < step.rows && step.sequence[base + lane] == s;
        const u32 found = __ballot_sync(~0u, mine);
        if (found && first < 0) first = base + __ffs(found) - 1;
        count += __popc(found);
    }
}

// Which keys one row sees. In a draft tree a row sees what its sequence had cached before the step, and
// those rows of the step whose bits are set in its mask; its depth is the number of set bits minus one.
struct View {
    const long long* trees;  // masks from the sequence's first row of the step on; null: plain causal
    u64 bits;
    int start, limit, window;

    __device__ __forceinline__ View(const Step& step, int row, int start_, int window_)
        : trees(nullptr), bits(0), start(start_), limit(step.index[row]), window(window_) {
        if (step.trees) {
            trees = step.trees + row - (limit - start);
            bits = static_cast<u64>(step.trees[row]);
        }
    }
    __device__ __forceinline__ bool sees(int key) const {
        if (!trees) return key <= limit && (!window || limit - key < window);
        const int own = key - start, depth = start + __popcll(bits) - 1;
        if (own < 0) return !window || depth - key < window;
        if (key > limit || own > 63 || !(bits >> own & 1)) return false;
        return !window || depth - (start + __popcll(static_cast<u64>(trees[own])) - 1) < window;
    }
};

// The first key that any row of a step's sequence can see.
__device__ __forceinline__ int first_seen(int start, int window) {
    return window ? max(0, start - window + 1) : 0;
}
#endif
