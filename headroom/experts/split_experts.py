"""SplitExperts: hot experts computed on the GPU, cold ones where the store says, plainly."""

import time

import torch

from headroom.experts.load_store import fill_rows
from headroom.experts.store import LayerStore, drop_cold
from headroom.families.config import ExpertsConfig
from headroom.kernels.reference.matmul import matmul
from headroom.kernels.reference.norms import gated_activation
from headroom.kernels.weight import PLAIN_TYPES, Weight
from headroom.layers.weights import WeightSource

Places = tuple[torch.Tensor, torch.Tensor]  # of picks: rows, and ranks among a row's


class SplitExperts:
    """The experts of one layer as their file has them, for types without a GPU's own kernels.

    Every answer is summed where all-hot experts would be: the same tokens, whatever is hot.
    """

    def __init__(self, config: ExpertsConfig, get: WeightSource, store: LayerStore) -> None:
        fill_rows(store, get)
        self._store, self._activation, self._dtype = store, config.activation, get.case.dtype
        # Of so many cold picks of a row, those whose experts come to the GPU.
        self._left = torch.tensor(store.choice.left, device=get.case.place)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts; `ids` and `weights` `[rows, used]`."""
        drops = self._store.path == "drop"
        if drops:
            weights = drop_cold(ids, weights, self._store.is_hot)
        answers = torch.zeros(*ids.shape, x.shape[1], device=x.device)
        comes = self._comes(ids)
        for expert in torch.bincount(ids.flatten()).nonzero().flatten().tolist():
            own, slot, cold = ids == expert, *self._places(expert)
            if slot is not None:
                self._answer(answers, x, _places(own), slot)
            elif not drops and cold is not None:
                if len((here := _places(own & comes))[0]):
                    self._answer(answers, x, here, self._store.bring(cold))
                if len((there := _places(own & ~comes))[0]):
                    self._answer_by_cpu(answers, x, there, cold)
        out = torch.zeros_like(x)
        for answer, weight in zip(answers.unbind(1), weights.unbind(1), strict=True):
            out += weight[:, None] * answer
        return out

    def _places(self, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._store.slot_of(expert), self._store.cold_of(expert)

    def _comes(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether a cold pick `[rows, used]` is one whose expert comes to the GPU."""
        cold = self._store.is_hot[ids] == 0
        return cold & (cold.cumsum(1) <= self._left[cold.sum(1)][:, None])

    def _answer(
        self, answers: torch.Tensor, x: torch.Tensor, picks: Places, blob: torch.Tensor
    ) -> None:
        """Fill in one expert's answers for some picks, computed where it lies."""
        row, rank = picks
        answers[row, rank] = self._answers(x[row], blob).to(x.device)

    def _answer_by_cpu(
        self, answers: torch.Tensor, x: torch.Tensor, picks: Places, blob: torch.Tensor
    ) -> None:
        """Fill in a cold expert's answers where it lies, and count what that costs."""
        started, counts = time.perf_counter(), self._store.counts
        self._answer(answers, x, picks, blob)
        counts.cpu_bytes += self._store.expert_bytes
        counts.cpu_s += time.perf_counter() - started

    def _answers(self, x: torch.Tensor, blob: torch.Tensor) -> torch.Tensor:
        """One expert's answers, where it lies."""
        here = x.to(blob.device)
        gate, up, down = self._weights(blob)
        inner = gated_activation(
            matmul(here, gate, self._dtype), matmul(here, up, self._dtype), self._activation
        )
        return matmul(inner, down, self._dtype)

    def _weights(self, blob: torch.Tensor) -> list[Weight]:
        layout = self._store.blobs
        parts = zip(self._store.parts(blob), layout.kinds, layout.shapes, strict=True)
        return [
            Weight(part.view(PLAIN_TYPES.get(kind.name, torch.uint8)).view(rows, -1), kind, rows, n)
            for part, kind, (rows, n) in parts
        ]


def _places(picks: torch.Tensor) -> Places:
    row, rank = torch.nonzero(picks, as_tuple=True)
    return row, rank
