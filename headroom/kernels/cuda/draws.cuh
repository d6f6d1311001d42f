// Building blocks of the sampler: sums over a row of scores, its order, and three ways to draw a token.
#ifndef HEADROOM_DRAWS
#define HEADROOM_DRAWS
#include "rank.cuh"

#define SLICES 64      // slices of a row; `peaks` and `masses` have a block for each
#define THREADS 1024   // threads of a block that draws

// The largest of a block's numbers, in every thread.
__device__ __forceinline__ u64 block_best(u64 best) {
    __shared__ u64 shared[32];
#pragma unroll
    for (int by = 16; by; by /= 2) best = max(best, __shfl_xor_sync(~0u, best, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < blockDim.x / 32; ++i) best = max(best, shared[i]);
    return best;
}
// The sum of a block's numbers, in every thread and always in the same order.
template <typename T> __device__ __forceinline__ T block_sum(T x) {
    __shared__ T shared[32];
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    T total = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) total += shared[i];
    return total;
}

__device__ __forceinline__ int slice_size(int vocabulary) { return (vocabulary + SLICES - 1) / SLICES; }

struct Odds {  // unnormalised probabilities: the largest is 1
    double temperature, peak;
    __device__ __forceinline__ double of(float score) const {
        return exp(static_cast<double>(score) / temperature - peak);
    }
};

__device__ __forceinline__ u64 best_of(const u64* best, int row) {
    u64 top = 0;
    for (int i = 0; i < SLICES; ++i) top = max(top, best[row * SLICES + i]);
    return top;
}

// A number of [0, 1) that depends on these three only: Philox 4x32-10, as in engine/sampler.py.
__device__ double uniform(u64 seed, u64 position, u64 draw) {
    u32 a = position, b = position >> 32, c = draw, d = draw >> 32, low = seed, high = seed >> 32;
    for (int i = 0; i < 10; ++i) {
        const u64 first = static_cast<u64>(a) * 0xD2511F53u, second = static_cast<u64>(c) * 0xCD9E8D57u;
        a = static_cast<u32>(second >> 32) ^ b ^ low;
        b = static_cast<u32>(second);
        c = static_cast<u32>(first >> 32) ^ d ^ high;
        d = static_cast<u32>(first);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return static_cast<double>((static_cast<u64>(a >> 5) << 26) + (b >> 6)) / 9007199254740992.0;
}

// Bitonic sort, the largest first; count is a power of two.
__device__ void sort_down(u64* list, int count) {
    for (int run = 2; run <= count; run *= 2)
        for (int gap = run / 2; gap; gap /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < count / 2; i += THREADS) {
                const int low = i / gap * gap * 2 + i % gap, high = low + gap;
                const u64 x = list[low], y = list[high];
                if ((x < y) == ((low & run) == 0)) {
                    list[low] = y;
                    list[high] = x;
                }
            }
        }
    __syncthreads();
}
__device__ __forceinline__ int power_of_two(int count) {
    int power = 2;
    while (power < count) power *= 2;
    return power;
}

struct Row {
    const float* scores;
    int vocabulary;
    Odds odds;

