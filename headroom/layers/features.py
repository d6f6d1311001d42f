"""Features: the residual stream after some layers, which a draft model reads of every step.

What is kept is planned and allocated before the first step, at fixed addresses, so that a captured
step contains the copies. Without a `FeatureRequest` nothing here is used.
"""

from collections.abc import Callable, Sequence

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.quantise import quantise
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.batch import Batch
from headroom.layers.block import Block
from headroom.plan.settings import FeatureRequest

# Rows that are quantised at a time: what that takes besides is then as little as in a decode step.
QUANTISED_ROWS = 32


class FeatureRows:
    """The output rows of some layers of one stage, of the last step."""

    def __init__(
        self,
        layers: Sequence[int],  # numbers in the model
        kind: str,  # type of the kept values: f32, f16, bf16 or q8_0
        hidden: int,
        # Returns them: [rows, layers, hidden], or for q8_0 uint8 [rows, layers, bytes].
        find: Callable[[], torch.Tensor],
    ) -> None:
        self.layers, self.hidden = tuple(layers), hidden
        self._quant, self._plain = BY_NAME[kind], kind in PLAIN_TYPES
        self._find = find

    def stored(self, layer: int, rows: int) -> torch.Tensor:
        """Return the first rows of a layer as they are kept: floats, or bytes of q8_0 blocks."""
        return self._find()[:rows, self.layers.index(layer)]

    def read(self, layer: int, rows: int, first: int = 0) -> torch.Tensor:
        """Return rows of a layer from a first one on, float32 `[rows, hidden]`, on its device."""
        stored = self.stored(layer, first + rows)[first:]
        return stored.float() if self._plain else dequantise(stored, self._quant, self.hidden)


class StageFeatures(FeatureRows):
    """The output rows of those layers of one stage that a caller asked for, as the stage keeps."""

    def __init__(
        self,
        layers: Sequence[int],
        kind: str,
        rows: int,  # most rows of a step, with padding
        hidden: int,
        device: str,  # torch's name
    ) -> None:
        super().__init__(layers, kind, hidden, lambda: self._kept)
        width = hidden if self._plain else self._quant.bytes_for(hidden)
        dtype = PLAIN_TYPES.get(kind, torch.uint8)
        self._kept = torch.zeros(rows, len(self.layers), width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return self._kept.nbytes

    def first_rows(self, rows: int) -> torch.Tensor:
        """Return the first rows of all layers as they are kept, for another process."""
        return self._kept[:rows]

    def keeping(self, layer: int, block: Block) -> Block:
        """Return a layer that also keeps its output rows, if it is one of those asked for."""
        if layer not in self.layers:
            return block
        place = self._kept[:, self.layers.index(layer)]
        return _KeepingBlock(block, lambda x: self._keep(x, place))

    def _keep(self, x: torch.Tensor, place: torch.Tensor) -> None:
        if self._plain:
            place[: len(x)].copy_(x)
            return
        for first in range(0, len(x), QUANTISED_ROWS):
            part = x[first : first + QUANTISED_ROWS]
            place[first : first + len(part)].copy_(quantise(part, self._quant))


class _KeepingBlock:
    """A layer whose output rows are kept."""

    def __init__(self, block: Block, keep: Callable[[torch.Tensor], None]) -> None:
        self._block, self._keep = block, keep

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the residual stream after the layer."""
        x = self._block(x, batch)
        self._keep(x)
        return x


class ModelFeatures:
    """The features of a whole model, on whichever stages its layers lie.

    They are those of the last step that was launched, row by row as in its batch, and stay valid
    until the next step is launched. Work that reads them must be launched before that.
    """

    def __init__(self, request: FeatureRequest, stages: Sequence[FeatureRows]) -> None:
        self.request = request
        self._stage_of = {layer: stage for stage in stages for layer in stage.layers}
        self.settle: Callable[[], None] = lambda: None  # lets all stages run the last step

    def stored(self, layer: int, rows: int) -> torch.Tensor:
        """Return the first rows of a layer in the type that was asked for, on its stage's device.

        Rows of q8_0 are bytes: blocks of 34 bytes for 32 values.
        """
        self.settle()
        return self._stage_of[layer].stored(layer, rows)

    def read(self, rows: int, device: str, first: int = 0) -> torch.Tensor:
        """Return rows of all layers from a first one on, float32 `[rows, layers, hidden]`.

        The layers have the order of the request. A copy to the host waits for the step.
        """
        self.settle()
        stages = self._stage_of
        found = [stages[layer].read(layer, rows, first) for layer in self.request.layers]
        return torch.stack([part.to(device) for part in found], dim=1)
