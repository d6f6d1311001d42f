"""Prefill steps that wait for their picks before they copy experts, and steps that do not."""

import threading
import time
from typing import Any

import pytest
import torch

from headroom.experts import prefill
from headroom.experts.prefill import CpuLayer, PrefillCpu
from headroom.experts.prompt_speeds import PROBE_EVERY_S, PromptSpeeds
from headroom.kernels.cuda import matmul
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.experts_prefill import many_rows
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.plan.cost_model import ColdLayer, ColdSpeeds, ExpertSize, prefill_cpu_seconds
from tests.experts.cold_layers import prefill_store
from tests.experts.test_prefill import (
    COLD,
    EXPERTS,
    HIDDEN,
    NO_CPU,
    USED,
    copied,
    gpu,
    layer_of,
    open_stream,
)
from tests.stand_in.cuda_on_cpu import COMPILER

__all__ = ["gpu", "layer_of"]  # fixtures
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SLOW_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=1e10, handover_s=1e-5, copy=1e10, cpu_flops=1e10)


def picks(rows: int) -> tuple[torch.Tensor, Picks]:
    ids = torch.stack([torch.randperm(EXPERTS)[:USED] for _ in range(rows)]).int()
    x, weights = torch.randn(rows, HIDDEN).bfloat16(), torch.rand(rows, USED)
    return x.to("cuda"), Picks(ids.to("cuda"), weights.to("cuda"))


