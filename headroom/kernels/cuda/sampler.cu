// Tokens drawn from logits, in the order of the engine's sampler: logit bias, penalties, temperature,
// top-k, top-p, min-p, draw. Probabilities are float64, not normalised; the likeliest token has 1.
// The number that engine/sampler.py adds in some order is added in that order here where few tokens
// can be drawn; over the whole vocabulary sums are made in another order, fixed too.
#include "early.cuh"
#include "rank.cuh"

#define SLICES 64
#define THREADS 1024   // of choose
#ifndef MOST           // candidates that are sorted in shared memory
#define MOST 4096
#endif
#define USUAL 512      // likeliest tokens that usually hold all that top-p and min-p leave


// scores [rows, vocabulary] in place. counts [rows, vocabulary] are zeros before and after.
// One block a row.
extern "C" __global__ void penalise(float* scores, int* counts, const long long* recent, const long long* bias_ids,
                                    const float* bias, const float* repetition, const double* frequency,
                                    const float* presence, int vocabulary, int most_recent, int most_bias) {
    begin_after_last();
    const size_t row = blockIdx.x;
    scores += row * vocabulary;
    counts += row * vocabulary;
    for (int i = threadIdx.x; i < most_bias; i += blockDim.x) {
        const long long id = bias_ids[row * most_bias + i];
        if (id >= 0) scores[id] = __fadd_rn(scores[id], bias[row * most_bias + i]);
    }
    for (int i = threadIdx.x; i < most_recent; i += blockDim.x) {
        const long long id = recent[row * most_recent + i];
        if (id >= 0) atomicAdd(counts + id, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < most_recent; i += blockDim.x) {
        const long long id = recent[row * most_recent + i];
        if (id < 0) continue;
        const int count = atomicExch(counts + id, 0);  // the first that comes deals with the token
        if (!count) continue;
        float x = scores[id];
        x = x > 0 ? __fdiv_rn(x, repetition[row]) : __fmul_rn(x, repetition[row]);
        x = __fsub_rn(x, static_cast<float>(frequency[row] * count));
        scores[id] = __fsub_rn(x, presence[row]);
    }
}

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

// best [rows, SLICES]: the likeliest token of each slice. blockIdx: the slice, the row.
extern "C" __global__ void peaks(const float* scores, u64* best, int vocabulary) {
    begin_after_last();
    const int size = slice_size(vocabulary), first = blockIdx.x * size, end = min(first + size, vocabulary);
    const float* row = scores + static_cast<size_t>(blockIdx.y) * vocabulary;
    u64 mine = 0;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) mine = max(mine, rank_of(row[i], i));
    mine = block_best(mine);
    if (threadIdx.x == 0) best[blockIdx.y * SLICES + blockIdx.x] = mine;
}

struct Odds {  // a score's probability, the largest being 1
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

// masses [rows, SLICES]: the sum of each slice's probabilities, where anything needs them.
extern "C" __global__ void masses(const float* scores, const u64* best, const double* temperature,
                                  const long long* top_k, double* mass, int vocabulary) {
    begin_after_last();
    const int row = blockIdx.y;
    const double t = temperature[row];
    if (t == 0 || (top_k[row] > 0 && top_k[row] <= THREADS)) return;
    const Odds odds{t, static_cast<double>(score_of(best_of(best, row))) / t};
    const int size = slice_size(vocabulary), first = blockIdx.x * size, end = min(first + size, vocabulary);
    double sum = 0;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x)
        sum += odds.of(scores[static_cast<size_t>(row) * vocabulary + i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) mass[row * SLICES + blockIdx.x] = sum;
}

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

// The largest first; count is a power of two.
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

