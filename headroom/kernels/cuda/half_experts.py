"""Routed experts of many rows in f16: rows have powers of two, sums of products are float32."""

from typing import Protocol

import torch

from headroom.kernels.cuda import grouped, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.narrow import POWER_THREADS, NarrowRows
from headroom.kernels.cuda.picks import ExpertGroup, gather_rows, grouped_product


class Unpacked(Protocol):
    """Brings a group's experts to the rows' type, asked in this order within a frame."""

    def gates_and_ups(self, group: ExpertGroup) -> torch.Tensor: ...

    def downs(self, group: ExpertGroup) -> torch.Tensor: ...


def compile_all(activation: str) -> None:
    """Compile the kernels before a step needs them: one source has all but the products."""
    compile_kernel("half_experts.cu", "combine", _constants(activation))
    grouped.kernels(torch.float16)


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
    inner = _inner_rows(x, group, plain, activation)
    answers = grouped_product(inner.values, unpacked.downs(group), group.ends, group.among)
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
    x: NarrowRows, group: ExpertGroup, gates_and_ups: torch.Tensor, activation: str
) -> NarrowRows:
    """`act(gate) * up` of a group's picks, its own first; those of others have no meaning."""
    picks, width = group.most, gates_and_ups.shape[1] // 2
    device, columns = x.values.device, x.values.shape[1]
    own = scratch.empty(picks, columns, dtype=torch.float16, device=device)
    values = scratch.empty(picks, width, dtype=torch.float16, device=device)
    powers = scratch.empty(picks, device=device)
    gathered = gather_rows(x.values, group, own)
    both = grouped_product(gathered, gates_and_ups, group.ends, group.among)
    compile_kernel("half_experts.cu", "activate", _constants(activation))(
        (picks,),
        (POWER_THREADS,),
        (
            *(both, x.powers, group.picks.rows, group.start, group.ends, values, powers),
            *(group.size - 1, width),
        ),
    )
    return NarrowRows(values, powers)


def _constants(activation: str) -> dict[str, int]:
    return {"GELU": int(activation == "gelu")}
