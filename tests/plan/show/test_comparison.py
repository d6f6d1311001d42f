"""The picture of plans side by side: common scales, every byte, every label."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from headroom.options import Options
from headroom.plan.plan import DoesNotFitError, Plan, make_plan
from headroom.plan.show.comparison import comparison_svg
from headroom.plan.show.palette import LOOKS
from headroom.units import gib
from tests.plan.drawn_plans import drawn_plans
from tests.plan.shapes import gpu, host, laguna
from tests.plan.show.pictures import SVG, bars, check_texts, number, read_picture, written

BARS = 576  # pixels of the longest bar


def plan_on(gibibytes: float) -> Plan:
    try:
        return make_plan([laguna()], [gpu(gibibytes), host(32)], Options())
    except DoesNotFitError as error:
        return error.plan


def check_comparison(plans: dict[str, Plan]) -> list[str]:
    """Check every bar against its plan; return the texts."""
    root = read_picture(comparison_svg(plans))
    check_texts(root)
    drawn = iter(bars(root))
    devices, hosts = [], []
    for plan in plans.values():
        for device in plan.devices:
            devices.append((next(drawn), device))
        if plan.host.lines:
            hosts.append((next(drawn), plan.host))
    assert next(drawn, None) is None
    for places in (devices, hosts):
        most = max((max(x.total_bytes, x.total_bytes - x.free_bytes) for _, x in places), default=1)
        for boxes, place in places:
            free, *parts = boxes
            assert [number(part, "data-bytes") for part in parts] == [
                line.bytes for line in place.lines
            ]
            assert number(free, "data-bytes") == max(0, place.free_bytes)
            for part in parts:
                share = number(part, "data-bytes") / most
                assert abs(number(part, "width") - BARS * share) < 0.01
    return [text.words for text in written(root)]


def test_each_plan_has_its_label_its_speed_and_what_is_free_or_missing() -> None:
    plans = {"1GiB": plan_on(1), "12GiB": plan_on(12), "24GiB": plan_on(24)}
    assert [plan.fits for plan in plans.values()] == [False, True, True]
    texts = check_comparison(plans)
    assert texts[:2] == ["2 of 3 fit", "laguna-xs.2:q4_k_m"]
    assert "does not fit" in texts
    assert f"{gib(-plans['1GiB'].devices[0].free_bytes)} missing" in texts
    for label in ("12GiB", "24GiB"):
        plan = plans[label]
        assert {label, f"{plan.predicted.decode_tokens_per_s:,.1f} tok/s"} <= set(texts)
        assert f"{gib(plan.devices[0].free_bytes)} free" in texts
    names = {
        x.name for p in plans.values() for x in (*p.devices[0].lines, *p.host.lines) if x.bytes
    }
    assert {LOOKS[name].title for name in names} <= set(texts)


def test_a_plan_whose_label_is_its_context_says_it_once() -> None:
    plan = plan_on(12)
    texts = check_comparison({"8192": plan, "12GiB": plan})
    assert plan.settings.context == 8192
    assert texts.count("context 8,192") == 2
    assert "8192" not in texts


def test_a_speed_is_marked_as_estimated_where_it_is() -> None:
    plan = plan_on(12)
    assert plan.predicted.estimate
    assert check_comparison({"a": plan, "b": plan_on(1)}).count("estimated") == 1
    measured = replace(plan, predicted=replace(plan.predicted, estimate=False))
    assert "estimated" not in check_comparison({"a": measured})


@pytest.mark.parametrize(
    ("sizes", "told", "role"),
    [
        ((12, 24), "2 of 2 fit", "good"),
        ((1, 12), "1 of 2 fit", "ink"),
        ((1,), "0 of 1 fit", "alarm"),
    ],
)
def test_only_plans_that_all_fit_are_good(sizes: tuple[int, ...], told: str, role: str) -> None:
    root = read_picture(comparison_svg({f"{size}GiB": plan_on(size) for size in sizes}))
    (badge,) = [x for x in root.iter(f"{SVG}text") if x.text == told]
    assert badge.get("class") == role


def test_the_legend_has_a_square_for_each_title_and_speeds_are_bold() -> None:
    root = read_picture(comparison_svg({"12GiB": plan_on(12), "24GiB": plan_on(24)}))
    squares = [x for x in root.iter(f"{SVG}rect") if number(x, "height") == 12]
    titles = {look.title for look in LOOKS.values()} & {text.words for text in written(root)}
    assert [number(square, "width") for square in squares] == [12] * len(titles)
    speeds = [x for x in root.iter(f"{SVG}text") if (x.text or "").endswith(" tok/s")]
    assert [speed.get("font-weight") for speed in speeds] == ["600", "600"]


@example_settings(max_examples=15)
@given(st.dictionaries(st.text("abc0+-, ", min_size=1), drawn_plans(), min_size=1, max_size=3))
def test_any_plans_are_drawn_to_their_last_byte(plans: dict[str, Plan]) -> None:
    check_comparison({f"x{label}": plan for label, plan in plans.items()})
