// The cache of a layer's experts: which of them have a slot in GPU memory, step after step.
//
// `resolve` runs after the router of a decode step. It finds the distinct experts that the rows picked, the
// hits and the misses among them, and divides the misses: some cross the link, the CPU computes the others.
// A miss that crosses the link may take over the slot of another expert: a fill. `resolve` changes the
// layer's table of addresses and lists the fills; the next kernel of the experts copies them (fill.cuh).
// `shadow` runs the same rules for other policies on integers alone. `fill` copies without computing.
//
// The rules are those of CacheModel (experts/cache.py), exactly. Only integers are compared, so that a
// given row of picks has one result on every GPU.
//
//   EXPERTS, SIGMOID           defined for choose_resolve, which also chooses the experts (route.cuh)
//   THREADS                    of a block: 32 for each row, and at least 256
#include "early.cuh"
#include "mailbox.cuh"
#include "fill.cuh"
#ifdef EXPERTS
#include "route.cuh"
#else
#define ALL 0xFFFFFFFFu
#endif

#define MOST_ROWS 32   // rows of a step: a warp for each
#define MOST 1024      // experts of a layer, and picks of a step
#define NEVER ~0ull    // key of an expert that cannot give up its slot
#define LANES_A_SLOT 8 // threads that rank one slot

// The words of a layer's `state`: the policy, the number of steps, then four words of each expert.
enum StateWord { POLICY = 0, STEP = 1, EXPERT_WORDS = 4 };
enum Policy { STATIC = 0, LRU = 1, SPARE = 2, COUNTS = 3 };
enum Counter { STEPS = 0, PICKS, HITS, LINKED, FILLED, BYPASSED, LEFT_TO_CPU, PINNED_HITS, PREFETCHED_HITS, COUNTERS };
// Why an expert is in a slot: the host put it there, a step filled the slot, or the end of a prompt did.
enum Origin { PLACED = 0, STEP_FILLED = 1, FILLED_AHEAD = 2 };
// Of handover.cu: words in GPU memory, and counters of a layer.
enum Own { REQUESTS = 0, FIRST = 3, SINCE = 4, ASKED = 8 };
enum HandoverCount { GPU_PICKS = 2 };

// One layer's cache.
struct Cache {
    int* place;    // [experts]: 0 in host memory; n: in slot n - 1. Static layers: 1 in GPU memory
    int* state;    // null: a static layer, whose experts only exchanges move
    int experts, slots;

    __device__ __forceinline__ int* last() const { return state + EXPERT_WORDS; }  // step of the last use
    // Hits since the expert was filled; -1: it is pinned.
    __device__ __forceinline__ int* uses() const { return last() + experts; }
    __device__ __forceinline__ int* score() const { return uses() + experts; }  // decayed count
    __device__ __forceinline__ int* origin() const { return score() + experts; }  // PLACED without a slot
    __device__ __forceinline__ int policy() const { return state ? state[POLICY] : STATIC; }
};

// Shared memory of a block that resolves a step.
struct Room {
    int place[MOST];      // by expert, before the step
    int first[MOST];      // by expert: its first place in the order of picks; MOST: not picked
    int score[MOST];      // by expert
    int in_order[MOST];   // by place in the order of picks: the missing expert that is first there, or -1
    int misses[MOST];     // missing experts in the order of picks
    int victims[MOST];    // slots in the order in which they are given up
    int slot[MOST];       // by miss: the slot that it fills, or -1
    int fate[MOST];       // by expert: n > 0: it is fill n - 1; -1: the CPU computes it; else 0
    u8 origin[MOST];      // by expert
    u64 keys[MOST];       // by slot: the smallest key is given up first; its lower half is the expert
    int warp_sums[32];
    int eligible, filled, hits, picks;
    int by_origin[3];  // hits
};

#define EACH_THREAD (MOST / THREADS)  // experts of a thread

