"""Hand-over: a captured step asks CPU threads for cold experts through pinned memory."""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda.compile import compile_kernel

MOST_ROWS, MOST_USED = 32, 32  # rows of a step, and picks of a row
LIMIT_MS = 10_000  # the longest time that a GPU waits for an answer
_LINE = 32  # words of two cache lines: words that different sides write do not share a line
WORDS = {
    "REQUEST": 0,
    "ANSWER": _LINE,
    "LAYER": 2 * _LINE,
    "ROWS": 2 * _LINE + 1,
    "DONE": 3 * _LINE,
    "FAILED": 4 * _LINE,
    "IDS": 5 * _LINE,
    "WEIGHTS": 5 * _LINE + MOST_ROWS * MOST_USED,
    "INPUTS": 5 * _LINE + 2 * MOST_ROWS * MOST_USED,
}
_OWNWORDS = 8 + MOST_ROWS
# Counters of each layer. `gpu_picks` counts the cold experts that cross the link, each once a step.
COUNTS = ("hot_ns", "wait_ns", "gpu_picks", "late_ns", "lates")


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Pinned memory that a GPU and CPU threads share, and the GPU's own state and counters."""

    hidden: int
    words: torch.Tensor  # int32 in pinned memory: flags, picks, input rows
    answers: torch.Tensor  # float32 [MOST_ROWS, hidden] in pinned memory
    own: torch.Tensor  # int32 on the GPU
    counts: torch.Tensor  # int64 [layers, len(COUNTS)] on the GPU

    @classmethod
    def allocate(cls, hidden: int, layers: int, device: str) -> "Mailbox":
        """Return an empty mailbox."""
        pinned = torch.device(device).type == "cuda"
        size = WORDS["INPUTS"] + MOST_ROWS * hidden
        return cls(
            hidden,
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned),
            torch.zeros(MOST_ROWS, hidden, pin_memory=pinned),
            torch.zeros(_OWNWORDS, dtype=torch.int32, device=device),
            torch.zeros(layers, len(COUNTS), dtype=torch.int64, device=device),
        )

    @property
    def addresses(self) -> list[int]:
        """The addresses of the parts in host memory, in the order of `WORDS`, then the answers."""
        first = self.words.data_ptr()
        return [*(first + 4 * word for word in WORDS.values()), self.answers.data_ptr()]

    @property
    def failed(self) -> bool:
        """Whether the GPU gave up waiting, or a CPU thread failed."""
        return bool(self.words[WORDS["FAILED"]])


def collect(
    out: torch.Tensor, box: Mailbox, layer: int, *, last: bool, limit_ms: int = LIMIT_MS
) -> None:
    """Wait for the CPU's answer in a layer, if it was asked, and add it to `out [rows, hidden]`.

    `last` ends the step: no layer after this one asks the CPU. Only tests of the time limit pass
    another `limit_ms`.
    """
    rows, hidden = out.shape
    assert out.is_contiguous()
    compile_kernel("handover.cu", "collect", WORDS)(
        (rows,),
        (512,),
        (
            *(out, box.answers, box.words, box.own, box.counts[layer], hidden, limit_ms),
            int(last),
        ),
        early=True,
    )


def drop(ids: torch.Tensor, weights: torch.Tensor, is_hot: torch.Tensor) -> None:
    """Remove cold picks in place; a row's other weights grow so that their sum stays the same."""
    rows, used = ids.shape
    compile_kernel("handover.cu", "drop", WORDS)(
        (-(-rows // 4),), (128,), (ids, weights, is_hot, rows, used), early=True
    )


def read_all(data: torch.Tensor, out: torch.Tensor) -> None:
    """Read pinned memory in a kernel, which a measurement times."""
    compile_kernel("handover.cu", "read_all", WORDS)(
        (4 * 132,), (512,), (data, data.nbytes // 16, out)
    )
