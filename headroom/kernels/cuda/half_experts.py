"""Routed experts of many rows in f16: rows have powers of two, sums of products are float32."""

from collections.abc import Sequence
from typing import Protocol

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.narrow import POWER_THREADS, NarrowRows
from headroom.kernels.cuda.picks import ExpertGroup, gather_rows


class Unpacked(Protocol):
    """Brings a group's experts to the rows' type, asked in this order within a frame."""

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor: ...

    def downs(self, group: ExpertGroup) -> torch.Tensor: ...


def compile_all(activation: str) -> None:
    """Compile the kernels before a step needs them; one source has them all."""
    compile_kernel("half_experts.cu", "combine", _constants(activation))


def add_group(
    x: NarrowRows,
    group: ExpertGroup,
    unpacked: Unpacked,
    activation: str,
    picks: tuple[torch.Tensor, torch.Tensor],  # ids and weights
    rest: tuple[Argument, ...],  # what rows get besides, and the output
) -> None:
    """Write the weighted sums of the answers of a group's experts, and what rows get besides."""
    plain = unpacked.gates_and_ups(group)
    ends = group.ends.tolist()  # the host waits to hear which rows an expert has
    inner = _inner_rows(x, group, ends, plain, activation)
    answers = grouped_product(inner.values, unpacked.downs(group), ends)
    ids, weights = picks
    rows, used = ids.shape
    compile_kernel("half_experts.cu", "combine", _constants(activation))(
        (rows,),
        (POWER_THREADS,),
        (
            *(answers, inner.powers, group.picks.places, group.start, ids, group.first, group.last),
            *(weights, used, answers.shape[1], *rest),
        ),
    )


def _inner_rows(
    x: NarrowRows,
    group: ExpertGroup,
    ends: Sequence[int],
    gates_and_ups: torch.Tensor,
    activation: str,
) -> NarrowRows:
    """`act(gate) * up` of a group's picks, its own first; those of others have no meaning."""
    picks, width = group.most, gates_and_ups.shape[1] // 2
    device, columns = x.values.device, x.values.shape[1]
    own = scratch.empty(picks, columns, dtype=torch.float16, device=device)
    values = scratch.empty(picks, width, dtype=torch.float16, device=device)
    powers = scratch.empty(picks, device=device)
    both = grouped_product(gather_rows(x.values, group, own), gates_and_ups, ends)
    compile_kernel("half_experts.cu", "activate", _constants(activation))(
        (picks,),
        (POWER_THREADS,),
        (
            *(both, x.powers, group.picks.rows, group.start, group.ends, values, powers),
            *(group.size - 1, width),
        ),
    )
    return NarrowRows(values, powers)


def grouped_product(x: torch.Tensor, weights: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed, in float32.

    One product after another; rows after the last expert's end have no meaning.
    """
    out = torch.empty(len(x), weights.shape[1], device=x.device)
    first = 0
    for matrix, end in zip(weights, ends, strict=True):
        if end > first:
            torch.mm(x[first:end], matrix.T, out_dtype=torch.float32, out=out[first:end])
        first = end
    return out


def _constants(activation: str) -> dict[str, int]:
    return {"GELU": int(activation == "gelu")}
