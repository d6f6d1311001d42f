"""Measure: what this machine's memory, links and arithmetic reach, by the work of a model."""

import time
from collections.abc import Callable
from datetime import date

import torch

from headroom.errors import KernelError
from headroom.kernels.cuda.handover import read_all
from headroom.kernels.cuda.measure import handover_seconds
from headroom.kernels.native.measure import expert_bytes, expert_speed
from headroom.kernels.native.module import MODULE, POOL
from headroom.memory.calibration import Speeds
from headroom.memory.devices import DeviceSpec, detect_cpu
from headroom.memory.precision import cuda_precision
from headroom.units import MIB

ROW = 4096  # values of a weight's row
SAMPLE_BYTES = 512 * MIB  # read in one go: far more than any processor's cache
MATRIX = 2048  # rows and columns of the products that measure arithmetic
LEAST_S, TRIES = 0.2, 3
_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def measure_machine() -> dict[str, Speeds]:
    """Return the speeds of the CPU and of every GPU that torch sees, by device name."""
    speeds = {"cpu": measure_cpu(detect_cpu())}
    for index in range(torch.cuda.device_count()):
        speeds[f"cuda:{index}"] = measure_cuda(torch.device("cuda", index))
    return speeds


def measure_cpu(cpu: DeviceSpec, sample_bytes: int = SAMPLE_BYTES) -> Speeds:
    """Return the CPU's speeds: reading weights as decoding does, and matrix products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cpu.cores))
    try:
        rows = max(1, min(sample_bytes, cpu.available_bytes // 4) // (4 * ROW))
        weight, vector = torch.ones(rows, ROW), torch.ones(ROW)
        read_s = fastest(lambda: torch.mv(weight, vector))
        square = torch.ones(MATRIX // 2, MATRIX // 2)
        product_s = fastest(lambda: square @ square)
    finally:
        torch.set_num_threads(threads)
    return Speeds(
        bandwidth=weight.nbytes / read_s,
        link=0.0,
        flops=2 * square.shape[0] ** 3 / product_s,
        date=date.today().isoformat(),
        experts=_experts(cpu, sample_bytes),
    )


def _experts(cpu: DeviceSpec, sample_bytes: int) -> float:
    """Return the bytes of experts a second; 0 where there are no kernels or too little room."""
    if MODULE is None or sample_bytes < SAMPLE_BYTES or 2 * expert_bytes() > cpu.available_bytes:
        return 0.0
    POOL.set(max(1, cpu.cores))
    try:
        return 1e9 * expert_speed(tiles=True)
    finally:
        POOL.set(torch.get_num_threads())


def measure_cuda(device: torch.device) -> Speeds:
    """Return a GPU's speeds: copies within it and from pinned memory, and matrix products."""
    major, minor = torch.cuda.get_device_capability(device)
    kind = _TYPES[cuda_precision(10 * major + minor).activation]
    free, _ = torch.cuda.mem_get_info(device)
    size = min(SAMPLE_BYTES, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pinned = torch.empty(size // 2, dtype=torch.uint8, pin_memory=True)
    square = torch.ones(2 * MATRIX, 2 * MATRIX, dtype=kind, device=device)

    def wait() -> None:
        torch.cuda.synchronize(device)

    copy_s = fastest(lambda: target.copy_(source), wait)
    link_s = fastest(lambda: target[: size // 2].copy_(pinned, non_blocking=True), wait)
    product_s = fastest(lambda: square @ square, wait)
    with torch.cuda.device(device):
        read_s, handover_s = _cold_seconds(pinned, wait)
    return Speeds(
        bandwidth=2 * size / copy_s,  # each byte is read and written
        link=pinned.nbytes / link_s,
        flops=2 * square.shape[0] ** 3 / product_s,
        date=date.today().isoformat(),
        link_read=pinned.nbytes / read_s if read_s else 0.0,
        handover_s=handover_s,
    )


def _cold_seconds(pinned: torch.Tensor, wait: Callable[[], None]) -> tuple[float, float]:
    """Return the times of reading pinned memory by a kernel, and of an empty hand-over.

    0 where there is no compiler for kernels, or no C++ module.
    """
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    try:
        read_s = fastest(lambda: read_all(pinned, out), wait)
        return read_s, handover_seconds("cuda") if MODULE is not None else 0.0
    except (KernelError, RuntimeError, OSError):
        return 0.0, 0.0


def fastest(work: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Return the least seconds that one run of the work takes; others only make it slower."""
    work()
    wait()
    best = float("inf")
    for _ in range(TRIES):
        runs, start = 0, time.perf_counter()
        while runs == 0 or time.perf_counter() - start < LEAST_S / TRIES:
            work()
            runs += 1
        wait()
        best = min(best, (time.perf_counter() - start) / runs)
    return best
