"""Products with packed weights on the CPU, of 8-bit, 24-bit or float activations; embeddings."""

from dataclasses import replace

import torch

from headroom.kernels.native import module
from headroom.kernels.native.memory import WEIGHTS
from headroom.kernels.native.module import MODULE, POOL, PRODUCTS
from headroom.kernels.native.scratch import matmul_scratch
from headroom.kernels.ops import Case
from headroom.kernels.types import PRODUCT_TYPES
from headroom.kernels.weight import PLAIN_TYPES, Weight

PANELS = "panels"  # the layout of weights that the C++ kernels read; see panels.h


def refuses_int8(case: Case) -> str | None:
    """Return why a case cannot run with 8-bit activations; None if it can."""
    return _refuses_rounded(case, "int8")


def refuses_int24(case: Case) -> str | None:
    """Return why a case cannot run with 24-bit activations; None if it can."""
    return _refuses_rounded(case, "int24")


def _refuses_rounded(case: Case, dtype: str) -> str | None:
    if case.dtype != dtype:
        return f"computes in {dtype}, not {case.dtype}"
    if case.quant.name in PLAIN_TYPES:
        return f"{case.quant} weights are not multiplied with rounded activations"
    return refuses(case)


def refuses_f32(case: Case) -> str | None:
    """Return why a case cannot run with float activations; None if it can."""
    if case.dtype not in PRODUCTS or (case.dtype != "f32" and case.quant.name not in PLAIN_TYPES):
        return f"computes in f32, not {case.dtype}"
    return refuses(case)


def refuses(case: Case) -> str | None:
    """Return why no product here runs a case's device or weight type; None if one does."""
    if (reason := module.refuses(case)) is not None:
        return reason
    return None if case.quant in PRODUCT_TYPES else f"{case.quant} weights have no panels"


def refuses_table(case: Case) -> str | None:
    """Return why an embedding table cannot be read; None if it can."""
    if case.layout != PANELS:
        return f"reads tables in {PANELS}, not in {case.layout}"
    return refuses(case)


def prepare(weight: Weight) -> Weight:
    """Return a weight in panels of sixteen rows (panels.h); no value changes."""
    if weight.layout == PANELS:
        return weight
    panels = WEIGHTS.take(_panel_bytes(weight))
    source = weight.data.contiguous()
    POOL.ops.pack(
        weight.quant.ggml_id, weight.rows, weight.columns, source.data_ptr(), panels.data_ptr()
    )
    return replace(weight, data=panels, layout=PANELS)


def matmul_int8(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose; `x` is rounded to 8 bits per 32 columns."""
    return _matmul(x, weight, out, PRODUCTS["int8"])


def matmul_int24(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose; `x` is rounded to 24 bits per 32 columns."""
    return _matmul(x, weight, out, PRODUCTS["int24"])


def matmul_f32(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose in float32."""
    return _matmul(x, weight, out, PRODUCTS["f32"])


def embed(ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write the table's rows `ids` to `out` as float32."""
    _check(out, (len(ids), table.columns))
    if not out.is_contiguous():
        return out.copy_(embed(ids, table, torch.empty(out.shape)))
    ids = ids.contiguous()
    POOL.ops.unpack(
        table.data.data_ptr(), table.quant.ggml_id, table.rows, table.columns,
        ids.data_ptr(), len(ids), out.data_ptr(),
    )  # fmt: skip
    return out


def _matmul(
    x: torch.Tensor, weight: Weight, out: torch.Tensor | None, products: int
) -> torch.Tensor:
    if out is not None and not out.is_contiguous():
        return out.copy_(_matmul(x, weight, None, products))
    x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, weight.rows) if out is None else out
    _check(out, (rows, weight.rows))
    scratch_bytes = matmul_scratch(rows, weight.columns)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
    POOL.ops.matmul(
        weight.data.data_ptr(), weight.quant.ggml_id, weight.rows, weight.columns, x.data_ptr(),
        rows, products, out.data_ptr(), scratch.data_ptr(), scratch_bytes,
    )  # fmt: skip
    return out


def _check(out: torch.Tensor, shape: tuple[int, int]) -> None:
    """Check the memory of a result: the C++ module gets only its address."""
    if tuple(out.shape) != shape:
        raise ValueError(f"a result of {shape} does not fit into memory of {tuple(out.shape)}")


def _panel_bytes(weight: Weight) -> int:
    size: int = MODULE.panel_bytes(weight.quant.ggml_id, weight.rows, weight.columns)
    return size


def panels_of(weight: Weight) -> object:
    """Return the C++ view of a weight in panels."""
    assert weight.layout == PANELS
    view: object = MODULE.Matrix(
        weight.data.data_ptr(), weight.quant.ggml_id, weight.rows, weight.columns
    )
    return view
