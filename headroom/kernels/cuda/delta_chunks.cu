// Gated DeltaNet in chunks of 64 rows, for steps with many rows of a sequence.
// COLUMNS: columns of a head's values in one block of `run_chunks`, 32 or 64.
// HELD: channels of keys and queries in a block's shared memory: all 128, or 64 on GPUs with little; then
// the two halves take turns there.
//
// With a_i the sum of the logarithms of a chunk's decays up to row i, b the update strengths (beta), D_ij =
// exp(a_i - a_j) for j <= i, and S the state before the chunk:
//   (1 + strict lower part of b_i (k_i.k_j) D_ij) [Wv, Wk] = b [V, exp(a) K]
//   U = Wv - Wk S;   out = exp(a) Q S + (Q K^T . D) U;   S <- exp(a_n) S + (exp(a_n - a) K)^T U
#include "delta_net.cuh"

#define CHUNK 64
#define WHOLE (HELD == DIM)
#define LONG (DIM + 4)     // strides of rows in shared memory: 4 floats more, so that rows begin in other banks
#define SHORT (CHUNK + 4)
#define STRIDE (HELD + 4)

__device__ __forceinline__ float dot(const float4& a, const float4& b, float to) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, to))));
}
__device__ __forceinline__ const float4& four_at(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Loads 64 rows of HELD channels to shared memory, each row times its factor; zeros after the chunk's end.
__device__ __forceinline__ void load_rows(const float* from, int stride, int count, const float* factors, float* to) {
#pragma unroll
    for (int n = 0; n < CHUNK * HELD / 4 / 256; ++n) {
        const int at = n * 256 + threadIdx.x, row = at / (HELD / 4), column = at % (HELD / 4) * 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (row < count) x = four_at(from + static_cast<size_t>(row) * stride + column);
        if (factors) {
            const float by = factors[row];
            x = make_float4(by * x.x, by * x.y, by * x.z, by * x.w);
        }
        *reinterpret_cast<float4*>(to + row * STRIDE + column) = x;
    }
}

// load_rows in two steps (to registers, then to shared memory), so that loads are in flight while other
// rows are used.
__device__ __forceinline__ void fetch_rows(const float* from, int stride, int count, float4* rows) {
#pragma unroll
    for (int n = 0; n < CHUNK * HELD / 4 / 256; ++n) {
        const int at = n * 256 + threadIdx.x, row = at / (HELD / 4), column = at % (HELD / 4) * 4;
        rows[n] = make_float4(0, 0, 0, 0);
        if (row < count) rows[n] = four_at(from + static_cast<size_t>(row) * stride + column);
    }
}
__device__ __forceinline__ void put_rows(const float4* rows, const float* factors, float* to, int stride) {
#pragma unroll
    for (int n = 0; n < CHUNK * HELD / 4 / 256; ++n) {
        const int at = n * 256 + threadIdx.x, row = at / (HELD / 4), column = at % (HELD / 4) * 4;
        const float by = factors ? factors[row] : 1.0f;
        *reinterpret_cast<float4*>(to + row * stride + column) =
            make_float4(by * rows[n].x, by * rows[n].y, by * rows[n].z, by * rows[n].w);
    }
}

// Computes what does not depend on the state, for all chunks in parallel. blockIdx: value head, chunk.
// solved [heads, chunks, 64, 256]: Wv, Wk; scores [heads, chunks, 64, 64]: Q K^T . D; sums [heads, chunks,
// 64]: a.
extern "C" __global__ void __launch_bounds__(256, 2)
prepare_chunks(const float* mixed, const float2* gates, const int* first_rows, const int* counts, float* solved,
               float* scores, float* sums) {
    extern __shared__ float shared[];
    float* keys = shared;
    float* queries = keys + CHUNK * STRIDE;
    float* factors = WHOLE ? queries + CHUNK * STRIDE : queries;  // strict lower, [64][64]
    float* sum = WHOLE ? factors + CHUNK * CHUNK : queries + CHUNK * STRIDE;
    float* strength = sum + CHUNK;
    const int head = blockIdx.x, chunk = blockIdx.y, thread = threadIdx.x;
    const int first = first_rows[chunk], count = counts[chunk];
    const size_t place = static_cast<size_t>(head) * gridDim.y + chunk;
    const float* own = mixed + static_cast<size_t>(first) * CHANNELS + key_head(head) * DIM;
    load_rows(own, CHANNELS, count, nullptr, queries);
    load_rows(own + KEY_HEADS * DIM, CHANNELS, count, nullptr, keys);
    if (thread < CHUNK) {
        float2 gate = make_float2(0, 0);
        if (thread < count) gate = gates[(first + thread) * HEADS + head];
        float a = gate.x;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const float before = __shfl_up_sync(0xFFFFFFFFu, a, o);
            if (thread % 32 >= o) a += before;
        }
        sum[thread] = a;
        strength[thread] = gate.y;
    }
    __syncthreads();
    if (thread >= 32 && thread < CHUNK) sum[thread] += sum[31];
    __syncthreads();
    if (thread < CHUNK) sums[place * CHUNK + thread] = sum[thread];

    const int tx = thread % 16, ty = thread / 16;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int part = 0; part < DIM; part += HELD) {
        if (part) {
            __syncthreads();
            load_rows(own + part, CHANNELS, count, nullptr, queries);
            load_rows(own + KEY_HEADS * DIM + part, CHANNELS, count, nullptr, keys);
            __syncthreads();
        }
#pragma unroll 4
        for (int d = 0; d < HELD; d += 4) {
            float4 other[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) other[j] = four_at(keys + (tx + 16 * j) * STRIDE + d);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 key = four_at(keys + (ty + 16 * i) * STRIDE + d);
                const float4 query = four_at(queries + (ty + 16 * i) * STRIDE + d);
#pragma unroll
                for (int j = 0; j <= i; ++j) {  // 16 x 16 squares above the diagonal are not needed
                    kk[i][j] = dot(key, other[j], kk[i][j]);
                    qk[i][j] = dot(query, other[j], qk[i][j]);
                }
            }
        }
    }
    if (!WHOLE) __syncthreads();  // `factors` overwrites the queries
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = ty + 16 * i, column = tx + 16 * j;
            // Above the diagonal the exponent would be positive and might overflow.
            const float decay = column <= row ? expf(sum[row] - sum[column]) : 0.0f;
            factors[row * CHUNK + column] = column < row ? strength[row] * kk[i][j] * decay : 0.0f;
            scores[place * CHUNK * CHUNK + row * CHUNK + column] = column <= row ? qk[i][j] * decay : 0.0f;
        }
    __syncthreads();

    // Forward substitution: each thread solves one column of the right-hand sides.
    float u[CHUNK];
    if (thread < DIM) {
        const float* values = mixed + static_cast<size_t>(first) * CHANNELS + (2 * KEY_HEADS + head) * DIM + thread;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) u[i] = i < count ? values[static_cast<size_t>(i) * CHANNELS] : 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) u[i] *= strength[i];
    } else if (WHOLE) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) u[i] = strength[i] * expf(sum[i]) * keys[i * STRIDE + thread - DIM];
    } else {
        const float* channel = own + KEY_HEADS * DIM + thread - DIM;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) u[i] = i < count ? channel[static_cast<size_t>(i) * CHANNELS] : 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) u[i] *= strength[i] * expf(sum[i]);
    }
    float* to = solved + place * CHUNK * 2 * DIM + thread;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        float4 known = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < i; j += 4) {  // factors on and above the diagonal are zeros
            const float4 by = four_at(factors + i * CHUNK + j);
            known.x = fmaf(by.x, u[j], known.x);
            if (j + 1 < i) known.y = fmaf(by.y, u[j + 1], known.y);
            if (j + 2 < i) known.z = fmaf(by.z, u[j + 2], known.z);
            if (j + 3 < i) known.w = fmaf(by.w, u[j + 3], known.w);
        }
        u[i] -= (known.x + known.y) + (known.z + known.w);
        to[i * 2 * DIM] = u[i];
    }
}

