// Pieces: rows of activations in f16, in the order of the second operand of tensor-core products (mma.cuh).
//
// Eight rows form a group; the only group of a step may have one, two or four. 256 columns of a group form
// a piece. With lane 4g + t for row g of the group, a piece holds, one after another:
//
//   words   [block of 32 columns][lane] 16 bytes: four words of two f16 numbers, columns
//           (4t, 4t + 2), (16 + 4t, 18 + 4t), (4t + 1, 4t + 3), (17 + 4t, 19 + 4t)
//   sums    [lane] 8 bytes: sums of blocks 2t and 2t + 1 in f16, and the rest that f16 could not hold
//   scales  [row] f32: a power of two; a number is the stored one times this
//
// The order of columns is that in which nibbles come out of a weight's words (tensor.cuh). High nibbles
// come out multiplied by sixteen; therefore the words of columns 16 and up hold the numbers divided by
// sixteen.
#include "types.cuh"

// The offsets of the parts of a piece of L / 4 rows; each row has four lanes.
template <int L> struct Piece {
    static constexpr int sums = 8 * L * 16;
    static constexpr int scales = sums + L * 8;
    static constexpr int bytes = scales + (L + 15) / 16 * 16;
};

__device__ __forceinline__ u32 as_word(__half2 x) { return *reinterpret_cast<const u32*>(&x); }
__device__ __forceinline__ __half2 as_halves(u32 x) { return *reinterpret_cast<const __half2*>(&x); }

// When a warp writes 256 columns, each lane has the eight columns of one slot and writes them in one store:
// four from lane_column() on, and four from UPPER columns later. Four lanes read 64 adjacent bytes at a
// time.
#define UPPER 16
__device__ __forceinline__ int lane_column() { return threadIdx.x % 32 / 4 * 32 + threadIdx.x % 4 * 4; }

// Reads a lane's eight columns of a row whose length is a multiple of four; columns after the end are
// zeros.
__device__ __forceinline__ void read_fours(const float* row, int column, int columns, float* v) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int from = column + half * UPPER;
        const float4 four = from < columns ? *reinterpret_cast<const float4*>(row + from) : make_float4(0, 0, 0, 0);
        v[4 * half] = four.x;
        v[4 * half + 1] = four.y;
        v[4 * half + 2] = four.z;
        v[4 * half + 3] = four.w;
    }
}

// Writes 256 columns of row g of a piece with one warp; each lane writes the slot of its eight columns. The
// sums are those of the rounded numbers, so that offsets and mins of the weights cancel exactly.
template <int L> __device__ __forceinline__ void write_halves(const float* v, u8* piece, int g) {
    const int lane = threadIdx.x % 32, block = lane / 4, t = lane % 4;
    float peak = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(v[i]));
#pragma unroll
    for (int o = 16; o; o /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
    // Scale the largest number to 512 .. 1023: a sum of 32 numbers then stays below the largest f16.
    const u32 exponent = max(__float_as_uint(peak) >> 23, 24u);
    const float inverse = __uint_as_float((263 - exponent) << 23);
    u32 words[4];
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int half = i % 2, at = 4 * half + i / 2;
        const float by = half ? inverse * 0.0625f : inverse;
        const __half2 both = __floats2half2_rn(v[at] * by, v[at + 2] * by);
        const float2 back = __half22float2(both);
        sums[half] += back.x + back.y;
        words[i] = as_word(both);
    }
    *reinterpret_cast<uint4*>(piece + block * L * 16 + (4 * g + t) * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    float sum = fmaf(16.0f, sums[1], sums[0]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) {
        const __half first = __float2half_rn(sum);
        __half* to = reinterpret_cast<__half*>(piece + Piece<L>::sums + (4 * g + block / 2) * 8) + block % 2;
        to[0] = first;
        to[2] = __float2half_rn(sum - __half2float(first));
    }
    if (lane == 0)
        reinterpret_cast<float*>(piece + Piece<L>::scales)[g] = __uint_as_float((exponent - 9) << 23);
}
