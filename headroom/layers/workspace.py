"""Workspace: memory of one stage, allocated once and reused by every step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from headroom.errors import CapacityError
from headroom.kernels.cuda.scratch import Arena, opened
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.plan.settings import PlanSettings


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The buffers of a step; their contents are valid until the next step."""

    stream: torch.Tensor  # float32 [rows, hidden]: the residual stream
    outputs: torch.Tensor  # float32 [rows, hidden]: the rows of `stream` that get logits
    embedded: torch.Tensor  # float32 [rows, hidden]: the stream before the first layer; or empty
    logits: torch.Tensor  # float32 [sequences, vocabulary]
    scratch: torch.Tensor  # bytes for C++ or CUDA kernels; empty for others
    arena: Arena | None = None  # lends the scratch to CUDA kernels

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
    hidden: int,
    vocab: int,
    settings: PlanSettings,
    scratch_bytes: int,
    count: Callable[[str, int], None],
    keeps_embedding: bool = False,
    device: str = "cpu",
) -> Workspace:
    """Allocate the workspace that the plan's staging, logits and workspace lines count."""
    rows = settings.stream_rows
    stream, outputs = (torch.empty(rows, hidden, device=device) for _ in range(2))
    embedded = torch.empty(rows if keeps_embedding else 0, hidden, device=device)
    captured = DECODE_ROWS if settings.kernels == "cuda" else 0
    logits = torch.empty(max(settings.parallel, captured), vocab, device=device)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    count("staging", stream.nbytes + outputs.nbytes + embedded.nbytes)
    count("logits", logits.nbytes)
    if scratch_bytes:
        count("workspace", scratch.nbytes)
    arena = Arena(scratch, settings.unpack_bytes) if settings.uses_arena else None
    return Workspace(stream, outputs, embedded, logits, scratch, arena)
