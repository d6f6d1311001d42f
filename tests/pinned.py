"""A driver that pins memory, or says why not; there is none here."""

import pytest
import torch

from headroom.layers import host_memory

_LOCKED: set[int] = set()  # addresses


def pretend_pinning(monkeypatch: pytest.MonkeyPatch, refusal: str = "") -> None:
    """Let host memory be pinned, unless it is refused for a reason."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        host_memory, "lock_pages", lambda address, size, device: _lock(address, refusal)
    )
    monkeypatch.setattr(host_memory, "unlock_pages", lambda address, device: _unlock(address))


def is_pinned(x: torch.Tensor) -> bool:
    """Tell whether a tensor begins memory that is pinned."""
    return x.data_ptr() in _LOCKED


def _lock(address: int, refusal: str) -> str:
    if not refusal:
        _LOCKED.add(address)
    return refusal


def _unlock(address: int) -> str:
    _LOCKED.discard(address)
    return ""
