"""A stage whose slots change hands within captured steps counts what the simulator counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.experts.cache import POLICIES, Policy
from headroom.experts.cold import ColdExperts
from headroom.experts.traces.replay import ReplaySettings, replay
from headroom.experts.traces.synth_trace import PRESETS, synth_trace
from headroom.experts.traces.taps import ImposedTrace, traced_layers
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.native.module import MODULE
from headroom.layers.draws import DeviceSampler
from headroom.plan.describe import describe
from headroom.split.gpu_stage import GpuStage
from tests.running import PAGE_SIZE, running
from tests.split.cached_models import (
    LINK,
    allow_small_caches,
    begin_with,
    cached_layers,
    set_link,
    share_misses,
)
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.kernels import Kernel, no_kernel, on_gpu_only, use_kernels
from tests.stand_in.model import ModelOnGpu
from tests.synth_models import write_model

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
]
STEPS = 16


def only_caches(source: str, name: str, defines: dict[str, int]) -> Kernel:
    """Find the kernels of caches and of the hand-over; all others do nothing."""
    computes = source in ("expert_cache.cu", "handover.cu")
    return (compile_on_cpu if computes else no_kernel)(source, name, defines)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that computes nothing but which experts are in slots."""
    allow_small_caches(monkeypatch)
    with stand_in_gpu(monkeypatch, computes=False) as made, monkeypatch.context() as patch:
        use_kernels(patch, on_gpu_only(only_caches, made.is_pinned))
        yield


class TracedStage:
    """A stage with captured steps; the picks of its routers are those of a trace."""

    def __init__(self, folder: Path, sequences: int, cold: str) -> None:
        checkpoint = open_checkpoint(write_model("qwen3moe", "q8_0", folder, few_layers=True))
        layers = traced_layers(describe(checkpoint).shape)
        self.sequences = sequences
        self.trace = synth_trace(
            layers, PRESETS["qwen3-30b-a3b"].model, tokens=STEPS * sequences, sequences=sequences
        )
        made = ModelOnGpu(
            checkpoint,
            tap=ImposedTrace(self.trace),
            dtype="bf16",
            kv_type="bf16",
            parallel=sequences,
            expert_budget="50%",
            cold=cold,
            expert_policy="auto",
        )
        settings, rings = made.plan.settings, frozenset(made.rings)
        sampler = DeviceSampler.allocate(DECODE_ROWS, made.described.config.vocab, "cuda:0")
        self.stage = GpuStage("cuda:0", made.model, settings, rings, sampler)
        self._pages = list(range(settings.sequence_pages))
        self.experts = self._experts(made)
        self.link = None
        if cold == "auto":
            self.link = LINK
            set_link(self.experts)
        self.stage.capture()

    def _experts(self, made: ModelOnGpu) -> ColdExperts:
        found = made.model.cold_experts
        assert found is not None
        return found

    def run(self) -> None:
        """Run all tokens of the trace, one of each sequence in a step."""
        rows = [
            running([0] * STEPS, self._pages, state_slot=index) for index in range(self.sequences)
        ]
        for _ in range(STEPS):
            with torch.inference_mode():
                self.stage.step(make_batch([Turn(one, 1) for one in rows], PAGE_SIZE))
            for one in rows:
                one.cached += 1

    @property
    def counts(self) -> list[list[int]]:
        """The counters of all layers."""
        counts: list[list[int]] = self.experts.store.cache_counts.cpu().tolist()
        return counts

    def shadow_counts(self, policy: Policy) -> list[list[int]]:
        """Return what the shadows of one policy have counted, by layer."""
        assert self.experts.policies is not None
        tables = self.experts.policies._tables
        counts: list[list[int]] = tables.counts[:, POLICIES.index(policy)].cpu().tolist()
        return counts

    def simulated(self, policy: Policy, link: tuple[int, ...] | None) -> list[list[int]]:
        """Return the counters of all layers after a replay of the trace."""
        placed = self.experts.store.placement.hot
        found = replay(self.trace, placed, ReplaySettings(policy, self.sequences, link))
        return [[getattr(layer, name) for name in COUNTERS] for layer in found.counts]


@pytest.mark.parametrize("cold", ["gpu", "auto"])
@pytest.mark.parametrize("sequences", [1, 4, 8])
def test_every_layer_and_every_shadow_counts_what_the_simulator_counts(
    sequences: int, cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_misses(monkeypatch, cold)
    made = TracedStage(tmp_path, sequences, cold)
    for policy in POLICIES:
        begin_with(made.experts, policy)
        made.run()
        assert made.counts == made.simulated(policy, made.link)
        for shadow in POLICIES:
            assert made.shadow_counts(shadow) == made.simulated(shadow, None)
        filled = [layer[COUNTERS.index("filled")] for layer in made.counts]
        assert [count > 0 for count in filled] == [policy != "static"] * len(filled)
    made.stage.close()


def test_requests_find_the_placement_whatever_warmed_the_gpu_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_misses(monkeypatch, "gpu")
    warmed: list[tuple[tuple[int, ...], ...]] = []
    restart = ColdExperts.restart

    def note(experts: ColdExperts) -> None:
        warmed.append(experts.store.current_placement().hot)
        restart(experts)

    monkeypatch.setattr(ColdExperts, "restart", note)
    made = TracedStage(tmp_path, 2, "gpu")
    placed = made.experts.store.placement.hot
    (found,) = warmed
    assert found != placed  # a prompt has filled slots
    assert made.experts.store.current_placement().hot == placed
    assert not any(map(any, made.counts))
    made.run()  # the first steps, with the policy at the start
    assert made.counts == made.simulated("counts", None)
    for shadow in POLICIES:
        assert made.shadow_counts(shadow) == made.simulated(shadow, None)
    assert len(cached_layers(made.experts.store)) == len(placed)
    made.stage.close()
