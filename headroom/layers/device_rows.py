"""Rows on a GPU on their way through packed products: a few in f16, many in bf16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.kernels.cuda import matmul, small
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.pack import PACKED, TILE_ROWS, tile_bytes
from headroom.kernels.weight import Weight
from headroom.layers.weights import WeightSource

FEW_ROWS = matmul.FEW_ROWS  # the most of a step that one pass over packed weights serves


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """What products read of some rows: `few` for steps of few rows, `many` for long ones."""

    count: int
    few: HalfRows | None = None
    many: torch.Tensor | None = None  # bf16 [rows, columns]
    floats: torch.Tensor | None = None  # float32 [rows, columns], beside `few`, for plain weights


def few_rows(count: int) -> bool:
    """Tell whether a step is small enough for one pass over packed weights."""
    return count <= FEW_ROWS


def plain_rows(x: torch.Tensor) -> DeviceRows:
    """Return rows as they are."""
    if few_rows(len(x)):
        return DeviceRows(len(x), few=matmul.half_rows(x), floats=x)
    return DeviceRows(len(x), many=x.to(torch.bfloat16))


def normed_rows(x: torch.Tensor, norm: RowNorm) -> DeviceRows:
    """Return rows after a norm; `norm.out` gets them in float32 where it is given."""
    if few_rows(len(x)):
        normed = torch.empty_like(x) if norm.out is None else norm.out
        rounded = matmul.half_rows(x, norm=RowNorm(norm.weight, norm.eps, normed))
        return DeviceRows(len(x), few=rounded, floats=normed)
    normed = small.rms_norm(x, norm.weight, norm.eps, norm.out)
    return DeviceRows(len(x), many=normed.to(torch.bfloat16))


def gated_rows(gate: torch.Tensor, up: torch.Tensor, activation: str) -> DeviceRows:
    """Return `act(gate) * up`."""
    if few_rows(len(gate)):
        return DeviceRows(len(gate), few=matmul.gated_half_rows(gate, up, activation))
    return DeviceRows(len(gate), many=small.gated_activation(gate, up, activation).bfloat16())


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Matrices with one input; those of one type lie one after another and are read in one go."""

    weights: tuple[Weight, ...]  # in tiles, or plain bf16 rows
    members: tuple[tuple[int, ...], ...]  # which of the matrices each weight holds
    rows: tuple[int, ...]  # of each matrix

    def __call__(self, x: DeviceRows, add: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return `[rows, its rows]` in float32 for each matrix; one alone is added to `add`."""
        device = self.weights[0].data.device
        outs = [torch.empty(x.count, rows, device=device) for rows in self.rows]
        if add is not None:
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
    plain = weight.data
    if weight.layout == matmul.TILES:
        plain = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=plain.device)
        matmul.dequantise(weight, plain)
    rows = x.many if x.few is None else _floats(x).to(torch.bfloat16)
    assert rows is not None
    answers = rows @ plain.T
    for out, part in zip(
        outs, torch.split(answers, [out.shape[1] for out in outs], dim=1), strict=True
    ):
        if add is None:
            out.copy_(part)
        else:
            out.add_(part)


def _floats(x: DeviceRows) -> torch.Tensor:
    """Return few rows as floats; what is gated is packed wherever it is multiplied."""
    assert x.floats is not None
    return x.floats


def stack(
    get: WeightSource, names: Sequence[str], orders: Sequence[torch.Tensor | None] = ()
) -> Stack:
    """Bring matrices with one input to the GPU, neighbours of one type together."""
    mapped = [
        get.mapped(name, order)
        for name, order in zip(names, orders or [None] * len(names), strict=True)
    ]
    runs: list[list[int]] = []
    for index, weight in enumerate(mapped):
        last = runs[-1] if runs else []
        if last and len(last) < matmul.MOST_OUTPUTS and _may_join(mapped[last[-1]], weight):
            last.append(index)
        else:
            runs.append([index])
    weights = tuple(_joined([mapped[index] for index in run]) for run in runs)
    for weight in weights:
        get.count(get.line, weight.nbytes)
    return Stack(weights, tuple(map(tuple, runs)), tuple(weight.rows for weight in mapped))


def _may_join(first: Weight, second: Weight) -> bool:
    return first.quant == second.quant and first.rows % TILE_ROWS == 0 and first.quant in PACKED


def _joined(weights: Sequence[Weight]) -> Weight:
    first, rows = weights[0], sum(weight.rows for weight in weights)
    if first.quant not in PACKED:
        assert len(weights) == 1
        plain = first.data.to("cuda").to(torch.bfloat16)
        return Weight(plain, first.quant, rows, first.columns)
    tiles = torch.empty(
        tile_bytes(first.quant, rows, first.columns), dtype=torch.uint8, device="cuda"
    )
    at = 0
    for weight in weights:
        size = tile_bytes(weight.quant, weight.rows, weight.columns)
        matmul.pack_into(tiles[at : at + size], weight)
        at += size
    return Weight(tiles, first.quant, rows, first.columns, matmul.TILES)
