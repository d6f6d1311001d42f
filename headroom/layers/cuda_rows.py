"""Rows and matrix products of the layers that run fused CUDA kernels.

A product reads rows in one of two forms. On the decode path (few rows) they are f16, and one kernel
multiplies them with packed weights in a single pass. On the prefill path (many rows) they are bf16
or f16, and weights are unpacked first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headroom.kernels.cuda import delta_net, matmul, matmul_scratch, norms, scratch
from headroom.kernels.cuda.matmul import (
    NARROW_QUANTS,
    HalfRows,
    NarrowRows,
    RowNorm,
    empty_narrow_rows,
    fill_narrow_rows,
    narrow_rows,
    narrow_type,
)
from headroom.kernels.cuda.sizes import MOST_OUTPUTS, TILE_ROWS, TILED, is_decode
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES, Weight
from headroom.layers.upload import FileMatrices
from headroom.layers.weights import WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class CudaRows:
    """Rows as products read them: `decode` is set on the decode path, else `prefill`."""

    count: int
    decode: HalfRows | None = None
    prefill: NarrowRows | None = None
    # Computes the rows of `decode` as float32 [rows, columns]; called for unpacked weights only.
    floats: Callable[[], torch.Tensor] | None = None


def plain_rows(x: torch.Tensor, narrow: torch.dtype) -> CudaRows:
    """Return the rows of `x` unchanged but for their type.

    Here and below, `narrow` is the type of rows on the prefill path.
    """
    if is_decode(len(x)):
        return CudaRows(len(x), decode=matmul.half_rows(x), floats=lambda: x)
    return CudaRows(len(x), prefill=narrow_rows(x, narrow))


def normed_rows(x: torch.Tensor, norm: RowNorm, narrow: torch.dtype) -> CudaRows:
    """Return the rows of `x` after a norm; `norm.out`, if given, gets them in float32."""
    if is_decode(len(x)):
        rounded = matmul.half_rows(x, norm=norm)
        return CudaRows(
            len(x), decode=rounded, floats=lambda: norms.rms_norm(x, norm.weight, norm.eps)
        )
    rows = empty_narrow_rows(x.shape, narrow, x.device)
    if rows.powers is None:
        norms.norm_narrow(x, norm.weight, norm.eps, rows.values, norm.out)
        return CudaRows(len(x), prefill=rows)
    with scratch.frame():
        fill_narrow_rows(rows, norms.rms_norm(x, norm.weight, norm.eps, norm.out))
    return CudaRows(len(x), prefill=rows)


def gated_rows(
    gate: torch.Tensor, up: torch.Tensor, activation: str, narrow: torch.dtype
) -> CudaRows:
    """Return `act(gate) * up`; on the prefill path in f16, `gate` is overwritten with it."""
    if is_decode(len(gate)):
        return CudaRows(
            len(gate),
            decode=matmul.gated_half_rows(gate, up, activation),
            floats=lambda: norms.gated_activation(gate, up, activation),
        )
    rows = empty_narrow_rows(gate.shape, narrow, gate.device)
    if rows.powers is None:
        norms.gated_narrow(gate, up, activation, rows.values)
    else:
        fill_narrow_rows(rows, norms.gated_activation(gate, up, activation, gate))
    return CudaRows(len(gate), prefill=rows)


def gated_head_rows(
    x: torch.Tensor, gate: torch.Tensor, norm: RowNorm, narrow: torch.dtype
) -> CudaRows:
    """Return rows of heads `[rows, heads, 128]`, each head normed and times `silu(gate)`."""
    if is_decode(len(x)):
        return CudaRows(
            len(x),
            decode=matmul.normed_head_rows(x, gate, norm.weight, norm.eps),
            floats=lambda: delta_net.gated_norm(x, gate, norm.weight, norm.eps).flatten(1),
        )
    rows = empty_narrow_rows(x.flatten(1).shape, narrow, x.device)
    if rows.powers is None:
        delta_net.gated_norm(x, gate, norm.weight, norm.eps, narrow=rows.values)
    else:
        with scratch.frame():
            fill_narrow_rows(rows, delta_net.gated_norm(x, gate, norm.weight, norm.eps).flatten(1))
    return CudaRows(len(x), prefill=rows)


@dataclass(frozen=True, slots=True, eq=False)
class MergedLinear:
    """Matrices with the same input; neighbours of one block format are one weight in memory."""

    weights: tuple[Weight, ...]  # in tiles; as bf16 or f16 rows where a format has no tiles
    members: tuple[tuple[int, ...], ...]  # of each weight: the indices of its matrices
    rows: tuple[int, ...]  # of each matrix

    def __call__(self, x: CudaRows, add: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return float32 `[rows of x, rows of the matrix]` for each matrix.

        With `add`, there is one matrix, and its product is added to that tensor.
        """
        device = self.weights[0].data.device
        if add is None:
            declared = matmul_scratch.products(x.count, self.rows)
            outs = [scratch.take(buffer, device) for buffer in declared]
        else:
            outs = [add]
        for weight, members in zip(self.weights, self.members, strict=True):
            _multiply(x, weight, [outs[index] for index in members], add)
        return outs


