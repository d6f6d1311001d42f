"""A plan as text: each line's row, the memory map, and plans side by side, column by column."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console
from rich.segment import Segment

from headroom.options import Options
from headroom.plan.lines import Line
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import LayerRange
from headroom.plan.show.palette import LOOKS
from headroom.plan.show.report import plan_json
from headroom.plan.show.table import compare_table, plan_table, plan_text
from headroom.units import GIB, gib
from tests.plan.shapes import cpu, gpu, host, hybrid_plan, laguna, smollm2

WIDE = 400  # columns, so that no row is folded


@cache
def two_gpus() -> Plan:
    devices = [gpu(9), gpu(7, "cuda:1"), host(64)]
    return make_plan([laguna()], devices, Options(activation_dtype="bf16"))


@cache
def too_small() -> Plan:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    device = replace(plan.devices[0], total_bytes=GIB // 2)
    return replace(plan, devices=(device,), fits=False)


def table_rows(title: str, lines: Sequence[Line], free: int) -> Iterable[str]:
    """Yield a memory's rows: letter and name to the left, sizes to the right, then the reasons."""
    letter, word = (".", "free") if free >= 0 else ("|", "missing")
    names = max(len(name) for name in (word, *(line.name for line in lines)))
    sizes = max(len(gib(size)) for size in (abs(free), *(line.bytes for line in lines)))
    yield title
    for line in lines:
        look = LOOKS[line.name].letter
        yield f"{look}  {line.name:<{names}}  {gib(line.bytes):>{sizes}}  {line.why}"
    yield f"{letter}  {word:<{names}}  {gib(abs(free)):>{sizes}}"


def memory_map(total: int, lines: Sequence[Line]) -> str:
    """Return 60 columns, each with the letter of the line that reaches beyond its beginning."""
    taken = sum(line.bytes for line in lines)
    whole, bar = max(total, taken), ""
    for column in range(60):
        if taken > total and column == total * 60 // whole:
            bar += "|"
        reached, letter = 0, "."
        for line in lines:
            reached += line.bytes
            if reached * 60 // whole > column:
                letter = LOOKS[line.name].letter
                break
        bar += letter
    return f"[{bar}]"


@pytest.mark.parametrize("make", [two_gpus, too_small])
def test_every_device_has_a_title_its_lines_what_is_free_and_a_map(make: object) -> None:
    plan = make()  # type: ignore[operator]
    expected = []
    for device in plan.devices:
        title = f"{device.name}, {gib(device.total_bytes)}: layers {device.layers[0]} to "
        title += str(device.layers[1])
        if device.total_experts:
            title += f", {device.hot_experts} of {device.total_experts} experts hot"
        expected += table_rows(title, device.lines, device.free_bytes)
        expected.append(memory_map(device.total_bytes, device.lines))
    if plan.host.lines:
        title = f"host memory, {gib(plan.host.total_bytes)}"
        expected += table_rows(title, plan.host.lines, plan.host.free_bytes)
        expected.append(memory_map(plan.host.total_bytes, plan.host.lines))
    _, *rows = plan_text(plan, WIDE).splitlines()
    assert rows[: len(expected)] == expected


def test_the_verdict_comes_first_and_types_and_speeds_come_last() -> None:
    plan = two_gpus()
    rows = plan_text(plan, WIDE).splitlines()
    assert rows[0] == (
        "laguna-xs.2:q4_k_m fits: context 8192, parallel 1, chunk 1024, cache of 8192 tokens "
        "(keys bf16, values bf16)"
    )
    reason, found = plan.precision.reason, plan.predicted
    first, last = found.stages
    whole = first.decode_s + last.decode_s
    assert rows[-3 - len(plan.lossy) - len(plan.notes) :] == [
        f"weights packed, computed in bf16 ({reason}), rows handed over in bf16; 7 threads",
        f"{found.decode_tokens_per_s:.1f} tokens/s decode, {found.prefill_tokens_per_s:.0f} "
        f"tokens/s prefill (estimated), bound by {found.bound_by}",
        f"a token takes {1e3 * first.decode_s:.2f} ms on {first.device} "
        f"({100 * first.decode_s / whole:.0f} %), {1e3 * last.decode_s:.2f} ms on {last.device} "
        f"({100 * last.decode_s / whole:.0f} %)",
        *(f"lossy: {choice}" for choice in plan.lossy),
        *(f"note: {note}" for note in plan.notes),
    ]


def test_a_plan_that_does_not_fit_says_what_is_missing_and_promises_no_speed() -> None:
    plan = too_small()
    missing = sum(line.bytes for line in plan.devices[0].lines) - GIB // 2
    text = plan_text(plan, WIDE)
    told = (
        f"smollm2 does not fit, {gib(missing)} are missing: context 8192, parallel 4, chunk 512, "
    )
    assert text.startswith(told)
    assert plan_text(two_gpus(), WIDE).count("tokens/s") == 2
    assert "tokens/s" not in text


def test_one_layer_is_said_to_be_one() -> None:
    plan = two_gpus()
    first, second = plan.devices
    one = replace(first, layers=LayerRange(0, 0))
    rest = replace(second, layers=LayerRange(1, 39))
    text = plan_text(replace(plan, devices=(one, rest)), WIDE)
    assert "cuda:0, 9.00 GiB: layer 0, " in text
    assert "cuda:1, 7.00 GiB: layers 1 to 39, " in text


