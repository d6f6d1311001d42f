"""Model: a run of blocks, with embedding and head."""

import torch

from headroom.layers.batch import Batch
from headroom.layers.block import Block
from headroom.layers.embedding import Embedding, Head


class Model:
    """The whole network; blocks hold their own caches."""

    def __init__(self, embedding: Embedding, blocks: list[Block], head: Head) -> None:
        self._embedding = embedding
        self._blocks = blocks
        self._head = head

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        x = self._embedding(batch.tokens)
        for block in self._blocks:
            x = block(x, batch)
        return x[batch.output_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some rows that `forward` returned."""
        return self._head(hidden)