def _multiply(
    x: CudaRows, weight: Weight, outs: Sequence[torch.Tensor], add: torch.Tensor | None
) -> None:
    if weight.layout == matmul.TILES and x.decode is not None:
        matmul.products(x.decode, weight, outs, add)
        return
    if x.prefill is not None:
        matmul.multiply_unpacked(x.prefill, weight, outs, add is not None)
        return
    assert x.floats is not None
    with scratch.frame():
        product = matmul.plain_product(x.floats(), weight.data)
    for out, part in zip(
        outs, torch.split(product, [out.shape[1] for out in outs], dim=1), strict=True
    ):
        if add is None:
            out.copy_(part)
        else:
            out.add_(part)


def add_product(
    x: torch.Tensor, matrix: MergedLinear, rows: CudaRows, post_norm: RowNorm | None = None
) -> None:
    """Add the product of one matrix to the residual stream `x`, after a norm if one is given."""
    if post_norm is None:
        matrix(rows, add=x)
    else:
        norms.norm_add(x, matrix(rows)[0], post_norm.weight, post_norm.eps)


def load_merged(
    get: WeightSource, names: Sequence[str], orders: Sequence[torch.Tensor | None] = ()
) -> MergedLinear:
    """Load matrices with the same input to the GPU, neighbours of one block format together."""
    found = [
        get.locate(name, order)
        for name, order in zip(names, orders or [None] * len(names), strict=True)
    ]
    runs: list[list[int]] = []
    for index, part in enumerate(found):
        last = runs[-1] if runs and not get.unpack else []
        if last and len(last) < MOST_OUTPUTS and _may_join(found[last[-1]], part):
            last.append(index)
        else:
            runs.append([index])
    weights = tuple(
        _load_weight(get, [names[index] for index in run], [found[index] for index in run])
        for run in runs
    )
    for weight in weights:
        get.note_loaded(weight)
    return MergedLinear(weights, tuple(map(tuple, runs)), tuple(part.rows for part in found))


def _may_join(first: FileMatrices, second: FileMatrices) -> bool:
    return first.quant == second.quant and first.rows % TILE_ROWS == 0 and first.quant in TILED


def _load_weight(get: WeightSource, names: Sequence[str], parts: Sequence[FileMatrices]) -> Weight:
    """Load one weight to the GPU: matrices of one format in tiles, or one matrix in 16 bits."""
    first, rows = parts[0], sum(part.rows for part in parts)
    if get.unpack or not (first.quant in TILED or first.quant.name in PLAIN_TYPES):
        return _unpack(get.from_file(names[0], first.order), get.case.dtype)
    assert get.upload is not None
    if first.quant in TILED:
        return Weight(get.upload.tiles(parts), first.quant, rows, first.columns, matmul.TILES)
    dtype = get.case.dtype
    values = get.upload.rows(first, narrow_type(dtype))
    return Weight(values, NARROW_QUANTS[dtype], rows, first.columns)


def _unpack(weight: Weight, dtype: str) -> Weight:
    """Return a weight whose format has no tiles as bf16 or f16 rows on the GPU."""
    there = weight.data.to("cuda")
    if weight.quant.name not in PLAIN_TYPES:
        there = dequantise(there, weight.quant, weight.columns)
    return Weight(there.to(narrow_type(dtype)), NARROW_QUANTS[dtype], weight.rows, weight.columns)