#define ACROSS (COLUMNS / 4)            // threads side by side, four columns each
#define ROWS (CHUNK / (256 / ACROSS))   // rows of a chunk that a thread computes

__device__ __forceinline__ void add(float* to, float by, const float4& x) {
    to[0] = fmaf(by, x.x, to[0]);
    to[1] = fmaf(by, x.y, to[1]);
    to[2] = fmaf(by, x.z, to[2]);
    to[3] = fmaf(by, x.w, to[3]);
}

// to [ROWS][4] += four columns of a thread's rows of `left` times four rows of `right`.
__device__ __forceinline__ void add_product(float (*to)[4], const float* left, int stride, const float4* right) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float4 by = four_at(left + i * stride);
        add(to[i], by.x, right[0]);
        add(to[i], by.y, right[1]);
        add(to[i], by.z, right[2]);
        add(to[i], by.w, right[3]);
    }
}

// Runs the chunks of each sequence one after another. blockIdx: value head, group of columns, sequence.
// chunk_ends [sequences]: one past a sequence's last chunk.
extern "C" __global__ void __launch_bounds__(256, 1)
run_chunks(const float* qkv, const float* mixed, const float* solved, const float* scores, const float* sums,
           const int* first_rows, const int* counts, const int* chunk_ends, const int* starts, const int* slots,
           float* memory, float* inputs, float* out, int chunks) {
    extern __shared__ float shared[];
    float* state = shared;                     // [128][COLUMNS]
    float* changes = state + DIM * COLUMNS;    // U: [64][COLUMNS]
    float* known = changes + CHUNK * COLUMNS;  // Wk
    float* queries = known + CHUNK * STRIDE;
    float* keys = WHOLE ? queries + CHUNK * STRIDE : known;  // [64][LONG]
    float* score = WHOLE ? keys + CHUNK * LONG : known;      // [64][SHORT]
    float* grown = WHOLE ? score + CHUNK * SHORT : queries + CHUNK * STRIDE;  // exp(a)
    float* left = grown + CHUNK;                                              // exp(a_n - a)
    const int head = blockIdx.x, s = blockIdx.z, thread = threadIdx.x;
    const int begin = s ? chunk_ends[s - 1] : 0, end = chunk_ends[s];
    if (begin == end) return;
    const bool fresh = starts[s] == 0;
    const size_t slot = slots[s];
    const int four = thread % ACROSS * 4, column = blockIdx.y * COLUMNS + four, ty = thread / ACROSS;
    float* mine = memory + (slot * HEADS + head) * DIM * DIM + blockIdx.y * COLUMNS;
    for (int i = thread; i < DIM * ACROSS; i += 256) {
        const int row = i / ACROSS, at = i % ACROSS * 4;
        *reinterpret_cast<float4*>(state + row * COLUMNS + at) =
            fresh ? make_float4(0, 0, 0, 0) : four_at(mine + row * DIM + at);
    }
    for (int chunk = begin; chunk < end; ++chunk) {
        const int first = first_rows[chunk], count = counts[chunk];
        const size_t place = static_cast<size_t>(head) * chunks + chunk;
        const float* own = mixed + static_cast<size_t>(first) * CHANNELS + key_head(head) * DIM;
        const float* from = solved + place * CHUNK * 2 * DIM;
        const float last = sums[place * CHUNK + CHUNK - 1];  // rows after the end have gates of 0
        // If the halves of the channels take turns, the next half is loaded while this one is used.
        float4 one[CHUNK * HELD / 4 / 256], other[CHUNK * HELD / 4 / 256];
        if (!WHOLE) {
            fetch_rows(from + DIM, 2 * DIM, CHUNK, one);
            fetch_rows(own, CHANNELS, count, other);
        }
        __syncthreads();  // all threads are done with the previous chunk
        if (thread < CHUNK) {
            const float a = sums[place * CHUNK + thread];
            grown[thread] = expf(a);
            left[thread] = expf(last - a);
        }
        __syncthreads();
        if (WHOLE) {
            load_rows(from + DIM, 2 * DIM, CHUNK, nullptr, known);
            load_rows(own, CHANNELS, count, grown, queries);
            load_rows(own + KEY_HEADS * DIM, CHANNELS, count, left, keys);
#pragma unroll
            for (int n = 0; n < CHUNK * CHUNK / 4 / 256; ++n) {
                const int at = n * 256 + thread, row = at / (CHUNK / 4), j = at % (CHUNK / 4) * 4;
                *reinterpret_cast<float4*>(score + row * SHORT + j) =
                    four_at(scores + place * CHUNK * CHUNK + row * CHUNK + j);
            }
            __syncthreads();
        }

        float remembered[ROWS][4] = {}, answer[ROWS][4] = {};
#pragma unroll
        for (int part = 0; part < DIM; part += HELD) {
            if (!WHOLE) {
                if (part) __syncthreads();
                put_rows(one, nullptr, known, STRIDE);
                put_rows(other, grown, queries, STRIDE);
                __syncthreads();
                if (part + HELD < DIM) {
                    fetch_rows(from + DIM + part + HELD, 2 * DIM, CHUNK, one);
                    fetch_rows(own + part + HELD, CHANNELS, count, other);
                } else {
                    fetch_rows(scores + place * CHUNK * CHUNK, CHUNK, CHUNK, one);
                }
            }
#pragma unroll 4
            for (int d = 0; d < HELD; d += 4) {
                float4 right[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) right[i] = four_at(state + (part + d + i) * COLUMNS + four);
                add_product(remembered, known + ty * ROWS * STRIDE + d, STRIDE, right);
                add_product(answer, queries + ty * ROWS * STRIDE + d, STRIDE, right);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = ty * ROWS + i;
            const float4 target = four_at(from + row * 2 * DIM + column);
            *reinterpret_cast<float4*>(changes + row * COLUMNS + four) =
                make_float4(target.x - remembered[i][0], target.y - remembered[i][1], target.z - remembered[i][2],
                            target.w - remembered[i][3]);
        }
        if (!WHOLE) {
            __syncthreads();
            put_rows(one, nullptr, score, SHORT);
            fetch_rows(own + KEY_HEADS * DIM, CHANNELS, count, one);
            fetch_rows(own + KEY_HEADS * DIM + HELD, CHANNELS, count, other);
        }
        __syncthreads();
        for (int j = 0; j < (ty + 1) * ROWS; j += 4) {  // scores above the diagonal are zeros
            float4 right[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) right[i] = four_at(changes + (j + i) * COLUMNS + four);
            add_product(answer, score + ty * ROWS * SHORT + j, SHORT, right);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = ty * ROWS + i;
            if (row < count)
                *reinterpret_cast<float4*>(out + (static_cast<size_t>(first + row) * HEADS + head) * DIM + column) =
                    make_float4(answer[i][0], answer[i][1], answer[i][2], answer[i][3]);
        }
        if (!WHOLE) {
            __syncthreads();
            put_rows(one, left, keys, LONG);
            put_rows(other, left, keys + HELD, LONG);
            __syncthreads();
        }
        // Update the state: this thread alone writes a tile of 2 * ROWS rows and four columns.
        float tile[2 * ROWS][4];
        const float keep = expf(last);
#pragma unroll
        for (int i = 0; i < 2 * ROWS; ++i) {
            const float4 old = four_at(state + (ty * 2 * ROWS + i) * COLUMNS + four);
            tile[i][0] = keep * old.x;
            tile[i][1] = keep * old.y;
            tile[i][2] = keep * old.z;
            tile[i][3] = keep * old.w;
        }
#pragma unroll 4
        for (int j = 0; j < CHUNK; ++j) {
            const float4 change = four_at(changes + j * COLUMNS + four);
#pragma unroll
            for (int i = 0; i < 2 * ROWS; i += 4) {
                const float4 key = four_at(keys + j * LONG + ty * 2 * ROWS + i);
                add(tile[i], key.x, change);
                add(tile[i + 1], key.y, change);
                add(tile[i + 2], key.z, change);
                add(tile[i + 3], key.w, change);
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * ROWS; ++i)
            *reinterpret_cast<float4*>(state + (ty * 2 * ROWS + i) * COLUMNS + four) =
                make_float4(tile[i][0], tile[i][1], tile[i][2], tile[i][3]);
    }
    __syncthreads();
    for (int i = thread; i < DIM * ACROSS; i += 256) {
        const int row = i / ACROSS, at = i % ACROSS * 4;
        *reinterpret_cast<float4*>(mine + row * DIM + at) = four_at(state + row * COLUMNS + at);
    }
    // Store the convolution's last inputs: every block stores a share of the channels. The rows of a
    // sequence are adjacent.
    const int first = first_rows[begin], count = first_rows[end - 1] + counts[end - 1] - first;
    for (int channel = (head * gridDim.y + blockIdx.y) * 256 + thread; channel < CHANNELS;
         channel += gridDim.x * gridDim.y * 256)
        keep_inputs(qkv, inputs + slot * (TAPS - 1) * CHANNELS, channel, first, count, fresh);
}
