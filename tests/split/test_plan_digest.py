"""Two processes with the same digest have the same plan."""

from dataclasses import replace

import pytest

from headroom.machine.targets import plan_devices
from headroom.options import Options, load_options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from headroom.split.plan_digest import plan_digest


def plan_of(options: Options) -> Plan:
    return make_plan([known_shape("qwen3-0.6b")], plan_devices(options), options)


OPTIONS = replace(load_options({}), device="24GiB", ram="64GiB", threads=4)


def test_plans_that_were_made_apart_have_the_same_digest() -> None:
    assert plan_digest(plan_of(OPTIONS)) == plan_digest(plan_of(OPTIONS))


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "16GiB"},
        {"device": "24GiB,24GiB"},
        {"ram": "32GiB"},
        {"context": 4096},
        {"kv_type": "q8_0"},
        {"activation_dtype": "f32"},
    ],
    ids=str,
)
def test_plans_with_another_line_or_setting_have_other_digests(changed: dict[str, object]) -> None:
    assert plan_digest(plan_of(replace(OPTIONS, **changed))) != plan_digest(plan_of(OPTIONS))


def test_one_byte_of_one_line_changes_the_digest() -> None:
    plan = plan_of(OPTIONS)
    (device,) = plan.devices
    line = replace(device.lines[0], bytes=device.lines[0].bytes + 1)
    other = replace(plan, devices=(replace(device, lines=(line, *device.lines[1:])),))
    assert plan_digest(other) != plan_digest(plan)
