"""The upkeep of experts whose slots change hands within steps."""

from pathlib import Path

import pytest

from headroom.experts import cache, layer_store
from headroom.experts.placement import load_placement
from headroom.experts.stats import RoutingHistory, StatsFile, StatsModel
from headroom.experts.store import ExpertStore
from headroom.split.expert_records import ExpertRecords
from headroom.split.upkeep import ExpertUpkeep
from headroom.split.upkeep_rules import UpkeepRules
from tests.experts.stores import blob_layout, small_store
from tests.split.test_upkeep import LAYERS, USED, Case, gpu
from tests.stand_in.gpu import StandInGpu
from tests.stand_in.streams import StandInError

__all__ = ["gpu"]  # a fixture


@pytest.fixture
def store(gpu: StandInGpu, monkeypatch: pytest.MonkeyPatch) -> ExpertStore:
    """A dense layer, and two layers whose slots change hands."""
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    layout = blob_layout(4, (4, 4, 2))
    made = small_store(
        *([None, layout, layout], [(), (0, 1), (0, 1)], "cuda:0"),
        cold="gpu",
        pin=True,
        keep_copy=True,
        policy="lru",
    )
    gpu.queues.finish()
    gpu.kept.append(made)
    return made


def upkeep_of(store: ExpertStore, rules: UpkeepRules) -> tuple[Case, ExpertUpkeep]:
    """Return a case without exchanges, and the upkeep of its cached layers."""
    case = Case(None, None, UpkeepRules(), device="cuda:0")
    case.stage.kept = store
    file = StatsFile(None, RoutingHistory.empty(LAYERS, 0.0))
    records = ExpertRecords(StatsModel(Path("m"), "abc", LAYERS, USED), file, rules)
    return case, ExpertUpkeep(case.pipeline, records)


def fill(store: ExpertStore, layer: int, hot: tuple[int, ...]) -> None:
    """Let steps have filled the slots of a layer; the host has not been told."""
    cached = store.layers[layer]
    assert cached is not None
    told = cached.residency
    cached.hold(hot)
    cached._residency = told


def test_experts_in_slots_are_told_and_saved_as_they_are_now(
    store: ExpertStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "placed.json"
    with caplog.at_level("INFO"):
        case, upkeep = upkeep_of(store, UpkeepRules(placement_path=path))
    assert "exchanges: none, since decode steps fill the slots of experts themselves" in caplog.text
    assert upkeep.tells_requests
    fill(store, 1, (1, 3))
    asked = upkeep.ask_view()
    assert upkeep.due(1, resting=False)
    upkeep.go_on(resting=False)
    upkeep.run(1, resting=False)
    assert [layer.hot for layer in asked.result().layers] == [
        *((), (False, True, False, True), (True, True, False, False))
    ]
    case.choose(1, 3, 6)
    case.choose(1, 0, 2)
    # Prompts and layers without counters of their own count by where experts are when it is read.
    assert upkeep.read().hits == (0, 6, 0)
    fill(store, 2, (2, 3))
    upkeep.close()
    assert load_placement(path, "abc", LAYERS).hot == ((), (1, 3), (2, 3))


@pytest.mark.parametrize("known", [True, False])
def test_of_a_lost_gpu_the_placement_that_was_known_last_is_saved(
    known: bool,
    store: ExpertStore,
    gpu: StandInGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "placed.json"
    case, upkeep = upkeep_of(store, UpkeepRules(placement_path=path))
    fill(store, 1, (1, 3))
    upkeep.read()  # as at the end of a request
    fill(store, 1, (0, 2))
    gpu.queues.finish()
    monkeypatch.setattr(case.stage, "lost", lambda: "CUDA error" if known else "")
    calls: list[str] = []

    def fail(*given: object) -> None:
        calls.append("copy")
        raise StandInError("CUDA error: an illegal memory access was encountered")

    for name in ("counts", "counts_with_decode"):
        monkeypatch.setattr(case.routing, name, fail)
    monkeypatch.setattr(ExpertStore, "take_places", fail)
    monkeypatch.setattr(layer_store, "copy_bytes", fail)
    upkeep.close_after_error()
    assert load_placement(path, "abc", LAYERS).hot == ((), (1, 3), (0, 1))
    assert calls == ([] if known else ["copy"])
    assert caplog.text == ""
