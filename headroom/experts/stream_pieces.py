"""The pieces in which a layer's cold experts are copied to the GPU, group by group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headroom.experts.copies import on_device
from headroom.experts.stream_rule import cut_pieces, runs
from headroom.kernels.cuda.expert_tiles import ExpertTiles
from headroom.kernels.cuda.experts import group_bounds

# A row of cold memory that is none, and no neighbour of one.
ELSEWHERE = -2


class ColdExperts(Protocol):
    """What is read of a layer's store."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""

    @property
    def cold(self) -> torch.Tensor:
        """The cold experts `[cold, expert_bytes]` in host memory."""

    @property
    def host_addresses(self) -> torch.Tensor:
        """Addresses `[experts, 3]` of cold experts; 0 of hot ones."""

    def cold_of(self, expert: int) -> torch.Tensor | None:
        """Return an expert's bytes in host memory; None where it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Cold experts that are copied at once."""

    which: torch.Tensor  # int32, counted from their group's first, on the GPU
    sources: tuple[torch.Tensor, ...]  # runs of cold memory


@dataclass(frozen=True, slots=True, eq=False)
class GroupExperts:
    """The experts of one group."""

    hot: torch.Tensor  # int32, counted from its first, on the GPU
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where a layer's experts lie, as long as they lie there."""

    lies: torch.Tensor  # the addresses that the rest was found for
    hot: list[bool]  # by expert
    rows: dict[int, int]  # of cold memory, by cold expert


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How all cold experts of some places are streamed."""

    places: _Places
    bounds: list[tuple[int, int]]
    groups: list[GroupExperts]


class ColdPieces:
    """Cuts the cold experts of one layer into pieces of at most so many."""

    def __init__(self, tiles: ExpertTiles, store: ColdExperts, most: int) -> None:
        self._tiles, self._store, self._most = tiles, store, most
        self._places: _Places | None = None
        self._all: _Plan | None = None

    def all_groups(self) -> list[GroupExperts]:
        """Return how all cold experts are streamed."""
        places, bounds, plan = self._find_places(), group_bounds(self._tiles), self._all
        if plan is None or plan.places is not places or plan.bounds != bounds:
            plan = _Plan(places, bounds, self._groups(places.rows, bounds))
            self._all = plan
        return plan.groups

    def some_groups(self, cold: Mapping[int, int]) -> list[GroupExperts]:
        """Return how some cold experts are streamed, given with their rows of cold memory."""
        return self._groups(cold, group_bounds(self._tiles))

    def rows(self) -> Mapping[int, int]:
        """Where each cold expert lies in cold memory; ELSEWHERE after an exchange that failed."""
        return self._find_places().rows

    def _find_places(self) -> _Places:
        """Where experts lie now; found anew when some of them have moved."""
        lies, store = self._store.host_addresses, self._store
        if self._places is None or not torch.equal(lies, self._places.lies):
            size, first, end = store.expert_bytes, store.cold.data_ptr(), len(store.cold)
            addresses = lies[:, 0].tolist()
            found = {e: (at - first) // size for e, at in enumerate(addresses) if at}
            rows = {e: row if 0 <= row < end else ELSEWHERE for e, row in found.items()}
            self._places = _Places(lies.clone(), [not at for at in addresses], rows)
        return self._places

    def _groups(
        self, cold: Mapping[int, int], bounds: Sequence[tuple[int, int]]
    ) -> list[GroupExperts]:
        """Groups that stream the given cold experts; every expert not cold at all is hot."""
        is_hot = self._find_places().hot
        by_row = {row: expert for expert, row in cold.items()}
        lists: list[list[int]] = []  # of experts, brought to the GPU by one copy
        rows: list[list[list[int]]] = []  # of cold memory, by group and piece
        for first, count in bounds:
            lists.append([expert for expert in range(count) if is_hot[first + expert]])
            group = [cold[expert] for expert in range(first, first + count) if expert in cold]
            rows.append(cut_pieces(group, self._most))
            lists += [[by_row[row] - first for row in part] for part in rows[-1]]
        on_gpu = iter(self._on_gpu(lists))
        groups = []
        for parts in rows:
            hot = next(on_gpu)
            pieces = tuple(Piece(next(on_gpu), self._sources(part, by_row)) for part in parts)
            groups.append(GroupExperts(hot, pieces))
        return groups

    def _sources(self, rows: Sequence[int], by_row: Mapping[int, int]) -> tuple[torch.Tensor, ...]:
        sources = []
        for first, end in runs(rows):
            blobs = self._store.cold[first:end]
            if first == ELSEWHERE:
                found = self._store.cold_of(by_row[ELSEWHERE])
                assert found is not None
                blobs = found
            sources.append(blobs)
        return tuple(sources)

    def _on_gpu(self, lists: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        flat = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int32)
        moved = on_device(flat, self._tiles.addresses.device)
        return torch.split(moved, [len(numbers) for numbers in lists])


def pieces_of(groups: Sequence[GroupExperts]) -> list[Piece]:
    """Return the pieces of all groups in the order of their use."""
    return [piece for group in groups for piece in group.pieces]
