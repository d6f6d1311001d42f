"""llama-bench is made to run as the plan does: its device, its experts, its cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from headroom.bench.peer_setup import (
    PeerSetup,
    check_comparable,
    cold_layers,
    setup_peer,
    visible_gpu,
)
from headroom.errors import OptionError
from headroom.families.synth.recipe import find_recipe
from headroom.formats.mixes import find_mix
from headroom.machine.targets import parse_device, plan_devices
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.plan.shaping import shape_of

GPU = {"device": "cuda:0", "ram": "8GiB"}
CPU = {"device": "cpu", "ram": "8GiB", "kv_type": "bf16"}


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs of 24 GiB, as far as plans know."""
    spec = parse_device("24GiB")
    local = "headroom.machine.targets.find_gpu"
    monkeypatch.setattr(local, lambda name, found: replace(spec, name=name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def shape_and_plan(family: str = "llama", **settings: object) -> tuple[ModelShape, Plan, Options]:
    shape = shape_of("tiny", find_recipe(family, "tiny").dims, find_mix("q8_0"))
    options = Options(context=1024, parallel=1, chunk=256, **settings)  # type: ignore[arg-type]
    return shape, make_plan([shape], plan_devices(options), options), options


def setup_of(family: str = "llama", **settings: object) -> PeerSetup:
    shape, plan, options = shape_and_plan(family, **settings)
    return setup_peer(plan, shape, options)


def test_on_a_cpu_no_gpu_is_seen() -> None:
    found = setup_of(device="cpu", ram="8GiB", kv_type="bf16", threads=3)
    flags = ("-ngl", "0", "-t", "3", "-fa", "1", "-ctk", "f16", "-ctv", "f16")
    assert found == PeerSetup(flags, "", context=1024, chunk=256)
    assert found.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "PATH" in found.environment


def test_a_cache_in_f32_is_one_in_f16_there() -> None:
    found = setup_of(device="cpu", ram="8GiB", k_type="f32", v_type="q8_0")
    assert found.flags[-4:] == ("-ctk", "f16", "-ctv", "q8_0")
    assert found.notes == (
        "llama-bench has its cache in f16, where ours is f32, which it does not take",
    )


def test_on_a_gpu_all_layers_are_there_and_no_other_gpu_is_seen() -> None:
    found = setup_of(**GPU | {"device": "cuda:1"}, k_type="q8_0", v_type="q4_0", threads=2)
    flags = ("-ngl", "99", "-t", "2", "-fa", "1", "-ctk", "q8_0", "-ctv", "q4_0")
    assert (found.flags, found.visible, found.notes) == (flags, "1", ())


def test_gpus_are_counted_among_those_that_we_see() -> None:
    assert visible_gpu("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, GPU-5f"}) == "GPU-5f"
    assert visible_gpu("cuda:2", {"CUDA_VISIBLE_DEVICES": ""}) == "2"
    assert visible_gpu("cuda:2", {}) == "2"


@pytest.mark.parametrize(("budget", "layers"), [("100%", 0), ("50%", 2), ("0%", 4)])
def test_as_many_experts_are_on_the_cpu_as_are_cold(budget: str, layers: int) -> None:
    shape, plan, options = shape_and_plan("qwen3moe", **GPU, expert_budget=budget, threads=1)
    assert len(shape.layers) == 4
    assert cold_layers(plan, shape) == layers
    found = setup_peer(plan, shape, options)
    assert found.flags[2:4] == (("-ncmoe", str(layers)) if layers else ("-t", "1"))
    device = plan.devices[0]
    cold = round(100 * (1 - device.hot_experts / device.total_experts))
    told = (
        f"llama-bench has all experts of its first {layers} layers on the CPU (-ncmoe {layers}), "
        f"{25 * layers} % of them; of ours {cold} % are cold, some of every layer"
    )
    assert found.notes == ((told,) if layers else ())


def test_experts_that_only_we_leave_out_are_told() -> None:
    (note,) = setup_of("qwen3moe", **GPU, expert_budget="50%", cold="drop").notes
    assert note.endswith("of ours 50 % are left out and computed by nobody, some of every layer")


def test_dense_layers_before_the_experts_count_too() -> None:
    shape, plan, _ = shape_and_plan("laguna", **GPU, expert_budget="90%")
    assert [bool(layer.experts) for layer in shape.layers[:2]] == [False, True]
    assert cold_layers(plan, shape) == 2  # one dense, and the nearest to a tenth of the others


def test_a_limit_of_memory_is_refused_where_it_cannot_be_compared() -> None:
    with pytest.raises(OptionError) as refused:
        setup_of(**GPU, device_memory="12GiB")
    assert str(refused.value) == (
        "llama-bench takes no --device-memory, and a dense model has no experts to leave in host "
        "memory. Leave out --device-memory, or --compare."
    )
    assert setup_of(**CPU, device_memory="12GiB").notes == ()
    assert setup_of("qwen3moe", **GPU, device_memory="12GiB").notes == (
        "--device-memory limits headroom alone; llama-bench has the whole GPU",
    )


def test_what_llama_bench_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"llama-bench reads \.gguf files, and .* is none"):
        check_comparable(tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    check_comparable(path)
