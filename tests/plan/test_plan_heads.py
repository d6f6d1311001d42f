"""Prediction heads in plans: who gets one by default, who is refused, and what lines say."""

from dataclasses import replace

import pytest

from headroom.errors import OptionError
from headroom.families.dims import Dims
from headroom.families.qwen35 import TINY, TINY_EXPERTS
from headroom.formats.mixes import find_mix
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.plan.shaping import shape_of
from headroom.plan.show.explain import explain_line
from tests.plan.shapes import gpu, host

SETTINGS = {"context": 512, "parallel": 2, "threads": 1}


def shape(dims: Dims = TINY) -> ModelShape:
    return shape_of("tiny", replace(dims, mtp=True), find_mix("q8_0"))


def planned(model: ModelShape, device: str = "cpu", **settings: object) -> Plan:
    devices = [host(64)] if device == "cpu" else [gpu(24), host(64)]
    devices = (
        [replace(x, name="cpu", runs_layers=True) for x in devices]
        if device == "cpu"
        else (devices)
    )
    return make_plan([model], devices, Options(**SETTINGS, **settings))  # type: ignore[arg-type]


def names(plan: Plan) -> set[str]:
    return {line.name for device in plan.devices for line in device.lines}


@pytest.mark.parametrize("dims", [TINY, TINY_EXPERTS], ids=["dense", "experts"])
def test_a_head_guesses_by_default_where_cpus_run_all_layers(dims: Dims) -> None:
    plan = planned(shape(dims))
    assert plan.problem.options.draft == "mtp"
    assert (plan.settings.mtp, plan.settings.draft_tokens) == (True, 4)
    assert {"draft_weights", "draft_kv", "draft_state"} <= names(plan)
    for other in (
        planned(shape(dims), device="cuda"),
        planned(shape(dims), draft="none"),
        planned(shape(dims), draft="ngram"),
        planned(shape_of("tiny", dims, find_mix("q8_0"))),
    ):
        assert not other.settings.mtp
        assert not {"draft_weights", "draft_kv", "draft_state"} & names(other)


def test_workers_do_not_guess_by_default() -> None:
    worker = replace(host(64), name="a:1", runs_layers=True, worker=True)
    plan = make_plan([shape()], [worker], Options(**SETTINGS))  # type: ignore[arg-type]
    assert plan.problem.options.draft is None


def test_a_head_that_is_asked_for_and_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(OptionError, match="Only CPUs verify guessed tokens so far, and cuda:0"):
        planned(shape(), device="cuda", draft="mtp")
    plain = shape_of("tiny", TINY, find_mix("q8_0"))
    with pytest.raises(OptionError, match="tiny has no prediction head that runs: its file has no"):
        planned(plain, draft="mtp")
    refused = replace(plain, mtp_refused="there are 2 of them, and one is supported")
    with pytest.raises(OptionError, match="runs: there are 2 of them, and one is supported"):
        planned(refused, draft="mtp")


def test_the_lines_of_a_head_are_multiplied_out() -> None:
    plan = planned(shape(TINY_EXPERTS), kv_type="f16", draft_tokens=3)
    pages = plan.settings.pages + 2
    assert f"{pages} pages" in explain_line(plan, "draft_kv")
    assert "2 sequences x 256 values x 4 bytes" in explain_line(plan, "draft_state")
    assert "8 rows x 256 values x 4 bytes" in explain_line(plan, "draft_state")
    assert "16 experts x" in explain_line(plan, "draft_weights")
