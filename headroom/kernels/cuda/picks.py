"""Picks in the order of their experts, and the products of each expert's own rows."""

from dataclasses import dataclass
from typing import Literal

import torch

from headroom.kernels.cuda import grouped

LIBRARYS_SM_100 = "2.13"  # the version of torch from which its grouped product runs on sm_100 too


@dataclass(frozen=True, slots=True, eq=False)
class SortedPicks:
    """The picks of many rows, sorted by expert; those of no expert (negative ids) come last."""

    rows: torch.Tensor  # int64 [picks]: whose pick stands at a place
    places: torch.Tensor  # int64 [rows, used]: where a pick stands
    ends: torch.Tensor  # int32 [experts]: the place after an expert's last


def sort_picks(ids: torch.Tensor, experts: int) -> SortedPicks:
    """Sort the picks `[rows, used]` where they are: nothing waits for the device."""
    flat = ids.flatten().long()
    numbers, order = torch.where(flat < 0, experts, flat).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=ids.device)
    every = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return SortedPicks(order // ids.shape[1], places.view(ids.shape), ends)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """The picks of neighbouring experts, their own first: what follows is another group's."""

    first: int  # expert
    last: int
    start: torch.Tensor | None  # int32 [1]: the group's first place among all; None: the very first
    rows: torch.Tensor  # int64 [picks]
    ends: torch.Tensor  # int32 [experts of the group], counted from `start`
    among: int  # experts of all groups, over which the picks spread


def expert_group(picks: SortedPicks, first: int, count: int) -> ExpertGroup:
    """Return the picks of `count` experts from `first` on, without waiting for the device."""
    ends = picks.ends[first : first + count]
    last = first + len(ends) - 1
    if first == 0:
        return ExpertGroup(first, last, None, picks.rows, ends, len(picks.ends))
    start = picks.ends[first - 1 : first]
    places = torch.arange(len(picks.rows), device=ends.device) + start
    rows = picks.rows[places.clamp_(max=len(picks.rows) - 1)]
    return ExpertGroup(first, last, start, rows, ends - start, len(picks.ends))


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, among: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed, in bf16.

    `x [picks, columns]` and `weights [experts, rows, columns]` are bf16, columns and rows divisible
    by 8 for 16-byte strides; rows after the last expert's end have no meaning. The picks spread
    over `among` experts, of which `weights` may be some. All but the loop leave the host free.
    """
    way = product_way(x.device)
    if way == "library":
        return torch._grouped_mm(x, weights.mT, offs=ends)
    if way == "own":
        return grouped.product(x, weights, ends, grouped.fitting_rows(len(x), among))
    out = x.new_zeros(len(x), weights.shape[1])
    first = 0
    for matrix, end in zip(weights, ends.tolist(), strict=True):
        if end > first:
            torch.mm(x[first:end], matrix.T, out=out[first:end])
        first = end
    return out


def product_way(device: torch.device) -> Literal["library", "own", "loop"]:
    """Return who multiplies on a device: torch in one go, our kernel, or torch expert by expert.

    Torch has a grouped product of its own for two generations only; on others it would wait for
    the device to hear where experts end, as the loop does.
    """
    if device.type != "cuda":
        return "loop"
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 or (major == 10 and torch.__version__ >= LIBRARYS_SM_100):
        return "library"
    return "own" if major >= 8 else "loop"
