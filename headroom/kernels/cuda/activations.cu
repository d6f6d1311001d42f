// Rows of activations made ready for products: normed where asked, rounded to 8 bits per 32 columns.
typedef unsigned char u8;

#define THREADS 256

// Where a row's scale of a block stands: rows lie in groups, so that a lane finds its two side by side.
__device__ __forceinline__ size_t place(int row, int block, int blocks, int group) {
    return (static_cast<size_t>(row / group) * blocks + block) * group + row % group;
}

__device__ __forceinline__ float sum_of_four(float v) {  // over the four lanes of a block
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ float max_of_four(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ float activate(float x, int gelu) {
    if (!gelu) return x / (1.0f + __expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// blockIdx: the row, and the share of its records. `weight` may be null: then nothing is normed. `normed` may be null. Where
// there is an `up`, a value is the activation of `x` times it, and nothing is normed.
// The layouts of `values`, `scales`, `sums` and `halves` are those of struct Rows in matmul.cu.
extern "C" __global__ void __launch_bounds__(THREADS)
quantise(const float* x, const float* up, int gelu, const float* weight, float eps, float* normed,
         u8* values, float* scales, float* sums, float* halves, int columns, int records, int group) {
    __shared__ float partial[THREADS / 32];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* from = x + static_cast<size_t>(row) * columns;
    float factor = 1.0f;
    if (weight != nullptr) {
        float squares = 0;
        for (int i = threadIdx.x; i < columns; i += THREADS) squares = fmaf(from[i], from[i], squares);
        for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        if (lane == 0) partial[warp] = squares;
        __syncthreads();
        float total = 0;
        for (int i = 0; i < THREADS / 32; ++i) total += partial[i];
        factor = rsqrtf(total / columns + eps);
    }
    const int blocks = records * 8;
    for (int record = blockIdx.y * (THREADS / 32) + warp; record < records;
         record += gridDim.y * (THREADS / 32)) {
        const int column = record * 256 + lane * 8, part = lane % 4, block = record * 8 + lane / 4;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = column + i < columns ? from[column + i] * factor : 0.0f;
            if (up != nullptr && column + i < columns)
                v[i] = activate(v[i], gelu) * up[static_cast<size_t>(row) * columns + column + i];
            if (weight != nullptr && column + i < columns) v[i] *= weight[column + i];
            if (normed != nullptr && column + i < columns)
                normed[static_cast<size_t>(row) * columns + column + i] = v[i];
        }
        float peak = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(v[i]));
        peak = max_of_four(peak);
        const float scale = peak / 127.0f, inverse = peak > 0 ? 127.0f / peak : 0.0f;
        int q[8];
        float total = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i] = __float2int_rn(v[i] * inverse);
            total += static_cast<float>(q[i]);
        }
        const float pair = total + __shfl_xor_sync(~0u, total, 1);  // of columns 0..15 or 16..31
        const float whole = sum_of_four(total);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int word = 2 * part + w;  // of the block: columns 4 * word ..
            const int t = word % 4, half = word / 4;
            const unsigned packed = (q[4 * w] & 255) | (q[4 * w + 1] & 255) << 8 |
                                    (q[4 * w + 2] & 255) << 16 | (q[4 * w + 3] & 255) << 24;
            *reinterpret_cast<unsigned*>(values + (static_cast<size_t>(row) * records + record) * 256 +
                                         t * 64 + lane / 4 * 8 + half * 4) = packed;
        }
        if (part == 0) {
            scales[place(row, block, blocks, group)] = scale;
            sums[place(row, block, blocks, group)] = scale * whole;
        }
        if (part % 2 == 0) halves[place(row, 2 * block + part / 2, 2 * blocks, group)] = scale * pair;
    }
}
