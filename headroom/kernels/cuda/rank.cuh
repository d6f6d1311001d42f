// Ranks: a token's score and id as one u64 whose order is "larger score first, then lower id".
#ifndef HEADROOM_RANK
#define HEADROOM_RANK
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 rank_of(float x, int id) {
    const u32 bits = __float_as_uint(x + 0.0f);  // turns -0 into +0
    const u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (0xFFFFFFFFu - static_cast<u32>(id));
}
__device__ __forceinline__ int id_of(u64 rank) { return static_cast<int>(0xFFFFFFFFu - static_cast<u32>(rank)); }
__device__ __forceinline__ float score_of(u64 rank) {
    const u32 ordered = static_cast<u32>(rank >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}
#endif
