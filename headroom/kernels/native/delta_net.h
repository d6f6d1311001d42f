// Gated DeltaNet (linear attention with a recurrent state): types shared by the operation and the kernels.
#pragma once

#include <cstdint>

namespace headroom {

struct DeltaShape {
    int64_t key_heads, value_heads, dim, taps;
    bool tiled;  // value head h reads key head h % key_heads, else h / (value_heads / key_heads)

    int64_t channels() const { return (2 * key_heads + value_heads) * dim; }
    int64_t key_head(int64_t h) const {
        return tiled ? h % key_heads : h / (value_heads / key_heads);
    }
};

constexpr int64_t DELTA_COLUMNS = 64;  // columns of a head's memory in one job of a thread

// One job: all rows of a span for one value head, and `width` columns of its memory from `column` on. The
// columns of the memory do not depend on each other.
struct DeltaJob {
    const float *queries, *keys, *values;  // the first row's; rows are `channels` floats apart
    const float *decays, *betas;           // the first row's; rows are `heads` floats apart
    float* out;                            // rows are `heads * dim` floats apart
    float* memory;                         // [dim, dim]
    int64_t rows, dim, channels, heads, column, width;
    bool fresh;  // the sequence begins: treat the memory as zeros, whatever it holds
    // Of guessed rows: the row that each follows (-1: none), and where the memory after it is kept for a
    // later row that follows it (-1: nowhere). The job's memory stays as it was. Null: plain rows.
    const int64_t *parents, *places;
};

// The rows of one sequence in a step, and the slot of its state. `guesses` is where the parents of guessed
// rows begin, whose sequence's state stays as it was; -1: plain rows.
struct DeltaSpan {
    int64_t first_row, rows, start, slot, guesses;
};

struct DeltaWeights {
    const float *conv, *decay, *dt_bias;
};

struct DeltaState {
    float *memory, *inputs;
};

}  // namespace headroom
