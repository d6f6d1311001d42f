"""Options that have no effect are reported, and the engine's plan does not count them."""

import logging
from dataclasses import fields

import pytest

from headroom.options import Options, flag, load_options
from headroom.plan.known import known_shape
from headroom.split.choice import make_run_plan
from headroom.split.unused import tell_unused

GIVEN = {"activation_model": "published"}
PLAN_ONLY = [setting for setting in fields(Options) if setting.metadata["group"] == "plan"]


def test_every_option_of_plan_alone_has_a_case() -> None:
    assert {setting.name for setting in PLAN_ONLY} == {*GIVEN, "ram"}  # a run obeys --ram


@pytest.mark.parametrize("name", GIVEN)
def test_a_run_ignores_an_option_of_plan_alone_and_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = known_shape("smollm2-135m:q4_k_m")
    usual = make_run_plan(shape, load_options({"device": "cpu"}))
    monkeypatch.setenv(f"HEADROOM_{name.upper()}", GIVEN[name])
    with caplog.at_level(logging.WARNING, "headroom"):
        found = make_run_plan(shape, load_options({"device": "cpu"}))
    assert found.settings == usual.settings
    lines = {line.name: line.bytes for line in found.devices[0].lines if line.name != "reserve"}
    assert lines == {x.name: x.bytes for x in usual.devices[0].lines if x.name != "reserve"}
    setting = next(setting for setting in PLAN_ONLY if setting.name == name)
    assert f"only headroom plan obeys {flag(setting)}" in caplog.text


def test_a_type_of_features_that_no_draft_reads_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = make_run_plan(known_shape("smollm2-135m:q4_k_m"), load_options({"device": "cpu"}))
    for options, told in (
        ({"feature_dtype": "f16"}, True),
        ({"feature_dtype": "f16", "draft": "draft.gguf"}, False),
        ({}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headroom"):
            tell_unused(plan, load_options(options))
        assert ("--feature-dtype; no draft model is named" in caplog.text) == told
