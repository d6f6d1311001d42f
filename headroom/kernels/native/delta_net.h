// Gated linear attention: what its operation and the kernels of each instruction set share.
#pragma once

#include <cstdint>

namespace headroom {

struct DeltaShape {
    int64_t key_heads, value_heads, dim, taps;
    bool tiled;  // value head h reads key head h % key_heads

    int64_t channels() const { return (2 * key_heads + value_heads) * dim; }
    int64_t key_head(int64_t h) const {
        return tiled ? h % key_heads : h / (value_heads / key_heads);
    }
};

constexpr int64_t DELTA_COLUMNS = 64;  // of a head's memory that one thread works on at a time

// Rows of one value head, and `width` columns of its memory from `column` on. A column of the
// memory depends on no other.
struct DeltaJob {
    const float *queries, *keys, *values;  // of the first row; rows are `channels` apart
    const float *decays, *betas;           // of the first row; rows are `heads` apart
    float* out;                            // rows are `heads * dim` apart
    float* memory;                         // [dim, dim]
    int64_t rows, dim, channels, heads, column, width;
    bool fresh;  // the memory is zeros, whatever lies there
};

// Rows that share one sequence, and where its state lies.
struct DeltaSpan {
    int64_t first_row, rows, start, slot;
};

struct DeltaWeights {
    const float *conv, *decay, *dt_bias;
};

struct DeltaState {
    float *memory, *inputs;
};

}  // namespace headroom
