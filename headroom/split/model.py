"""Model: a run of blocks, with embedding and head."""

from collections.abc import Set

import torch

from headroom.experts.cold import Hybrid
from headroom.experts.decode import ColdCompute
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.layers.batch import Batch
from headroom.layers.block import Layer
from headroom.layers.cuda_block import CudaBlock
from headroom.layers.modules import Embedding, Head
from headroom.layers.per_layer_inputs import PerLayerInputs
from headroom.layers.step_timing import begin_step
from headroom.layers.weights import KernelVariants
from headroom.layers.workspace import Workspace


class Model:
    """The whole network; blocks hold their own caches."""

    def __init__(
        self,
        embedding: Embedding,
        blocks: list[Layer],
        head: Head,
        workspace: Workspace,
        routing: RoutingStats | None = None,
        side: PerLayerInputs | None = None,
        hybrid: Hybrid | None = None,
    ) -> None:
        self._workspace = workspace
        self.to_compile: Set[KernelVariants] = frozenset()  # CUDA kernels that steps need
        self._embedding = embedding
        self._side = side
        self._blocks = blocks
        self._head = head
        self.routing = routing  # of all layers; None where there are no experts
        self.hybrid = hybrid  # None where no expert is cold
        # Where the CPU computes cold experts for a GPU.
        self.cold: ColdCompute | None = None if hybrid is None else hybrid.start()

    @property
    def store(self) -> ExpertStore | None:
        """Where experts are; None where none is cold."""
        return None if self.hybrid is None else self.hybrid.store

    @property
    def capturable(self) -> bool:
        """Whether a step on a GPU never waits for the host: only the fused layers keep to that."""
        return all(isinstance(block, CudaBlock) for block in self._blocks)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        wanted = self._workspace.outputs[: len(batch.output_rows)]
        return torch.index_select(self.run(batch), 0, batch.output_rows, out=wanted)

    def run(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of all its rows."""
        begin_step()
        self._workspace.check(len(batch.tokens))
        x = self._embedding(batch.tokens, self._workspace.stream[: len(batch.tokens)])
        if self._side is not None:
            # A copy: the first layers may change the stream where it lies.
            embedded = self._workspace.embedded[: len(x)].copy_(x)
            self._side.prepare(batch.tokens, embedded)
        with self._workspace.lend():
            for block in self._blocks:
                x = block(x, batch)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some rows that `forward` returned.

        At most as many rows as sequences run together; they are valid until the next call.
        """
        return self._head(hidden, self._workspace.logits_for(len(hidden)))