@pytest.fixture
def first_to_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to 40 rows wait to hear what was chosen, and leave expert 1 to the CPU."""
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: 40)
    monkeypatch.setattr(
        prefill, "left_to_cpu", lambda counts, *more: frozenset({1}) & counts.keys()
    )


def test_a_layer_asks_once_and_by_what_is_expected_of_its_cold_experts(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of
) -> None:
    asked: list[ColdLayer] = []
    monkeypatch.setattr(
        prefill, "most_counted_rows", lambda layer, speeds: asked.append(layer) or 40
    )
    layer = prefill_store(*layer_of, COLD[70])
    stream, (streamed,) = open_stream(gpu, [layer], 2)
    assert [(cold.experts, cold.picks) for cold in asked] == [(7, 1.0)]
    assert asked[0].size.bytes == layer.expert_bytes
    assert asked[0].ahead_bytes == 2 * stream.buffer_bytes
    read: list[int] = []
    read_back = prefill.read_back
    monkeypatch.setattr(prefill, "read_back", lambda *what: read.append(1) or read_back(*what))
    for rows, reads in ((40, 1), (41, 1)):
        streamed.many_rows(*picks(rows))
        assert len(read) == reads
    assert len(asked) == 1


@pytest.mark.parametrize("counted", [(True, False), (False, True), (True, True), (False, False)])
def test_layers_that_wait_and_layers_that_do_not_may_follow_each_other(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, counted: tuple[bool, bool]
) -> None:
    by_cold = dict(zip((7, 3), counted, strict=True))
    monkeypatch.setattr(
        prefill, "most_counted_rows", lambda layer, speeds: 36 * by_cold[layer.experts]
    )
    read: list[int] = []
    read_back = prefill.read_back
    monkeypatch.setattr(prefill, "read_back", lambda *what: read.append(1) or read_back(*what))
    layers = [prefill_store(*layer_of, COLD[70]), prefill_store(*layer_of, COLD[30])]
    _, (first, second) = open_stream(gpu, layers, 1, NO_CPU)
    hot = prefill_store(*layer_of, ()).tiles
    for _ in range(2):  # steps
        gpu.driver.copies.clear()
        x, (ids, weights) = picks(36)
        ids = torch.where(ids == 4, -1, ids)  # which is cold in both
        wanted = many_rows(x, ids, weights, hot, "silu", Addends())
        assert torch.equal(first.many_rows(x, Picks(ids, weights)), wanted)
        # What follows comes meanwhile, unless it waits to hear what was chosen.
        assert copied(layers[1], gpu) == ([] if counted[1] else [0, 1])
        assert torch.equal(second.many_rows(x, Picks(ids, weights)), wanted)
        assert copied(layers[0], gpu) == [0, 1, 2, *([] if counted[0] else [3]), 4, 5, 6]
        assert copied(layers[1], gpu) == ([0, 2] if counted[1] else [0, 1, 2])
    assert len(read) == 2 * sum(counted)  # the host waits for nothing else


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_only_picks_of_the_cpus_experts_are_handed_to_it(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, first_to_cpu: None
) -> None:
    handed: list[torch.Tensor] = []
    run = prefill.experts_into

    def watched(out: torch.Tensor, x: torch.Tensor, picks: Picks, *more: Any) -> None:
        handed.append(picks.ids)
        run(out, x, picks, *more)

    monkeypatch.setattr(prefill, "experts_into", watched)
    layer = prefill_store(*layer_of, COLD[30])
    _, (streamed,) = open_stream(gpu, [layer], 2, SLOW_CPU)
    x, (ids, weights) = picks(40)
    ids[5], ids[6, 0] = -1, -1
    found = streamed.many_rows(x, Picks(ids, weights), Addends(residual=x.float()))
    wanted = many_rows(
        x, ids, weights, prefill_store(*layer_of, ()).tiles, "silu", Addends(residual=x.float())
    )
    theirs = (ids == 1).any(1)
    assert torch.equal(handed[0], torch.where(ids == 1, ids, -1).cpu())
    assert copied(layer, gpu) == [1, 2]
    assert torch.equal(found[~theirs], many_rows(
        x, torch.where(ids == 1, -1, ids), weights, prefill_store(*layer_of, ()).tiles, "silu",
        Addends(residual=x.float()),
    )[~theirs])  # fmt: skip
    assert float((found - wanted).norm() / (wanted - x.float()).norm()) < 0.01


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_rows_in_f16_keep_their_powers_of_two_where_the_cpu_takes_experts(  # type: ignore[no-untyped-def]
    gpu, layer_of, first_to_cpu: None
) -> None:
    _, (streamed,) = open_stream(gpu, [prefill_store(*layer_of, COLD[30])], 2, SLOW_CPU)
    wide, (ids, weights) = picks(40)
    powers = torch.logspace(-3, 7, 40, base=10)[:, None].to(wide.device)
    wide = wide.float() * powers  # some rows lie beyond f16 without powers of their own
    x = matmul.narrow_rows(wide, torch.float16)
    found = streamed.many_rows(x, Picks(ids, weights))
    wanted = many_rows(x, ids, weights, prefill_store(*layer_of, ()).tiles, "silu")
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert (ids == 1).any()
    assert float(errors.max()) < 0.01


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_a_step_that_fails_leaves_no_thread_that_reads_experts(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, first_to_cpu: None
) -> None:
    begun, ended = threading.Event(), threading.Event()
    run = prefill.experts_into

    def slow(*what: Any) -> None:
        begun.set()
        time.sleep(0.2)
        run(*what)
        ended.set()

    def fail(*what: Any) -> None:
        begun.wait()
        raise RuntimeError("the GPU is full")

    monkeypatch.setattr(prefill, "experts_into", slow)
    monkeypatch.setattr(prefill.experts_prefill, "sum_groups", fail)
    layer = prefill_store(*layer_of, COLD[30])
    _, (streamed,) = open_stream(gpu, [layer], 2, SLOW_CPU)
    with pytest.raises(RuntimeError, match="the GPU is full"):
        streamed.many_rows(*picks(40))
    assert ended.is_set()


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_the_cpu_is_asked_after_the_main_thread_has_ended_too(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, first_to_cpu: None
) -> None:
    layer = prefill_store(*layer_of, COLD[30])
    x, chosen = picks(40)
    found = []
    for alive in (True, False):
        monkeypatch.setattr(threading.main_thread(), "is_alive", lambda alive=alive: alive)
        _, (streamed,) = open_stream(gpu, [layer], 2, SLOW_CPU)
        found.append(streamed.many_rows(x, chosen))
    assert torch.equal(*found)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_what_the_cpu_takes_follows_the_time_that_it_took(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of
) -> None:
    now_s, slower, asked = 0.0, 1.0, []
    ask = PrefillCpu._compute

    def timed(cpu: PrefillCpu, x: torch.Tensor, picks: Picks, experts: CpuLayer) -> Any:
        answers, _ = ask(cpu, x, picks, experts)
        kept = picks.ids[picks.ids >= 0]
        asked.append(len(kept.unique()))
        counts = kept.unique(return_counts=True)[1].tolist()
        return answers, slower * prefill_cpu_seconds(counts, size, fast)

    monkeypatch.setattr(PrefillCpu, "_compute", timed)
    layer = prefill_store(*layer_of, COLD[100])
    # CPU and copies are equally fast; both take far longer than all else.
    size = ExpertSize(layer.expert_bytes, 6 * layer.tiles.width * HIDDEN)
    fast = ColdSpeeds(gpu=4e12, link=1e4, cpu=1e4, handover_s=0.0, copy=1e4, cpu_flops=1e12)
    stream, (streamed,) = open_stream(gpu, [layer], 2, fast)
    stream.speeds = PromptSpeeds(fast, follows=True, clock=lambda: now_s)
    for _ in range(3):
        streamed.many_rows(*picks(34))
    assert set(asked) == {4}
    slower = 50.0
    for _ in range(9):
        streamed.many_rows(*picks(34))
    assert len(asked) == 4  # one slow answer is enough
    assert stream.speeds.now.cpu < 0.2 * fast.cpu
    # Now it gets nothing, but one layer in a while leaves it one expert.
    now_s, slower = PROBE_EVERY_S, 1.0
    streamed.many_rows(*picks(34))
    assert asked[4:] == [1]
    for _ in range(60):
        now_s += PROBE_EVERY_S
        streamed.many_rows(*picks(34))
    assert asked[-1] == 4


def test_which_steps_wait_is_asked_anew_when_speeds_have_changed(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of
) -> None:
    found: list[ColdSpeeds] = []
    monkeypatch.setattr(
        prefill, "most_counted_rows", lambda layer, speeds: found.append(speeds) or 40
    )
    stream, (streamed,) = open_stream(gpu, [prefill_store(*layer_of, COLD[70])], 2, SLOW_CPU)
    now = stream.speeds = PromptSpeeds(SLOW_CPU, follows=True)
    assert (streamed.counted_rows, len(found)) == (40, 1)
    now.copied(1 << 30, 1.05 * (1 << 30) / SLOW_CPU.copy)
    assert (streamed.counted_rows, len(found)) == (40, 1)
    now.copied(1 << 30, 9.0 * (1 << 30) / SLOW_CPU.copy)
    assert (streamed.counted_rows, len(found)) == (40, 2)
    assert found[1] == now.now
    for _ in range(9):
        now.cpu_took(1.0, 9.0)
    assert (streamed.counted_rows, len(found)) == (40, 3)
    assert (streamed.counted_rows, len(found)) == (40, 3)
