// A weight in tiles as plain rows in bf16, or in f16 with OUT_F16, for the products of many rows.
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

// What a lane holds of a record, block by block: put(block, i, values) gets four neighbours, for
// i % 2 in row g + 8 instead of g, for i / 2 from column 16 + 4t of the block instead of 4t.
template <class Put> __device__ __forceinline__ void unpack_packed(const u8* record, int lane, Put put) {
    Quants<KIND> quants;
    Scales<KIND> scales;
    quants.load<true>(record, lane);
    scales.load(record, lane / 4);
#pragma unroll
    for (int b = 0; b < 8; ++b) {
        u32 a[4];
        float2 scale, low = make_float2(0, 0), second;
        quants.block(b, a);
        scales.block(b, scale, low, second);
        if constexpr (KIND != Q6_K) second = scale;
        float2 second_low = low;
        if constexpr (KIND == Q6_K) second_low = make_float2(-32 * second.x, -32 * second.y);
        if constexpr (by_record(KIND)) {
            const float2 outer = scales.outer;
            const float2 under = has_groups(KIND)
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
                const float q = KIND == Q8_0 || KIND == IQ4_NL || KIND == MXFP4
                    ? static_cast<float>(static_cast<signed char>(byte)) : static_cast<float>(byte);
                four[j] = fmaf(q, s, l);
            }
            put(b, i, four);
        }
    }
}

// The same of a plain type.
template <class Put> __device__ __forceinline__ void unpack_plain(const u8* record, int lane, Put put) {
    const auto value = [](u32 bits) {
        const u16 half = bits;
        return KIND == BF16 ? __uint_as_float(bits << 16) : __half2float(*reinterpret_cast<const __half*>(&half));
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
template <class Put> __device__ __forceinline__ void unpack_record(const u8* record, int lane, Put put) {
    if constexpr (is_plain(KIND)) unpack_plain(record, lane, put);
    else unpack_packed(record, lane, put);
}

// blockIdx.x: the tile; each warp takes every WARPS-th record. `out` is [rows, columns].
__device__ __forceinline__ void dequantise_tile(const u8* weight, Narrow* out, int rows, int columns,
                                                int records) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* tile = weight + static_cast<size_t>(blockIdx.x) * records * Record<KIND>::bytes;
    for (int r = blockIdx.y * WARPS + warp; r < records; r += gridDim.y * WARPS) {
        unpack_record(tile + static_cast<size_t>(r) * Record<KIND>::bytes, lane, [&](int b, int i, const float* four) {
            const int row = blockIdx.x * 16 + g + i % 2 * 8;
            const int column = r * 256 + b * 32 + i / 2 * 16 + 4 * t;
            if (row >= rows || column >= columns) return;
            Narrow narrow[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) narrow[j] = narrowed(four[j]);
            *reinterpret_cast<uint2*>(out + static_cast<size_t>(row) * columns + column) =
                *reinterpret_cast<const uint2*>(narrow);
        });
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
dequantise(const u8* weight, Narrow* out, int rows, int columns, int records) {
    dequantise_tile(weight, out, rows, columns, records);
}

// One matrix of each expert that has picks. blockIdx.z: the expert; table [experts][3], of which
// `part` is the matrix's place; ends [experts]: the pick after an expert's last, in sorted order.
// An expert's matrix is `apart` values after the one before it.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
dequantise_experts(const long long* table, const int* ends, Narrow* out, int part, int apart, int rows,
                   int columns, int records) {
    const int expert = blockIdx.z;
    if (ends[expert] == (expert ? ends[expert - 1] : 0)) return;
    dequantise_tile(reinterpret_cast<const u8*>(table[expert * 3 + part]), out + static_cast<size_t>(expert) * apart,
                    rows, columns, records);
}

// The same for some experts of a group, which[blockIdx.z] of it each. With `staged` they lie there one after
// another, `blob` bytes apart, from this matrix of the first one on; else where the table says.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
dequantise_some(const int* which, const u8* staged, int blob, const long long* table, const int* ends,
                Narrow* out, int part, int apart, int rows, int columns, int records) {
    const int expert = which[blockIdx.z];
    if (ends[expert] == (expert ? ends[expert - 1] : 0)) return;
    const u8* weight = staged ? staged + static_cast<size_t>(blockIdx.z) * blob
                              : reinterpret_cast<const u8*>(table[expert * 3 + part]);
    dequantise_tile(weight, out + static_cast<size_t>(expert) * apart, rows, columns, records);
}

// out [rows, columns] = scale * the rows `ids` of a table in tiles. blockIdx: the row, WARPS records.
// Of a warp only the four lanes that hold the row have work.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
embed_tiles(const u8* table, const long long* ids, float* out, int columns, int records, float by) {
    const int r = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const long long id = ids[blockIdx.x];
    if (r >= records || lane / 4 != id % 8) return;
    const u8* record = table + (static_cast<size_t>(id / 16) * records + r) * Record<KIND>::bytes;
    float* row = out + static_cast<size_t>(blockIdx.x) * columns;
    unpack_record(record, lane, [&](int b, int i, const float* four) {
        const int column = r * 256 + b * 32 + i / 2 * 16 + 4 * t;
        if (i % 2 != id % 16 / 8 || column >= columns) return;
#pragma unroll
        for (int j = 0; j < 4; ++j) row[column + j] = four[j] * by;
    });
}
