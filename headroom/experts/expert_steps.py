"""ExpertSteps: how a GPU's steps run on the experts of a layer, wherever those are."""

from typing import Protocol

import torch

from headroom.experts.store import LayerStore
from headroom.experts.stream import StreamedLayer
from headroom.kernels.cuda import experts as cuda_experts
from headroom.kernels.cuda import few_experts, handover
from headroom.kernels.cuda.expert_tiles import ExpertTiles, Others
from headroom.kernels.cuda.matmul import HalfRows
from headroom.kernels.cuda.narrow import NarrowRows
from headroom.kernels.cuda.route import Unchosen

Picks = tuple[torch.Tensor, torch.Tensor]  # ids and weights [rows, used]


class ExpertSteps(Protocol):
    """Runs a layer's experts; picks with a negative id are passed over.

    `out` may be the residual of `others`.
    """

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others, inside a captured step."""
        ...

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same for more rows; never captured."""
        ...


class ReadInPlace:
    """The GPU reads experts where they lie, in its own memory or over its link."""

    def __init__(self, tiles: ExpertTiles, activation: str) -> None:
        self._tiles, self._activation = tiles, activation

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts and others."""
        tiles, activation = self._tiles, self._activation
        if isinstance(picks, Unchosen):
            if x.rows <= few_experts.CHOSEN_ROWS:
                return few_experts.choose_few_rows(x, picks, tiles, activation, others, out)
            picks = picks.made()
        ids, weights = picks
        return few_experts.few_rows(x, ids, weights, tiles, activation, others, out)

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; each expert that was chosen is read once."""
        return cuda_experts.many_rows(x, *picks, self._tiles, self._activation, others, out)


class Streamed(ReadInPlace):
    """The same, but that many rows get cold experts through buffers on the GPU."""

    def __init__(self, tiles: ExpertTiles, activation: str, stream: StreamedLayer) -> None:
        super().__init__(tiles, activation)
        self._stream = stream

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; each cold expert is copied at most once."""
        return self._stream.many_rows(x, picks, others, out)


class WithoutCold(ReadInPlace):
    """Only hot experts run, which changes what a model says."""

    def __init__(self, tiles: ExpertTiles, activation: str, is_hot: torch.Tensor) -> None:
        super().__init__(tiles, activation)
        self._is_hot = is_hot

    def few_rows(
        self, x: HalfRows, picks: Picks | Unchosen, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of each row's hot experts, whose weights grow, and others."""
        made = picks.made() if isinstance(picks, Unchosen) else picks
        handover.drop(*made, self._is_hot)
        return super().few_rows(x, made, others, out)

    def many_rows(
        self, x: NarrowRows, picks: Picks, others: Others, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same."""
        handover.drop(*picks, self._is_hot)
        return super().many_rows(x, picks, others, out)


def stored_tiles(store: LayerStore) -> ExpertTiles:
    """Return the experts of a store as kernels find them; exchanges change what they find."""
    memory = tuple(piece for piece in (store.slots, store.cold) if len(piece))
    nbytes = sum(piece.nbytes for piece in memory)
    return ExpertTiles(store.addresses, store.kinds, store.width, store.hidden, nbytes, memory)
