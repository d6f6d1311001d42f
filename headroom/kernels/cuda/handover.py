"""Cold experts handed to CPU threads from inside a captured step, through pinned memory."""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda.compile import compile_kernel

MOST_ROWS, MOST_USED = 32, 32  # of a step, and experts of a row
LIMIT_MS = 10_000  # the longest that a GPU waits for an answer
_LINE = 32  # words of a cache line, twice over: words that two sides write lie apart
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
COUNTS = ("hot_ns", "wait_ns", "gpu_picks")  # of each layer


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Memory that a GPU and the host's threads share, and what the GPU keeps for itself."""

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
        """Where its parts lie in host memory, in the order of `WORDS`, then the answers."""
        first = self.words.data_ptr()
        return [*(first + 4 * word for word in WORDS.values()), self.answers.data_ptr()]

    @property
    def failed(self) -> bool:
        """Whether a GPU gave up waiting, or a thread of the host failed."""
        return bool(self.words[WORDS["FAILED"]])


@dataclass(frozen=True, slots=True, eq=False)
class Takers:
    """Who computes a layer's picks; both tensors lie on the GPU."""

    is_hot: torch.Tensor  # int32 [experts]: 1 in GPU memory, 0 in host memory
    left: torch.Tensor  # int32 [used + 1]: of so many cold picks of a row, those left to the GPU


def publish(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    takers: Takers,
    box: Mailbox,
    layer: int,
) -> None:
    """Ask the CPU for its picks of a layer's rows; their ids become -1 where they stand."""
    (rows, used), hidden = ids.shape, x.shape[1]
    assert rows <= MOST_ROWS
    assert used <= MOST_USED
    assert hidden == box.hidden
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    compile_kernel("handover.cu", "publish", WORDS)(
        (1,),
        (MOST_ROWS * 32,),
        (
            *(x, ids, weights, takers.is_hot, takers.left, rows, used, hidden, layer),
            *(box.words, box.own, box.counts[layer]),
        ),
        early=True,
    )


def collect(
    out: torch.Tensor, box: Mailbox, layer: int, *, last: bool, limit_ms: int = LIMIT_MS
) -> None:
    """Wait for what the CPU was asked in a layer, and add it to `out [rows, hidden]`.

    `last` ends the step: no layer after this one asks the CPU. Engines wait for as long as
    LIMIT_MS; tests that provoke its end have less time.
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
    """Leave cold picks out, in place: the others' weights grow so that a row's sum stays."""
    rows, used = ids.shape
    compile_kernel("handover.cu", "drop", WORDS)(
        (-(-rows // 4),), (128,), (ids, weights, is_hot, rows, used), early=True
    )


def read_all(data: torch.Tensor, out: torch.Tensor) -> None:
    """Read all bytes of pinned memory by a kernel, to see how fast that is."""
    compile_kernel("handover.cu", "read_all", WORDS)(
        (4 * 132,), (512,), (data, data.nbytes // 16, out)
    )
