"""Every family with experts, some of them cold, on the stand-in GPU."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch

from headroom.experts import ffn
from headroom.experts import store as stores
from headroom.experts.exchange import Exchange, ExchangeRound, StoreExchanges
from headroom.experts.layer_store import LayerStore
from headroom.experts.placement import LayerExperts
from headroom.experts.store import drop_cold
from headroom.experts.telemetry import ColdFigures
from headroom.families.files import open_checkpoint
from headroom.options import Options
from headroom.plan.cost_model import DecodeChoice
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split.build import load_model
from headroom.split.placing import find_placement, placed_plan
from tests.experts.stores import exchange
from tests.families import family_gguf
from tests.families.oracles import PROMPT, variant
from tests.plan.shapes import host
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.model import GPU, ModelOnGpu, run_on_gpu

PROMPTS = [PROMPT[:5]]
PIECES = [4, 1]
FAMILIES = ("mixtral", "qwen3moe", "qwen3moe-fused", "qwen35moe", "laguna", "glm4moe", "gemma4-26b")
# Every share by every way where that takes a second; of the others each share and each way once.
WAYS = [("0%", "cpu"), ("40%", "auto"), ("60%", "gpu"), ("100%", "auto")]
SHARES, COLD = ("0%", "40%", "60%", "100%"), ("auto", "cpu", "gpu")
ALL_WAYS = [(share, cold) for share in SHARES for cold in COLD]


def _exchange_all(stage: ModelOnGpu) -> None:
    """Make cold experts hot in every layer, as many as there are slots."""
    store, draw = stage.model.store, Random(1)
    assert store is not None
    for layer in store.layers:
        if layer is not None:
            cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
            draw.shuffle(cold)
            for promoted, demoted in zip(cold, layer.hot, strict=False):
                exchange(layer, promoted, demoted)


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_hot_the_answers_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "F32"))
    with stand_in_gpu(monkeypatch):
        wanted = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference")
        for share, cold in ALL_WAYS if name == "qwen3moe" else WAYS:
            found = run_on_gpu(
                checkpoint, PROMPTS, PIECES, kernels="reference", expert_budget=share, cold=cold
            )
            assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["qwen35moe", "gemma4-26b"])
def test_cold_experts_of_a_layer_may_be_shared_between_both_sides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "F32"))
    monkeypatch.setattr(
        stores,
        "choose_decode",
        lambda speeds, size, used, *more, **rates: DecodeChoice("cpu", (0, *range(used))),
    )
    brought: list[int] = []
    bring = LayerStore.bring
    monkeypatch.setattr(
        LayerStore, "bring", lambda store, blob: brought.append(1) or bring(store, blob)
    )

    with stand_in_gpu(monkeypatch):
        wanted = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference")
        found = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference", expert_budget="40%")
    assert brought
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("cold", "paths"), [("cpu", {"cpu"}), ("gpu", {"stream"})])
def test_experts_without_fused_kernels_report_what_cold_ones_cost(
    cold: str, paths: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("qwen3moe").save_gguf(tmp_path / "m.gguf", "F32"))
    read: list[ColdFigures] = []

    def look(stage: ModelOnGpu) -> None:
        cold_experts = stage.model.cold_experts
        assert cold_experts is not None
        assert cold_experts.shares is None  # plain kernels share by a rule that never changes
        read.append(cold_experts.meter.figures())

    with stand_in_gpu(monkeypatch):
        run_on_gpu(
            checkpoint, PROMPTS, PIECES, look, kernels="reference", expert_budget="40%", cold=cold
        )
    figures = read[-1]
    assert {path for path, size in figures.read_bytes.items() if size} == paths
    assert (figures.seconds.get("cold", 0.0) > 0) == (cold == "cpu")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen3moe", {}),
        ("qwen3moe", {"keep_host_copy": True}),
        ("qwen3moe", {"no_pin": True}),
        ("qwen35moe", {"cold": "gpu"}),
        ("laguna", {"cold": "cpu"}),
        ("gemma4-26b", {}),
    ],
)
def test_experts_that_change_places_between_steps_change_no_answer(
    name: str, more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = "MIXED" if name == "qwen3moe" else "F32"  # unpacking them takes longer than all else
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", types))
    with stand_in_gpu(monkeypatch):
        wanted = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference")
        found = run_on_gpu(
            checkpoint, PROMPTS, PIECES, _exchange_all,
            kernels="reference", expert_budget="50%", **more,
        )  # fmt: skip
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


class Overlapped:
    """After each step, continues copies and exchanges while later steps run."""

    def __init__(self, gpu: StandInGpu) -> None:
        gpu.queues.stepped = True
        self._gpu = gpu
        self.exchanges: ExchangeRound | None = None

    def __call__(self, stage: ModelOnGpu) -> None:
        if self.exchanges is None:
            self.exchanges = self._begin(stage)
        for _ in range(3):  # half a copy may be left
            for stream in self._gpu.queues.streams[1:]:
                stream.advance()
        if not self.exchanges.over and self.exchanges.ready():
            self.exchanges.end() if self.exchanges.turned else self.exchanges.turn()

    def _begin(self, stage: ModelOnGpu) -> ExchangeRound:
        store = stage.model.store
        assert store is not None
        planned = []
        for index, layer in enumerate(store.layers):
            if layer is not None:
                cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
                planned.append(Exchange(index, cold[0], layer.hot[0], 1.0, 2))
        layers = [LayerExperts(0, 0)] * len(store.layers)
        return ExchangeRound(StoreExchanges(store, layers, same_bits=True), planned)


@pytest.mark.parametrize("more", [{}, {"keep_host_copy": True}])
def test_steps_during_the_copies_of_exchanges_answer_the_same(
    more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("qwen3moe").save_gguf(tmp_path / "m.gguf", "MIXED"))
    prompts, pieces = [PROMPT[:9]], [1] * 9
    with stand_in_gpu(monkeypatch) as gpu:
        wanted = run_on_gpu(checkpoint, prompts, pieces, kernels="reference")
        overlapped = Overlapped(gpu)
        found = run_on_gpu(
            checkpoint, prompts, pieces, overlapped,
            kernels="reference", expert_budget="50%", **more,
        )  # fmt: skip
    assert overlapped.exchanges is not None
    assert overlapped.exchanges.error is None
    assert len(overlapped.exchanges.done) >= 2
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize("more", [
    {}, {"keep_host_copy": True}, {"cold": "drop"}, {"cold": "drop", "keep_host_copy": True},
])  # fmt: skip
def test_a_store_takes_what_was_planned(
    more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("laguna").save_gguf(tmp_path / "m.gguf", "MIXED"))
    with stand_in_gpu(monkeypatch):
        stage = ModelOnGpu(checkpoint, kernels="reference", expert_budget="50%", **more)
    names = ("hot_experts", "cold_experts", "expert_staging", "expert_spare")
    assert [stage.counted[name] for name in names] == [stage.planned[name] for name in names]
    held = more != {"cold": "drop"}
    assert [stage.counted[name] > 0 for name in names] == [True, held, held, held]


@pytest.mark.parametrize("more", [
    {}, {"keep_host_copy": True}, {"cold": "drop"}, {"cold": "drop", "keep_host_copy": True},
])  # fmt: skip
@pytest.mark.parametrize("favoured", [1, 2, 6])
def test_a_placement_by_statistics_takes_what_is_planned_for_it(
    favoured: int, more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experts of layers 2 and 5 are larger, as in most published mixes.
    for layer in (2, 5):
        monkeypatch.setitem(family_gguf.MIXED, f"blk.{layer}.ffn_down_exps.weight", "Q8_0")
    model = describe(open_checkpoint(variant("laguna").save_gguf(tmp_path / "m.gguf", "MIXED")))
    options = Options(
        device="cuda:0", kernels="reference", expert_budget="50%",
        context=256, parallel=4, kv_type="f32", dtype="f32", **more,
    )  # fmt: skip
    plan = make_plan([model.shape], [GPU, host(24)], options)
    shapes = enumerate(model.shape.layers)
    counts = [[1e6 if index == favoured else 0.0] * layer.experts for index, layer in shapes]
    placement = find_placement(model.shape, plan, options, "", counts)
    assert placement is not None
    assert len(placement.hot[favoured]) == 8  # all of them
    placed, counted = placed_plan(plan, placement), Counter[str]()

    def count(line: str, size: int) -> None:
        counted[line] += size

    with stand_in_gpu(monkeypatch):
        device, tensors = placed.devices[0], model.checkpoint.tensors
        load_model(model.config, tensors, placed, device, count, placement)
    names = ("hot_experts", "cold_experts", "expert_staging", "expert_spare")
    lines = placed.devices[0].allocated | {line.name: line.bytes for line in placed.host.lines}
    assert [counted[name] for name in names] == [lines.get(name, 0) for name in names]
    assert placed.devices[0].hot_by_layer == tuple(len(ids) for ids in placement.hot)
    before = plan.devices[0].allocated
    assert before["hot_experts"] != lines["hot_experts"]  # or the first plan would have done
    assert placed.settings == plan.settings


@pytest.mark.parametrize("copy", [False, True])
def test_dropped_experts_leave_their_weight_to_the_others(
    copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("qwen3moe").save_gguf(tmp_path / "m.gguf", "MIXED"))
    seen: list[tuple[torch.Tensor, ...]] = []

    def dropped(ids: torch.Tensor, weights: torch.Tensor, is_hot: torch.Tensor) -> torch.Tensor:
        left = drop_cold(ids, weights, is_hot)
        seen.append((is_hot[ids].cpu() > 0, weights.cpu().clone(), left.cpu().clone()))
        return left

    monkeypatch.setattr(ffn, "drop_cold", dropped)
    with stand_in_gpu(monkeypatch):
        wanted, found = (
            run_on_gpu(
                checkpoint,
                PROMPTS,
                PIECES,
                kernels="reference",
                expert_budget="50%",
                cold=cold,
                keep_host_copy=copy,
            )
            for cold in ("auto", "drop")
        )
    assert not torch.equal(found[0], wanted[0])
    assert all(part.isfinite().all() for part in found)
    hot, before, after = (torch.cat(parts) for parts in zip(*seen, strict=True))
    some = hot.any(1)
    assert (~hot[some]).any()
    assert not after[~hot].any()
    torch.testing.assert_close(after.sum(1), before.sum(1) * some)
