"""Lets a later GPU run what an older one would: kernels compiled for it, and its limits.

Code in PTX for an older architecture runs on every later one, so that the ways around what sm_75
lacks are taken and computed by a GPU. Its speed says nothing.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headroom.kernels.cuda import compile as cuda
from tests.nvrtc import compile_ptx

SHARED_BYTES = {75: 64 << 10, 86: 99 << 10}  # that a block may have


@contextmanager
def as_older(sm: int = 75) -> Iterator[None]:
    """Compile kernels for `sm`, and let launchers see a GPU of it, as long as the block runs."""
    real = torch.cuda.get_device_properties
    limits = {
        "major": sm // 10,
        "minor": sm % 10,
        "shared_memory_per_block_optin": SHARED_BYTES[sm],
        "shared_memory_per_multiprocessor": SHARED_BYTES[sm] + (sm > 75) * 1024,
    }

    def properties(device: Any = None) -> SimpleNamespace:
        own = real(device)
        known = {name: getattr(own, name) for name in ("name", "multi_processor_count")}
        return SimpleNamespace(**known, total_memory=own.total_memory, **limits)

    with ExitStack() as stack:
        put = stack.enter_context
        put(patch.object(cuda, "_compile", _compiler(sm)))
        put(patch.object(torch.cuda, "get_device_properties", properties))
        capability = divmod(sm, 10)
        put(patch.object(torch.cuda, "get_device_capability", lambda device=None: capability))
        if sm < 80:  # torch's attention without what it has for later GPUs
            put(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
        yield


def _compiler(sm: int) -> Any:
    kept: dict[tuple[object, ...], cuda.CudaKernel] = {}

    def compiled(source: str, name: str, defines: Any, device: int) -> cuda.CudaKernel:
        key = (source, name, defines, device)
        if key not in kept:
            kept[key] = _load(compile_ptx(source, dict(defines), sm), f"{source}:{name}", name)
        return kept[key]

    return compiled


def _load(ptx: bytes, told: str, name: str) -> cuda.CudaKernel:
    driver = cuda._driver()
    torch.zeros(1, device="cuda")  # the driver has a context from here on
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(ptx))
    assert status == 0, f"{told} is not loaded: error {status} of the driver"
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0
    return cuda.CudaKernel(told, module, function, early=False)