// A thread's share of a layer's state, which is loaded before the kernels before this one have ended: nothing
// else in a step changes it.
struct Held {
    int place[EACH_THREAD], last[EACH_THREAD], uses[EACH_THREAD], score[EACH_THREAD];
    int policy, step;

    __device__ __forceinline__ void load(const Cache& cache, Room& room) {
        policy = cache.policy();
        step = cache.state ? cache.state[STEP] : 0;
#pragma unroll
        for (int i = 0; i < EACH_THREAD; ++i) {
            const int e = i * THREADS + threadIdx.x;
            if (e >= cache.experts) break;
            place[i] = cache.place[e];
            if (cache.state) last[i] = cache.last()[e], uses[i] = cache.uses()[e], score[i] = cache.score()[e];
            room.place[e] = place[i];
            room.origin[e] = cache.state ? cache.origin()[e] : PLACED;
            room.first[e] = MOST;
            room.fate[e] = 0;
            room.keys[e] = NEVER;  // of a slot without an expert, which only the host fills (LayerStore.hold)
        }
    }
};

// What a step does with its distinct experts.
struct Division {
    int misses, linked;
};

// Returns how many threads before this one say `mine`, and in `total` how many of the block do.
__device__ __forceinline__ int count_before(bool mine, int* warp_sums, int& total) {
    const u32 votes = __ballot_sync(ALL, mine);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (lane == 0) warp_sums[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before + __popc(votes & ((1u << lane) - 1));
}

__device__ __forceinline__ u64 key_of(int policy, int expert, int last, int uses, int score) {
    int key = last;
    if (policy == SPARE) key += SPARE_STEPS * min(uses, SPARE_MOST);
    if (policy == COUNTS) key = score;
    return static_cast<u64>(static_cast<u32>(key)) << 32 | static_cast<u32>(expert);
}

// Resolves the picks of a step: thread (row, rank) brings `expert`, -1 for none. `link [most + 1]`: of so many
// misses, how many cross the link; null: all. One block of at least 32 threads for each row.
__device__ __forceinline__ Division divide(const Cache& cache, Held& held, int expert, int rows, const int* link,
                                           int most, Room& room) {
    const int thread = threadIdx.x, row = thread / 32, rank = thread % 32;
    const int policy = held.policy, order = rank * rows + row;
    room.in_order[thread] = -1;
    if (thread == 0) room.eligible = room.filled = room.hits = room.picks = 0;
    if (thread < 3) room.by_origin[thread] = 0;
    __syncthreads();
    if (expert >= 0) {
        atomicMin(room.first + expert, order);
        atomicAdd(&room.picks, 1);
        if (room.place[expert]) {
            atomicAdd(&room.hits, 1);
            atomicAdd(room.by_origin + room.origin[expert], 1);
        }
    }
    int step = held.step + 1;
    const bool halve = step == STEP_MOST;  // so that steps never overflow
    if (halve) step /= 2;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH_THREAD; ++i) {
        const int e = i * THREADS + thread;
        if (e >= cache.experts) break;
        const bool picked = room.first[e] < MOST, hit = held.place[i] != 0;
        if (picked && !hit) room.in_order[room.first[e]] = e;
        if (!cache.state) continue;
        int score = held.score[i], last = held.last[i], uses = held.uses[i];
        score -= score >> SCORE_SHIFT;
        if (halve) last = max(0, last - STEP_MOST / 2);
        if (picked) {
            score += SCORE_ONE;
            last = step;
            if (hit && uses >= 0) uses = min(uses + 1, SPARE_MOST);
        }
        room.score[e] = score;
        if (hit) {
            const bool stays = picked || uses < 0;
            room.keys[held.place[i] - 1] = stays ? NEVER : key_of(policy, e, last, uses, score);
            if (!stays) atomicAdd(&room.eligible, 1);
        }
        cache.score()[e] = score;
        cache.last()[e] = last;
        cache.uses()[e] = uses;
    }
    __syncthreads();
    Division found;
    const int miss = room.in_order[thread];
    const int before = count_before(miss >= 0, room.warp_sums, found.misses);
    if (miss >= 0) room.misses[before] = miss;
    found.linked = link == nullptr || found.misses == 0 ? found.misses : link[min(found.misses, most)];
    if (cache.state && thread == 0) cache.state[STEP] = step;
    if (found.misses == 0) return found;  // the same for all threads
    __syncthreads();
    if (thread >= found.linked && thread < found.misses) room.fate[room.misses[thread]] = -1;
    if (thread < found.linked) room.slot[thread] = -1;
    if (policy == STATIC || found.linked == 0) {  // the same for all threads
        __syncthreads();
        return found;
    }
    const int each = blockDim.x / LANES_A_SLOT;
    for (int begin = 0; begin < cache.slots; begin += each) {
        const int s = begin + thread / LANES_A_SLOT;
        const u64 key = s < cache.slots ? room.keys[s] : NEVER;
        int smaller = 0;
        if (key != NEVER)
            for (int other = thread % LANES_A_SLOT; other < cache.slots; other += LANES_A_SLOT)
                smaller += room.keys[other] < key;
#pragma unroll
        for (int o = LANES_A_SLOT / 2; o > 0; o >>= 1) smaller += __shfl_xor_sync(ALL, smaller, o);
        if (key != NEVER && thread % LANES_A_SLOT == 0 && smaller < found.linked) room.victims[smaller] = s;
    }
    __syncthreads();
    if (thread == 0) {
        int next = 0;
        for (int i = 0; i < found.linked && next < room.eligible; ++i) {
            const int e = room.misses[i], slot = room.victims[next];
            if (policy == COUNTS && room.score[e] <= static_cast<int>(room.keys[slot] >> 32)) continue;
            room.slot[i] = slot;
            room.fate[e] = ++next;
        }
        room.filled = next;
    }
    __syncthreads();
    return found;
}

