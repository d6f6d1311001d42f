"""The one stand-in for a GPU: this machine seems to have a card, and the CPU does its work.

Its memory is host memory that the host may not touch (`tensors`), its copies run late (`streams`,
`driver`), and its kernels are the real sources, built or interpreted for the CPU (`kernels`).
"""

import pkgutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from headroom.kernels import triton
from headroom.kernels.cuda import attention as cuda_attention
from headroom.kernels.cuda import compile as cuda_compile
from headroom.kernels.cuda import driver
from headroom.kernels.cuda.compile import Code, WantedKernel
from headroom.kernels.triton import attention, matmul
from headroom.kernels.triton.matmul import TileSizes
from headroom.layers import draws, host_memory
from headroom.machine import targets
from headroom.machine.devices import DeviceSpec
from headroom.split import choice
from headroom.units import GIB
from tests.stand_in import kernels
from tests.stand_in.driver import Driver
from tests.stand_in.streams import Event, KernelRun, Queues, Stream
from tests.stand_in.tensors import Capture, Graph, StandInMode, WrongDeviceError

# Shared memory of a block and of a multiprocessor, in bytes.
SHARED_BYTES = {75: (64 << 10, 64 << 10), 89: (99 << 10, 100 << 10), 90: (227 << 10, 228 << 10)}


@dataclass(frozen=True, slots=True)
class Card:
    """What the driver and torch say of the GPU."""

    product: str = "NVIDIA H200"
    sm: int = 90
    gfx: str = ""  # of an AMD GPU, which has no sm
    total_bytes: int = 24 * GIB
    free_bytes: int = 24 * GIB
    processors: int = 132

    @property
    def is_amd(self) -> bool:
        """Whether the card is AMD's, which torch calls cuda, too."""
        return bool(self.gfx)

    @property
    def spec(self) -> DeviceSpec:
        """The card as a device to plan for."""
        kind = "hip" if self.is_amd else "cuda"
        return DeviceSpec(
            name=f"{kind}:0",
            kind=kind,
            total_bytes=self.total_bytes,
            available_bytes=self.free_bytes,
            link=1e10,
            sm=0 if self.is_amd else self.sm,
            gfx=self.gfx,
        )

    @property
    def properties(self) -> SimpleNamespace:
        """The card as torch describes it."""
        block, processor = SHARED_BYTES[self.sm]
        return SimpleNamespace(
            name=self.product,
            total_memory=self.total_bytes,
            multi_processor_count=self.processors,
            shared_memory_per_block_optin=block,
            shared_memory_per_multiprocessor=processor,
            major=self.sm // 10,
            minor=self.sm % 10,
            gcnArchName=f"{self.gfx}:xnack-",
        )


H200 = Card()
ADA = Card(product="NVIDIA GeForce RTX 4090", sm=89)
TURING = Card(product="Tesla T4", sm=75)
RADEON = Card(product="AMD Radeon RX 7900 XTX", gfx="gfx1100", free_bytes=23 * GIB)


class StandInGpu:
    """A GPU in host memory: its queues, its driver and the kernels that it was asked for."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.queues = Queues()
        self.driver = Driver(self.queues)
        self.kernels: set[str] = set()  # the names of kernels of CUDA and Triton
        self.codes: list[Code] = []  # sources of CUDA kernels, and their macros
        self.asked: list[WantedKernel] = []  # the same with their names
        # What late copies read and write must live until they have run: a test that ends before
        # leaves its tensors here.
        self.kept: list[object] = []

    def is_pinned(self, x: torch.Tensor) -> bool:
        """Tell whether a tensor lies in host memory that was pinned at some time."""
        at = x.data_ptr()
        pinned = (*self.driver.pinned.items(), *self.queues.pinned_by_torch.items())
        return any(first <= at < first + size for first, size in pinned)

    def profile(self, activities: Sequence[object], acc_events: bool) -> "Profile":
        """Return a profiler of this GPU."""
        assert acc_events  # or torch warns
        return Profile(self.queues)

    def noted(self, find: kernels.FindKernel) -> kernels.FindKernel:
        """Return a way to find kernels that notes their names."""

        def found(source: str, name: str, defines: dict[str, int]) -> kernels.Kernel:
            self.kernels.add(name)
            self.codes.append((source, defines))
            self.asked.append(WantedKernel(source, name, tuple(sorted(defines.items()))))
            return find(source, name, defines)

        return found


@dataclass
class Profile:
    """Stands in for torch's profiler: sees the kernels that run while it is open."""

    queues: Queues
    first: int = 0
    last: int = 0

    def __enter__(self) -> "Profile":
        self.first = len(self.queues.timeline)
        return self

    def __exit__(self, *error: object) -> None:
        self.last = len(self.queues.timeline)

    def events(self) -> list[SimpleNamespace]:
        """Return the kernels, and a call of the host that takes all the time."""
        seen = self.queues.timeline[self.first : self.last]
        host = KernelRun("cudaLaunchKernel", 0.0, 1e9)
        return [_profiled(host, DeviceType.CPU), *(_profiled(x, DeviceType.CUDA) for x in seen)]


def _profiled(run: KernelRun, device_type: DeviceType) -> SimpleNamespace:
    times = SimpleNamespace(start=run.start, end=run.end)
    return SimpleNamespace(name=run.name, time_range=times, device_type=device_type)


