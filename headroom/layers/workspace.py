"""Workspace: memory of one stage, allocated once and reused by every step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from headroom.errors import CapacityError
from headroom.families.config import ModelConfig
from headroom.kernels.cuda.scratch import Arena, opened
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.weight import plain_type
from headroom.plan.lines import StagePlace
from headroom.plan.settings import PlanSettings


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The buffers of a step; their contents are valid until the next step."""

    stream: torch.Tensor  # float32 [rows, hidden]: the residual stream
    outputs: torch.Tensor  # float32 [rows, hidden]: the rows of `stream` that get logits; or empty
    embedded: torch.Tensor  # float32 [rows, hidden]: the stream before the first layer; or empty
    logits: torch.Tensor  # float32 [sequences, vocabulary]; empty without a head
    scratch: torch.Tensor  # bytes for C++ or CUDA kernels; empty for others
    arena: Arena | None = None  # lends the scratch to CUDA kernels
    # Rows in the hand-over type, `[rows, hidden]`: from the stage before, and for the stage after.
    # None: there is no such stage, or rows are handed over in float32, without a copy of their own.
    received: torch.Tensor | None = None
    handed: torch.Tensor | None = None

    def check(self, rows: int) -> None:
        """Refuse a step of more rows than were planned: a kernel would write beyond a buffer."""
        if rows > len(self.stream):
            raise CapacityError(
                f"A step has {rows} rows and memory was planned for {len(self.stream)}.",
                hint="Run it in smaller steps, or plan for a larger chunk.",
            )

    def lend(self) -> AbstractContextManager[None]:
        """Let CUDA kernels take their buffers from `scratch` within the context."""
        return opened(self.arena)

    def logits_for(self, rows: int) -> torch.Tensor:
        """Return memory for the logits of `rows` rows."""
        if rows > len(self.logits):
            raise CapacityError(
                f"{rows} rows of logits were asked for, memory was planned for {len(self.logits)}.",
                hint="Ask for them in smaller runs, or plan for more sequences together.",
            )
        return self.logits[:rows]


def open_workspace(
    config: ModelConfig,
    place: StagePlace,
    settings: PlanSettings,
    scratch_bytes: int,
    count: Callable[[str, int], None],
    device: str = "cpu",
) -> Workspace:
    """Allocate the workspace that the plan's staging, logits and workspace lines count."""
    rows, hidden = settings.stream_rows, config.hidden

    def buffer(kept: bool, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows if kept else 0, hidden, dtype=kind, device=device)

    stream, outputs = buffer(True), buffer(place.ends)
    if not place.begins:
        # Padding rows of captured steps read what lies here; kernels expect numbers.
        stream.zero_()
    embedded = buffer(place.begins and config.keeps_embedding)
    narrow, received, handed = plain_type(settings.handover_type), None, None
    if settings.handover_type != "f32":
        received = None if place.begins else buffer(True, narrow).zero_()
        handed = None if place.ends else buffer(True, narrow)
    logits_rows = 0
    if place.ends:
        captured = DECODE_ROWS if settings.kernels == "cuda" else 0
        logits_rows = max(settings.logits_rows, captured)
    logits = torch.empty(logits_rows, config.vocab, device=device)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    staging = (stream, outputs, embedded, *(x for x in (received, handed) if x is not None))
    count("staging", sum(part.nbytes for part in staging))
    count("logits", logits.nbytes)
    if scratch_bytes:
        count("workspace", scratch.nbytes)
    arena = Arena(scratch, settings.unpack_bytes) if settings.uses_arena else None
    return Workspace(stream, outputs, embedded, logits, scratch, arena, received, handed)


def copy_rows(there: torch.Tensor, here: torch.Tensor) -> None:
    """Copy rows from one device to another.

    Between two GPUs, and within one, the copy runs behind the work of both. A CPU waits for it:
    it works with the rows at once, or overwrites them in its next step.
    """
    there.copy_(here, non_blocking=there.device.type != "cpu" and here.device.type != "cpu")
