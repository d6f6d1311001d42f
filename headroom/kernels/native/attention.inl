// Attention of some queries over one block of cached keys: scores, softmax, weighted sum of values.

namespace headroom {
namespace {

inline void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
}

// The addresses of KEY_TILE keys' heads; null for keys that no query sees, which must not be read.
struct Tile {
    const uint8_t* heads[KEY_TILE];
};

// Looks up the keys [from, from + KEY_TILE) that lie in [first, to), and prefetches them. The heads of a
// job are adjacent in a slot.
void open_tile(const AttentionJob& job, const KvPlane& plane, int64_t from, int64_t first, int64_t to,
               Tile& tile) {
    const int64_t low = first > from ? first : from;
    int64_t page = low / job.page_size, offset = low % job.page_size;
    for (int64_t key = from; key < from + KEY_TILE; ++key) {
        tile.heads[key - from] = nullptr;
        if (key < low || key >= to) continue;
        const int64_t slot = job.pages[page] * job.page_size + offset;
        const uint8_t* heads = plane.data + slot * plane.slot_bytes + job.head * plane.head_bytes;
        prefetch(heads, job.heads * plane.head_bytes);
        tile.heads[key - from] = heads;
        if (++offset == job.page_size) {  // cheaper than a division per key
            offset = 0;
            ++page;
        }
    }
}

// Unpacks one head of a tile's keys to floats in `memory`, unless they are floats already. `rows` receives
// the addresses; keys that are not read point to a row of zeros.
template <Kind K>
void read_tile(const Tile& tile, int64_t offset, int64_t dim, float* memory, const uint8_t** rows) {
    const int64_t width = padded_dim(dim);
    for (int64_t key = 0; key < KEY_TILE; ++key) {
        float* row = memory + key * width;
        rows[key] = reinterpret_cast<const uint8_t*>(tile.heads[key] ? row : memory + KEY_TILE * width);
        if (!tile.heads[key]) continue;  // zeros
        if (K == F32 && dim == width) rows[key] = tile.heads[key] + offset;
        else load_head<K>(tile.heads[key] + offset, dim, row);
    }
}

void read_tile(Kind kind, const Tile& tile, int64_t offset, int64_t dim, float* memory,
               const uint8_t** rows) {
    switch (kind) {
        case F32: return read_tile<F32>(tile, offset, dim, memory, rows);
        case F16: return read_tile<F16>(tile, offset, dim, memory, rows);
        case BF16: return read_tile<BF16>(tile, offset, dim, memory, rows);
        case Q8_0: return read_tile<Q8_0>(tile, offset, dim, memory, rows);
        case Q5_1: return read_tile<Q5_1>(tile, offset, dim, memory, rows);
        case Q5_0: return read_tile<Q5_0>(tile, offset, dim, memory, rows);
        case Q4_1: return read_tile<Q4_1>(tile, offset, dim, memory, rows);
        default: return read_tile<Q4_0>(tile, offset, dim, memory, rows);
    }
}

// The scores of Q queries with N keys of plain type K; Q * N is at most sixteen. Every score is summed in
// the same order, whatever Q and N are.
template <Kind K, int Q, int N>
inline void score(const float* queries, int64_t width, const uint8_t* const* rows, float* scores) {
    constexpr int size = kind_info(K).block_bytes;
    constexpr int B = MANY_REGISTERS ? Q : Q % 2 ? 1 : 2;  // B queries x C keys at a time: so many sums
    constexpr int C = MANY_REGISTERS ? N : 4 / B;          // fit into registers
    F sums[16];
    for (int i = Q * N; i < 16; ++i) sums[i] = zero();
    for (int q = 0; q < Q; q += B)
        for (int key = 0; key < N; key += C) {
            F some[B][C];
            for (int i = 0; i < B; ++i)
                for (int j = 0; j < C; ++j) some[i][j] = zero();
            for (int64_t d = 0; d < width; d += 16) {
                F keys[C];
                for (int j = 0; j < C; ++j) keys[j] = load_plain<K>(rows[key + j] + d * size);
                for (int i = 0; i < B; ++i) {
                    const F query = load(queries + (q + i) * width + d);
                    for (int j = 0; j < C; ++j) some[i][j] = fma(query, keys[j], some[i][j]);
                }
            }
            for (int i = 0; i < B; ++i)
                for (int j = 0; j < C; ++j) sums[(q + i) * N + key + j] = some[i][j];
        }
    float lanes[16];
    store(lanes, sum_each(sums));
    for (int q = 0; q < Q; ++q) std::memcpy(scores + q * KEY_BLOCK, lanes + q * N, N * sizeof(float));
}

template <Kind K, int Q, int N>
inline void score_tile(const float* queries, int64_t width, const uint8_t* const* rows,
                       float* scores) {
    for (int key = 0; key < KEY_TILE; key += N)
        score<K, Q, N>(queries, width, rows + key, scores + key);
}

template <Kind K>
void score_all(const float* queries, int count, int64_t width, const uint8_t* const* rows,
               float* scores) {
    int q = 0;
    for (; q + 4 <= count; q += 4)
        score_tile<K, 4, 4>(queries + q * width, width, rows, scores + q * KEY_BLOCK);
    const float* rest = queries + q * width;
    if (count - q == 3) score_tile<K, 3, 4>(rest, width, rows, scores + q * KEY_BLOCK);
    if (count - q == 2) score_tile<K, 2, 8>(rest, width, rows, scores + q * KEY_BLOCK);
    if (count - q == 1) score_tile<K, 1, 16>(rest, width, rows, scores + q * KEY_BLOCK);
}

// Adds a tile's weighted values to C vectors (16 columns each) of the sums of Q queries.
template <Kind K, int Q, int C>
inline void add_columns(const uint8_t* const* rows, int64_t column, const float* weights,
                        int64_t width, float* sums) {
    constexpr int size = kind_info(K).block_bytes;
    F totals[Q][C];
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) totals[q][c] = load(sums + q * width + column + 16 * c);
    for (int64_t key = 0; key < KEY_TILE; ++key) {
        F values[C];
        for (int c = 0; c < C; ++c) values[c] = load_plain<K>(rows[key] + (column + 16 * c) * size);
        for (int q = 0; q < Q; ++q) {
            const F weight = set1(weights[q * KEY_BLOCK + key]);
            for (int c = 0; c < C; ++c) totals[q][c] = fma(weight, values[c], totals[q][c]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) store(sums + q * width + column + 16 * c, totals[q][c]);
}

template <Kind K, int Q>
inline void add_tile(const uint8_t* const* rows, const float* weights, int64_t width, float* sums) {
    constexpr int C = MANY_REGISTERS || Q == 1 ? 4 : Q == 2 ? 2 : 1;
    int64_t column = 0;
    for (; column + 16 * C <= width; column += 16 * C)
        add_columns<K, Q, C>(rows, column, weights, width, sums);
    for (; column < width; column += 16) add_columns<K, Q, 1>(rows, column, weights, width, sums);
}

template <Kind K>
void add_all(const uint8_t* const* rows, const float* weights, int count, int64_t width,
             float* sums) {
    int q = 0;
    for (; q + 4 <= count; q += 4)
        add_tile<K, 4>(rows, weights + q * KEY_BLOCK, width, sums + q * width);
    weights += q * KEY_BLOCK;
    if (count - q == 3) add_tile<K, 3>(rows, weights, width, sums + q * width);
    if (count - q == 2) add_tile<K, 2>(rows, weights, width, sums + q * width);
    if (count - q == 1) add_tile<K, 1>(rows, weights, width, sums + q * width);
}

// Computes the scores of one head's queries with a tile's keys; with `add` adds its weighted values.
template <Kind K>
inline void use_rows(bool add, const uint8_t* const* rows, const float* queries, int count,
                     int64_t width, float* scores, float* sums) {
    if (add) add_all<K>(rows, scores, count, width, sums);
    else score_all<K>(queries, count, width, rows, scores);
}

// Runs use_rows on a tile of the cache. Up to four queries read f16 and bf16 in place: unpacking them to
// memory first pays only when they are read more than once.
void use_tile(bool add, Kind kind, const Tile& tile, int64_t offset, int dim, float* memory,
              const float* queries, int count, float* scores, float* sums) {
    const int64_t width = padded_dim(dim);
    const uint8_t* rows[KEY_TILE];
    if (count > 4 || dim != width || (kind != F16 && kind != BF16)) {
        read_tile(kind, tile, offset, dim, memory, rows);
        return use_rows<F32>(add, rows, queries, count, width, scores, sums);
    }
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(memory + KEY_TILE * width);
    for (int64_t key = 0; key < KEY_TILE; ++key)
        rows[key] = tile.heads[key] ? tile.heads[key] + offset : zeros;
    if (kind == F16) use_rows<F16>(add, rows, queries, count, width, scores, sums);
    else use_rows<BF16>(add, rows, queries, count, width, scores, sums);
}

inline int64_t clamped(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

// Writes `value` as the score of each of the keys [from, from + count) that a query does not see.
void hide(const AttentionJob& job, int query, int64_t from, int64_t count, float value, float* scores) {
    const int64_t low = clamped(job.first[query] - from, 0, count);
    const int64_t high = clamped(job.last[query] - from, 0, count);
    for (int64_t i = 0; i < low; ++i) scores[i] = value;
    for (int64_t i = high; i < count; ++i) scores[i] = value;
    const uint8_t* tree = job.tree[query];
    if (!tree) return;
    int64_t depth = 0;  // depth of the next ancestor: ancestors are stored in the order of their depth
    for (int64_t key = job.start; key < from + high; ++key) {
        const bool seen = tree[key - job.start] && depth >= job.shallowest[query];
        depth += tree[key - job.start];
        if (!seen && key >= from) scores[key - from] = value;
    }
}

// Turns one query's scores into softmax weights, 0 for keys that it does not see; returns peak and sum.
Partial weigh(const AttentionJob& job, int query, int64_t from, int64_t count, float* scores) {
    hide(job, query, from, count, -INFINITY, scores);
    F peaks = set1(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) peaks = max(peaks, load(scores + i));
    const float peak = largest(peaks);
    if (peak == -INFINITY) {
        std::memset(scores, 0, count * sizeof(float));
        return {peak, 0};
    }
    for (int64_t i = 0; i < count; i += 16)
        store(scores + i, exponential(sub(load(scores + i), set1(peak))));
    hide(job, query, from, count, 0, scores);
    F totals = zero();
    for (int64_t i = 0; i < count; i += 16) totals = add(totals, load(scores + i));
    return {peak, sum(totals)};
}

void attend(const AttentionJob& job, int64_t from, int64_t to, Partial* partials, float* sums,
            float* scratch) {
    const int queries = job.heads * job.count;
    const int64_t width = padded_dim(job.dim), tiles = (to - from + KEY_TILE - 1) / KEY_TILE;
    float* scores = scratch;  // [queries, KEY_BLOCK]
    float* memory = scratch + queries * KEY_BLOCK;  // [KEY_TILE + 1, width]; the last row is zero
    std::memset(memory + KEY_TILE * width, 0, width * sizeof(float));
    std::memset(sums, 0, queries * width * sizeof(float));
    int64_t first = to;
    for (int q = 0; q < queries; ++q) first = job.first[q] < first ? job.first[q] : first;
    const auto plane = [&](int64_t i) -> const KvPlane& { return i < tiles ? job.keys : job.values; };
    // First all tiles of keys, then all tiles of values. Each tile is prefetched while the one before it is
    // computed; the softmax is done between the two.
    Tile opened[2];
    open_tile(job, job.keys, from, first, to, opened[0]);
    for (int64_t i = 0; i < 2 * tiles; ++i) {
        if (i + 1 < 2 * tiles)
            open_tile(job, plane(i + 1), from + (i + 1) % tiles * KEY_TILE, first, to,
                      opened[(i + 1) % 2]);
        if (i == tiles)
            for (int q = 0; q < queries; ++q)
                partials[q] = weigh(job, q, from, tiles * KEY_TILE, scores + q * KEY_BLOCK);
        float* block = scores + i % tiles * KEY_TILE;
        for (int head = 0; head < job.heads; ++head) {
            const int q = head * job.count;
            use_tile(i >= tiles, plane(i).kind, opened[i % 2], head * plane(i).head_bytes, job.dim,
                     memory, job.queries + q * width, job.count, block + q * KEY_BLOCK,
                     sums + q * width);
        }
    }
}

}  // namespace
}  // namespace headroom