    // How many tokens, or how much probability, come at or before a rank.
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
    // The last rank of the fewest tokens that are `wanted`, or that reach `target`. Passes over the
    // row for each bit: for settings that leave very many tokens.
    template <bool COUNT> __device__ u64 find(u64 low, u64 high, double wanted) const {
        while (low < high) {  // at `low` it is reached
            const u64 middle = low + (high - low) / 2 + 1;
            const bool reached = COUNT ? count(middle) >= wanted : mass(middle) >= wanted;
            if (reached) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// A token among all from `cut` on with at least `least` probability, each thread a run of ids.
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
        int chosen = first;  // the last token of the run where sums in another order fall short
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

// A token among all, none left out: the slice is found by the slices' sums, the token within it.
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
            slice = i;  // the last one with any chance, where rounding puts the point on the end
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
    // Sums of all threads before: within a warp by shuffles, then over the warps.
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
    if (lane) bound += earlier;  // where the thread before ends
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

// A token among the first `keep` of a sorted list, in the order of ids, as the engine's sampler adds.
__device__ int draw_listed(u64* list, double* odds, int keep, double share) {
    __shared__ int token;
    const int power = power_of_two(keep);
    __syncthreads();
    // Sorting puts large numbers first and ids are stored upside down: the lowest id comes first.
    for (int i = threadIdx.x; i < power; i += THREADS)
        list[i] = i < keep ? (list[i] & 0xFFFFFFFFu) << 32 | static_cast<u32>(i) : 0;
    sort_down(list, power);
    if (threadIdx.x == 0) {
        double total = 0, bound = 0;
        for (int i = 0; i < keep; ++i) total += odds[static_cast<u32>(list[i])];
        const double point = share * total;
        int at = 0;
        for (; at < keep; ++at) {
            bound += odds[static_cast<u32>(list[at])];
            if (bound > point) break;
        }
        token = id_of(list[min(at, keep - 1)] >> 32);
    }
    __syncthreads();
    return token;
}

// ids [rows]: the tokens. One block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
choose(const float* scores, const u64* best, const double* mass, const double* temperature, const double* top_p,
       const double* min_p, const long long* top_k, const long long* seed, const long long* position,
       const long long* draw, long long* ids, int vocabulary) {
    begin_after_last();
    extern __shared__ u64 memory[];
    u64* list = memory;                                    // [MOST]
    double* odds = reinterpret_cast<double*>(list + MOST);  // [MOST]
    __shared__ int found, keep;
    const int at = blockIdx.x;
    const u64 top = best_of(best, at);
    const double t = temperature[at];
    if (t == 0) {
        if (threadIdx.x == 0) ids[at] = id_of(top);
        return;
    }
    const Row row{scores + static_cast<size_t>(at) * vocabulary, vocabulary,
                  {t, static_cast<double>(score_of(top)) / t}};
    const double share = uniform(seed[at], position[at], draw[at]), p = top_p[at], least = min_p[at];
    const bool limited = top_k[at] > 0 && top_k[at] < vocabulary;
    const int limit = limited ? static_cast<int>(top_k[at]) : vocabulary;
    const bool summed = !(top_k[at] > 0 && top_k[at] <= THREADS);  // `mass` was filled
    double total = 0;
    if (summed)
        for (int i = 0; i < SLICES; ++i) total += mass[at * SLICES + i];
    if (limited || p < 1 || least > 0) {
        // The best tokens of 1024 threads bound what the likeliest `wanted` of all can be.
        const int wanted = min(limited && limit <= THREADS ? limit : USUAL, vocabulary);
        u64 mine = 0;
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) mine = max(mine, rank_of(row.scores[i], i));
        list[threadIdx.x] = mine;
        if (threadIdx.x == 0) found = 0;
        sort_down(list, THREADS);
        const u64 bound = list[min(wanted, THREADS) - 1];
        __syncthreads();
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
            const u64 rank = rank_of(row.scores[i], i);
            if (rank < bound) continue;
            const int place = atomicAdd(&found, 1);
            if (place < MOST) list[place] = rank;
        }
        __syncthreads();
        const int count = found;
        if (count <= MOST) {
            const int power = power_of_two(count);
            for (int i = count + threadIdx.x; i < power; i += THREADS) list[i] = 0;
            sort_down(list, power);
            for (int i = threadIdx.x; i < count; i += THREADS) odds[i] = row.odds.of(score_of(list[i]));
            __syncthreads();
            if (threadIdx.x == 0) {
                const bool whole = limit <= count || count == vocabulary;  // nothing else can be drawn
                int left = min(limit, count);
                keep = whole ? left : 0;  // 0: the list may be too short
                if (p < 1 && (whole || !limited)) {
                    double all = 0, reached = 0;
                    if (whole)
                        for (int i = 0; i < left; ++i) all += odds[i];
                    else
                        all = total;
                    int i = 0;
                    for (; i < left; ++i) {
                        reached += odds[i];
                        if (reached >= p * all) break;
                    }
                    if (i < left) keep = left = i + 1;
                }
                if (least > 0 && (keep || (p >= 1 && !limited))) {
                    int few = left;
                    while (few > 1 && odds[few - 1] < least) --few;
                    if (keep || few < left) keep = few;
                }
            }
            __syncthreads();
            if (keep) {
                const int token = draw_listed(list, odds, keep, share);
                if (threadIdx.x == 0) ids[at] = token;
                return;
            }
        }
    }
    if (!limited && p >= 1 && least <= 0) {
        const int token = draw_any(row, mass + at * SLICES, share, reinterpret_cast<double*>(memory));
        if (threadIdx.x == 0) ids[at] = token;
        return;
    }
    u64 cut = 0;
    if (limited) {
        cut = row.find<true>(0, top, limit);
        total = row.mass(cut);
    }
    if (p < 1) cut = row.find<false>(cut, top, p * total);
    __syncthreads();
    const int token = draw_wide(row, cut, least, share, reinterpret_cast<double*>(memory));
    if (threadIdx.x == 0) ids[at] = token;
}
