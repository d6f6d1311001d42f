// Sorts picks by expert, and gathers the rows that they belong to (products of many rows).
#define WARPS 16  // warps of a block that sorts

// Sorts the picks by expert; the picks of an expert keep their order. Every block reads all ids and places
// the picks of one expert.
//   blockIdx.x            the expert; the last block places picks with a negative id, after all others
//   rows [picks]          the row of the pick at each place
//   places [picks]        the place of each pick
//   ends [experts]        one past an expert's last place
//   group_ends [experts]  ends, counted from the first place of the expert's group of `each` adjacent experts
extern "C" __global__ void __launch_bounds__(WARPS * 32)
sort_picks(const int* ids, long long* rows, long long* places, int* ends, int* group_ends, int picks, int used,
           int experts, int each) {
    __shared__ int counts[WARPS], before[WARPS], elsewhere[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x, group = expert / each * each;
    const int share = (picks + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int first = warp * share, end = min(picks, first + share);
    // Among a warp's picks: those of this expert, of earlier experts, and of earlier groups.
    int own = 0, earlier = 0, outside = 0;
    for (int i = first + lane; i < first + share; i += 32) {
        const int id = i >= end ? experts + 1 : ids[i] < 0 ? experts : ids[i];
        own += __popc(__ballot_sync(~0u, id == expert));
        earlier += __popc(__ballot_sync(~0u, id < expert));
        outside += __popc(__ballot_sync(~0u, id < group));
    }
    if (lane == 0) {
        counts[warp] = own;
        before[warp] = earlier;
        elsewhere[warp] = outside;
    }
    __syncthreads();
    int place = 0, last = 0, start = 0;
    for (int w = 0; w < WARPS; ++w) {
        place += before[w] + (w < warp ? counts[w] : 0);
        last += before[w] + counts[w];
        start += elsewhere[w];
    }
    if (threadIdx.x == 0 && expert < experts) {
        ends[expert] = last;
        group_ends[expert] = last - start;
    }
    for (int i = first + lane; i < first + share; i += 32) {
        const int id = i >= end ? experts + 1 : ids[i] < 0 ? experts : ids[i];
        const unsigned mine = __ballot_sync(~0u, id == expert);
        if (id == expert) {
            const int at = place + __popc(mine & ((1u << lane) - 1));
            rows[at] = i / used;
            places[i] = at;
        }
        place += __popc(mine);
    }
}

// out [picks, columns] in 16 bits: the rows of x that the picks of a group belong to; a row has `words` x
// 16 bytes. The group's picks begin at place *start (null: 0) and are ends[last] in number; nothing is
// written after them.
extern "C" __global__ void gather(const uint4* x, const long long* rows, const int* start, const int* ends,
                                  uint4* out, int last, int words) {
    const int count = ends[last], before = start ? *start : 0;
    for (int pick = blockIdx.x; pick < count; pick += gridDim.x) {
        const uint4* from = x + rows[before + pick] * words;
        for (int i = threadIdx.x; i < words; i += blockDim.x) out[static_cast<size_t>(pick) * words + i] = from[i];
    }
}
