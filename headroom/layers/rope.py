"""Rotary tables for the positions of a step."""

import torch

from headroom.layers.batch import Batch
from headroom.layers.config import RopeConfig


def rope_tables(config: RopeConfig, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin `[rows, dims / 2]`; layers with the same rotation share them."""
    return batch.shared(config, lambda: _make_tables(config, batch.positions))


def _make_tables(config: RopeConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.arange(0, config.dims, 2, dtype=torch.float32) / config.dims
    frequency = 1.0 / config.theta**exponent
    if config.divisors:
        frequency = frequency / torch.tensor(config.divisors)
    angles = positions[:, None].float() * frequency.to(positions.device)
    return angles.cos() * config.scale, angles.sin() * config.scale
