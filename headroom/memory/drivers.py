"""What NVIDIA's driver tells of GPUs beside their memory: products, its version, who holds what."""

import subprocess

from headroom.memory.readiness import GpuFacts, Holder
from headroom.options import visible_gpus
from headroom.units import MIB

_GPU_QUERY = "index,name,compute_cap,driver_version,uuid"
_PROCESS_QUERY = "gpu_uuid,pid,process_name,used_memory"


def ask_driver(query: str) -> str:
    """Return the driver's answer as rows of comma-separated values; "" where there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def ask_gpus(columns: str) -> str:
    """Return the driver's rows of the GPUs that this process may use, as torch numbers them."""
    report = ask_driver(f"--query-gpu=uuid,{columns}")
    return visible_rows(report, visible_gpus())


def visible_rows(report: str, visible: str | None) -> str:
    """Return rows of `uuid, index, ...` without the first, those left visible numbered anew.

    As CUDA does, it stops at the first word that names no GPU. Parts of GPUs are in no row: where
    one is named, all rows stay.
    """
    rows = [row.split(",", 2) for row in report.splitlines() if row.count(",") > 1]
    if visible is None or "MIG" in visible:
        return "\n".join(f"{index},{rest}" for _, index, rest in rows)
    chosen: list[str] = []
    for word in visible.split(","):
        found = [rest for uuid, index, rest in rows if _names(word.strip(), uuid, index.strip())]
        if len(found) != 1:
            break
        chosen.append(f"{len(chosen)},{found[0]}")
    return "\n".join(chosen)


def _names(word: str, uuid: str, index: str) -> bool:
    return word == index or (word.startswith("GPU-") and uuid.startswith(word))


def gpu_facts() -> list[GpuFacts]:
    """Return what the driver knows of this machine's NVIDIA GPUs."""
    return read_gpus(ask_gpus(_GPU_QUERY))


def gpu_holders(name: str) -> list[Holder]:
    """Return the processes that hold memory of a GPU, most first; none where all is hidden."""
    return read_holders(
        name, ask_gpus(_GPU_QUERY), ask_driver(f"--query-compute-apps={_PROCESS_QUERY}")
    )


def read_gpus(report: str) -> list[GpuFacts]:
    """Return the GPUs of the driver's report."""
    return [
        GpuFacts(name=f"cuda:{index}", product=product, sm=read_sm(capability), driver=driver)
        for index, product, capability, driver, _ in _rows(report, 5)
    ]


def read_holders(name: str, gpus: str, processes: str) -> list[Holder]:
    """Return the processes of one GPU from the driver's two reports."""
    own = {uuid for index, *_, uuid in _rows(gpus, 5) if f"cuda:{index}" == name}
    found = [
        Holder(int(pid), process.rpartition("/")[2], int(used) * MIB)
        for uuid, pid, process, used in _rows(processes, 4)
        if uuid in own and pid.isdigit() and used.isdigit()
    ]
    return sorted(found, key=lambda holder: -holder.bytes)


def _rows(report: str, width: int) -> list[list[str]]:
    rows = [[part.strip() for part in row.split(",")] for row in report.splitlines()]
    return [row for row in rows if len(row) == width]


def read_sm(capability: str) -> int:
    """Return a compute capability such as 9.0 as 90; 0 where it is unknown."""
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else 0
