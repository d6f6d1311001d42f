"""Kernels of a timeline go to the part whose marker came last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.bench.timeline import KernelTime, marked, part_times
from headroom.errors import HeadroomError
from headroom.layers.step_timing import MARKER, PARTS

ALL = slice(None)


def timeline(*entries: tuple[str, float]) -> list[KernelTime]:
    """Kernels one after another, a second between them; names of parts stand for markers."""
    found, now = [], 0.0
    for name, seconds in entries:
        found.append(KernelTime(name, now, now + seconds))
        now += seconds + 1
    return found


def marker(name: str) -> tuple[str, float]:
    return MARKER + name, 0.25


def test_kernels_belong_to_the_marker_before_them() -> None:
    step = [
        marker("step"), ("embed", 1.0), marker("attention"), ("product", 2.0), ("decode", 3.0),
        marker("other"), ("copy", 0.5), marker("head"), ("product", 4.0),
    ]  # fmt: skip
    times = part_times(timeline(*step, *step, marker("step")), ALL)
    assert times.steps == 2
    assert times.parts == {"other": 1.5, "attention": 5.0, "head": 4.0}
    assert times.kernels["attention"] == {"decode": 3.0, "product": 2.0}
    assert list(times.kernels["attention"]) == ["decode", "product"]  # the longest first
    assert times.step_s == pytest.approx(10.5 + 4 * 0.25 + 9)


def test_markers_are_known_however_their_names_are_written() -> None:
    assert marked(MARKER + "head") == "head"
    assert marked(f"void {MARKER}sampling()") == "sampling"
    assert marked("product") == ""


def test_only_the_chosen_steps_count() -> None:
    prompt = [marker("step"), marker("dense"), ("long", 9.0)]
    decode = [marker("step"), marker("dense"), ("short", 1.0)]
    seen = timeline(*prompt, *decode, *decode, marker("step"), ("half a step", 5.0))
    assert part_times(seen, slice(0, 1)).parts == {"dense": 9.0}
    assert part_times(seen, slice(-2, None)).parts == {"dense": 1.0}


def test_time_that_kernels_share_is_counted_once() -> None:
    kernels = [
        KernelTime(MARKER + "step", 0.0, 0.1),
        KernelTime("first", 1.0, 3.0),
        KernelTime("overlaps", 2.0, 4.0),
        KernelTime("within", 2.5, 3.5),
        KernelTime(MARKER + "step", 5.0, 5.1),
    ]
    times = part_times(kernels[::-1], ALL)
    assert times.kernels == {"other": {"first": 2.0, "overlaps": 1.0, "within": 0.0}}
    assert times.busy_s == 3.0


def test_a_timeline_without_a_whole_step_is_refused() -> None:
    with pytest.raises(HeadroomError, match=r"saw 2 kernels and 1 starts of steps.*--no-parts"):
        part_times(timeline(marker("step"), ("product", 1.0)), ALL)


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0, 10)), max_size=6),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_parts_together_are_all_that_kernels_took(steps: list[list[tuple[str, float]]]) -> None:
    entries = []
    for step in steps:
        entries.append(marker("step"))
        for part, seconds in step:
            entries += [marker(part), (f"kernel of {part}", seconds), marker("other")]
    times = part_times(timeline(*entries, marker("step")), ALL)
    total = sum(seconds for step in steps for _, seconds in step)
    assert times.busy_s * len(steps) == pytest.approx(total)
    assert times.busy_s <= times.step_s
    for part, kernels in times.kernels.items():
        assert sum(kernels.values()) == pytest.approx(times.parts[part])


def test_copies_over_the_link_do_not_keep_a_gpu_busy() -> None:
    kernels = [
        KernelTime(MARKER + "step", 0.0, 0.5),
        KernelTime("Memcpy HtoD (Pinned -> Device)", 1.0, 4.0),
        KernelTime("product", 2.0, 3.0),
        KernelTime("other product", 2.5, 3.5),
        KernelTime("Memcpy DtoD (Device -> Device)", 5.0, 6.0),
        KernelTime(MARKER + "step", 8.0, 8.5),
    ]
    times = part_times(kernels, ALL)
    assert times.kernel_s == 2.5
    assert times.link_s == 3.0
