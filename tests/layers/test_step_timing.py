"""Parts of a step: what recorders get, and that nothing is called without a recorder."""

import pytest

from headroom.layers.step_timing import (
    STEP_PARTS,
    ClockRecorder,
    MarkerRecorder,
    begin_step,
    part_of_step,
    recording,
)


class Diary:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin_step(self) -> None:
        self.lines.append("step")

    def begin(self, part: str) -> None:
        self.lines.append(f"+{part}")

    def end(self, part: str) -> None:
        self.lines.append(f"-{part}")


@part_of_step("dense")
def dense(value: int) -> int:
    return value + 1


@part_of_step("experts")
def experts(value: int) -> int:
    return 2 * dense(value)


@part_of_step("head")
def broken() -> None:
    raise ValueError("broken")


def test_only_the_outermost_part_is_reported() -> None:
    diary = Diary()
    with recording(diary):
        begin_step()
        assert experts(1) == 4
        assert dense(value=1) == 2
    assert diary.lines == ["step", "+experts", "-experts", "+dense", "-dense"]


def test_a_part_ends_where_it_fails() -> None:
    diary = Diary()
    with recording(diary):
        with pytest.raises(ValueError, match="broken"):
            broken()
        dense(1)
    assert diary.lines == ["+head", "-head", "+dense", "-dense"]


def test_without_a_recorder_no_part_is_reported() -> None:
    diary = Diary()
    with recording(diary):
        pass
    begin_step()
    assert experts(1) == 4
    assert diary.lines == []


def test_a_clock_adds_up_the_parts_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("headroom.layers.step_timing.time.perf_counter", lambda: next(ticks))
    clock = ClockRecorder()
    with recording(clock):
        dense(1)  # before the first step: belongs to no step
        begin_step()
        dense(1)
        dense(1)
        experts(1)
        begin_step()
        experts(1)
    assert [step.parts for step in clock.steps] == [{"dense": 2, "experts": 1}, {"experts": 1}]
    assert clock.steps[1].started > clock.steps[0].started


def test_markers_are_kernels_that_the_source_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from headroom.kernels.cuda.compile import read_source

    source, launched = read_source("marker.cu"), []

    def compile_kernel(file: str, name: str):
        assert file == "marker.cu"
        assert f"void {name}() {{}}" in source
        return lambda grid, block, args: launched.append(name)

    monkeypatch.setattr("headroom.layers.step_timing.compile_kernel", compile_kernel)
    with recording(MarkerRecorder()):
        begin_step()
        for part in STEP_PARTS:
            part_of_step(part)(int)()
    names = [name.removeprefix("headroom_part_") for name in launched]
    assert names == ["step", *(name for part in STEP_PARTS for name in (part, "other"))]
