"""Rotary tables for the positions of a step."""

from functools import cache

import torch

from headroom.families.config import RopeConfig
from headroom.layers.batch import Batch


def rope_tables(config: RopeConfig, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin `[rows, dims / 2]`; layers with the same rotation share them."""
    return batch.shared(config, lambda: _make_tables(config, batch.positions))


def _make_tables(config: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * _frequencies(config, positions.device)
    return angles.cos() * config.scale, angles.sin() * config.scale


@cache
def _frequencies(config: RopeConfig, device: torch.device) -> torch.Tensor:
    exponent = torch.arange(0, config.dims, 2, dtype=torch.float32) / config.dims
    frequency = 1.0 / config.theta**exponent
    if config.divisors:
        frequency = frequency / torch.tensor(config.divisors)
    return frequency.to(device)
