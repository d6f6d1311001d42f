"""Model: the layers of one stage, with the embedding if it is the first, the head if the last."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.experts.cold import ColdExperts
from headroom.experts.decode import DecodeWorker
from headroom.experts.stats import RoutingStats
from headroom.experts.store import ExpertStore
from headroom.experts.traces.taps import StageTap
from headroom.kernels.cuda.sizes import is_decode
from headroom.layers.batch import Batch
from headroom.layers.block import Block
from headroom.layers.cache import StageCaches
from headroom.layers.cuda_block import CudaBlock
from headroom.layers.draft_network import DraftNetwork
from headroom.layers.features import StageFeatures
from headroom.layers.guesses import Guesses
from headroom.layers.modules import Embedding, Head
from headroom.layers.per_layer_inputs import LayerInputs, PerLayerInputs
from headroom.layers.step_timing import begin_step
from headroom.layers.workspace import Workspace, copy_rows


@dataclass(frozen=True, slots=True, eq=False)
class HandedRows:
    """The rows of a step as one stage hands them to the next; valid until its next step begins."""

    stream: torch.Tensor  # [rows, hidden]: the residual stream, in the hand-over type
    # float32 [rows, layers, width]: the per-layer inputs of all later layers; None: there are none
    inputs: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are handed over."""
        return self.stream.nbytes + (0 if self.inputs is None else self.inputs.nbytes)


class Model:
    """Runs steps through the blocks, which hold their own weights and caches."""

    def __init__(
        self,
        *,
        embedding: Embedding | None,  # None: rows come from the stage before
        blocks: Sequence[Block],
        head: Head | None,  # None: rows go to the stage after
        workspace: Workspace,
        next_layer: int,  # the number of the first layer of the stage after
        per_layer_inputs: LayerInputs | None = None,
        routing: RoutingStats | None = None,
        tap: StageTap | None = None,
        cold_experts: ColdExperts | None = None,
        caches: StageCaches | None = None,
        features: StageFeatures | None = None,
        guesses: Guesses | None = None,
        draft_network: DraftNetwork | None = None,
    ) -> None:
        self.embedding = embedding
        self._blocks = self._layers = blocks
        self.features = features  # the output rows of some layers; None: nobody asked for any
        if features is not None:
            first = next_layer - len(blocks)
            self._layers = [features.keeping(first + at, x) for at, x in enumerate(blocks)]
        self.guesses = guesses  # keeps the accepted rows of guesses; None: steps have no guesses
        self.draft_network = draft_network  # learns every step; None: nothing here guesses
        self._head = head
        self._workspace = workspace
        self._next_layer = next_layer
        self.embed_s = 0.0  # seconds of the last step's embedding; on a GPU: of its launch
        self._per_layer_inputs = per_layer_inputs
        self.routing = routing  # how often each expert was picked; None: no experts in this stage
        self.tap = tap  # records or replaces the picks of the stage's routers; usually None
        self.cold_experts = cold_experts  # None if no expert is cold
        self.caches = caches or StageCaches((), (), 0, pin=False)
        # Computes cold experts on the CPU for a GPU; None if no layer asks for it.
        worker = None if cold_experts is None else cold_experts.start()
        self.decode_worker: DecodeWorker | None = worker

    @property
    def store(self) -> ExpertStore | None:
        """Where each expert is; None if no expert is cold."""
        return None if self.cold_experts is None else self.cold_experts.store

    @property
    def has_head(self) -> bool:
        """Whether this stage returns logits."""
        return self._head is not None

    @property
    def capturable(self) -> bool:
        """Whether a decode step can be captured: a CudaBlock never waits for the host."""
        return all(isinstance(block, CudaBlock) for block in self._blocks)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of the rows whose logits are wanted."""
        wanted = self._workspace.outputs[: len(batch.output_rows)]
        x = self.run(batch)
        torch.index_select(x, 0, batch.output_rows, out=wanted)
        if self.draft_network is not None:
            self.draft_network.learn(x, batch)
        return wanted

    def receive(self, handed: HandedRows) -> None:
        """Copy the rows of a step from the stage before; `run` reads them."""
        rows = len(handed.stream)
        self._workspace.check(rows)
        there = self._workspace.received
        there = self._workspace.stream if there is None else there
        copy_rows(there[:rows], handed.stream)
        if handed.inputs is not None:
            assert self._per_layer_inputs is not None
            self._per_layer_inputs.receive(handed.inputs)

    def run(self, batch: Batch) -> torch.Tensor:
        """Run one step; return the residual stream of all its rows."""
        begin_step()
        self._workspace.check(len(batch.tokens))
        if self.tap is not None:
            self.tap.begin_step(batch)
        x = self._first_rows(batch)
        with self._workspace.lend():
            for layer in self._layers:
                x = layer(x, batch)
        if self._workspace.handed is not None:
            self._workspace.handed[: len(x)].copy_(x)
        if self.cold_experts is not None and is_decode(len(x)):
            self.cold_experts.end_step(len(x))
        return x

    def _first_rows(self, batch: Batch) -> torch.Tensor:
        """Return the residual stream before the stage's first layer."""
        stream, received = self._workspace.stream[: len(batch.tokens)], self._workspace.received
        if self.embedding is None:
            return stream if received is None else stream.copy_(received[: len(stream)])
        started = time.perf_counter()
        x = self.embedding(batch.tokens, stream)
        if isinstance(self._per_layer_inputs, PerLayerInputs):
            # A copy, because the first layer may change the stream in place.
            embedded = self._workspace.embedded[: len(x)].copy_(x)
            self._per_layer_inputs.prepare(batch.tokens, embedded)
        self.embed_s = time.perf_counter() - started
        return x

    def handed(self, x: torch.Tensor, rows: int) -> HandedRows:
        """Return the first rows of a step for the stage after; `run` returned `x`."""
        handed = self._workspace.handed
        return HandedRows(
            stream=(x if handed is None else handed)[:rows],
            inputs=None
            if self._per_layer_inputs is None
            else self._per_layer_inputs.beginning_with(self._next_layer, rows),
        )

    def idle_rows(self) -> HandedRows:
        """Return what a full step would hand over, all zero, before any step has run."""
        rows = self.handed(self._workspace.stream, len(self._workspace.stream))
        rows.stream.zero_()
        if rows.inputs is not None:
            rows.inputs.zero_()
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` of some rows that `forward` returned.

        At most as many rows as sequences run together; they are valid until the next call.
        """
        assert self._head is not None, "only the last stage has logits"
        return self._head(hidden, self._workspace.logits_for(len(hidden)))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return some rows that `forward` returned after the final norm."""
        assert self._head is not None, "only the last stage has the final norm"
        return self._head.norm(hidden)
