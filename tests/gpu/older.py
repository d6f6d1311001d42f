"""Lets a later GPU run what an older one would: kernels compiled for it, and its limits.

Code in PTX for an older architecture runs on every later one, so that the ways around what sm_75
lacks are taken and computed by a GPU. Its speed says nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headroom.kernels.cuda import compile as cuda
from headroom.kernels.cuda.code_cache import code_key
from headroom.kernels.cuda.driver import find_function, load_module
from headroom.kernels.cuda.nvrtc import FLAGS, open_nvrtc

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
        put(patch.object(cuda, "_find_kernel", _compiler(sm)))
        put(patch.object(cuda, "_FOUND", {}))
        put(patch.object(torch.cuda, "get_device_properties", properties))
        capability = divmod(sm, 10)
        put(patch.object(torch.cuda, "get_device_capability", lambda device=None: capability))
        if sm < 80:  # torch's attention without what it has for later GPUs
            put(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
        yield


def _compiler(sm: int) -> Any:
    def compiled(source: str, name: str, defines: Any, device: int) -> cuda.CudaKernel:
        function = find_function(_module(sm, source, defines, device), name)
        return cuda.CudaKernel(f"{source}:{name}", function, early=False, device=device)

    return cache(compiled)


@cache
def _module(sm: int, source: str, defines: cuda.Defines, device: int) -> Any:
    """All kernels of a source as PTX for an older GPU, kept as machine code is."""
    nvrtc, target = open_nvrtc(), f"compute_{sm}"
    text = cuda.with_macros(source, dict(defines))
    key = code_key(text, target, nvrtc.version, *FLAGS)
    code = cuda.CODE.load(key)
    if code is None:
        code = nvrtc.compile(text, source, target)
        cuda.CODE.save(key, code)
    return load_module(code, device)
