// Sixteen rows of an F16 or BF16 weight in tiles times a row of activations: on the tensor cores as packed
// ones, but that its numbers are read as they are. Then no product meets a scale of the weight's.
#include "tensor.cuh"

// Tensor cores that multiply in bf16; others get BF16 weights in f16, as dense ones have them there.
#ifndef BF16_CORES
#define BF16_CORES (__CUDA_ARCH__ >= 800)
#endif

// What a lane holds of a record: the first operands of the products of each half of a block.
struct PlainShare {
    uint4 words[16];

    template <bool STREAMED> __device__ __forceinline__ void load(const u8* record, int lane) {
        const uint4* from = reinterpret_cast<const uint4*>(record) + lane;
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i] = STREAMED ? __ldcs(from + 32 * i) : from[32 * i];
    }
};
template <> struct Share<F16> : PlainShare {};
template <> struct Share<BF16> : PlainShare {};

// Two numbers of bf16 in f16.
__device__ __forceinline__ u32 to_halves(u32 pair) {
    return as_word(__floats2half2_rn(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)));
}
// Two numbers of f16 as sums of two of bf16, which has eight bits of their eleven: nothing is rounded.
__device__ __forceinline__ void split_pair(u32 pair, u32& upper, u32& rest) {
    const float2 both = __half22float2(as_halves(pair));
    const u32 x = __float_as_uint(both.x), y = __float_as_uint(both.y);
    upper = __byte_perm(x, y, 0x7632);
    rest = __byte_perm(__float_as_uint(both.x - __uint_as_float(x & 0xFFFF0000u)),
                       __float_as_uint(both.y - __uint_as_float(y & 0xFFFF0000u)), 0x7632);
}
// c += sixteen columns of a weight of type K times the same of a row.
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

// acc += a record times a row, packed or plain. The upper columns of a block are stored as sixteenths, see
// halves.cuh.
template <int K, int L>
__device__ __forceinline__ void add_record(const Share<K>& share, const u8* piece, const Slot& slot,
                                           float (*acc)[1][4]) {
    if constexpr (!is_plain(K)) {
        add_records<K, L, 1, 1>(&share, piece, &slot, acc);
    } else {
        float lower[4] = {}, upper[4] = {};
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            const uint4 x = *reinterpret_cast<const uint4*>(piece + b * L * 16 + slot.words * 16);
            add_columns<K>(lower, share.words[2 * b], x.x, x.z);
            add_columns<K>(upper, share.words[2 * b + 1], x.y, x.w);
        }
        const float* powers = reinterpret_cast<const float*>(piece + Piece<L>::scales);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            acc[0][0][i] = fmaf(powers[slot.scales[i % 2]], fmaf(16.0f, upper[i], lower[i]), acc[0][0][i]);
    }
}
