// Draws tokens from logits, with the steps of engine/sampler.py: logit bias, penalties, mask, temperature,
// top-k, top-p, min-p, draw. Probabilities are float64 and not normalised: the likeliest token has 1. If few
// tokens can be drawn, sums run in the order of engine/sampler.py; over the whole vocabulary they run in
// another fixed order.
//
// limited [rows] is 1 for rows whose draw is limited by a mask. A call draws either the limited rows
// (`masked` is 1) or all others (0): blocks of other rows return at once and leave their token as it is.
#include "early.cuh"
#include "draws.cuh"

#ifndef MOST           // most candidates that are sorted in shared memory
#define MOST 4096
#endif
#define USUAL 512      // so many of the likeliest tokens usually contain all that top-p and min-p leave

// Applies logit bias and penalties to scores [rows, vocabulary] in place. counts [rows, vocabulary] are
// zeros before and after. One block per row.
extern "C" __global__ void penalise(float* scores, int* counts, const long long* recent, const long long* bias_ids,
                                    const float* bias, const float* repetition, const double* frequency,
                                    const float* presence, int vocabulary, int most_recent, int most_bias,
                                    const int* limited, int masked) {
    begin_after_last();
    const size_t row = blockIdx.x;
    if (limited[row] != masked) return;
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
        const int count = atomicExch(counts + id, 0);  // the first thread that gets here handles the token
        if (!count) continue;
        float x = scores[id];
        x = x > 0 ? __fdiv_rn(x, repetition[row]) : __fmul_rn(x, repetition[row]);
        x = __fsub_rn(x, static_cast<float>(frequency[row] * count));
        scores[id] = __fsub_rn(x, presence[row]);
    }
}

// Applies masks [rows, words] to scores if `masked`: what has no bit gets minus infinity. Writes best
// [rows, SLICES]: the rank of the likeliest token of each slice. blockIdx: the slice, the row.
extern "C" __global__ void peaks(float* scores, u64* best, const u32* masks, int words, int vocabulary,
                                 const int* limited, int masked) {
    begin_after_last();
    if (limited[blockIdx.y] != masked) return;
    const int size = slice_size(vocabulary), first = blockIdx.x * size, end = min(first + size, vocabulary);
    float* row = scores + static_cast<size_t>(blockIdx.y) * vocabulary;
    const u32* mask = masks + static_cast<size_t>(blockIdx.y) * words;
    u64 mine = 0;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
        if (masked && !(mask[i / 32] >> i % 32 & 1)) row[i] = __uint_as_float(0xFF800000u);
        mine = max(mine, rank_of(row[i], i));
    }
    mine = block_best(mine);
    if (threadIdx.x == 0) best[blockIdx.y * SLICES + blockIdx.x] = mine;
}

// Writes mass [rows, SLICES]: the sum of each slice's probabilities, for rows whose settings need it.
extern "C" __global__ void masses(const float* scores, const u64* best, const double* temperature,
                                  const long long* top_k, double* mass, int vocabulary,
                                  const int* limited, int masked) {
    begin_after_last();
    const int row = blockIdx.y;
    if (limited[row] != masked) return;
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

// Draws the tokens ids [rows]. One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
choose(const float* scores, const u64* best, const double* mass, const double* temperature, const double* top_p,
       const double* min_p, const long long* top_k, const long long* seed, const long long* position,
       const long long* draw, long long* ids, int vocabulary, const int* limited, int masked) {
    begin_after_last();
    if (limited[blockIdx.x] != masked) return;
    extern __shared__ uint4 memory[];
    u64* list = reinterpret_cast<u64*>(memory);             // [MOST]
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
    const bool by_count = top_k[at] > 0 && top_k[at] < vocabulary;
    const int limit = by_count ? static_cast<int>(top_k[at]) : vocabulary;
    const bool summed = !(top_k[at] > 0 && top_k[at] <= THREADS);  // `mass` was filled
    double total = 0;
    if (summed)
        for (int i = 0; i < SLICES; ++i) total += mass[at * SLICES + i];
    if (by_count || p < 1 || least > 0) {
        // Each of the 1024 threads finds its best token. The `wanted`-th best of these is a lower bound for
        // the ranks of the `wanted` likeliest tokens of all.
        const int wanted = min(by_count && limit <= THREADS ? limit : USUAL, vocabulary);
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
                const bool whole = limit <= count || count == vocabulary;  // the list has all tokens of the top-k
                int left = min(limit, count);
                keep = whole ? left : 0;  // 0: the list may be too short
                if (p < 1 && (whole || !by_count)) {
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
                if (least > 0 && (keep || (p >= 1 && !by_count))) {
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
    if (!by_count && p >= 1 && least <= 0) {
        const int token = draw_any(row, mass + at * SLICES, share, reinterpret_cast<double*>(memory));
        if (threadIdx.x == 0) ids[at] = token;
        return;
    }
    u64 cut = 0;
    if (by_count) {
        cut = row.find<true>(0, top, limit);
        total = row.mass(cut);
    }
    if (p < 1) cut = row.find<false>(cut, top, p * total);
    __syncthreads();
    const int token = draw_wide(row, cut, least, share, reinterpret_cast<double*>(memory));
    if (threadIdx.x == 0) ids[at] = token;
}