// Gives the filled experts their slots; `then(fill, expert, slot, victim)` is called for each.
template <class Then>
__device__ __forceinline__ void take_slots(const Cache& cache, const Division& found, const Room& room, int origin,
                                           Then then) {
    const int i = threadIdx.x;
    if (i >= found.linked || room.slot[i] < 0) return;
    const int expert = room.misses[i], slot = room.slot[i], victim = static_cast<int>(room.keys[slot]);
    cache.place[victim] = 0;
    cache.place[expert] = slot + 1;
    cache.uses()[expert] = 0;
    cache.origin()[victim] = PLACED;
    cache.origin()[expert] = origin;
    then(room.fate[expert] - 1, expert, slot, victim);
}

// Counts a step in a layer's COUNTERS.
__device__ __forceinline__ void count_step(u64* counts, const Division& found, const Room& room) {
    if (threadIdx.x) return;
    counts[STEPS] += 1;
    counts[PICKS] += room.picks;
    counts[HITS] += room.hits;
    counts[LINKED] += found.linked;
    counts[FILLED] += room.filled;
    counts[BYPASSED] += found.linked - room.filled;
    counts[LEFT_TO_CPU] += found.misses - found.linked;
    counts[PINNED_HITS] += room.by_origin[PLACED];
    counts[PREFETCHED_HITS] += room.by_origin[FILLED_AHEAD];
}

// The memories that a layer's addresses point into.
struct Memories {
    long long* table;   // [experts][3]: addresses of gate, up and down
    const u8* host;     // every expert, in the order of their numbers
    u8* slots;
    int expert_bytes, up, down;  // where up and down begin within an expert

    __device__ __forceinline__ void point(int expert, const u8* at) const {
        table[expert * 3] = reinterpret_cast<long long>(at);
        table[expert * 3 + 1] = reinterpret_cast<long long>(at + up);
        table[expert * 3 + 2] = reinterpret_cast<long long>(at + down);
    }
};

// The mailbox of the CPU, see handover.cu; `mail` is null in a layer that does not ask it.
struct Mail {
    const float* x;  // [rows, hidden]
    const float* weights;
    u32* mail;
    u32* own;
    u64* counts;
    int hidden, layer;
};

