"""An AMD GPU that is not there: the pretended one in ROCm's name, with interpreted kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.engine.engine import Engine
from headroom.kernels.triton import attention, delta_net, experts, launch, matmul, rows
from headroom.kernels.triton.matmul import TileSizes
from headroom.layers import host_memory
from headroom.machine.devices import DeviceSpec
from headroom.units import GIB
from tests.pretend_cuda import OnCuda, Pretence, PretendedError, plain, pretend_cuda

AMD = DeviceSpec(
    name="hip:0", kind="hip", total_bytes=24 * GIB, available_bytes=23 * GIB, link=1e10,
    gfx="gfx1100",
)  # fmt: skip


class _Interpreted:
    """A kernel that takes tensors of the pretended GPU, and no others."""

    def __init__(self, module: str, name: str, launches: list[str]) -> None:
        self._kernel = launch.find_kernel(module, name)
        self._name, self._launches = name, launches

    def __getitem__(self, grid: Any) -> Any:
        def start(*args: Any, **named: Any) -> None:
            given = [x for x in args if isinstance(x, torch.Tensor)]
            if not all(isinstance(x, OnCuda) for x in given):
                raise PretendedError(f"{self._name} is given a tensor of the host")
            self._launches.append(self._name)
            with torch._C.DisableTorchFunction():
                self._kernel[grid](*(plain(x) for x in args), **named)

        return start


@contextmanager
def pretend_amd(monkeypatch: pytest.MonkeyPatch, device: DeviceSpec = AMD) -> Iterator[list[str]]:
    """Let this machine have an AMD GPU and torch be built for it; yield what was launched."""
    launches: list[str] = []
    for where in ("headroom.split.choice", "headroom.machine.targets"):
        monkeypatch.setattr(f"{where}.detect_gpus", lambda: [device])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    memory = (device.available_bytes, device.total_bytes)
    answers = {
        "init": lambda: None, "device_count": lambda: 1, "get_arch_list": lambda: ["gfx1100"],
        "mem_get_info": lambda name: memory, "synchronize": lambda name: None,
        "memory_reserved": lambda name: 0, "max_memory_reserved": lambda name: 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for module in (attention, delta_net, experts, matmul, rows):
        monkeypatch.setattr(
            module, "find_kernel", lambda file, name: _Interpreted(file, name, launches)
        )
    # The interpreter takes its time for every program, not for every value.
    monkeypatch.setattr(matmul, "EXACT", TileSizes(outs=128, rows=16, columns=256, warps=1))
    monkeypatch.setattr(attention, "SHORT_QUERIES", 128)
    monkeypatch.setattr(attention, "BLOCK_KEYS", 128)
    run = Engine._run
    monkeypatch.setattr(Engine, "_run", lambda engine: _pretending(run, engine))
    with pretend_cuda(monkeypatch):
        properties = SimpleNamespace(
            name="AMD Radeon RX 7900 XTX", total_memory=memory[1], gcnArchName="gfx1100:xnack-"
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: properties)
        monkeypatch.setattr(host_memory, "lock_pages", _no_driver)
        yield launches


def _pretending(run: Any, engine: Engine) -> None:
    with Pretence():  # of this thread
        run(engine)


def _no_driver(*given: object) -> str:
    raise PretendedError("CUDA's driver is asked on an AMD machine")
