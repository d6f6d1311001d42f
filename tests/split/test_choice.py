"""The device that an engine runs on: named, found, or refused."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.errors import DeviceError, OptionError, PlanError
from headroom.machine import devices
from headroom.machine.calibration import gpu_runtime
from headroom.machine.devices import DeviceSpec
from headroom.machine.readiness import GpuFacts, GpuMemory, Holder, TorchFacts
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.split import choice
from headroom.split.placing import even_placement
from headroom.units import GIB

TORCH = TorchFacts(version="2.11.0+cu130", cuda="13.0", count=2, archs=("sm_90",))
MODEL = known_shape("qwen3.6-27b:q4_k_m")
EXPERTS = known_shape("qwen3.6-35b-a3b:q4_k_m")


class Machine:
    """A machine with one H200, or what a test makes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.torch = TORCH
        self.gpus = [gpu("cuda:0", 140 * GIB)]
        self.free = 140 * GIB
        self.home = str(home)
        self.compiler = ""
        self.silence = ("", "")  # why the driver reports nothing, and what to try
        for where in ("headroom.split.choice", "headroom.machine.targets"):
            monkeypatch.setattr(f"{where}.detect_gpus", lambda: self.gpus)
        for where in ("headroom.split.choice", "headroom.machine.gpus"):
            monkeypatch.setattr(f"{where}.why_unseen", lambda name: self.silence)
        monkeypatch.setattr(choice, "read_torch", lambda: self.torch)
        monkeypatch.setattr(choice, "read_gpu", lambda known, torch: known)
        monkeypatch.setattr(choice, "gpu_facts", lambda: [self.facts(x) for x in self.gpus])
        monkeypatch.setattr(choice, "gpu_memory", lambda name: GpuMemory(self.free, 141 * GIB))
        monkeypatch.setattr(choice, "gpu_holders", lambda name: [Holder(4711, "python3", GIB)])

    def facts(self, device: DeviceSpec) -> GpuFacts:
        return GpuFacts(
            name=device.name, product="NVIDIA H200", sm=device.sm, driver="580.1",
            compiler=self.compiler,
        )  # fmt: skip

    def options(self, device: str | None = None, **more: object) -> Options:
        given = {"context": 4096, "parallel": 1, "home": self.home, "ram": "256GiB"} | more
        return Options(device=device, **given)  # type: ignore[arg-type]


