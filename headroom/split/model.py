"""Model: the layers of one stage, with embedding and head."""

from collections.abc import Sequence

import torch

from headroom.experts.cold import ColdExperts
from headroom.experts.decode import DecodeWorker
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.experts.taps import RouterTap
from headroom.kernels.cuda.sizes import is_decode
from headroom.layers.batch import Batch
from headroom.layers.block import Block
from headroom.layers.cuda_block import CudaBlock
from headroom.layers.modules import Embedding, Head
from headroom.layers.per_layer_inputs import PerLayerInputs
from headroom.layers.step_timing import begin_step
from headroom.layers.workspace import Workspace


class Model:
    """Runs steps through the blocks, which hold their own weights and caches."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        blocks: Sequence[Block],
        head: Head,
        workspace: Workspace,
        per_layer_inputs: PerLayerInputs | None = None,
        routing: RoutingStats | None = None,
        tap: RouterTap | None = None,
        cold_experts: ColdExperts | None = None,
    ) -> None:
        self._embedding = embedding
        self._blocks = blocks
        self._head = head
        self._workspace = workspace
        self._per_layer_inputs = per_layer_inputs
        self.routing = routing  # how often each expert of all layers was picked; None: no experts
        self.tap = tap  # records or replaces the picks of all routers; usually None
        self.cold_experts = cold_experts  # None if no expert is cold
        # Computes cold experts on the CPU for a GPU; None if no layer asks for it.
        worker = None if cold_experts is None else cold_experts.start()
        self.decode_worker: DecodeWorker | None = worker

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert is; None if no expert is cold."""
        return None if self.cold_experts is None else self.cold_experts.store

    @property
    def capturable(self) -> bool:
        """Whether a decode step can be captured: a CudaBlock never waits for the host."""
        return all(isinstance(block, CudaBlock) for block in self._blocks)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        wanted = self._workspace.outputs[: len(batch.output_rows)]
        return torch.index_select(self.run(batch), 0, batch.output_rows, out=wanted)

    def run(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of all its rows."""
        begin_step()
        self._workspace.check(len(batch.tokens))
        if self.tap is not None:
            self.tap.begin_step(batch)
        x = self._embedding(batch.tokens, self._workspace.stream[: len(batch.tokens)])
        if self._per_layer_inputs is not None:
            # A copy, because the first layer may change the stream in place.
            embedded = self._workspace.embedded[: len(x)].copy_(x)
            self._per_layer_inputs.prepare(batch.tokens, embedded)
        with self._workspace.lend():
            for block in self._blocks:
                x = block(x, batch)
        if self.cold_experts is not None and is_decode(len(x)):
            self.cold_experts.end_step(len(x))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some rows that `forward` returned.

        At most as many rows as sequences run together; they are valid until the next call.
        """
        return self._head(hidden, self._workspace.logits_for(len(hidden)))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return some rows that `forward` returned after the final norm."""
        return self._head.norm(hidden)
