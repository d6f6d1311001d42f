"""Block: norm, mixer, norm, feed-forward, each added to the residual stream."""

from collections.abc import Sequence
from typing import Protocol

import torch

from headroom.layers.batch import Batch
from headroom.layers.modules import RmsNorm


class Layer(Protocol):
    """One layer of a model: the residual stream in, the residual stream out."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Mixer(Protocol):
    """Mixes the rows of each sequence: attention or a recurrent layer."""

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor: ...


class Ffn(Protocol):
    """Changes each row on its own: a plain network or a choice of experts."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Block:
    """One layer of a model."""

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
    """One layer whose parts bring their own norms, before and after, and may be more than two."""

    def __init__(
        self,
        mixer: Mixer,
        parts: Sequence[Ffn],  # each added to the residual stream that it reads
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
        """Return the part's output for rows of the residual stream."""
        return self._after(self._mixer(self._before(x), batch))


class NormedFfn:
    """A feed-forward part between two norms."""

    def __init__(self, before: RmsNorm, ffn: Ffn, after: RmsNorm) -> None:
        self._before = before
        self._ffn = ffn
        self._after = after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output for rows of the residual stream."""
        return self._after(self._ffn(self._before(x)))


class PostNormed:
    """A feed-forward part that norms its own input, and a norm after it."""

    def __init__(self, ffn: Ffn, after: RmsNorm) -> None:
        self._ffn = ffn
        self._after = after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output for rows of the residual stream."""
        return self._after(self._ffn(x))
