"""What is proposed where no setting fits: each proposal fits, and one step less does not."""

from dataclasses import replace

import pytest

from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.alternatives import alternatives
from headroom.plan.known import known_shape
from headroom.plan.plan import DoesNotFitError, make_plan


def test_a_smaller_mix_more_cards_and_more_memory_are_proposed() -> None:
    options = Options(model="qwen3.6-27b:q8_0", device="16GiB", ram="64GiB")
    found = list(alternatives([known_shape(options.model)], options))
    assert found[:2] == ["qwen3.6-27b:q4_0", "--device 16GiB,16GiB"]
    flag, size = found[-1].split()
    assert flag == "--device"
    shape = known_shape(options.model)
    enough = replace(options, device=size)
    assert make_plan([shape], plan_devices(enough), enough).fits
    less = replace(options, device=f"{int(size.removesuffix('GiB')) - 1}GiB")
    with pytest.raises(DoesNotFitError):
        make_plan([shape], plan_devices(less), less)


def test_a_host_that_is_too_small_is_given_more_memory() -> None:
    options = Options(model="qwen3-30b-a3b:q8_0", device="8GiB", ram="16GiB")
    found = list(alternatives([known_shape(options.model)], options))
    assert found[0] == "qwen3-30b-a3b:q5_k_m"
    assert "--ram 25GiB" in found


def test_a_cpu_alone_is_given_more_memory_only() -> None:
    options = Options(model="model.gguf", ram="1GiB")
    found = list(alternatives([known_shape("qwen3-30b-a3b:q8_0")], options))
    assert [words.split()[0] for words in found] == ["--ram"]


def test_nothing_is_proposed_where_no_machine_is_large_enough() -> None:
    shape = replace(known_shape("qwen3-0.6b"), embed_bytes=1 << 60)
    assert list(alternatives([shape], Options(model="m.gguf", ram="1GiB"))) == []