    // The number, and the probability, of the tokens whose rank is at least `cut`.
    __device__ int count(u64 cut) const {
        int mine = 0;
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) mine += rank_of(scores[i], i) >= cut;
        return block_sum(mine);
    }
    __device__ double mass(u64 cut) const {
        double mine = 0;
        for (int i = threadIdx.x; i < vocabulary; i += THREADS)
            if (rank_of(scores[i], i) >= cut) mine += odds.of(scores[i]);
        return block_sum(mine);
    }
    // The largest cut such that the tokens from it on are at least `wanted` in number (COUNT) or
    // probability. Binary search with one pass over the row per bit: only for settings that leave very many
    // tokens.
    template <bool COUNT> __device__ u64 find(u64 low, u64 high, double wanted) const {
        while (low < high) {  // invariant: `low` reaches `wanted`
            const u64 middle = low + (high - low) / 2 + 1;
            const bool reached = COUNT ? count(middle) >= wanted : mass(middle) >= wanted;
            if (reached) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// Draws among all tokens whose rank is at least `cut` and whose probability is at least `least`; each
// thread sums up a run of ids.
__device__ int draw_wide(const Row& row, u64 cut, double least, double share, double* shared) {
    const int size = (row.vocabulary + THREADS - 1) / THREADS;
    const int first = min(static_cast<int>(threadIdx.x) * size, row.vocabulary);
    const int end = min(first + size, row.vocabulary);
    __shared__ int token;
    double sum = 0;
    int last = -1;
    for (int i = first; i < end; ++i)
        if (const double p = row.odds.of(row.scores[i]); rank_of(row.scores[i], i) >= cut && p >= least && p > 0) {
            sum += p;
            last = i;
        }
    __syncthreads();
    shared[threadIdx.x] = sum;
    last = static_cast<int>(block_best(static_cast<u64>(last + 1))) - 1;
    if (threadIdx.x == 0) {
        double before = 0;
        for (int i = 0; i < THREADS; ++i) {
            const double mine = shared[i];
            shared[i] = before;
            before += mine;
        }
        shared[THREADS] = before;
        token = last;
    }
    __syncthreads();
    const double point = share * shared[THREADS];
    double bound = shared[threadIdx.x];
    if (sum > 0 && bound <= point && point < shared[threadIdx.x + 1]) {
        int chosen = first;  // stays at the run's last token if rounding makes its sum fall short of `point`
        for (int i = first; i < end && bound <= point; ++i) {
            const double p = row.odds.of(row.scores[i]);
            if (rank_of(row.scores[i], i) < cut || p < least || p == 0) continue;
            bound += p;
            chosen = i;
        }
        token = chosen;
    }
    __syncthreads();
    return token;
}

// Draws among all tokens: finds the slice by the slices' sums, then the token within it.
__device__ int draw_any(const Row& row, const double* masses, double share, double* shared) {
    __shared__ double sums[SLICES], point;
    __shared__ int slice, token;
    if (threadIdx.x < SLICES) sums[threadIdx.x] = masses[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0, before = 0;
        for (int i = 0; i < SLICES; ++i) total += sums[i];
        slice = 0;
        for (int i = 0; i < SLICES; ++i) {
            if (sums[i] <= 0) continue;
            slice = i;  // the last slice with any probability, if rounding puts the point at the very end
            if (before + sums[i] > share * total) break;
            before += sums[i];
        }
        point = share * total - before;
    }
    __syncthreads();
    const int size = slice_size(row.vocabulary), begin = slice * size;
    const int stop = min(begin + size, row.vocabulary), each = (size + THREADS - 1) / THREADS;
    const int first = min(begin + static_cast<int>(threadIdx.x) * each, stop), end = min(first + each, stop);
    double sum = 0;
    int last = -1;
    for (int i = first; i < end; ++i)
        if (const double p = row.odds.of(row.scores[i]); p > 0) {
            sum += p;
            last = i;
        }
    // Prefix sums over the threads: within a warp by shuffles, then over the warps.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double upto = sum;
    for (int o = 1; o < 32; o *= 2) {
        const double other = __shfl_up_sync(0xFFFFFFFFu, upto, o);
        if (lane >= o) upto += other;
    }
    if (lane == 31) shared[warp] = upto;
    last = static_cast<int>(block_best(static_cast<u64>(last + 1))) - 1;  // also a barrier
    if (threadIdx.x == 0) token = last;
    __syncthreads();
    const double earlier = __shfl_up_sync(0xFFFFFFFFu, upto, 1);
    double bound = 0;
    for (int i = 0; i < warp; ++i) bound += shared[i];
    const double after = bound + upto;
    if (lane) bound += earlier;  // where the previous thread's run ends
    if (sum > 0 && bound <= point && point < after) {
        int chosen = first;
        for (int i = first; i < end && bound <= point; ++i) {
            const double p = row.odds.of(row.scores[i]);
            if (p == 0) continue;
            bound += p;
            chosen = i;
        }
        token = chosen;
    }
    __syncthreads();
    return token;
}

// Draws among the first `keep` tokens of a sorted list. Adds up probabilities in the order of ids, as
// engine/sampler.py does.
__device__ int draw_listed(u64* list, double* odds, int keep, double share) {
    __shared__ int token;
    const int power = power_of_two(keep);
    __syncthreads();
    // A rank stores the complement of the id, so that sorting the largest first puts the lowest id first.
    for (int i = threadIdx.x; i < power; i += THREADS)
        list[i] = i < keep ? (list[i] & 0xFFFFFFFFu) << 32 | static_cast<u32>(i) : 0;
    sort_down(list, power);
    if (threadIdx.x == 0) {
        double total = 0, bound = 0;
        for (int i = 0; i < keep; ++i) total += odds[static_cast<u32>(list[i])];
        const double point = share * total;
        int chosen = 0;  // the last token with any probability, if rounding puts the point at the very end
        for (int at = 0; at < keep; ++at) {
            const double p = odds[static_cast<u32>(list[at])];
            if (p == 0) continue;
            bound += p;
            chosen = at;
            if (bound > point) break;
        }
        token = id_of(list[chosen] >> 32);
    }
    __syncthreads();
    return token;
}
#endif
