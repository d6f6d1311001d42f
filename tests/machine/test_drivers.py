"""What NVIDIA's driver reports, in torch's numbering, and errors if it reports nothing."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.errors import OptionError
from headroom.machine import drivers
from headroom.machine.drivers import ask_driver, gpu_facts, gpu_holders, read_gpus, read_holders
from headroom.machine.gpus import detect_gpus, find_gpu
from headroom.machine.readiness import GpuFacts, Holder
from headroom.options import cuda_variables
from headroom.units import MIB

SLOW = "NVIDIA GeForce RTX 3060, 12288, 11000, 8.6, 580.1, GPU-a1"
FAST = "NVIDIA GeForce RTX 3090, 24576, 24000, 8.6, 580.1, GPU-b2"
OTHER = "NVIDIA GeForce RTX 3090, 24576, 23000, 8.6, 580.1, GPU-b3"
REPORT = f"{SLOW}\n{FAST}\n{OTHER}\n"
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def seen(environment: dict[str, str]) -> list[str]:
    """The ids that a process sees, from cuda:0 on."""
    found = read_gpus(REPORT, environment)
    assert [gpu.name for gpu in found] == [f"cuda:{index}" for index in range(len(found))]
    return [gpu.uuid.removeprefix("GPU-") for gpu in found]


def test_gpus_are_counted_by_their_bus_where_that_is_asked_for_else_the_fastest_first() -> None:
    assert seen(BY_BUS) == ["a1", "b2", "b3"]
    assert seen({}) == ["b2", "b3", "a1"]


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ("1", ["b2"]), ("2,0", ["b3", "a1"]), (" 1 , 2", ["b2", "b3"]), ("", []), ("-1", []),
        ("0,7,1", ["a1"]), ("0,-1,1", ["a1"]), ("GPU-b3", ["b3"]), ("GPU-b3,0", ["b3", "a1"]),
        ("GPU-b", []), ("MIG-1", []),
    ],
)  # fmt: skip
def test_only_gpus_that_the_variable_names_are_seen_up_to_the_first_wrong_name(
    chosen: str, wanted: list[str]
) -> None:
    assert seen(BY_BUS | {"CUDA_VISIBLE_DEVICES": chosen}) == wanted


def test_a_part_of_the_only_card_is_seen_as_that_card() -> None:
    found = read_gpus(SLOW, {"CUDA_VISIBLE_DEVICES": "MIG-5f0c"})
    assert [(gpu.name, gpu.uuid, gpu.listed) for gpu in found] == [("cuda:0", "GPU-a1", 1)]


def test_numbers_of_the_variable_follow_the_order_of_cuda() -> None:
    assert seen({"CUDA_VISIBLE_DEVICES": "0,2"}) == ["b2", "a1"]


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver's program that says what a test lets it say."""
    told = SimpleNamespace(gpus=REPORT, processes="", returncode=0, error=None)

    def run(command: list[str], **_: Any) -> Any:
        assert command[0] == "nvidia-smi"
        if told.error is not None:
            raise told.error
        said = told.gpus if "--query-gpu" in command[1] else told.processes
        return SimpleNamespace(stdout=said, stderr="", returncode=told.returncode)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(drivers, "cuda_variables", dict)
    return told


def test_facts_and_holders_are_those_of_the_gpu_that_torch_means(
    smi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "cuda_variables", cuda_variables)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    smi.processes = "GPU-a1, 7, /usr/bin/python3, 512\nGPU-b2, 9, other, 100\n"
    assert gpu_facts() == [
        GpuFacts(name="cuda:0", product="NVIDIA GeForce RTX 3060", sm=86, driver="580.1",
                 total_bytes=12288 * MIB, listed=3)
    ]  # fmt: skip
    assert gpu_holders("cuda:0") == [Holder(7, "python3", 512 * MIB)]
    assert [gpu.total_bytes for gpu in detect_gpus() if gpu.kind == "cuda"] == [12288 * MIB]


def test_holders_that_are_hidden_are_left_out_and_the_largest_comes_first() -> None:
    processes = (
        "GPU-b, 7, /usr/bin/python3, 512\nGPU-a, 9, other, 100\nGPU-b, 8, big, 1024\n"
        "GPU-b, 3, hidden, [N/A]\n"
    )
    wanted = [Holder(8, "big", 1024 * MIB), Holder(7, "python3", 512 * MIB)]
    assert read_holders({"GPU-b"}, processes) == wanted
    assert read_holders({"GPU-b"}, "") == read_holders(set(), processes) == []


CONTAINER = (
    "In a container it needs NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's "
    "tools, or choose --device cpu. It has cpu; other machines are named as rtx3060-12gb or 24GiB."
)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"error": FileNotFoundError()}, "there is no nvidia-smi"),
        ({"error": PermissionError(13, "Permission denied")},
         "nvidia-smi does not start (Permission denied)"),
        ({"error": subprocess.TimeoutExpired("nvidia-smi", 10)},
         "nvidia-smi did not answer in 10 seconds"),
        ({"gpus": "Failed to initialize NVML: Driver/library version mismatch.\n",
          "returncode": 18},
         "nvidia-smi fails (Failed to initialize NVML: Driver/library version mismatch)"),
        ({"gpus": "", "returncode": 9}, "nvidia-smi fails (exit 9)"),
    ],
)  # fmt: skip
def test_a_gpu_is_refused_with_why_the_driver_is_silent(
    smi: SimpleNamespace, said: dict[str, Any], why: str
) -> None:
    for name, value in said.items():
        setattr(smi, name, value)
    with pytest.raises(OptionError) as refused:
        find_gpu("cuda:0", [])
    assert refused.value.message == (
        f"--device cuda:0 is not seen on this machine: {why}, which reports the memory of GPUs."
    )
    assert refused.value.hint == CONTAINER


def test_a_gpu_whose_memory_is_not_told_is_refused_by_its_name(smi: SimpleNamespace) -> None:
    smi.gpus = "NVIDIA GB10, [N/A], [N/A], 12.1, 580.1, GPU-c\n"
    with pytest.raises(OptionError) as refused:
        find_gpu("cuda:0", [])
    assert refused.value.message == (
        "--device cuda:0 is not seen on this machine: nvidia-smi lists it as NVIDIA GB10 and does "
        "not report its memory."
    )
    assert refused.value.hint.startswith("A plan needs that: choose --device cpu. It has cpu;")


def test_a_gpu_that_the_variable_hides_is_refused_with_its_value(
    smi: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "cuda_variables", lambda: {"CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(OptionError) as refused:
        find_gpu("cuda:1", [])
    assert refused.value.message == (
        "--device cuda:1 is not seen on this machine: CUDA_VISIBLE_DEVICES=1 leaves 1 of the 3 "
        "GPUs that nvidia-smi lists."
    )
    assert refused.value.hint.startswith("What is left is counted from cuda:0 on. It has cpu;")


def test_a_number_beyond_the_last_gpu_is_just_not_there(smi: SimpleNamespace) -> None:
    with pytest.raises(OptionError, match=r"^--device cuda:7 is not on this machine\. It has cpu;"):
        find_gpu("cuda:7", [])


def test_the_real_program_is_asked_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<end\n{REPORT}end\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ask_driver("--query-gpu=name") == (REPORT, "")
    program.write_text("#!/bin/sh\nprintf 'GPU-a1, 7, caf\\351, 512'\n")
    assert ask_driver("--query-compute-apps=pid")[0].startswith("GPU-a1, 7, caf")
