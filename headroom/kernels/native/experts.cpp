// The routed experts of a step: sorts the picks by expert, so that each expert's weights are read once for
// all tokens that chose it. A pick is one (token, rank) pair of the router's choice.
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace headroom {

size_t Ops::experts_scratch(int64_t tokens, int64_t per_token, int64_t hidden, int64_t width,
                            int64_t experts, bool tiles) {
    const int64_t picks = tokens * per_token;
    const auto wide = [](int64_t rows, int64_t columns) {
        return Scratch::size(rows * wide_records(columns) * static_cast<int64_t>(sizeof(WideRecord))) +
               Scratch::size(rows * 8);
    };
    size_t inputs = Scratch::size(picks * hidden * 4) + matmul_scratch(picks, hidden);
    size_t inner = matmul_scratch(picks, width);
    if (tiles) {  // the rows may be WideRecords instead
        inputs = std::max(inputs, wide(tokens, hidden) + Scratch::size(picks * 8));
        inner = std::max(inner, wide(picks, width) + Scratch::size(picks * width * 4));
    }
    return Scratch::size((experts + 1) * 4) + 2 * Scratch::size(picks * 4) +
           Scratch::size(picks * width * 4) + inputs + inner;
}

// Copies each pick's row of x, in the sorted order, and prepares it.
Ops::Input Ops::gather_picks(const float* x, int64_t hidden, const Picks& picks, Form form,
                             Scratch& scratch) {
    float* rows = scratch.take<float>(picks.count * hidden);
    const Input input = prepare(rows, picks.count, hidden, form, scratch);
    pool_.parallel(picks.count, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            std::memcpy(rows + i * hidden, x + picks.token(i) * hidden, hidden * sizeof(float));
            prepare_row(input, i);
        }
    });
    return input;
}

// Prepares each token's row once as WideRecords; the picks point to their tokens' records.
Ops::Input Ops::wide_picks(const float* x, int64_t tokens, int64_t hidden, const Picks& picks,
                           Scratch& scratch) {
    const Input of_tokens = prepare(x, tokens, hidden, Form::wide, scratch);
    prepare_rows(of_tokens);
    Input input = of_tokens;
    input.rows = picks.count;
    input.wide = scratch.take<const WideRecord*>(picks.count);
    for (int64_t i = 0; i < picks.count; ++i) input.wide[i] = of_tokens.wide[picks.token(i)];
    return input;
}