// Publishes a request for the picks whose fate is the CPU's.
__device__ __forceinline__ void publish(const Mail& to, int expert, int rows, int used, const Room& room,
                                        const Division& found, int* taken) {
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, pick = row * used + lane;
    const bool cpus = expert >= 0 && room.fate[expert] < 0;
    const u32 mine = __ballot_sync(ALL, cpus);
    if (lane == 0) taken[row] = __popc(mine);
    __syncthreads();
    int total = 0, first = rows;
    for (int r = rows - 1; r >= 0; --r)
        if (taken[r]) total += taken[r], first = r;
    u32 number = to.own[REQUESTS] + 1;
    if (number == 0) number = 1;  // 0 means "no request"; the number wraps after 2^32 requests
    __syncthreads();  // all threads have read the last number
    if (lane == 0 && row < rows) to.own[ASKED + row] = taken[row] ? number : 0;
    if (threadIdx.x == 0) {
        to.counts[GPU_PICKS] += found.linked;
        to.own[FIRST] = first;
        if (total) to.own[REQUESTS] = number;
        *reinterpret_cast<u64*>(to.own + SINCE) = now_ns();
    }
    if (!total) return;  // nothing for the CPU: `collect` will not wait
    if (row < rows && lane < used) {
        to.mail[IDS + pick] = cpus ? expert : -1;
        reinterpret_cast<float*>(to.mail)[WEIGHTS + pick] = to.weights[pick];
    }
    if (threadIdx.x == 0) to.mail[LAYER] = to.layer, to.mail[ROWS] = rows;
    for (int r = first; r < rows; ++r) {
        if (!taken[r]) continue;
        const float4* from = reinterpret_cast<const float4*>(to.x + static_cast<size_t>(r) * to.hidden);
        float4* at = reinterpret_cast<float4*>(to.mail + INPUTS + static_cast<size_t>(r) * to.hidden);
        for (int i = threadIdx.x; i < to.hidden / 4; i += blockDim.x) at[i] = from[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release(to.mail + REQUEST, number);
}

// The body of resolve and choose_resolve, for thread (row, rank) with its pick.
__device__ __forceinline__ void run(int expert, int* ids, int rows, int used, const Cache& cache, Held& held,
                                    Room& room, const Memories& memories, const int* link, int most, u32* fills, int* picks_seen,
                                    u64* cache_counts, const Mail& to, int origin) {
    __shared__ int taken[MOST_ROWS];
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32, pick = row * used + lane;
    const bool is_pick = row < rows && lane < used;
    if (!is_pick) expert = -1;
    if (picks_seen && is_pick) picks_seen[pick] = expert;
    const Division found = divide(cache, held, expert, rows, to.mail ? link : nullptr, most, room);
    take_slots(cache, found, room, origin, [&](int fill, int filled, int slot, int victim) {
        memories.point(victim, memories.host + static_cast<size_t>(victim) * memories.expert_bytes);
        memories.point(filled, memories.slots + static_cast<size_t>(slot) * memories.expert_bytes);
        fills[FILL_EXPERT + fill] = filled;
        fills[FILL_SLOT + fill] = slot;
        fills[FILL_ARRIVED + fill] = 0;
    });
    if (is_pick) {
        const int fate = expert < 0 ? 0 : room.fate[expert];
        ids[pick] = fate < 0 ? -1 : expert;
        if (fills) fills[FILL_OF_PICK + pick] = max(fate, 0);
    }
    if (threadIdx.x == 0 && fills) fills[FILL_COUNT] = room.filled;
    count_step(cache_counts, found, room);
    if (!to.mail) return;
    publish(to, expert, rows, used, room, found, taken);
}

// ids, weights [rows, used]: the router's picks; ids of the CPU's picks become -1. seen [rows, used]: receives
// the picks for `shadow`, may be null. origin: of the fills. One block, a warp for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
resolve(int* ids, const float* weights, int rows, int used, int* place, int* state, int experts, int slots,
        long long* table, const u8* host, u8* slot_memory, int expert_bytes, int up, int down, const int* link,
        int most, u32* fills, int* seen, u64* cache_counts, const float* x, u32* mail, u32* own, u64* counts,
        int hidden, int layer, int origin) {
    __shared__ Room room;
    const Cache cache{place, state, experts, slots};
    Held held;
    let_next_begin();
    held.load(cache, room);
    wait_for_last();
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = row < rows && lane < used ? ids[row * used + lane] : -1;
    run(expert, ids, rows, used, cache, held, room,
        Memories{table, host, slot_memory, expert_bytes, up, down}, link, most, fills, seen, cache_counts,
        Mail{x, weights, mail, own, counts, hidden, layer}, origin);
}

#ifdef EXPERTS
// The same, which first chooses the experts from the router's logits as route.cu does, and counts the picks.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_resolve(const float* logits, int stride, const float* bias, const int* sequence, u64* picked, int normalise,
               float scale, float softcap, int* ids, float* weights, int rows, int used, int* place, int* state,
               int slots, long long* table, const u8* host, u8* slot_memory, int expert_bytes, int up, int down,
               const int* link, int most, u32* fills, int* seen, u64* cache_counts, const float* x, u32* mail,
               u32* own, u64* counts, int hidden, int layer, int origin) {
    __shared__ Room room;
    const Cache cache{place, state, EXPERTS, slots};
    Held held;
    let_next_begin();
    held.load(cache, room);
    wait_for_last();
    const int row = threadIdx.x / 32, lane = threadIdx.x % 32;
    int expert = -1;
    if (row < rows) {
        const bool is_padding = sequence && sequence[row] < 0;
        float weight = 0.0f;
        if (!is_padding)
            weight = choose(logits + static_cast<size_t>(row) * stride, bias, Rule{used, normalise, scale, softcap},
                            lane, expert);
        if (lane < used) {
            weights[row * used + lane] = weight;
            if (!is_padding) atomicAdd(picked + expert, 1ull);
        } else {
            expert = -1;
        }
    }
    run(expert, ids, rows, used, cache, held, room,
        Memories{table, host, slot_memory, expert_bytes, up, down}, link, most, fills, seen, cache_counts,
        Mail{x, weights, mail, own, counts, hidden, layer}, origin);
}
#endif

// Runs a step's picks of all layers through caches of integers alone, one for each layer and policy.
// blockIdx: layer, policy. seen [layers][stride]: picks [rows, used]. places, states: [layers][policies][...].
// shape [layers][3]: experts, slots, picks of a row; a layer without slots is left out.
extern "C" __global__ void __launch_bounds__(THREADS)
shadow(const int* seen, int stride, const int* shape, int* places, int place_words, int* states, int state_words,
       u64* counts, int rows) {
    begin_after_last();
    __shared__ Room room;
    const int at = blockIdx.x * gridDim.y + blockIdx.y, *own = shape + blockIdx.x * 3;
    const int experts = own[0], slots = own[1], used = own[2], row = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (slots == 0) return;
    const Cache cache{places + static_cast<size_t>(at) * place_words, states + static_cast<size_t>(at) * state_words,
                      experts, slots};
    Held held;
    held.load(cache, room);
    int expert = -1;
    if (row < rows && lane < used) expert = seen[static_cast<size_t>(blockIdx.x) * stride + row * used + lane];
    const Division found = divide(cache, held, expert, rows, nullptr, 0, room);
    take_slots(cache, found, room, STEP_FILLED, [](int, int, int, int) {});
    count_step(counts + static_cast<size_t>(at) * COUNTERS, found, room);
}

// Copies the fills that `resolve` has listed.
extern "C" __global__ void __launch_bounds__(FILL_THREADS)
fill(u32* fills, const u8* host, u8* slots, int count, int expert_bytes, int front_bytes) {
    begin_after_last();
    copy_fills(Fills{fills, host, slots, count, expert_bytes, front_bytes}, blockIdx.x, gridDim.x);
}
