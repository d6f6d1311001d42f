"""A driver that pins memory, or says why not; there is none here."""

import pytest
import torch

from headroom.layers import pinned


def pretend_pinning(monkeypatch: pytest.MonkeyPatch, refusal: str = "") -> None:
    """Let host memory be pinned, unless it is refused for a reason."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pinned, "lock_pages", lambda address, size, device: refusal)
    monkeypatch.setattr(pinned, "unlock_pages", lambda address, device: "")
