// Small operations between products: RMS norm, gated activation, embedding. Each kernel is compiled on its
// own, with its own defines.
#include "rows.cuh"
#include "common.cuh"

// norm_rows: 1 if the normed x is added to a residual; then nothing else is written.
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
#ifndef GELU  // gated: 1 for GELU, 0 for silu
#define GELU 0
#endif
#ifndef KIND  // embed: the table's type
#define KIND F32
#endif

#define NORM_WARPS 16
#define CHUNK 2048  // values that one thread block of embed unpacks

// Stores four values as bf16.
__device__ __forceinline__ void write_narrow(__nv_bfloat16* to, float4 y) {
    __align__(8) const __nv_bfloat16 four[4] = {__float2bfloat16(y.x), __float2bfloat16(y.y), __float2bfloat16(y.z),
                                   __float2bfloat16(y.w)};
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(four);
}

// out = narrow = weight * x / sqrt(mean(x^2) + eps); out (f32) or narrow (bf16) may be null. One block per
// row; width is a multiple of 4.
extern "C" __global__ void __launch_bounds__(NORM_WARPS * 32)
norm_rows(const float* x, const float* weight, float* residual, float* out, __nv_bfloat16* narrow, int width,
          int stride, float eps) {
    __shared__ float shared[NORM_WARPS];
    const size_t row = blockIdx.x;
    const float4* from = reinterpret_cast<const float4*>(x + row * stride);
    float4* kept = reinterpret_cast<float4*>(residual + row * width);
    float squares = 0;
    for (int i = threadIdx.x; i < width / 4; i += NORM_WARPS * 32) {
        const float4 v = from[i];
        squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = squares;
    __syncthreads();
    const float total = warp_sum(threadIdx.x % 32 < NORM_WARPS ? shared[threadIdx.x % 32] : 0.0f);
    const float by = 1.0f / sqrtf(total / width + eps);
    for (int i = threadIdx.x; i < width / 4; i += NORM_WARPS * 32) {
        const float4 v = from[i];
        const float4 w = reinterpret_cast<const float4*>(weight)[i];
        const float4 y = make_float4(__fmul_rn(w.x, __fmul_rn(v.x, by)), __fmul_rn(w.y, __fmul_rn(v.y, by)),
                               __fmul_rn(w.z, __fmul_rn(v.z, by)), __fmul_rn(w.w, __fmul_rn(v.w, by)));
        if constexpr (RESIDUAL) {
            const float4 old = kept[i];
            kept[i] = make_float4(old.x + y.x, old.y + y.y, old.z + y.z, old.w + y.w);
        } else {
            if (out) reinterpret_cast<float4*>(out + row * width)[i] = y;
            if (narrow) write_narrow(narrow + row * width + 4 * i, y);
        }
    }
}

__device__ __forceinline__ float activate(float x) {
    if constexpr (GELU) return gelu(x);
    return x / (1.0f + expf(-x));  // expf, not __expf: accurate to float32 rounding
}

// act(gate) * up [rows, width], written to `out` (f32) or, if that is null, to `narrow` (bf16). Rows of
// gate and up are gate_stride and up_stride floats apart. blockIdx.y: the row.
extern "C" __global__ void gated(const float* gate, const float* up, float* out, __nv_bfloat16* narrow, int width,
                                 int gate_stride, int up_stride) {
    const size_t row = blockIdx.y;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < width; i += gridDim.x * blockDim.x) {
        const float y = activate(gate[row * gate_stride + i]) * up[row * up_stride + i];
        if (out) out[row * width + i] = y;
        else narrow[row * width + i] = __float2bfloat16(y);
    }
}

// out [rows, columns] = scale * the table's rows `ids`. blockIdx.x: a chunk of CHUNK values; blockIdx.y:
// the row. The table may be in pinned host memory: its bytes are read once, in the widest words that its
// alignment allows.
extern "C" __global__ void __launch_bounds__(256)
embed(const u8* table, const long long* ids, float* out, int columns, float scale) {
    __shared__ uint4 shared[row_bytes(KIND, CHUNK) / 16];
    u8* bytes = reinterpret_cast<u8*>(shared);
    const int first = blockIdx.x * CHUNK, count = min(CHUNK, columns - first);
    const size_t row_size = static_cast<size_t>(columns) / block_values(KIND) * block_bytes(KIND);
    const u8* from = table + static_cast<size_t>(ids[blockIdx.y]) * row_size + row_bytes(KIND, first);
    const int size = row_bytes(KIND, count);
    const int ends = static_cast<int>(reinterpret_cast<size_t>(from) | size);
    if (ends % 16 == 0) {
        for (int i = threadIdx.x; i < size / 16; i += 256) shared[i] = reinterpret_cast<const uint4*>(from)[i];
    } else if (ends % 4 == 0) {
        for (int i = threadIdx.x; i < size / 4; i += 256)
            reinterpret_cast<u32*>(bytes)[i] = reinterpret_cast<const u32*>(from)[i];
    } else {
        for (int i = threadIdx.x; i < size; i += 256) bytes[i] = from[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += 256)
        out[static_cast<size_t>(blockIdx.y) * columns + first + i] = __fmul_rn(value_at<KIND>(bytes, i), scale);
}