def gpu(name: str, free: int, sm: int = 90) -> DeviceSpec:
    kind = "hip" if name.startswith("hip") else "cuda"
    return DeviceSpec(
        name=name, kind=kind, total_bytes=141 * GIB, available_bytes=free, bandwidth=4e12,
        link=50e9, flops=500e12, sm=sm, gfx="gfx1100" if kind == "hip" else "",
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_a_named_gpu_is_planned_for(machine: Machine) -> None:
    plan = choice.make_run_plan(MODEL, machine.options("cuda:0"))
    assert (plan.devices[0].name, plan.settings.compute_type) == ("cuda:0", "bf16")
    assert plan.settings.kernels == "cuda"
    plain = choice.make_run_plan(MODEL, machine.options("cuda:0", kernels="reference", dtype="f32"))
    assert plain.settings.kernels == "reference"


def test_a_model_beside_others_gets_the_memory_that_they_leave(machine: Machine) -> None:
    options = machine.options("cuda:0")
    alone = choice.make_run_plan(MODEL, options)
    needed = sum(line.bytes for line in alone.devices[0].lines)
    taken = alone.devices[0].free_bytes - GIB
    left = {"cuda:0": 140 * GIB - taken, "cpu": 255 * GIB}
    beside = choice.make_run_plan(MODEL, options, left)
    assert sum(line.bytes for line in beside.devices[0].lines) == needed + taken
    assert beside.problem.devices[1].available_bytes == 255 * GIB
    with pytest.raises(PlanError, match="does not fit"):
        choice.make_run_plan(MODEL, options, {"cuda:0": 8 * GIB})
    # More than the driver reports is never planned for.
    most = choice.make_run_plan(MODEL, options, {"cuda:0": 200 * GIB})
    assert most.devices == alone.devices


def test_a_plan_may_count_on_the_memory_of_models_that_would_be_unloaded(
    machine: Machine,
) -> None:
    options = machine.options("cuda:0")
    alone = choice.make_run_plan(MODEL, options)
    machine.gpus = [gpu("cuda:0", 8 * GIB)]
    machine.free = 8 * GIB
    with pytest.raises(PlanError, match="does not fit"):
        choice.make_run_plan(MODEL, options)
    again = choice.make_run_plan(MODEL, options, freed={"cuda:0": 132 * GIB})
    assert again.devices == alone.devices
    # Not more than the GPU has.
    most = choice.make_run_plan(MODEL, options, freed={"cuda:0": 900 * GIB})
    assert most.problem.devices[0].available_bytes == most.problem.devices[0].total_bytes


def test_without_a_name_the_gpu_with_most_free_memory_is_taken(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus = [gpu("cuda:0", 30 * GIB), gpu("cuda:1", 100 * GIB)]
    with caplog.at_level(logging.INFO):
        assert choice.make_run_plan(MODEL, machine.options()).devices[0].name == "cuda:1"
    assert "device: cuda:1, sm_90, 100.00 GiB of 141.00 GiB free" in caplog.text


def test_as_few_gpus_as_hold_the_model_are_taken_the_fastest_first(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    fast = [replace(gpu(f"cuda:{at}", 12 * GIB), bandwidth=8e12) for at in (0, 1)]
    # A slower card holds the model by itself.
    machine.gpus = [*fast, gpu("cuda:2", 100 * GIB)]
    machine.torch = replace(TORCH, count=3)
    with caplog.at_level(logging.INFO):
        plan = choice.make_run_plan(MODEL, machine.options())
    assert [x.name for x in plan.devices] == ["cuda:2"]
    assert "device: cuda:2, since on cuda:0: " in caplog.text
    assert "GiB of weights do not fit into 12.00 GiB" in caplog.text
    # No single card does: the pair with the faster one, although the slower two would do, too.
    machine.gpus = [fast[0], gpu("cuda:1", 13 * GIB), gpu("cuda:2", 13 * GIB)]
    machine.free = 13 * GIB
    plan = choice.make_run_plan(MODEL, machine.options())
    assert [x.name for x in plan.devices] == ["cuda:0", "cuda:1"]


def test_all_gpus_are_taken_where_none_hold_every_expert(machine: Machine) -> None:
    machine.gpus = [gpu(f"cuda:{at}", 8 * GIB) for at in range(2)]
    machine.free = 8 * GIB
    plan = choice.make_run_plan(EXPERTS, machine.options())
    assert [x.name for x in plan.devices] == ["cuda:0", "cuda:1"]
    assert 0 < plan.hot_experts < plan.total_experts


def test_sets_of_equal_gpus_are_planned_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus = [gpu(f"cuda:{at}", 3 * GIB) for at in range(12)]
    machine.torch = replace(TORCH, count=12)
    machine.free = 3 * GIB
    made, make = [], choice.make_plan

    def counting(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(choice, "make_plan", counting)
    plan = choice.make_run_plan(MODEL, machine.options(context=512))
    used = [x.name for x in plan.devices]
    assert used == [f"cuda:{at}" for at in range(len(used))]
    assert 6 <= len(used) <= 12  # 15.4 GiB of weights
    # Of 4095 sets: one for each count of GPUs, and who holds their memory where a plan fails.
    assert len(made) <= 2 * len(machine.gpus)


def test_without_a_usable_gpu_the_cpu_is_taken_and_told_why(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.torch = TorchFacts(version="2.13.0+cpu")
    assert choice.make_run_plan(MODEL, machine.options()).devices[0].name == "cpu"
    assert (
        "device: not cuda:0: torch 2.13.0+cpu is built for CPUs alone, without CUDA. "
        "Install a CUDA build of torch, or choose --device cpu." in caplog.text
    )
    machine.gpus = [gpu("hip:0", GIB)]
    assert choice.make_run_plan(MODEL, machine.options()).devices[0].name == "cpu"
    assert "device: not hip:0: torch 2.13.0+cpu is built for CPUs alone, without R" in caplog.text


def test_a_gpu_that_only_torch_sees_is_reported_with_what_to_try(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus, machine.silence = [], ("there is no nvidia-smi.", "Install it.")
    assert choice.choose_gpus(machine.options()) == []
    told = "device: cpu, although torch sees 2 GPUs: there is no nvidia-smi. Install it."
    assert told in caplog.text
    caplog.clear()
    machine.torch = TorchFacts(version="2.13.0+cpu")
    assert choice.choose_gpus(machine.options()) == []
    assert not caplog.text


AMD = TorchFacts(version="2.11.0+rocm7.0", hip="7.0", count=1, archs=("gfx1100",))


@pytest.mark.parametrize("name", ["hip:0", None])
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_an_amd_gpu_is_planned_for_with_tritons_kernels(
    machine: Machine, name: str | None, kernels: str
) -> None:
    machine.torch, machine.gpus = AMD, [gpu("hip:0", 140 * GIB)]
    plan = choice.make_run_plan(MODEL, machine.options(name, kernels=kernels))
    assert (plan.devices[0].name, plan.devices[0].kind) == ("hip:0", "hip")
    assert (plan.settings.kernels, plan.settings.uses_arena) == ("triton", False)
    why = {line.name: line.why for line in plan.devices[0].lines}
    none = "0 B for captured graphs (AMD's GPUs run steps without capturing them), "
    assert why["graphs"].startswith(none)
    assert why["runtime"].startswith("ROCm's context and kernels; an estimate from")
    assert why["staging"].endswith("values, f32")
    plain = choice.make_run_plan(MODEL, machine.options(name, kernels="reference"))
    assert plain.settings.kernels == "reference"


def test_an_amd_gpu_without_triton_or_with_too_little_memory_is_refused(machine: Machine) -> None:
    machine.torch, machine.gpus, machine.free = AMD, [gpu("hip:0", 140 * GIB)], 2 * GIB
    with pytest.raises(DeviceError, match=r"hip:0 has 2.00 GiB of 141.00 GiB free and the plan"):
        choice.make_run_plan(MODEL, machine.options("hip:0"))
    machine.compiler = "triton is not installed"
    with pytest.raises(DeviceError, match=r"for hip:0: triton is not installed. Triton comes"):
        choice.make_run_plan(MODEL, machine.options("hip:0"))


def test_cold_experts_of_an_amd_gpu_are_refused_before_anything_is_loaded(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.torch, machine.gpus = AMD, [gpu("hip:0", 12 * GIB)]
    machine.free = 12 * GIB
    with pytest.raises(PlanError) as refused:
        choice.make_run_plan(EXPERTS, machine.options("hip:0"))
    assert "of 10240 experts cold, which only CUDA's driver and kernels" in str(refused.value)
    assert choice.make_run_plan(EXPERTS, machine.options()).devices[0].name == "cpu"
    assert "device: cpu, not hip:0: hip:0 would leave " in caplog.text


def test_a_part_of_a_card_is_planned_for_where_an_engine_keeps_to_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"listed": 1, "total_bytes": 141 * GIB, "torch_bytes": 40 * GIB}
    monkeypatch.setattr(machine, "torch", replace(machine.torch, count=1))
    monkeypatch.setattr(choice, "read_gpu", lambda known, torch: replace(known, **part))
    machine.free = 40 * GIB
    with pytest.raises(DeviceError, match="torch sees a part of it"):
        choice.make_run_plan(MODEL, machine.options("cuda:0"))
    for name in ("cuda:0", None):
        options = machine.options(name, device_memory="39GiB")
        assert choice.make_run_plan(MODEL, options).devices[0].name == "cuda:0"


def test_products_in_8_bits_stay_on_the_cpu(machine: Machine) -> None:
    assert choice.choose_gpus(machine.options())[0] == "cuda:0"
    assert choice.choose_gpus(machine.options(dtype="int8")) == []


def test_a_model_that_does_not_fit_the_found_gpu_runs_on_the_cpu_and_says_so(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus = [gpu("cuda:0", int(1.5 * GIB))]
    assert choice.make_run_plan(EXPERTS, machine.options()).devices[0].name == "cpu"
    assert "device: cpu, not cuda:0:" in caplog.text


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("rtx3090", OptionError, "--device rtx3090-24gb is a device to plan for, not one"),
        ("24GiB", OptionError, "--device 24.00GiB is a device to plan for, not one of this"),
        ("cuda:0,cuda:7", OptionError, "--device cuda:7 is not on this machine. It has cuda:0"),
        ("cpu,rtx3090", OptionError, "--device rtx3090-24gb is a device to plan for, not one"),
        ("cuda:7", OptionError, "--device cuda:7 is not on this machine. It has cuda:0, hip:0"),
        ("hip:0", DeviceError, r"torch 2.11.0\+cu130 is built for CUDA 13.0, without ROCm."),
    ],
)
def test_devices_that_cannot_run_are_refused_by_name(
    machine: Machine, device: str, error: type[Exception], message: str
) -> None:
    machine.gpus.append(gpu("hip:0", GIB))
    with pytest.raises(error, match=message):
        choice.make_run_plan(MODEL, machine.options(device))


def test_a_trial_takes_the_device_of_a_run_or_one_that_is_not_here(machine: Machine) -> None:
    assert choice.make_trial_plan(EXPERTS, machine.options()).devices[0].name == "cuda:0"
    there = choice.make_trial_plan(EXPERTS, machine.options("rtx3060-12gb")).devices[0]
    assert there.name == "rtx3060-12gb"
    assert 0 < there.hot_experts < there.total_experts
    with pytest.raises(PlanError, match="8 hot experts in each of 40 layers"):
        choice.make_trial_plan(EXPERTS, machine.options("rtx3060-12gb", expert_budget="1%"))


def test_a_named_gpu_that_is_too_old_is_refused(machine: Machine) -> None:
    machine.gpus = [gpu("cuda:0", 24 * GIB, sm=61)]
    with pytest.raises(DeviceError, match="sm_61; the kernels need sm_75, and bf16 sm_80"):
        choice.make_run_plan(MODEL, machine.options("cuda:0"))


def test_experts_that_do_not_fit_are_planned_cold(machine: Machine) -> None:
    machine.gpus, machine.free = [gpu("cuda:0", 16 * GIB)], 16 * GIB
    for name in ("cuda:0", None):
        device = choice.make_run_plan(EXPERTS, machine.options(name)).devices[0]
        assert device.name == "cuda:0"
        assert 0 < device.hot_experts < device.total_experts == 10240


@pytest.mark.parametrize("name", ["cuda:0", None])
def test_a_budget_below_the_floor_is_refused_with_both_numbers(
    machine: Machine, name: str | None
) -> None:
    with pytest.raises(PlanError) as refused:
        choice.make_run_plan(EXPERTS, machine.options(name, expert_budget="1%"))
    assert refused.value.message.startswith("8 hot experts in each of 40 layers need ")
    assert "and the budget for experts is " in refused.value.message
    plan = choice.make_run_plan(EXPERTS, machine.options(name, expert_budget="0%"))
    assert plan.devices[0].name == "cuda:0"


@pytest.mark.parametrize("name", ["cuda:0", None])
@pytest.mark.parametrize(
    "asked", [{"expert_budget": "20%"}, {"device_memory": "8GiB"}, {"keep_host_copy": True}]
)
def test_a_host_too_small_for_the_cold_experts_is_refused(
    machine: Machine, name: str | None, asked: dict[str, Any]
) -> None:
    if "keep_host_copy" in asked:  # without it 18 GiB hold what this GPU leaves cold
        machine.gpus, machine.free = [gpu("cuda:0", 16 * GIB)], 16 * GIB
    ram = "18GiB" if "keep_host_copy" in asked else "8GiB"
    with pytest.raises(PlanError, match=r"host memory has \d+\.00 GiB and .* cold_experts, "):
        choice.make_run_plan(EXPERTS, machine.options(name, ram=ram, **asked))


def test_a_found_gpu_that_has_no_room_whatever_is_asked_of_it_is_passed_over(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.gpus = [gpu("cuda:0", int(1.5 * GIB))]
    plan = choice.make_run_plan(EXPERTS, machine.options(expert_budget="50%", cold="gpu"))
    assert plan.devices[0].name == "cpu"
    assert "device: cpu, not cuda:0:" in caplog.text


def test_a_gpu_does_not_read_what_is_not_pinned(machine: Machine) -> None:
    options = machine.options("cuda:0", expert_budget="60%", cold="gpu", no_pin=True)
    with pytest.raises(OptionError) as refused:
        choice.make_run_plan(EXPERTS, options)
    assert str(refused.value) == (
        "--cold gpu needs pinned memory: a GPU does not read what --no-pin leaves in place. "
        "Leave out --no-pin, or choose --cold cpu."
    )


@pytest.mark.parametrize(
    ("asked", "words"), [({"cold": "cpu"}, "--cold cpu"), ({"no_pin": True}, "--no-pin")]
)
def test_what_only_the_cpu_can_compute_needs_its_kernels(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], words: str
) -> None:
    options = machine.options("cuda:0", expert_budget="60%", **asked)
    assert choice.make_run_plan(EXPERTS, options)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(OptionError) as refused:
        choice.make_run_plan(EXPERTS, options)
    assert str(refused.value) == (
        f"{words} leaves cold experts to the CPU, whose C++ kernels were not built here. Leave it "
        "out: the GPU reads cold experts in pinned memory. See headroom doctor."
    )
    for possible in ({"dtype": "f32"}, {"cold": "drop"}):
        other = machine.options("cuda:0", expert_budget="60%", **asked | possible)
        assert choice.make_run_plan(EXPERTS, other)


def test_memory_that_went_since_planning_is_refused_with_who_holds_it(machine: Machine) -> None:
    machine.free = 2 * GIB
    with pytest.raises(DeviceError, match=r"cuda:0 has 2.00 GiB of 141.00 GiB free and the plan"):
        choice.make_run_plan(MODEL, machine.options("cuda:0"))


def test_a_gpu_of_which_little_may_be_taken_is_planned_as_a_small_one(machine: Machine) -> None:
    options = machine.options("cuda:0", device_memory="12GiB", chunk=512)
    plan = choice.make_run_plan(EXPERTS, options)
    device = plan.devices[0]
    assert device.total_bytes == 12 * GIB
    assert 0 < device.hot_experts < device.total_experts
    assert 0 <= device.free_bytes < 0.1 * GIB
    # What CUDA takes is that of the card that is there, not of a small one.
    (runtime,) = (line.bytes for line in device.lines if line.name == "runtime")
    assert runtime == gpu_runtime(141 * GIB).bytes > gpu_runtime(12 * GIB).bytes
    roomy = machine.options("cuda:0", device_memory="999GiB", chunk=512)
    assert choice.make_run_plan(EXPERTS, roomy).devices[0].total_bytes == 141 * GIB
    with pytest.raises(OptionError, match=r"--device-memory is '0GiB'\. Write 12GiB\."):
        choice.make_run_plan(EXPERTS, machine.options("cuda:0", device_memory="0GiB"))


def test_a_budget_of_nothing_keeps_all_experts_cold(machine: Machine) -> None:
    plan = choice.make_run_plan(EXPERTS, machine.options("cuda:0", expert_budget="0%"))
    assert plan.devices[0].hot_experts == 0
    assert {line.name for line in plan.host.lines} >= {"cold_experts", "expert_spare"}


def test_a_model_that_others_leave_no_room_for_is_refused_with_who_they_are(
    machine: Machine,
) -> None:
    machine.gpus = [gpu("cuda:0", 10 * GIB)]
    with pytest.raises(PlanError) as refused:
        choice.make_run_plan(MODEL, machine.options("cuda:0"))
    assert "does not fit: cuda:0 has 141.00 GiB and " in refused.value.message
    assert refused.value.message.endswith(
        "It would fit if others did not hold 131.00 GiB of cuda:0: python3 (pid 4711) 1.00 GiB."
    )
    assert refused.value.hint.startswith("End what holds it. Try ")


def test_a_gpu_without_room_for_a_kernel_is_refused_or_passed_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = GpuMemory(GIB // 8, 141 * GIB, (Holder(4711, "python3", 140 * GIB),))
    monkeypatch.setattr(
        choice,
        "read_gpu",
        lambda known, torch: replace(known, compiler="out of memory", full=full),
    )
    told = r"cuda:0 has 128.0 MiB of 141.00 GiB free, too little .* python3 \(pid 4711\)"
    with pytest.raises(DeviceError, match=told):
        choice.make_run_plan(MODEL, machine.options("cuda:0"))
    assert choice.make_run_plan(MODEL, machine.options()).devices[0].name == "cpu"
    assert "device: not cuda:0: cuda:0 has 128.0 MiB of 141.00 GiB free" in caplog.text


def test_hidden_holders_are_reported_as_such(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "gpu_holders", lambda name: [])
    machine.gpus = [gpu("cuda:0", 10 * GIB)]
    assert choice.make_run_plan(MODEL, machine.options()).devices[0].name == "cpu"
    assert "hold 131.00 GiB of cuda:0: who they are is not known." in caplog.text


def test_experts_below_the_floor_are_all_cold_where_others_hold_the_memory(
    machine: Machine,
) -> None:
    machine.gpus, machine.free = [gpu("cuda:0", int(3.8 * GIB))], int(3.8 * GIB)
    options = machine.options("cuda:0", context=512, chunk=16)
    plan = choice.make_run_plan(EXPERTS, options)
    assert plan.devices[0].hot_experts == 0
    assert even_placement(EXPERTS, plan).total == 0


@pytest.mark.parametrize("free", [140.5, 80, 10])
def test_nobody_is_blamed_where_the_model_does_not_fit_an_idle_gpu(
    machine: Machine, free: float
) -> None:
    machine.gpus = [gpu("cuda:0", int(free * GIB))]
    with pytest.raises(PlanError, match="does not fit") as refused:
        choice.make_run_plan(MODEL, machine.options("cuda:0", cache_tokens=1 << 24))
    assert "others did not hold" not in str(refused.value)
