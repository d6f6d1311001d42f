"""Picks in the order of their experts, and the products of each expert's own rows."""

from dataclasses import dataclass
from typing import Literal

import torch

from headroom.kernels.cuda import grouped
from headroom.kernels.cuda.compile import capability_of, compile_kernel

SORT_THREADS = 512  # of picks.cu
GATHER_THREADS, GATHER_BLOCKS = 256, 4096
LIBRARYS_SM_100 = "2.13"  # the version of torch from which its grouped product runs on sm_100 too


@dataclass(frozen=True, slots=True, eq=False)
class SortedPicks:
    """The picks of many rows, sorted by expert; those of no expert (negative ids) come last."""

    rows: torch.Tensor  # int64 [picks]: whose pick stands at a place
    places: torch.Tensor  # int64 [rows, used]: where a pick stands
    ends: torch.Tensor  # int32 [experts]: the place after an expert's last
    group_ends: torch.Tensor  # the same, counted from the first place of an expert's group


def sort_in_groups(ids: torch.Tensor, experts: int, each: int) -> SortedPicks:
    """Sort the picks int32 `[rows, used]` in one launch; groups are of `each` experts."""
    assert ids.is_contiguous()
    (rows, used), device = ids.shape, ids.device
    owners, places = torch.empty(2, rows * used, dtype=torch.int64, device=device).unbind()
    ends, group_ends = torch.empty(2, experts, dtype=torch.int32, device=device).unbind()
    compile_kernel("picks.cu", "sort_picks")(
        (experts + 1,),
        (SORT_THREADS,),
        (ids, owners, places, ends, group_ends, rows * used, used, experts, each),
    )
    return SortedPicks(owners, places.view(rows, used), ends, group_ends)


def sort_picks(ids: torch.Tensor, experts: int) -> SortedPicks:
    """Sort the picks `[rows, used]` of one group by torch: nothing waits for the device."""
    flat = ids.flatten().long()
    numbers, order = torch.where(flat < 0, experts, flat).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=ids.device)
    every = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return SortedPicks(order // ids.shape[1], places.view(ids.shape), ends, ends)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """The picks of neighbouring experts, their own first: what follows is another group's."""

    first: int  # expert
    last: int
    start: torch.Tensor | None  # int32 [1]: the group's first place among all; None: the very first
    picks: SortedPicks  # of all groups
    ends: torch.Tensor  # int32 [experts of the group], counted from `start`

    @property
    def most(self) -> int:
        """The most picks that it can have: all."""
        return self.picks.rows.shape[0]

    @property
    def among(self) -> int:
        """Experts of all groups, over which the picks spread."""
        return self.picks.ends.shape[0]

    @property
    def size(self) -> int:
        """Its experts."""
        return self.last - self.first + 1


def expert_group(picks: SortedPicks, first: int, count: int) -> ExpertGroup:
    """Return the group of `count` experts from `first` on, without waiting for the device."""
    ends = picks.group_ends[first : first + count]
    start = picks.ends[first - 1 : first] if first else None
    return ExpertGroup(first, first + ends.shape[0] - 1, start, picks, ends)


def gather_rows(x: torch.Tensor, group: ExpertGroup, out: torch.Tensor) -> torch.Tensor:
    """Write the rows of `x`, of 16 bits, that a group's picks belong to; return `out [picks, ...]`.

    Rows after the group's last have no meaning.
    """
    assert x.is_contiguous()
    words = x.shape[1] // 8
    compile_kernel("picks.cu", "gather")(
        (min(group.most, GATHER_BLOCKS),),
        (GATHER_THREADS,),
        (x, group.picks.rows, group.start, group.ends, out, group.size - 1, words),
    )
    return out


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, among: int
) -> torch.Tensor:
    """Return rows sorted by expert times their expert's matrix, transposed.

    `x [picks, columns]` and `weights [experts, rows, columns]` are bf16, and so is what comes, or
    f16, which gives float32; columns and rows are divisible by 8 for 16-byte strides. Rows after
    the last expert's end have no meaning. The picks spread over `among` experts, of which `weights`
    may be some. All but the loop leave the host free.
    """
    way = "own" if x.dtype == torch.float16 else product_way(x.device)
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
    """Return who multiplies bf16: torch in one go, our kernel, or torch expert by expert.

    Torch has a grouped product of its own for two generations only, and none that gives f16's sums
    in float32; on others it would wait for the device to hear where experts end, as the loop does.
    """
    if device.type != "cuda":
        return "loop"
    major, _ = capability_of(device)
    if major == 9 or (major == 10 and torch.__version__ >= LIBRARYS_SM_100):
        return "library"
    return "own" if major >= 8 else "loop"
