// Matrix products of a step: threads divide the panels of a weight; each computes all rows of its panels.
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace headroom {

// The grain of ThreadPool::parallel for a weight: at least 64 KiB of panels, but at least four ranges per
// thread, so that no thread waits long for the last range.
int64_t Ops::panel_grain(const Matrix& w) const {
    const int64_t bytes = static_cast<int64_t>(panel_size(w.kind, w.columns));
    const int64_t worth = std::max<int64_t>(1, (64 << 10) / bytes);
    return std::clamp<int64_t>(w.panels() / (4 * threads()), 1, worth);
}

size_t Ops::matmul_scratch(int64_t rows, int64_t columns) {
    // The three pieces of rows in 8 bits take less, but each is rounded up to 64 bytes.
    return rows * (columns / CELL) * sizeof(DigitCell) + 2 * Scratch::size(1);
}

Ops::Input Ops::prepare(const float* x, int64_t rows, int64_t columns, Form form, Scratch& scratch) {
    Input input{form, nullptr, {}, nullptr, {x, nullptr}, rows, columns};
    if (form == Form::wide) {
        WideRecord* records = scratch.take<WideRecord>(rows * wide_records(columns));
        input.wide = scratch.take<const WideRecord*>(rows);
        for (int64_t row = 0; row < rows; ++row) input.wide[row] = records + row * wide_records(columns);
    } else if (form == Form::int24) {
        input.digits = scratch.take<DigitCell>(rows * (columns / CELL));
    } else if (form == Form::int8) {
        input.quantised.values = scratch.take<int8_t>(rows * columns);
        input.quantised.scales = scratch.take<float>(rows * (columns / CELL));
        input.quantised.sums = scratch.take<int32_t>(rows * (columns / 16));
    } else {
        input.floats.sums = scratch.take<float>(rows * (columns / 16));
    }
    return input;
}

void Ops::prepare_row(const Input& input, int64_t row) {
    const float* x = input.floats.values + row * input.columns;
    if (input.form == Form::wide)
        kernels_.widen(x, input.columns, const_cast<WideRecord*>(input.wide[row]));
    else if (input.form == Form::int24)
        kernels_.split(x, input.columns, input.digits + row * (input.columns / CELL));
    else if (input.form == Form::int8)
        kernels_.quantise(x, input.columns, input.quantised.values + row * input.columns,
                          input.quantised.scales + row * (input.columns / CELL),
                          input.quantised.sums + row * (input.columns / 16));
    else
        kernels_.sum_columns(x, input.columns,
                             const_cast<float*>(input.floats.sums) + row * (input.columns / 16));
}

void Ops::panel(const Matrix& w, int64_t index, const Input& input, float* out) {
    if (input.form == Form::wide) return kernels_.tile_wide(w, index, input.wide, input.rows, out);
    if (w.tiles) {
        thread_local std::vector<uint8_t> memory;  // one panel; `turned` is its part aligned to 64 bytes
        memory.resize(panel_size(w.kind, w.columns) + 64);
        uint8_t* turned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        const size_t at = static_cast<size_t>(index) * tile_size(w.kind, w.columns);
        kernels_.tile_to_panel(w.kind, w.columns, w.data + at, turned);
        return panel({turned, w.kind, PANEL_ROWS, w.columns}, 0, input, out);
    }
    if (input.form == Form::int24) kernels_.panel_int24(w, index, input.digits, input.rows, out);
    else if (input.form == Form::int8) kernels_.panel_int8(w, index, input.quantised, input.rows, out);
    else kernels_.panel_float(w, index, input.floats, input.rows, out);
}

// out [rows, w.rows] = input times w^T; with `add` it is added to `out`.
void Ops::project(const Matrix& w, const Input& input, float* out, bool add) {
    const int64_t panels = w.panels();
    const int64_t grain = panel_grain(w);
    pool_.parallel(panels, grain, [&](int64_t first, int64_t last) {
        float result[ROW_BATCH * PANEL_ROWS];
        for (int64_t index = first; index < last; ++index) {
            const int64_t column = index * PANEL_ROWS;
            const int64_t width = std::min<int64_t>(PANEL_ROWS, w.rows - column);
            for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
                const int64_t rows = std::min(ROW_BATCH, input.rows - row);
                panel(w, index, rows_of(input, row, rows), result);
                for (int64_t r = 0; r < rows; ++r) {
                    float* to = out + (row + r) * w.rows + column;
                    const float* from = result + r * PANEL_ROWS;
                    if (add) for (int64_t i = 0; i < width; ++i) to[i] += from[i];
                    else std::memcpy(to, from, width * sizeof(float));
                }
            }
        }
    });
}

