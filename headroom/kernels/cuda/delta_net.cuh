// What the kernels of gated DeltaNet share.
// HEADS: value heads; KEY_HEADS: key heads; TILED: value head h reads key head h % KEY_HEADS, else
// h / (HEADS / KEY_HEADS); TAPS: taps of the convolution.
#include "common.cuh"

#define DIM 128  // values of a key or value head
#define CHANNELS ((2 * KEY_HEADS + HEADS) * DIM)

__device__ __forceinline__ int key_head(int head) {
    return TILED ? head % KEY_HEADS : head / (HEADS / KEY_HEADS);
}

// Stores a channel's last inputs after `count` rows from `first` on. It overwrites the old ones, so nothing
// may still need them.
__device__ __forceinline__ void keep_inputs(const float* qkv, float* inputs, int channel, int first, int count,
                                            bool fresh) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; ++j) {
        const int row = count - (TAPS - 1) + j;
        float kept = 0.0f;
        if (row >= 0) kept = qkv[static_cast<size_t>(first + row) * CHANNELS + channel];
        else if (!fresh) kept = inputs[(count + j) * CHANNELS + channel];
        inputs[j * CHANNELS + channel] = kept;
    }
}
