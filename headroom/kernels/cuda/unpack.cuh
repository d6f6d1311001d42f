// Unpacking of tiles to plain bf16 values (f16 with OUT_F16), for products of many rows.
#include "tiles.cuh"
#include <cuda_bf16.h>

#ifndef OUT_F16
#define OUT_F16 0
#endif
#if OUT_F16
typedef __half Narrow;
__device__ __forceinline__ Narrow narrowed(float x) { return __float2half_rn(x); }
#else
typedef __nv_bfloat16 Narrow;
__device__ __forceinline__ Narrow narrowed(float x) { return __float2bfloat16(x); }
#endif

// Unpacks what a lane holds of a packed record: calls put(block, i, values) with four adjacent columns. Odd
// i are of row g + 8, even i of row g; i / 2 says whether they begin at column 4t or 16 + 4t of the block.
template <int K, class Put> __device__ __forceinline__ void unpack_packed(const u8* record, int lane, Put put) {
    Quants<K> quants;
    Scales<K> scales;
    quants.template load<true>(record, lane);
    scales.load(record, lane / 4);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        u32 a[4];
        float2 scale, low = make_float2(0, 0), second;
        quants.block(b, a);
        scales.block(b, scale, low, second);
        if constexpr (K != Q6_K) second = scale;
        float2 second_low = low;
        if constexpr (K == Q6_K) second_low = make_float2(-32 * second.x, -32 * second.y);
        if constexpr (by_record(K)) {
            const float2 outer = scales.outer;
            const float2 under = has_groups(K)
                ? make_float2(-scales.outer_min.x, -scales.outer_min.y) : outer;
            scale = make_float2(scale.x * outer.x, scale.y * outer.y);
            second = make_float2(second.x * outer.x, second.y * outer.y);
            low = make_float2(low.x * under.x, low.y * under.y);
            second_low = make_float2(second_low.x * under.x, second_low.y * under.y);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 s2 = i / 2 ? second : scale, l2 = i / 2 ? second_low : low;
            const float s = i % 2 ? s2.y : s2.x, l = i % 2 ? l2.y : l2.x;
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 byte = a[i] >> 8 * j & 255;
                const float q = K == Q8_0 || K == IQ4_NL || K == MXFP4
                    ? static_cast<float>(static_cast<signed char>(byte)) : static_cast<float>(byte);
                four[j] = fmaf(q, s, l);
            }
            put(b, i, four);
        }
    }
}

// Unpacks what a lane holds of an F16 or BF16 record, with calls of `put` as above.
template <int K, class Put> __device__ __forceinline__ void unpack_plain(const u8* record, int lane, Put put) {
    const auto value = [](u32 bits) {
        const u16 half = bits;
        return K == BF16 ? __uint_as_float(bits << 16) : __half2float(*reinterpret_cast<const __half*>(&half));
    };
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const uint4 words = __ldcs(reinterpret_cast<const uint4*>(record) + 32 * i + lane);
        const auto put_row = [&](int h, u32 even, u32 odd) {
            const float four[4] = {value(even & 0xFFFF), value(odd & 0xFFFF), value(even >> 16), value(odd >> 16)};
            put(i / 2, i % 2 * 2 + h, four);
        };
        put_row(0, words.x, words.z);
        put_row(1, words.y, words.w);
    }
}
template <int K, class Put> __device__ __forceinline__ void unpack_record(const u8* record, int lane, Put put) {
    if constexpr (is_plain(K)) unpack_plain<K>(record, lane, put);
    else unpack_packed<K>(record, lane, put);
}

// Unpacks record r of a tile to its place in `out [rows, columns]`.
template <int K>
__device__ __forceinline__ void write_record(const u8* record, Narrow* out, int tile, int r, int rows, int columns) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unpack_record<K>(record, lane, [&](int b, int i, const float* four) {
        const int row = tile * 16 + g + i % 2 * 8;
        const int column = r * 256 + b * 32 + i / 2 * 16 + 4 * t;
        if (row >= rows || column >= columns) return;
        Narrow narrow[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) narrow[j] = narrowed(four[j]);
        *reinterpret_cast<uint2*>(out + static_cast<size_t>(row) * columns + column) =
            *reinterpret_cast<const uint2*>(narrow);
    });
}
