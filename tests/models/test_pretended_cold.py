"""Every family with experts, some of them cold, on a GPU that is not there."""

from pathlib import Path
from random import Random

import pytest
import torch

from headroom.formats.checkpoint import open_checkpoint
from headroom.moe import load_store
from headroom.moe.cost import Choice
from headroom.moe.store import LayerStore
from tests.families import PROMPT, variant
from tests.pretend_cuda import pretend_cuda
from tests.pretend_stage import PretendedStage, run_pretended

PROMPTS = [PROMPT[:5]]
PIECES = [4, 1]
FAMILIES = ("qwen3moe", "qwen3moe-fused", "qwen35moe", "laguna", "gemma4-26b")


def _exchange_all(stage: PretendedStage) -> None:
    """Make cold experts hot in every layer, as many as there are slots."""
    store, draw = stage.model.store, Random(1)
    assert store is not None
    for layer in store.layers:
        if layer is not None:
            cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
            draw.shuffle(cold)
            for promoted, demoted in zip(cold, layer.hot, strict=False):
                layer.exchange(promoted, demoted)


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_hot_the_answers_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "F32"))
    with pretend_cuda(monkeypatch):
        wanted = run_pretended(checkpoint, PROMPTS, PIECES, kernels="reference")
        for share, cold in (("0%", "cpu"), ("30%", "auto"), ("60%", "gpu")):
            found = run_pretended(
                checkpoint, PROMPTS, PIECES, kernels="reference", expert_budget=share, cold=cold
            )
            assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["qwen35moe", "gemma4-26b"])
def test_cold_experts_of_a_layer_may_be_shared_between_both_sides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "F32"))
    monkeypatch.setattr(
        load_store, "choose", lambda speeds, size, used, hits: Choice("cpu", (0, *range(used)), 0.0)
    )
    brought: list[int] = []
    bring = LayerStore.bring
    monkeypatch.setattr(
        LayerStore, "bring", lambda store, blob: brought.append(1) or bring(store, blob)
    )

    with pretend_cuda(monkeypatch):
        wanted = run_pretended(checkpoint, PROMPTS, PIECES, kernels="reference")
        found = run_pretended(checkpoint, PROMPTS, PIECES, kernels="reference", expert_budget="30%")
    assert brought
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize("more", [{}, {"keep_host_copy": True}, {"no_pin": True}])
def test_experts_that_change_places_between_steps_change_no_answer(
    more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("qwen3moe").save_gguf(tmp_path / "m.gguf", "MIXED"))
    with pretend_cuda(monkeypatch):
        wanted = run_pretended(checkpoint, PROMPTS, PIECES, kernels="reference")
        found = run_pretended(
            checkpoint, PROMPTS, PIECES, _exchange_all,
            kernels="reference", expert_budget="50%", **more,
        )  # fmt: skip
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


@pytest.mark.parametrize("more", [{}, {"keep_host_copy": True}])
def test_a_store_takes_what_was_planned(
    more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("laguna").save_gguf(tmp_path / "m.gguf", "MIXED"))
    with pretend_cuda(monkeypatch):
        stage = PretendedStage(checkpoint, kernels="reference", expert_budget="50%", **more)
    names = ("hot_experts", "cold_experts", "expert_staging", "expert_spare")
    assert [stage.counted[name] for name in names] == [stage.planned[name] for name in names]


def test_dropped_experts_leave_their_weight_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant("qwen3moe").save_gguf(tmp_path / "m.gguf", "MIXED"))
    with pretend_cuda(monkeypatch):
        wanted, found = (
            run_pretended(
                checkpoint, PROMPTS, PIECES, kernels="reference", expert_budget="50%", cold=cold
            )
            for cold in ("auto", "drop")
        )
    assert not torch.equal(found[0], wanted[0])
    assert all(part.isfinite().all() for part in found)
