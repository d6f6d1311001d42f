"""Blocks: one layer each; here with a mixer and a feed-forward part that are run one by one.

`native_block` and `cuda_block` have the blocks whose parts are fused for one backend.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from headroom.layers.batch import Batch
from headroom.layers.modules import RmsNorm


class Block(Protocol):
    """One layer of a model: the residual stream in, the residual stream out."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Mixer(Protocol):
    """Mixes the rows of each sequence: attention or a recurrent layer."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Ffn(Protocol):
    """Changes each row on its own: a dense network, routed experts, or both."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PreNormBlock:
    """Norm, mixer, norm, feed-forward part; each part is added to the residual stream."""

    def __init__(self, mixer_norm: RmsNorm, mixer: Mixer, ffn_norm: RmsNorm, ffn: Ffn) -> None:
        self._mixer_norm = mixer_norm
        self._mixer = mixer
        self._ffn_norm = ffn_norm
        self._ffn = ffn

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x = x + self._mixer(self._mixer_norm(x), batch)
        return x + self._ffn(self._ffn_norm(x))


class SandwichBlock:
    """A layer whose parts have norms before and after them; there may be more than two parts."""

    def __init__(
        self,
        mixer: Mixer,  # with its norms
        parts: Sequence[Ffn],  # with their norms; each is added to the residual stream it reads
        scale: torch.Tensor | None,  # of the residual stream at the end
    ) -> None:
        self._mixer = mixer
        self._parts = tuple(parts)
        self._scale = scale

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x = x + self._mixer(x, batch)
        for part in self._parts:
            x = x + part(x)
        return x if self._scale is None else x.mul_(self._scale)


class NormedMixer:
    """A mixer between two norms."""

    def __init__(self, before: RmsNorm, mixer: Mixer, after: RmsNorm) -> None:
        self._before = before
        self._mixer = mixer
        self._after = after

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mixer's normed output for rows of the residual stream."""
        return self._after(self._mixer(self._before(x), batch))


class NormedFfn:
    """A feed-forward part between two norms."""

    def __init__(self, before: RmsNorm, ffn: Ffn, after: RmsNorm) -> None:
        self._before = before
        self._ffn = ffn
        self._after = after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's normed output for rows of the residual stream."""
        return self._after(self._ffn(self._before(x)))


class PostNormed:
    """A feed-forward part that norms its own input, followed by a norm."""

    def __init__(self, ffn: Ffn, after: RmsNorm) -> None:
        self._ffn = ffn
        self._after = after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's normed output for rows of the residual stream."""
        return self._after(self._ffn(x))
