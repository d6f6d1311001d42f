// Reading of rows in GGUF's own block order (embedding tables, KV caches), in all types of
// formats/quants.py. Every value is computed by the operations of the reference kernels in their order, so
// that it has the same bits.
#ifndef HEADROOM_ROWS
#define HEADROOM_ROWS
#include "types.cuh"
#include <cuda_bf16.h>

__host__ __device__ constexpr bool is_plain(int k) { return k == F32 || k == F16 || k == BF16; }
__host__ __device__ constexpr int block_values(int k) {
    return is_plain(k) ? 1 : k == Q4_K || k == Q5_K || k == Q6_K ? 256 : 32;
}
__host__ __device__ constexpr int block_bytes(int k) {
    return k == F32 ? 4 : k == F16 || k == BF16 ? 2 : k == Q4_0 || k == IQ4_NL ? 18 : k == Q4_1 ? 20
         : k == Q5_0 ? 22 : k == Q5_1 ? 24 : k == Q8_0 ? 34 : k == Q4_K ? 144 : k == Q5_K ? 176
         : k == Q6_K ? 210 : 17;
}
__host__ __device__ constexpr int row_bytes(int k, int values) {
    return values / block_values(k) * block_bytes(k);
}

__constant__ const signed char IQ4_NL_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                    1, 13, 25, 38, 53, 69, 89, 113};
__constant__ const signed char MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12,
                                                   0, -1, -2, -3, -4, -6, -8, -12};

__device__ __forceinline__ u32 word16(const u8* at) { return *reinterpret_cast<const u16*>(at); }
__device__ __forceinline__ float half_at(const u8* at) {
    return __half2float(*reinterpret_cast<const __half*>(at));
}
// a * b + c that the compiler may not fuse into an fma: the reference kernels round both.
__device__ __forceinline__ float times_plus(float a, float b, float c) {
    return __fadd_rn(__fmul_rn(a, b), c);
}

// The value of one nibble of a block of 32; `fifth` is its fifth bit (bit 4), if the type has one.
template <int K> __device__ __forceinline__ float of_nibble(const u8* block, int nibble, int fifth) {
    const float scale = K == MXFP4 ? 0.0f : half_at(block);
    if constexpr (K == Q4_0) return __fmul_rn(scale, static_cast<float>(nibble - 8));
    if constexpr (K == Q4_1) return times_plus(scale, static_cast<float>(nibble), half_at(block + 2));
    if constexpr (K == Q5_0) return __fmul_rn(scale, static_cast<float>((nibble | fifth << 4) - 16));
    if constexpr (K == Q5_1)
        return times_plus(scale, static_cast<float>(nibble | fifth << 4), half_at(block + 2));
    if constexpr (K == IQ4_NL) return __fmul_rn(scale, static_cast<float>(IQ4_NL_VALUES[nibble]));
    // Half of 2^(exponent - 127), to match the doubled table; the two smallest are subnormal.
    const u32 e = block[0];
    const float power = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    return __fmul_rn(power, static_cast<float>(MXFP4_VALUES[nibble]));
}
__host__ __device__ constexpr int nibbles_at(int k) { return k == MXFP4 ? 1 : block_bytes(k) - 16; }
__host__ __device__ constexpr bool has_fifth(int k) { return k == Q5_0 || k == Q5_1; }
template <int K> __device__ __forceinline__ u32 fifth_bits(const u8* block) {
    if constexpr (!has_fifth(K)) return 0;
    const u8* at = block + (K == Q5_0 ? 2 : 4);
    return word16(at) | word16(at + 2) << 16;
}

// Value i of a block of 256.
template <int K> __device__ __forceinline__ float of_k_block(const u8* block, int i) {
    if constexpr (K == Q6_K) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const u32 low = block[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter / 2)) & 15;
        const u32 high = block[128 + 32 * half + at] >> (2 * quarter) & 3;
        const float scale = __fmul_rn(half_at(block + 208),
                                      static_cast<float>(static_cast<signed char>(block[192 + i / 16])));
        return __fmul_rn(scale, static_cast<float>(static_cast<int>(low | high << 4) - 32));
    } else {
        const int group = i / 32;
        u32 scale, low;
        if (group < 4) {
            scale = block[4 + group] & 63;
            low = block[8 + group] & 63;
        } else {
            scale = (block[8 + group] & 15) | (block[group] >> 6) << 4;
            low = (block[8 + group] >> 4) | (block[4 + group] >> 6) << 4;
        }
        const u8* quants = block + (K == Q4_K ? 16 : 48);
        u32 value = quants[32 * (group / 2) + i % 32] >> (4 * (group % 2)) & 15;
        if constexpr (K == Q5_K) value |= (block[16 + i % 32] >> group & 1) << 4;
        return __fsub_rn(__fmul_rn(__fmul_rn(half_at(block), static_cast<float>(scale)),
                                   static_cast<float>(value)),
                         __fmul_rn(half_at(block + 2), static_cast<float>(low)));
    }
}

// Value i of a row.
template <int K> __device__ __forceinline__ float value_at(const u8* row, int i) {
    if constexpr (K == F32) return reinterpret_cast<const float*>(row)[i];
    if constexpr (K == F16) return __half2float(reinterpret_cast<const __half*>(row)[i]);
    if constexpr (K == BF16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
    if constexpr (!is_plain(K)) {
        const u8* block = row + i / block_values(K) * block_bytes(K);
        const int at = i % block_values(K);
        if constexpr (K == Q8_0)
            return __fmul_rn(static_cast<float>(static_cast<signed char>(block[2 + at])), half_at(block));
        else if constexpr (block_values(K) == 256)
            return of_k_block<K>(block, at);
        else
            return of_nibble<K>(block, block[nibbles_at(K) + at % 16] >> (at / 16 * 4) & 15,
                                fifth_bits<K>(block) >> at & 1);
    }
}

// Values i .. i + 7 of a row of a cache's packed type, i a multiple of 8; 16 bits a load.
template <int K> __device__ __forceinline__ void eight_values(const u8* row, int i, float* to) {
    const u8* block = row + i / 32 * block_bytes(K);
    const int at = i % 32;
    if constexpr (K == Q8_0) {
        const float scale = half_at(block);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 both = word16(block + 2 + at + 2 * j);
            to[2 * j] = __fmul_rn(static_cast<float>(static_cast<signed char>(both & 255)), scale);
            to[2 * j + 1] = __fmul_rn(static_cast<float>(static_cast<signed char>(both >> 8)), scale);
        }
    } else {
        const u32 fifth = fifth_bits<K>(block) >> at;
        const int shift = at / 16 * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 both = word16(block + nibbles_at(K) + at % 16 + 2 * j) >> shift;
            to[2 * j] = of_nibble<K>(block, both & 15, fifth >> (2 * j) & 1);
            to[2 * j + 1] = of_nibble<K>(block, both >> 8 & 15, fifth >> (2 * j + 1) & 1);
        }
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int by = 16; by; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}
#endif
