"""PolicyKeeper: which policy decides how slots change hands, by what each would have achieved.

At the end of each decode step one kernel runs the step's picks through a cache of integers for each
layer and policy (`expert_cache.shadow`). Between steps the keeper copies their counters to host
memory, without a wait, and lets the policy with the most hits decide in all layers from then on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headroom.experts.cache import POLICIES, RULES, Policy
from headroom.experts.copies import Mark, pinned_empty
from headroom.experts.layer_store import LayerStore, copy_bytes
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import PolicyState
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import COUNTERS, ShadowTables

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0
MIN_STEPS = 128  # decode steps that a comparison rests on
MIN_GAIN = 0.01  # share of the picks that another policy must hit more often
# A policy that fills slots must beat "static" by this share of the picks, because filling takes
# time even where it gains no hits: 4 % of a step where all experts are chosen equally often (60 %
# of Qwen3.5-35B-A3B resident, H200, 2026-11).
FILLS_COST = 0.02
# The most that is copied back between two steps after a change to "static": a few milliseconds.
RESTORED_BYTES = 256 << 20
_STEPS, _PICKS, _HITS = (COUNTERS.index(name) for name in ("steps", "picks", "hits"))


def better_policy(current: Policy, hit_rates: Mapping[Policy, float]) -> Policy:
    """Return the policy that is worth most, or the current one if that is nearly as good."""
    worth = {
        policy: rate - (0.0 if policy == "static" else FILLS_COST)
        for policy, rate in hit_rates.items()
    }
    best = max(worth, key=lambda policy: worth[policy])
    return best if worth[best] - worth[current] > MIN_GAIN else current


@dataclass(frozen=True, slots=True, eq=False)
class ShadowStart:
    """What shadows begin with, in host memory; ShadowTables has the shapes."""

    shape: torch.Tensor
    places: torch.Tensor
    states: torch.Tensor


def start_shadows(layers: Sequence[LayerStore | None]) -> ShadowStart:
    """Return caches of integers for all layers and policies, with the experts that are resident."""
    experts = max(layer.experts for layer in layers if layer is not None and layer.is_cached)
    shape = torch.zeros(len(layers), 3, dtype=torch.int32)
    places = torch.zeros(len(layers), len(POLICIES), experts, dtype=torch.int32)
    words = expert_cache.state_words(experts)
    states = torch.zeros(len(layers), len(POLICIES), words, dtype=torch.int32)
    for index, layer in enumerate(layers):
        if layer is not None and layer.is_cached:
            slots = len(layer.slots)
            shape[index] = torch.tensor([layer.experts, slots, layer.blobs.used])
            places[index, :, : layer.experts] = (layer.residency.slot + 1).int()
            for policy in range(len(POLICIES)):
                own = expert_cache.new_state(layer.experts, policy, layer.pinned)
                states[index, policy, : len(own)] = own
    return ShadowStart(shape, places, states)


def open_shadows(layers: Sequence[LayerStore | None], seen: torch.Tensor) -> ShadowTables:
    """Return the shadows of all layers on the GPU, where steps leave their picks in `seen`."""
    start, device = start_shadows(layers), seen.device
    counts = torch.zeros(len(layers), len(POLICIES), len(COUNTERS), dtype=torch.int64)
    return ShadowTables(
        *(seen, start.shape.to(device), start.places.to(device), start.states.to(device)),
        counts.to(device),
    )


class PolicyKeeper:
    """Runs the shadows of one GPU's layers, and changes the policy of their caches.

    `end_step` is part of captured steps. Only the engine's thread calls `follow`, between steps.
    `now` may be read by any thread.
    """

    def __init__(
        self,
        store: ExpertStore,
        first: Policy,
        mark: Callable[[], Mark],  # of all that was enqueued on the GPU so far
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._layers = [layer for layer in store.layers if layer is not None and layer.is_cached]
        self._policy = first
        # Layers whose placed experts are still to be copied back, after a change to "static".
        self._restores: deque[tuple[LayerStore, tuple[int, ...]]] = deque()
        self._tables = open_shadows(store.layers, store.seen)
        self._mark, self._clock = mark, clock
        self._host = pinned_empty(tuple(self._tables.counts.shape), torch.int64)
        self._arrived: Mark | None = None  # of a reading that is under way
        self._read_at_s = float("-inf")
        self._before: torch.Tensor | None = None  # [policies, COUNTERS] when they were compared
        self.now = PolicyState(first, {})

    def restart(self) -> None:
        """Let all shadows begin anew with the experts that are resident now."""
        start = start_shadows(self._store.layers)
        self._tables.places.copy_(start.places)  # in place, because captured steps read them
        self._tables.states.copy_(start.states)
        self._tables.counts.zero_()

    def end_step(self, rows: int) -> None:
        """Run the picks of a decode step through all shadows."""
        expert_cache.shadow(self._tables, rows, RULES)

    def follow(self) -> None:
        """Take a reading that has arrived, or begin one that is due.

        This waits for the GPU only while the experts of the placement are brought back.
        """
        if self._restores:
            self._restore()
        if self._arrived is None:
            now_s = self._clock()
            if now_s - self._read_at_s >= READ_EVERY_S:
                copy_bytes(self._host, self._tables.counts)
                self._arrived, self._read_at_s = self._mark(), now_s
            return
        if not self._arrived.query():
            return
        self._arrived = None
        totals = self._host.sum(0)
        if self._before is None:  # what warm-up steps have counted
            self._before = totals
        elif self._steps(totals - self._before) >= MIN_STEPS:
            self._compare(totals - self._before)
            self._before = totals

    def _steps(self, counts: torch.Tensor) -> int:
        return int(counts[0, _STEPS]) // len(self._layers)

    def _compare(self, counts: torch.Tensor) -> None:
        picks, hits = counts[:, _PICKS].tolist(), counts[:, _HITS].tolist()
        rates = {
            policy: hit / max(1, picked)
            for policy, hit, picked in zip(POLICIES, hits, picks, strict=True)
        }
        before = self._policy
        best = better_policy(before, rates)
        if best != before:
            index = POLICIES.index(best)
            for layer in self._layers:
                layer.set_policy(index)
            log.info(
                "experts: slots change hands by %s from now on, which would have hit %.1f %% of "
                "the last choices, and %s %.1f %%",
                best,
                100 * rates[best],
                before,
                100 * rates[before],
            )
            self._restores.clear()
            if best == "static":
                # The shadow of "static" has the placement, not the experts that are in slots now.
                self._restores.extend(
                    (layer, hot)
                    for layer, hot in zip(
                        self._store.layers, self._store.placement.hot, strict=True
                    )
                    if layer is not None and layer.is_cached
                )
        self._policy = best
        self.now = PolicyState(best, {**rates})

    def _restore(self) -> None:
        """Bring some more experts of the placement back into their slots.

        If a copy fails, all others stay where they are. Steps still find every expert.
        """
        copied = 0
        try:
            self._store.take_places()
            while self._restores and copied < RESTORED_BYTES:
                layer, hot = self._restores.popleft()
                copied += layer.hold(hot)
        except Exception:  # of a lost GPU, too, which the next step finds
            self._restores.clear()
            log.exception("experts: those of the placement are not all brought back")
