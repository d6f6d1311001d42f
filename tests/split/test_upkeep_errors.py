"""After an engine's error: what the host knows of experts is saved, and no lost GPU is asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headroom.experts.placement import load_placement
from headroom.experts.stats import load_history
from headroom.split.upkeep_rules import UpkeepRules
from tests.split.test_upkeep import LAYERS, POLICY, Case, cold_half, gpu
from tests.stand_in.gpu import StandInGpu

__all__ = ["gpu"]  # a fixture


class LostCase(Case):
    """An upkeep whose GPU is lost: every call to it is noted and fails."""

    def lose(self, monkeypatch: pytest.MonkeyPatch, reason: str = "CUDA error") -> list[str]:
        """Lose the GPU, for a reason that the stage knows or not; return the calls to it."""
        asked: list[str] = []

        def failing(name: str) -> Callable[[], None]:
            def fail() -> None:
                asked.append(name)
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            return fail

        monkeypatch.setattr(self.stage, "lost", lambda: reason)
        for name in ("counts", "counts_with_decode"):
            monkeypatch.setattr(self.routing, name, failing(name))
        if self.experts is not None:
            for name in ("begin", "ready", "wait", "turn", "end"):
                monkeypatch.setattr(self.experts, name, failing(name))
        return asked


@pytest.mark.parametrize(
    ("reason", "asked"), [("CUDA error", []), ("", ["counts"])], ids=["lost", "lost when asked"]
)
def test_a_gpu_known_to_be_lost_is_not_asked_and_what_the_host_has_seen_is_saved(
    gpu: StandInGpu,
    reason: str,
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, placed = tmp_path / "m.json", tmp_path / "placed.json"
    rules = UpkeepRules(policy=POLICY, placement_path=placed)
    case = LostCase(kept, cold_half(gpu), rules, device="cuda:0", copies_run=False)
    case.choose(1, 3, 9)
    case.look_after(5, resting=True)  # an exchange turns, and its copies are under way
    case.choose(2, 0, 4)
    case.upkeep.end_request(case.upkeep.begin_request())
    case.choose(2, 1, 7)  # choices that the host has not read
    calls = case.lose(monkeypatch, reason)
    case.upkeep.close_after_error()
    assert calls == asked
    assert load_history(kept, "abc", LAYERS).counts == (
        (), (0.0, 0.0, 0.0, 9.0), (4.0, 0.0, 0.0, 0.0)
    )  # fmt: skip
    assert load_placement(placed, "abc", LAYERS).hot == ((), (0, 3), (0, 1))
    assert caplog.text == ""


def test_choices_that_were_saved_are_not_taken_back_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.json"
    case = LostCase(path, None, UpkeepRules(save_every_s=0.0), device="cuda:0")
    case.choose(1, 2, 7)
    case.upkeep.run(5, resting=False)
    case.lose(monkeypatch)
    case.upkeep.close_after_error()
    assert load_history(path, "abc", LAYERS).counts[1] == (0.0, 0.0, 7.0, 0.0)


def test_after_an_error_a_gpu_that_is_not_lost_is_asked_for_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    case = Case(path, None, UpkeepRules(), device="cuda:0")
    case.choose(1, 2, 7)
    case.upkeep.close_after_error()
    assert load_history(path, "abc", LAYERS).counts[1] == (0.0, 0.0, 7.0, 0.0)
