"""Measures the speed of this machine's memory, links and arithmetic, with a model's operations."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

import torch

from headroom.errors import KernelError
from headroom.kernels.cuda.handover import read_all
from headroom.kernels.cuda.measure import handover_seconds
from headroom.kernels.native.cold import worker_threads
from headroom.kernels.native.measure import expert_bytes, expert_flops, expert_speed
from headroom.kernels.native.module import MODULE, POOL
from headroom.machine.calibration import Speeds
from headroom.machine.devices import DeviceSpec, detect_cpu
from headroom.machine.gpus import detect_gpus
from headroom.machine.precision import cuda_precision
from headroom.progress import StepCounter, StepReport, ignore_steps
from headroom.units import MIB

log = logging.getLogger(__name__)

ROW = 4096  # values of a weight's row
SAMPLE_BYTES = 512 * MIB  # read at once: far more than any processor's cache
MATRIX = 2048  # rows and columns of the products that measure arithmetic
LINK_BYTES = 256 * MIB
CPU_STEPS, GPU_STEPS = 3, 4  # what is measured of each device
LEAST_S, TRIES, MOST_RUNS = 0.2, 3, 1000
_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Speeds from pinned host memory to a GPU, in bytes per second."""

    copy: float
    read: float  # by kernels that read host memory in place; 0: no compiler for them


def measure_machine(report: StepReport = ignore_steps) -> dict[str, Speeds]:
    """Return the speeds of the CPU and of every GPU that torch sees, by device name."""
    cpu = detect_cpu()
    steps = StepCounter(CPU_STEPS + GPU_STEPS * torch.cuda.device_count(), report)
    speeds = {"cpu": measure_cpu(cpu, steps=steps)}
    gpus = {gpu.name: gpu for gpu in detect_gpus()}  # with the names that plans use
    POOL.set(worker_threads(cpu.cores))  # as many threads as compute cold experts
    try:
        kind = "hip" if torch.version.hip else "cuda"  # torch calls both cuda
        for index in range(torch.cuda.device_count()):
            name = f"{kind}:{index}"
            speeds[name] = measure_cuda(torch.device("cuda", index), steps)
            if (gpu := gpus.get(name)) is not None:
                speeds[name] = replace(
                    speeds[name], product=gpu.product, total_bytes=gpu.total_bytes
                )
    finally:
        POOL.set(torch.get_num_threads())
    return speeds


def measure_cpu(
    cpu: DeviceSpec, sample_bytes: int = SAMPLE_BYTES, steps: StepCounter | None = None
) -> Speeds:
    """Return the CPU's speeds: reading weights as decoding does, and matrix products."""
    steps = steps or StepCounter(CPU_STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cpu.cores))
    try:
        rows = max(1, min(sample_bytes, cpu.available_bytes // 4) // (4 * ROW))
        steps.begin("cpu: memory")
        weight, vector = torch.ones(rows, ROW), torch.ones(ROW)
        read_s = fastest(lambda: torch.mv(weight, vector))
        steps.begin("cpu: arithmetic")
        square = torch.ones(MATRIX // 2, MATRIX // 2)
        product_s = fastest(lambda: square @ square)
    finally:
        torch.set_num_threads(threads)
    steps.begin("cpu: experts")
    experts, flops = _experts(cpu, sample_bytes)
    return Speeds(
        bandwidth=weight.nbytes / read_s,
        link=0.0,
        flops=2 * square.shape[0] ** 3 / product_s,
        date=date.today().isoformat(),
        experts=experts,
        expert_flops=flops,
    )


def _experts(cpu: DeviceSpec, sample_bytes: int) -> tuple[float, float]:
    """Return the expert kernels' bytes per second with one row, and operations per second with
    several.

    Both are 0 without C++ kernels, or with too little free memory.
    """
    if MODULE is None or sample_bytes < SAMPLE_BYTES or 2 * expert_bytes() > cpu.available_bytes:
        return 0.0, 0.0
    POOL.set(worker_threads(cpu.cores))
    try:
        # As cold experts are computed: rows of 24 bits, or of 16 with AVX-512 and AMX.
        return 1e9 * expert_speed("int24", tiles=True), expert_flops()
    finally:
        POOL.set(torch.get_num_threads())


def measure_cuda(device: torch.device, steps: StepCounter | None = None) -> Speeds:
    """Return a GPU's speeds: copies within it and from pinned memory, and matrix products."""
    steps = steps or StepCounter(GPU_STEPS)
    major, minor = torch.cuda.get_device_capability(device)
    kind = _TYPES[cuda_precision(10 * major + minor).type]
    steps.begin(f"{device}: arithmetic")
    square = torch.ones(2 * MATRIX, 2 * MATRIX, dtype=kind, device=device)
    product_s = fastest(lambda: square @ square, lambda: torch.cuda.synchronize(device))
    steps.begin(f"{device}: link")
    link = measure_link(device)
    steps.begin(f"{device}: memory")
    bandwidth = copy_bandwidth(device)
    steps.begin(f"{device}: hand-over")
    return Speeds(
        bandwidth=bandwidth,
        link=link.copy,
        flops=2 * square.shape[0] ** 3 / product_s,
        date=date.today().isoformat(),
        link_read=link.read,
        handover_s=_handover(device),
    )


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that copies within a GPU read and write."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(SAMPLE_BYTES, free // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = fastest(lambda: target.copy_(source), lambda: torch.cuda.synchronize(device))
    return 2 * source.nbytes / seconds


def measure_link(device: torch.device) -> LinkSpeeds:
    """Return the speeds of copies from pinned memory, and of kernels that read it."""
    free, _ = torch.cuda.mem_get_info(device)
    pinned = torch.zeros(min(LINK_BYTES, free // 4 // MIB * MIB), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(pinned, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)

    def wait() -> None:
        torch.cuda.synchronize(device)

    copy_s = fastest(lambda: target.copy_(pinned, non_blocking=True), wait)
    read_s = 0.0
    if not torch.version.hip:  # no CUDA kernel runs there
        with torch.cuda.device(device):
            read_s = _or_zero(
                "reads of host memory", lambda: fastest(lambda: read_all(pinned, out), wait)
            )
    return LinkSpeeds(pinned.nbytes / copy_s, pinned.nbytes / read_s if read_s else 0.0)


def _handover(device: torch.device) -> float:
    """Return the seconds of an empty hand-over; 0 without the C++ module or a CUDA compiler."""
    if MODULE is None or torch.version.hip:
        return 0.0
    with torch.cuda.device(device):
        return _or_zero("hand-overs to the CPU", lambda: handover_seconds(str(device)))


def _or_zero(what: str, measure: Callable[[], float]) -> float:
    """Return the measured value; 0, with a warning, if the kernels do not run."""
    try:
        return measure()
    except (KernelError, RuntimeError, OSError, AttributeError) as error:
        log.warning("calibrate: %s are not measured: %s", what, error)
        return 0.0


def fastest(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of the fastest run: other programs can only make a run slower."""
    work()
    wait()
    start = time.perf_counter()
    work()
    wait()
    once = max(1e-9, time.perf_counter() - start)
    # The number of runs is fixed first: a GPU's queue accepts many seconds of work.
    runs = max(1, min(MOST_RUNS, int(LEAST_S / TRIES / once)))
    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        for _ in range(runs):
            work()
        wait()
        best = min(best, (time.perf_counter() - start) / runs)
    return best