@contextmanager
def stand_in_gpu(
    monkeypatch: pytest.MonkeyPatch,
    card: Card = H200,
    computes: bool = True,
) -> Iterator[StandInGpu]:
    """Let this machine have a GPU for as long as the block runs.

    One that does not compute runs all code of the host around its kernels, which leave memory as
    it is. That takes little time, and tells what is allocated and asked for.
    """
    gpu = StandInGpu(card)
    with monkeypatch.context() as patch:
        _patch_torch(patch, gpu)
        _patch_kernels(patch, gpu, computes)
        if not computes:
            kernels.skip_values(patch)
        run = threading.Thread.run

        def run_with_gpu(thread: threading.Thread) -> None:
            with StandInMode():  # it holds for one thread
                run(thread)

        patch.setattr(threading.Thread, "run", run_with_gpu)
        Queues._current.append(gpu.queues)
        try:
            with StandInMode():
                yield gpu
                gpu.queues.repair()
                gpu.queues.lost = ""
                gpu.queues.finish()
        finally:
            Queues._current.pop()
            _forget_pinned()


@contextmanager
def stand_in_driver(monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> Iterator[Driver]:
    """Let this machine have the driver of some GPUs, on which no kernel runs.

    Host memory can be pinned and copied, and code be loaded; tensors are the host's alone.
    """
    made = Driver(Queues(), gpus)
    with monkeypatch.context() as patch:
        for module in (driver, cuda_compile):
            patch.setattr(module, "driver", lambda: made)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        try:
            yield made
        finally:
            _forget_pinned()


def _forget_pinned() -> None:
    """Let memory that is still pinned go without a word to the driver, which is gone by then."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (held := finalizer.peek()) is not None and held[1] is host_memory._give_back:
            finalizer.detach()


def _patch_torch(patch: pytest.MonkeyPatch, gpu: StandInGpu) -> None:
    card, queues = gpu.card, gpu.queues
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: card.properties,
        "get_device_capability": lambda device=None: divmod(card.sm, 10),
        "get_arch_list": lambda: [card.gfx or f"sm_{card.sm}"],
        "init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: _started(queues),
        "mem_get_info": lambda device=None: (card.free_bytes, card.total_bytes),
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: queues.finish(),
        "current_stream": lambda device=None: _stream_of(queues, device),
        "stream": lambda stream: _chosen_stream(queues, stream),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: None,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    patch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    patch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    patch.setattr(torch.version, "cuda", None if card.is_amd else "13.0")
    patch.setattr(torch.version, "hip", "7.0" if card.is_amd else None)
    patch.setattr(torch, "mm", kernels.product)
    for module in (choice, targets):
        patch.setattr(module, "detect_gpus", lambda: [card.spec])


@contextmanager
def _started(queues: Queues) -> Iterator[None]:
    if queues.memory_bytes == 0:
        raise RuntimeError("CUDA error: out of memory")  # CUDA itself needs some
    with queues.chosen_device():
        yield


def _stream_of(queues: Queues, device: object) -> Stream:
    """Return the stream of a GPU that is named, or that the thread has chosen before.

    Beside a second GPU, any other call may get the stream of the wrong one.
    """
    if device is None and not queues.device_is_chosen:
        raise WrongDeviceError("current_stream() names no GPU")
    return queues.current_stream()


@contextmanager
def _chosen_stream(queues: Queues, stream: Stream) -> Iterator[None]:
    before = queues.current_stream()
    queues.choose(stream)
    try:
        yield
    finally:
        queues.choose(before)


def _patch_kernels(patch: pytest.MonkeyPatch, gpu: StandInGpu, computes: bool) -> None:
    find_kernel = kernels.compile_few_blocks if computes else kernels.no_kernel
    patch.setattr(driver, "driver", _no_driver if gpu.card.is_amd else lambda: gpu.driver)
    kernels.use_kernels(patch, gpu.noted(kernels.on_gpu_only(find_kernel, gpu.is_pinned)))

    def find_interpreted(module: str, name: str) -> kernels.InterpretedKernel:
        gpu.kernels.add(name)
        return kernels.InterpretedKernel(module, name, gpu.is_pinned, computes)

    for found in pkgutil.iter_modules(triton.__path__, f"{triton.__name__}."):
        module = import_module(found.name)
        if hasattr(module, "find_kernel") and not found.name.endswith(".launch"):
            patch.setattr(module, "find_kernel", find_interpreted)
    # The interpreter takes its time for every program, not for every value.
    patch.setattr(matmul, "EXACT", TileSizes(outs=128, rows=16, columns=256, warps=1))
    patch.setattr(attention, "SHORT_QUERIES", 128)
    patch.setattr(attention, "BLOCK_KEYS", 128)
    # Torch's fused kernels for causal attention run on no CPU.
    patch.setattr(cuda_attention, "attend_causal", _attend_causal)
    # The sampler's kernels take long on a CPU; the plain sampler draws the same tokens.
    patch.setattr(
        draws,
        "sample_fast",
        lambda x, tables, scratch, out, masks=None: draws.sample_into(x, tables, out, masks),
    )


def _attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grouped: bool
) -> torch.Tensor:
    rows, count = q.shape[-2], k.shape[-2]
    seen = torch.ones(rows, count, dtype=torch.bool, device="cuda").tril(count - rows)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=grouped)


def _no_driver() -> Driver:
    raise WrongDeviceError("CUDA's driver is asked on an AMD machine")
