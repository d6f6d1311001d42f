// Products of F16 and BF16 weights in tiles with rows of activations: as tensor.cuh, but the weights are
// the operands themselves and have no scales. Also add_any and SingleRow, which serve packed and plain
// types.
#include "tensor.cuh"

// Whether the tensor cores multiply bf16. If not, BF16 weights are converted to f16.
#ifndef BF16_CORES
#define BF16_CORES (__CUDA_ARCH__ >= 800)
#endif

// A lane's share of a plain record: the first operands for each half of each block.
struct PlainShare {
    uint4 words[16];

    template <bool STREAMED> __device__ __forceinline__ void load(const u8* record, int lane) {
        const uint4* from = reinterpret_cast<const uint4*>(record) + lane;
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = STREAMED ? __ldcs(from + 32 * i) : from[32 * i];
    }
    __device__ __forceinline__ uint4 word(int i) const { return words[i]; }
};
template <> struct Share<F16> : PlainShare {};
template <> struct Share<BF16> : PlainShare {};

// A lane's share of a plain record in shared memory, read only when a product needs it.
struct PlainPlace {
    const uint4* from;

    template <bool STREAMED> __device__ __forceinline__ void load(const u8* record, int lane) {
        from = reinterpret_cast<const uint4*>(record) + lane;
    }
    __device__ __forceinline__ uint4 word(int i) const { return from[32 * i]; }
};
template <int K> struct SharedShare { typedef Share<K> Type; };
template <> struct SharedShare<F16> { typedef PlainPlace Type; };
template <> struct SharedShare<BF16> { typedef PlainPlace Type; };

// Converts two bf16 numbers to f16.
__device__ __forceinline__ u32 to_halves(u32 pair) {
    return as_word(__floats2half2_rn(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)));
}
// Splits two f16 numbers exactly into sums of two bf16 numbers: f16 has 11 significant bits, bf16 has 8.
__device__ __forceinline__ void split_pair(u32 pair, u32& upper, u32& rest) {
    const float2 both = __half22float2(as_halves(pair));
    const u32 x = __float_as_uint(both.x), y = __float_as_uint(both.y);
    upper = __byte_perm(x, y, 0x7632);
    rest = __byte_perm(__float_as_uint(both.x - __uint_as_float(x & 0xFFFF0000u)),
                       __float_as_uint(both.y - __uint_as_float(y & 0xFFFF0000u)), 0x7632);
}
// c += sixteen columns of a weight of type K times those of a row.
template <int K> __device__ __forceinline__ void add_columns(float* c, const uint4& weight, u32 even, u32 odd) {
    u32 a[4] = {weight.x, weight.y, weight.z, weight.w};
    if constexpr (K == BF16) {
#if BF16_CORES
        u32 upper[2], rest[2];
        split_pair(even, upper[0], rest[0]);
        split_pair(odd, upper[1], rest[1]);
        mma_bf16(c, a, rest);
        mma_bf16(c, a, upper);
        return;
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = to_halves(a[i]);
#endif
    }
    mma(c, a, even, odd);
}

// acc += the records of M tiles times the pieces of N groups of rows, for packed and plain types.
// Activations of the upper sixteen columns of a block are stored divided by sixteen (halves.cuh).
template <int K, int M, int N, class S, class R>
__device__ __forceinline__ void add_any(const S* share, const R& rows, float (*acc)[N][4]) {
    if constexpr (!is_plain(K)) {
        add_records<K, M, N>(share, rows, acc);
    } else {
        float lower[M][N][4] = {}, upper[M][N][4] = {};
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            uint4 x[N];
#pragma unroll
            for (int n = 0; n < N; ++n) x[n] = rows.block(b, n);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const uint4 first = share[m].word(2 * b), second = share[m].word(2 * b + 1);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    add_columns<K>(lower[m][n], first, x[n].x, x[n].z);
                    add_columns<K>(upper[m][n], second, x[n].y, x[n].w);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 powers = rows.powers(n);
#pragma unroll
            for (int i = 0; i < 4 * M; ++i) {
                float& sum = acc[i / 4][n][i % 4];
                sum = fmaf(i % 2 ? powers.y : powers.x,
                           fmaf(16.0f, upper[i / 4][n][i % 4], lower[i / 4][n][i % 4]), sum);
            }
        }
    }
}

// Products with one row of a piece. If blocks have f32 scales, a lane reads one block of the row (OneRow);
// else all eight columns of a product are the same row. Every lane ends with the sums of weight rows g and
// g + 8.
template <int K, int L, bool BY_BLOCK = !is_plain(K) && !by_record(K)> struct SingleRow : OneRow<L> {
    template <int M, class S> __device__ __forceinline__ void add(const S* share, float (*acc)[2]) const {
        add_row_records<K, L, M>(share, *this, acc);
    }
};
template <int K, int L> struct SingleRow<K, L, false> {
    Rows<L, 1, true> rows;

    __device__ __forceinline__ void load(const u8* piece, int row, int lane) {
        const Slot slot{row * 4 + lane % 4, {row, row}};
        rows.load(piece, &slot);
    }
    template <int M, class S> __device__ __forceinline__ void add(const S* share, float (*acc)[2]) const {
        float sums[M][1][4];
#pragma unroll
        for (int i = 0; i < 4 * M; ++i) sums[i / 4][0][i % 4] = acc[i / 4][i % 4 / 2];
        add_any<K, M, 1>(share, rows, sums);
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) acc[i / 2][i % 2] = sums[i / 2][0][i % 2 * 2];
    }
};
