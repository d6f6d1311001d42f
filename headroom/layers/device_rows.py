"""Rows on a GPU on their way through packed products: a few in f16, many in bf16 or f16."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headroom.kernels.cuda import delta_net, matmul, plain, scratch, small, unpacked
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.narrow import (
    QUANTS,
    NarrowRows,
    empty_rows,
    fill_rows,
    narrow_rows,
    narrow_type,
)
from headroom.kernels.cuda.sizes import DECODE_ROWS, MOST_OUTPUTS, TILE_ROWS, TILED
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES, Weight
from headroom.layers.pieces import FileMatrices
from headroom.layers.weights import WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """What products read of some rows: `few` for steps of few rows, `many` for long ones."""

    count: int
    few: HalfRows | None = None
    many: NarrowRows | None = None
    # float32 [rows, columns], beside `few`; made only where weights are plain
    floats: Callable[[], torch.Tensor] | None = None


def few_rows(count: int) -> bool:
    """Tell whether a step is small enough for one pass over packed weights."""
    return count <= DECODE_ROWS


def plain_rows(x: torch.Tensor, narrow: torch.dtype) -> DeviceRows:
    """Return rows as they are; `narrow` is here and below the type of many rows."""
    if few_rows(len(x)):
        return DeviceRows(len(x), few=matmul.half_rows(x), floats=lambda: x)
    return DeviceRows(len(x), many=narrow_rows(x, narrow))


def normed_rows(x: torch.Tensor, norm: RowNorm, narrow: torch.dtype) -> DeviceRows:
    """Return rows after a norm; `norm.out` gets them in float32 where it is given."""
    if few_rows(len(x)):
        rounded = matmul.half_rows(x, norm=norm)
        return DeviceRows(
            len(x), few=rounded, floats=lambda: small.rms_norm(x, norm.weight, norm.eps)
        )
    many = empty_rows(x.shape, narrow, x.device)
    if many.powers is None:
        small.norm_narrow(x, norm.weight, norm.eps, many.values, norm.out)
        return DeviceRows(len(x), many=many)
    with scratch.frame():
        fill_rows(many, small.rms_norm(x, norm.weight, norm.eps, norm.out))
    return DeviceRows(len(x), many=many)


def gated_rows(
    gate: torch.Tensor, up: torch.Tensor, activation: str, narrow: torch.dtype
) -> DeviceRows:
    """Return `act(gate) * up`; many rows in f16 are also left in `gate`."""
    if few_rows(len(gate)):
        return DeviceRows(
            len(gate),
            few=matmul.gated_half_rows(gate, up, activation),
            floats=lambda: small.gated_activation(gate, up, activation),
        )
    many = empty_rows(gate.shape, narrow, gate.device)
    if many.powers is None:
        small.gated_narrow(gate, up, activation, many.values)
    else:
        fill_rows(many, small.gated_activation(gate, up, activation, gate))
    return DeviceRows(len(gate), many=many)


def gated_heads(
    x: torch.Tensor, gate: tuple[torch.Tensor, torch.Tensor, float], narrow: torch.dtype
) -> DeviceRows:
    """Return many rows of heads of 128 `[rows, heads, 128]`, normed and gated."""
    many = empty_rows(x.flatten(1).shape, narrow, x.device)
    if many.powers is None:
        delta_net.gated_norm(x, *gate, narrow=many.values)
    else:
        with scratch.frame():
            fill_rows(many, delta_net.gated_norm(x, *gate).flatten(1))
    return DeviceRows(len(x), many=many)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Matrices with one input; those of one type lie one after another and are read in one go."""

    weights: tuple[Weight, ...]  # in tiles, or rows in bf16 or f16 of what has none
    members: tuple[tuple[int, ...], ...]  # which of the matrices each weight holds
    rows: tuple[int, ...]  # of each matrix

    def __call__(self, x: DeviceRows, add: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return `[rows, its rows]` in float32 for each matrix; one alone is added to `add`."""
        device = self.weights[0].data.device
        if add is None:
            outs = [scratch.empty(x.count, rows, device=device) for rows in self.rows]
        else:
            outs = [add]
        for weight, members in zip(self.weights, self.members, strict=True):
            _multiply(x, weight, [outs[index] for index in members], add)
        return outs


def _multiply(
    x: DeviceRows, weight: Weight, outs: Sequence[torch.Tensor], add: torch.Tensor | None
) -> None:
    if weight.layout == matmul.TILES and x.few is not None:
        matmul.products(x.few, weight, outs, add)
        return
    if x.many is not None:
        unpacked.multiply(x.many, weight, outs, add is not None)
        return
    assert x.floats is not None
    with scratch.frame():
        answers = plain.product(x.floats(), weight.data)
    for out, part in zip(
        outs, torch.split(answers, [out.shape[1] for out in outs], dim=1), strict=True
    ):
        if add is None:
            out.copy_(part)
        else:
            out.add_(part)


def add_answers(
    x: torch.Tensor, matrix: Stack, rows: DeviceRows, after: RowNorm | None = None
) -> None:
    """Add what one matrix answers to the residual stream, normed on its way where asked."""
    if after is None:
        matrix(rows, add=x)
    else:
        small.norm_add(x, matrix(rows)[0], after.weight, after.eps)


def stack(
    get: WeightSource, names: Sequence[str], orders: Sequence[torch.Tensor | None] = ()
) -> Stack:
    """Bring matrices with one input to the GPU, neighbours of one type together."""
    found = [
        get.found(name, order)
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
        _brought(get, [names[index] for index in run], [found[index] for index in run])
        for run in runs
    )
    for weight in weights:
        get.took(weight)
    return Stack(weights, tuple(map(tuple, runs)), tuple(part.rows for part in found))


def _may_join(first: FileMatrices, second: FileMatrices) -> bool:
    return first.quant == second.quant and first.rows % TILE_ROWS == 0 and first.quant in TILED


def _brought(get: WeightSource, names: Sequence[str], parts: Sequence[FileMatrices]) -> Weight:
    """Bring one weight to the GPU: matrices of one type in tiles; F32 and others in 16 bits."""
    first, rows = parts[0], sum(part.rows for part in parts)
    if get.unpack or not (first.quant in TILED or first.quant.name in PLAIN_TYPES):
        return _plain(get.mapped(names[0], first.order), get.case.dtype)
    assert get.upload is not None
    if first.quant in TILED:
        return Weight(get.upload.tiles(parts), first.quant, rows, first.columns, matmul.TILES)
    dtype = get.case.dtype
    values = get.upload.rows(first, narrow_type(dtype))
    return Weight(values, QUANTS[dtype], rows, first.columns)


def _plain(weight: Weight, dtype: str) -> Weight:
    """Return a weight that has no tiles in bf16 or f16 on the GPU."""
    there = weight.data.to("cuda")
    if weight.quant.name not in PLAIN_TYPES:
        there = dequantise(there, weight.quant, weight.columns)
    return Weight(there.to(narrow_type(dtype)), QUANTS[dtype], weight.rows, weight.columns)
