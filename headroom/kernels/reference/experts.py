"""Routed experts in plain torch: each picked expert is unpacked once for all its rows."""

from dataclasses import replace

import torch

from headroom.kernels.ops import ExpertTable
from headroom.kernels.reference.matmul import matmul
from headroom.kernels.reference.norms import gated_activation
from headroom.kernels.weight import Weight


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTable,
    activation: str,
    dtype: str,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, summed from the best on."""
    rows, used = ids.shape
    answers = torch.empty(used, rows, x.shape[1], device=x.device)  # the output of each pick
    for expert in torch.bincount(ids.flatten()).nonzero().flatten().tolist():
        row, rank = torch.nonzero(ids == expert, as_tuple=True)
        own = x[row]
        gate, up = (matmul(own, part[expert], dtype) for part in (table.gate, table.up))
        inner = gated_activation(gate, up, activation)
        answers[rank, row] = matmul(inner, table.down[expert], dtype)
    out = torch.zeros_like(x)
    for answer, weight in zip(answers, weights.unbind(1), strict=True):
        out += weight[:, None] * answer
    return out


def prepare(table: ExpertTable) -> ExpertTable:
    """Return a copy of the experts with one tensor each for gates, ups and downs."""
    return ExpertTable(*(_in_one_piece(part) for part in table.parts))


def _in_one_piece(part: tuple[Weight, ...]) -> tuple[Weight, ...]:
    like = part[0].data
    piece = torch.empty(len(part), *like.shape, dtype=like.dtype)
    for place, weight in zip(piece, part, strict=True):
        place.copy_(weight.data)
    return tuple(replace(weight, data=place) for place, weight in zip(piece, part, strict=True))
