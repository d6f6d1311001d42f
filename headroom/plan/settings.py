"""PlanSettings: every setting of an engine that memory depends on; PlanRequest: what users ask.

PlanStage: a device that runs layers, with its own types and kernels.
"""

from dataclasses import dataclass

from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.devices import DeviceSpec
from headroom.plan.device_scratch import NARROW_TYPES
from headroom.plan.shape import LayerRange, ModelShape

PAGE_SIZE = 64  # tokens per page of the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """All settings that memory depends on, none left open."""

    context: int  # tokens one sequence may hold
    parallel: int  # sequences worked on together
    chunk: int  # prompt tokens of one step
    cache_tokens: int  # tokens of all sequences together, whole pages
    page_size: int = PAGE_SIZE
    k_type: str  # of cached keys
    v_type: str  # of cached values
    compute_type: str  # of the inputs of matrix products; "int8" and "int24" round them
    handover_type: str = "f32"  # of rows that one device hands to the next
    weights: str  # "packed" or "unpacked"
    threads: int  # of the CPU
    pin_threads: bool = False  # each thread on its own core
    kernels: str = "reference"  # or "native" (C++), "triton" or "cuda"
    unpack_bytes: int = 0  # most bytes of weights that a GPU unpacks at a time
    cold: str = "auto"  # who computes cold experts: "auto", "gpu" or "cpu"; "drop": left out
    pin_experts: bool = True  # pin the memory of cold experts, so that a GPU reads them in place
    keep_host_copy: bool = False  # keep hot experts in host memory, too
    worker: bool = False  # the stage has a process of its own, and sends rows to other processes
    # How slots of a GPU change hands within steps: "auto" or one of experts.cache.POLICIES. All but
    # "static" need copies of hot experts.
    expert_policy: str = "static"
    exact_batch: bool = False  # a step's rounding does not depend on who shares it
    prefix_cache: bool = True  # keep the prefixes of requests for later ones
    snapshots: int = 0  # of recurrent states and windows, in host memory
    host_pages: int = 0  # of kept prefixes, in host memory, for pages that leave the devices
    draft_tokens: int = 0  # most tokens that are guessed for a sequence at a time; 0: none
    mtp: bool = False  # the layer of the model that predicts further ahead guesses them

    @property
    def rows(self) -> int:
        """Rows of the largest step: one prompt chunk and one token of every sequence."""
        return self.chunk + self.parallel

    @property
    def verify_rows(self) -> int:
        """Rows of the largest step that verifies guesses; 0 without a draft.

        A sequence has a row for its last token and one for each guess. Such a step takes the decode
        path.
        """
        if not self.draft_tokens:
            return 0
        return min(DECODE_ROWS, self.parallel * (1 + self.draft_tokens), self.rows)

    @property
    def logits_rows(self) -> int:
        """Rows whose logits are computed together: of all sequences, or of all guesses."""
        return max(self.parallel, self.verify_rows)

    @property
    def stream_rows(self) -> int:
        """Rows of the residual stream: a captured step may have more rows than a small chunk."""
        return max(self.rows, DECODE_ROWS) if self.kernels == "cuda" else self.rows

    @property
    def uses_arena(self) -> bool:
        """Whether a GPU's fused kernels run the layers; one allocation holds their scratch."""
        return uses_arena(self.kernels, self.compute_type)

    def held(self, shape: ModelShape) -> ModelShape:
        """Return a model with the bytes of its weights as these kernels hold them."""
        return held_shape(shape, self.kernels, self.compute_type)

    @property
    def holds_cold(self) -> bool:
        """Whether host memory holds cold experts."""
        return holds_cold(self.cold, self.keep_host_copy)

    @property
    def expert_unpack_bytes(self) -> int:
        """Bytes of cold experts that a GPU unpacks at a time; 0 if its kernels unpack nothing."""
        return self.unpack_bytes if self.uses_arena else 0

    @property
    def pages(self) -> int:
        """Pages of each layer that sees the whole context."""
        return self.cache_tokens // self.page_size

    @property
    def draft_pages(self) -> int:
        """Pages of a draft network's cache: one more for each sequence, for what it guesses."""
        return self.pages + self.parallel

    @property
    def sequence_pages(self) -> int:
        """Pages of one sequence that fills the context."""
        return pages_for(self.context)

    def window_pages(self, window: int) -> int:
        """Return the pages of each layer with a window; older pages are used again.

        Every sequence that may run has its own, one more than the window and a chunk need, since
        neither starts at a page's edge.
        """
        per_sequence = pages_for(window + self.chunk) + 1
        return self.parallel * min(self.sequence_pages, per_sequence)


@dataclass(frozen=True, slots=True)
class PlanStage:
    """A device that runs layers, with its own types and kernels."""

    device: DeviceSpec
    settings: PlanSettings  # the same for all stages but for types and kernels
    model: ModelShape  # with the bytes of its weights as these kernels hold them


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Which layers' output rows are kept of every step, and in which type."""

    layers: tuple[int, ...]  # numbers in the model, in the order in which they are read
    type: str = "f32"  # f32, f16, bf16 or q8_0

    def within(self, layers: LayerRange) -> tuple[int, ...]:
        """Return those of the layers that lie in a range."""
        return tuple(layer for layer in self.layers if layers.first <= layer <= layers.last)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a user asks of a plan in addition to the engine's settings."""

    split: tuple[float, ...] = ()  # share of layers for each device; empty: by balance
    expert_bytes: int | None = None  # most bytes of hot experts; None: as many as fit
    published_activation: bool = False  # take the published formula for the workspace
    draft: ModelShape | None = None
    features: FeatureRequest | None = None  # None: no layer's output rows are kept
    snapshot_bytes: int = 0  # most host memory for snapshots
    most_snapshots: int = 0
    host_page_bytes: int = 0  # most host memory for snapshots and pages of kept prefixes together


def pages_for(tokens: int) -> int:
    """Return the pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)


def uses_arena(kernels: str, compute_type: str) -> bool:
    """Return whether a GPU's fused kernels run the layers."""
    return kernels == "cuda" and compute_type in NARROW_TYPES


def held_shape(shape: ModelShape, kernels: str, compute_type: str) -> ModelShape:
    """Return a model with the bytes of its weights as kernels hold them: in panels, tiles or rows.

    Panels are those of the C++ kernels, tiles those of a GPU's fused ones; the other kernels read
    rows as the file has them.
    """
    if kernels == "native":
        return shape.in_panels()
    return shape.in_tiles() if uses_arena(kernels, compute_type) else shape


def holds_cold(cold: str, keep_copy: bool) -> bool:
    """Return whether host memory holds cold experts: dropped experts are not held."""
    return cold != "drop" or keep_copy
