// All kernels of one instruction set, written over the sixteen-lane vectors of a simd_*.h file.
//
// kernels_<isa>.cpp includes one simd_*.h and then this file. A row's result is computed by the same
// operations in the same order, however many rows share a call: it does not depend on the batch.
#include "quants.inl"

#include "products.inl"

#include "digits.inl"

#include "rows.inl"

#include "cache.inl"

#include "attention.inl"

#include "delta_net.inl"

#include "gpu_tiles.inl"

#include "wide.inl"

namespace headroom {
namespace {

constexpr Kernels make_kernels(const char* name) {
    return {name,          quantise,      split,         sum_columns, read_bytes,
            panel_int8,    panel_int24,   panel_float,   tile_to_panel, WIDEN,
            TILE_WIDE,     rms_norm,      silu_multiply, gelu_multiply, rope,
            store_head,    attend,        convolve,      delta_rows,    gated_norm};
}

}  // namespace
}  // namespace headroom
