"""What is proposed where no setting fits: each proposal fits, and one step less does not."""

from dataclasses import replace

import pytest

from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.alternatives import (
    _least_gib,
    _memory_flags,
    _more_devices,
    alternatives,
)
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


def test_several_devices_of_a_kind_are_tried_before_one_with_the_cpu() -> None:
    copies = [",".join(["16GiB"] * count) for count in range(2, 9)]
    assert list(_more_devices(Options(device="16GiB"))) == [*copies, "16GiB,cpu"]
    # This machine has no second card of the same number.
    assert list(_more_devices(Options(device="cuda:0"))) == ["cuda:0,cpu"]
    assert list(_more_devices(Options(device="hip:12"))) == ["hip:12,cpu"]
    for device in (None, "cpu", "16GiB,8GiB"):
        assert list(_more_devices(Options(device=device))) == []


def test_memory_is_added_to_the_host_and_to_a_device_that_is_alone() -> None:
    flags = _memory_flags(Options(model="m", device="16GiB", ram="1GiB"))
    assert list(flags) == ["--ram", "--device"]
    assert flags["--ram"](3) == Options(model="m", device="16GiB", ram="3GiB")
    assert flags["--device"](3) == Options(model="m", device="3GiB", ram="1GiB")
    for device in (None, "cpu", "16GiB,8GiB"):
        assert list(_memory_flags(Options(device=device))) == ["--ram"]


@pytest.mark.parametrize("least", [1, 2, 3, 511, 512, 513, 1023, 1024])
def test_the_least_size_that_fits_is_found(least: int) -> None:
    assert _least_gib(lambda size: size >= least) == least


def test_more_than_1024_gibibytes_are_not_proposed() -> None:
    assert _least_gib(lambda size: size >= 1025) is None