void Ops::experts(const Matrix& gate, const Matrix& up, const Matrix& down,
                  const ExpertWeights* table, int64_t expert_count, const int32_t* ids,
                  const float* weights, int64_t per_token, const float* x, int64_t tokens, Gate act,
                  Products products, float* out, Scratch scratch) {
    const int64_t hidden = gate.columns, width = gate.rows, asked = tokens * per_token;
    // Sort the picks by expert: starts[e] .. starts[e + 1] are those of expert e, tokens in order.
    int32_t* starts = scratch.take<int32_t>(expert_count + 1);
    int32_t* order = scratch.take<int32_t>(asked);   // pick at each sorted place
    std::memset(starts, 0, (expert_count + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < asked; ++i) {
        if (ids[i] >= expert_count)
            throw std::out_of_range("a row picks expert " + std::to_string(ids[i]) + ", but the layer has " +
                                    std::to_string(expert_count));
        if (ids[i] >= 0) ++starts[ids[i] + 1];
    }
    for (int64_t e = 0; e < expert_count; ++e) starts[e + 1] += starts[e];
    int32_t* chosen = scratch.take<int32_t>(asked);  // experts with any pick, in order
    int64_t chosen_count = 0;
    for (int32_t e = 0; e < expert_count; ++e)
        if (starts[e + 1] > starts[e]) chosen[chosen_count++] = e;
    const int64_t picks = starts[expert_count];
    for (int64_t i = asked - 1; i >= 0; --i)
        if (ids[i] >= 0) order[--starts[ids[i] + 1]] = static_cast<int32_t>(i);
    // The loop above left starts[e + 1] at the first pick of e; shift back.
    for (int64_t e = 0; e < expert_count; ++e) starts[e] = starts[e + 1];
    starts[expert_count] = static_cast<int32_t>(picks);

    float* inner = scratch.take<float>(picks * width);
    const bool packed = !is_plain(gate.kind) && !is_plain(up.kind);  // gate and up share one prepared input
    const bool wide = gate.tiles && products == Products::int24 && packed && !is_plain(down.kind) &&
                      kernels_.tile_wide;
    const Input in = wide ? wide_picks(x, tokens, hidden, {order, picks, per_token}, scratch)
                          : gather_picks(x, hidden, {order, picks, per_token}, form_of(products, packed), scratch);
    const Input inner_in = prepare(
        inner, picks, width, wide ? Form::wide : form_of(products, !is_plain(down.kind)), scratch);
    const auto matrix_of = [](const Matrix& like, const uint8_t* data) {
        return Matrix{data, like.kind, like.rows, like.columns, like.tiles};
    };
    const int64_t panels = gate.panels();
    if (wide) {  // mostly few rows: gate and up panels are separate jobs, which balances the threads
        float* ups = scratch.take<float>(picks * width);
        pool_.parallel(2 * chosen_count * panels, panel_grain(gate), [&](int64_t first, int64_t last) {
            for (int64_t job = first; job < last; ++job) {
                const int32_t e = chosen[job / panels / 2];
                const bool second = job / panels % 2;
                const Matrix w = second ? matrix_of(up, table[e].up) : matrix_of(gate, table[e].gate);
                panel_into(w, job % panels, rows_of(in, starts[e], starts[e + 1] - starts[e]),
                           (second ? ups : inner) + starts[e] * width);
            }
        });
        const auto multiply = act == Gate::silu ? kernels_.silu_multiply : kernels_.gelu_multiply;
        pool_.parallel(picks, 4, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                multiply(inner + i * width, ups + i * width, width, inner + i * width);
                prepare_row(inner_in, i);
            }
        });
    } else {
        pool_.parallel(chosen_count * panels, panel_grain(gate), [&](int64_t first, int64_t last) {
            for (int64_t job = first; job < last; ++job) {
                const int32_t e = chosen[job / panels];
                const Input part = rows_of(in, starts[e], starts[e + 1] - starts[e]);
                gate_up_panel(matrix_of(gate, table[e].gate), matrix_of(up, table[e].up), job % panels,
                              part, act, inner + starts[e] * width);
            }
        });
        prepare_rows(inner_in);
    }
    pool_.parallel(down.panels(), panel_grain(down),
                   [&](int64_t first, int64_t last) {
        // For each expert in turn all panels of this range: each expert's memory is read in one run. A
        // token's sum runs over its experts in the order of their ids.
        float result[ROW_BATCH * PANEL_ROWS];
        const int64_t begin = first * PANEL_ROWS, end = std::min(hidden, last * PANEL_ROWS);
        for (int64_t t = 0; t < tokens; ++t)
            std::memset(out + t * hidden + begin, 0, (end - begin) * sizeof(float));
        for (int64_t c = 0; c < chosen_count; ++c) {
            const int32_t e = chosen[c];
            const Matrix w = matrix_of(down, table[e].down);
            for (int64_t index = first; index < last; ++index) {
                const int64_t column = index * PANEL_ROWS;
                const int64_t count = std::min<int64_t>(PANEL_ROWS, hidden - column);
                for (int64_t row = starts[e]; row < starts[e + 1]; row += ROW_BATCH) {
                    const int64_t n = std::min<int64_t>(ROW_BATCH, starts[e + 1] - row);
                    panel(w, index, rows_of(inner_in, row, n), result);
                    for (int64_t r = 0; r < n; ++r) {
                        const int32_t pick = order[row + r];
                        float* to = out + pick / per_token * hidden + column;
                        for (int64_t i = 0; i < count; ++i)
                            to[i] += weights[pick] * result[r * PANEL_ROWS + i];
                    }
                }
            }
        }
    });
}

}  // namespace headroom
