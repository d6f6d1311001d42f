"""What NVIDIA's driver reports about GPUs, in torch's numbering, and which processes use them."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headroom.errors import OptionError
from headroom.machine.catalogue import find_device
from headroom.machine.devices import DeviceSpec
from headroom.machine.readiness import GpuFacts, Holder
from headroom.options import cuda_variables
from headroom.units import GIB, MIB

_GPU_QUERY = "--query-gpu=name,memory.total,memory.free,compute_cap,driver_version,uuid"
_PROCESS_QUERY = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_IN_CONTAINERS = (
    "In a container it needs NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's "
    "tools, or choose --device cpu."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaGpu:
    """One GPU of the driver's report."""

    name: str = ""  # torch's name, which counts the visible GPUs: "cuda:0"
    product: str
    total_bytes: int  # 0 if the driver does not report it
    free_bytes: int
    sm: int
    driver: str
    uuid: str
    listed: int = 0  # GPUs that the driver lists, whether a process sees them or not


def ask_driver(query: str) -> tuple[str, str]:
    """Return the driver's answer as comma-separated rows, and why it is empty ("" if it is not)."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        # Names of processes may be in any encoding.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except FileNotFoundError:
        return "", "there is no nvidia-smi"
    except subprocess.TimeoutExpired:
        return "", "nvidia-smi did not answer in 10 seconds"
    except OSError as error:
        return "", f"nvidia-smi does not start ({error.strerror})"
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0].rstrip(".")
        return done.stdout, f"nvidia-smi fails ({said or f'exit {done.returncode}'})"
    return done.stdout, ""


def nvidia_gpus() -> list[NvidiaGpu]:
    """Return the GPUs that the driver lists and this process may see, as torch numbers them."""
    return read_gpus(ask_driver(_GPU_QUERY)[0], cuda_variables())


def gpu_facts() -> list[GpuFacts]:
    """Return what the driver knows of this machine's NVIDIA GPUs."""
    return [
        GpuFacts(
            name=x.name,
            product=x.product,
            sm=x.sm,
            driver=x.driver,
            total_bytes=x.total_bytes,
            listed=x.listed,
        )
        for x in nvidia_gpus()
    ]


def gpu_holders(name: str) -> list[Holder]:
    """Return the processes that hold memory of a GPU, most first; empty if they are hidden."""
    own = {gpu.uuid for gpu in nvidia_gpus() if gpu.name == name}
    return read_holders(own, ask_driver(_PROCESS_QUERY)[0])


def why_unseen(name: str) -> tuple[str, str]:
    """Return why the driver does not list a GPU, and what to try; two empty texts if unknown."""
    report, problem = ask_driver(_GPU_QUERY)
    if problem:
        return (
            f"{problem}, which reports the memory of GPUs.",
            _IN_CONTAINERS,
        )
    seen = {gpu.name: gpu for gpu in read_gpus(report, cuda_variables())}
    if name in seen and not seen[name].total_bytes:
        return (
            f"nvidia-smi lists it as {seen[name].product} and does not report its memory.",
            "A plan needs that: choose --device cpu.",
        )
    chosen = cuda_variables().get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and read_gpus(report, {}):
        return (
            f"CUDA_VISIBLE_DEVICES={chosen} leaves {len(seen)} of the "
            f"{len(read_gpus(report, {}))} GPUs that nvidia-smi lists.",
            "What is left is counted from cuda:0 on.",
        )
    return "", ""


def read_gpus(report: str, environment: Mapping[str, str]) -> list[NvidiaGpu]:
    """Return the GPUs of the driver's report that are visible under an environment."""
    found = [
        NvidiaGpu(
            product=product,
            total_bytes=_mebibytes(total),
            free_bytes=min(_mebibytes(free), _mebibytes(total)),
            sm=read_sm(capability),
            driver=driver,
            uuid=uuid,
        )
        for product, total, free, capability, driver, uuid in _rows(report, 6)
    ]
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":  # the order of the report
        # CUDA puts the fastest GPU first, by an unpublished rule; the catalogue's speeds come
        # nearest. `readiness` compares the result with torch's before anything is loaded.
        found.sort(key=lambda gpu: -_flops(gpu))
    visible = _visible(found, environment.get("CUDA_VISIBLE_DEVICES"))
    return [
        replace(gpu, name=f"cuda:{index}", listed=len(found)) for index, gpu in enumerate(visible)
    ]


def _visible(gpus: Sequence[NvidiaGpu], chosen: str | None) -> list[NvidiaGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, up to the first name that is wrong."""
    if chosen is None:
        return list(gpus)
    visible: list[NvidiaGpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.isdigit():
            matching = list(gpus[int(word) : int(word) + 1])
        elif word.startswith("MIG-") and len(gpus) == 1:
            matching = list(gpus)  # a part (MIG) of the only card; torch reports its size
        else:
            matching = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(matching) != 1:
            break
        visible += matching
    return visible


def read_holders(uuids: set[str], processes: str) -> list[Holder]:
    """Return the processes of some GPUs from the driver's report."""
    found = [
        Holder(int(pid), process.rpartition("/")[2], int(used) * MIB)
        for uuid, pid, process, used in _rows(processes, 4)
        if uuid in uuids and pid.isdigit() and used.isdigit()
    ]
    return sorted(found, key=lambda holder: -holder.bytes)


def find_card(product: str, total_bytes: int) -> DeviceSpec | None:
    """Return the catalogue's entry for a driver's name and size; None if there is none."""
    size = round(total_bytes / GIB)
    for text in (f"{product}-{size}gb", product):
        try:
            return find_device(text)
        except OptionError:
            continue
    return None


def _flops(gpu: NvidiaGpu) -> float:
    card = find_card(gpu.product, gpu.total_bytes)
    return card.flops if card else 0.0


def _rows(report: str, width: int) -> list[list[str]]:
    rows = [[part.strip() for part in row.split(",")] for row in report.splitlines()]
    return [row for row in rows if len(row) == width]


def _mebibytes(text: str) -> int:
    return int(text) * MIB if text.isdigit() else 0


def read_sm(capability: str) -> int:
    """Return a compute capability such as 9.0 as 90; 0 where it is unknown."""
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else 0