Ops::Input Ops::rows_of(const Input& input, int64_t row, int64_t rows) {
    Input part = input;
    part.rows = rows;
    part.floats.values += row * input.columns;
    if (input.form == Form::wide) {
        part.wide += row;
    } else if (input.form == Form::int24) {
        part.digits += row * (input.columns / CELL);
    } else if (input.form == Form::int8) {
        part.quantised.values += row * input.columns;
        part.quantised.scales += row * (input.columns / CELL);
        part.quantised.sums += row * (input.columns / 16);
    } else {
        part.floats.sums += row * (input.columns / 16);
    }
    return part;
}

void Ops::matmul(const Matrix& w, const float* x, int64_t rows, Products products, float* out,
                 Scratch scratch) {
    const Input input = prepare(x, rows, w.columns, form_of(products, !is_plain(w.kind)), scratch);
    prepare_rows(input);
    project(w, input, out, false);
}

void Ops::norm_rows(const float* x, const float* weight, float eps, float* normed,
                    const Input& input) {
    const int64_t columns = input.columns;
    pool_.parallel(input.rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            kernels_.rms_norm(x + row * columns, weight, columns, eps, normed + row * columns);
            prepare_row(input, row);
        }
    });
}

void Ops::prepare_rows(const Input& input) {
    pool_.parallel(input.rows, 4, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) prepare_row(input, row);
    });
}

// Products of several matrices with the same input, in one parallel run over the panels of all.
void Ops::project_several(const Matrix* const* matrices, float* const* outputs, int count,
                          const Input& input) {
    int64_t total = 0;
    for (int m = 0; m < count; ++m) total += matrices[m]->panels();
    const int64_t grain = std::max<int64_t>(1, total / (4 * threads()));
    pool_.parallel(total, grain, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last; ++index) {
            int m = 0;
            int64_t local = index;
            for (; local >= matrices[m]->panels(); ++m) local -= matrices[m]->panels();
            panel_into(*matrices[m], local, input, outputs[m]);
        }
    });
}

void Ops::panel_into(const Matrix& w, int64_t index, const Input& input, float* out) {
    float result[ROW_BATCH * PANEL_ROWS];
    const int64_t column = index * PANEL_ROWS;
    const int64_t width = std::min<int64_t>(PANEL_ROWS, w.rows - column);
    for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
        const int64_t rows = std::min(ROW_BATCH, input.rows - row);
        panel(w, index, rows_of(input, row, rows), result);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(out + (row + r) * w.rows + column, result + r * PANEL_ROWS,
                        width * sizeof(float));
    }
}

// inner [rows, width] = act(gate x) * (up x), panel by panel.
void Ops::gate_up(const Matrix& gate, const Matrix& up, const Input& input, Gate act, float* inner) {
    const int64_t panels = gate.panels();
    const int64_t grain = panel_grain(gate);
    pool_.parallel(panels, grain, [&](int64_t first, int64_t last) {
        for (int64_t index = first; index < last; ++index)
            gate_up_panel(gate, up, index, input, act, inner);
    });
}

void Ops::gate_up_panel(const Matrix& gate, const Matrix& up, int64_t index, const Input& input,
                        Gate act, float* inner) {
    float gates[ROW_BATCH * PANEL_ROWS], ups[ROW_BATCH * PANEL_ROWS];
    const int64_t column = index * PANEL_ROWS;
    const int64_t width = std::min<int64_t>(PANEL_ROWS, gate.rows - column);
    const auto multiply = act == Gate::silu ? kernels_.silu_multiply : kernels_.gelu_multiply;
    for (int64_t row = 0; row < input.rows; row += ROW_BATCH) {
        const int64_t rows = std::min(ROW_BATCH, input.rows - row);
        const Input part = rows_of(input, row, rows);
        panel(gate, index, part, gates);
        panel(up, index, part, ups);
        multiply(gates, ups, rows * PANEL_ROWS, gates);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(inner + (row + r) * gate.rows + column, gates + r * PANEL_ROWS,
                        width * sizeof(float));
    }
}

}  // namespace headroom