def test_a_type_that_the_user_chose_and_measured_speeds_are_said_to_be_so() -> None:
    device = replace(cpu(24), measured=True)
    text = plan_text(make_plan([smollm2()], [device], Options(dtype="bf16")), WIDE)
    assert ", computed in bf16 (set by --dtype)" in text
    assert " (measured speeds), bound by memory of cpu\n" in text


def test_text_is_folded_at_the_given_width() -> None:
    assert max(map(len, plan_text(two_gpus()).splitlines())) <= 120
    assert max(map(len, plan_text(two_gpus(), 70).splitlines())) <= 70


def styled(plan: Plan) -> list[Segment]:
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDE, color_system="256")
    return list(console.render(plan_table(plan)))


def test_names_have_colours_reasons_are_dim_and_missing_memory_is_red() -> None:
    for plan in (two_gpus(), too_small()):
        shown = {part.text.strip(): part.style for part in styled(plan) if part.style}
        for line in plan.devices[0].lines:
            name, why = shown[line.name], shown[line.why]
            assert name.color is not None
            assert why.dim
        head = plan_text(plan, WIDE).splitlines()[0]
        assert shown[head].bold
    missing = shown["missing"]
    assert missing.bold
    assert missing.color is not None
    assert missing.color.name == "red"
    lacking = shown[gib(-too_small().devices[0].free_bytes)]
    assert lacking.color == missing.color
    free = next(part.style for part in styled(two_gpus()) if part.text.strip() == "free")
    assert free is not None
    assert (free.bold, free.color) == (True, None)


def test_plans_side_by_side_have_the_sums_of_all_devices_and_the_host() -> None:
    plans = {"two": two_gpus(), "small": too_small()}
    out = io.StringIO()
    Console(file=out, width=WIDE).print(compare_table(plans))
    head, *rows = out.getvalue().splitlines()
    assert head.split() == ["two", "small"]
    expected: dict[str, list[str]] = {}
    for word in ("context", "parallel", "chunk", "cache_tokens"):
        expected[word] = [str(getattr(plan.settings, word)) for plan in plans.values()]
    for column, plan in enumerate(plans.values()):
        lines = [*(line for device in plan.devices for line in device.lines), *plan.host.lines]
        for name in {line.name: None for line in lines}:
            total = sum(line.bytes for line in lines if line.name == name)
            expected.setdefault(name, ["-", "-"])[column] = gib(total)
    hot = sum(device.hot_experts for device in plans["two"].devices)
    expected["hot experts"] = [f"{hot} of 9984", "-"]
    expected["fits"] = ["yes", "no"]
    expected["missing"] = ["-", gib(-plans["small"].devices[0].free_bytes)]
    expected["decode tokens/s"] = [f"{plans['two'].predicted.decode_tokens_per_s:.1f}", "-"]
    names = max(map(len, expected))
    first, second = (max(len(row[n]) for row in expected.values()) for n in (0, 1))
    assert [row.rstrip() for row in rows] == [
        f"{name:<{names}}  {row[0]:>{first}}  {row[1]:>{second}}" for name, row in expected.items()
    ]


def test_the_text_names_every_line_and_the_verdict() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(kv_type="q8_0"))
    text = plan_text(plan)
    assert text.startswith("smollm2 fits: context 8192, parallel 4, chunk 512, cache of 32768")
    assert all(f"  {line.name} " in text for line in plan.devices[0].lines)
    assert "lossy: cached keys are kept in q8_0" in text
    assert "(estimated), bound by memory of cpu" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("options", "shown", "threads"),
    [
        (Options(), "; 4 threads\n", 4),
        (Options(threads=1), "; 1 thread\n", 1),
        (Options(threads=3, pin_threads=True), "; 3 threads, pinned\n", 3),
        (Options(device="rtx3060-12gb", threads=3), "; 3 threads\n", 3),
        (Options(device="rtx3060-12gb"), None, None),
        (Options(ram="24GiB"), None, None),
    ],
)
def test_a_plan_shows_the_threads_of_this_machine_only(
    options: Options, shown: str | None, threads: int | None
) -> None:
    plan = make_plan([smollm2()], [cpu(24)], options)
    text = plan_text(plan)
    assert shown in text if shown else "thread" not in text.partition("\nweights")[2]
    assert plan_json(plan)["settings"]["threads"] == threads


def test_the_memory_map_has_the_same_width_for_every_device() -> None:
    bars = [row for row in plan_text(hybrid_plan()).splitlines() if row.startswith("[")]
    assert [len(bar) for bar in bars] == [62, 62]
    assert "k" in bars[0]
    assert "c" in bars[1]


def test_the_table_has_colours_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=100).print(plan_table(hybrid_plan()))
    assert "\x1b[" in out.getvalue()


def test_plans_stand_side_by_side() -> None:
    out = io.StringIO()
    plans = {"12 GiB": hybrid_plan(12), "24 GiB": hybrid_plan(24)}
    Console(file=out, width=80).print(compare_table(plans))
    rows = {row[:17].strip(): row[17:].split() for row in out.getvalue().splitlines()}
    assert rows["context"] == ["8192", "8192"]
    assert rows["cold_experts"][-1] == "-"
    assert rows["hot experts"][-3:] == ["9984", "of", "9984"]
    assert rows["fits"] == ["yes", "yes"]


def test_a_long_name_of_a_plan_is_folded_and_stays_whole() -> None:
    name = "0123456789" * 6
    out = io.StringIO()
    Console(file=out, width=40).print(compare_table({name: hybrid_plan(12)}))
    head = out.getvalue().partition("context")[0]
    assert "".join(head.split()) == name
