"""Routed experts in plain torch: each picked expert is unpacked once for all its rows."""

from dataclasses import replace

import torch

from headroom.kernels.ops import ExpertTable, MatmulOp
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
    return sum_experts(x, ids, weights, table, activation, dtype, matmul)


def sum_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTable,
    activation: str,
    dtype: str,
    multiply: MatmulOp,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, which are computed one after another."""
    rows, used = ids.shape
    answers = torch.empty(used, rows, x.shape[1], device=x.device)  # the output of each pick
    for expert in torch.bincount(ids.flatten()).nonzero().flatten().tolist():
        row, rank = torch.nonzero(ids == expert, as_tuple=True)
        answers[rank, row] = _one_expert(x[row], expert, table, activation, dtype, multiply)
    out = torch.zeros_like(x)
    for answer, weight in zip(answers, weights.unbind(1), strict=True):
        out += weight[:, None] * answer
    return out


def _one_expert(
    x: torch.Tensor,
    expert: int,
    table: ExpertTable,
    activation: str,
    dtype: str,
    multiply: MatmulOp,
) -> torch.Tensor:
    """Return the output of one expert for rows."""
    gate, up = (multiply(x, part[expert], dtype) for part in (table.gate, table.up))
    if table.biases is not None:
        gate, up = gate + table.biases.gate[expert], up + table.biases.up[expert]
    down = multiply(gated_activation(gate, up, activation), table.down[expert], dtype)
    return down if table.biases is None else down + table.biases.down[expert]


def prepare(table: ExpertTable) -> ExpertTable:
    """Return a copy of the experts with one tensor each for gates, ups and downs."""
    gate, up, down = (_in_one_piece(part) for part in table.parts)
    return ExpertTable(gate, up, down, table.biases)


def _in_one_piece(part: tuple[Weight, ...]) -> tuple[Weight, ...]:
    like = part[0].data
    piece = torch.empty(len(part), *like.shape, dtype=like.dtype)
    for place, weight in zip(piece, part, strict=True):
        place.copy_(weight.data)
    return tuple(replace(weight, data=place) for place, weight in zip(piece, part, strict=True))
