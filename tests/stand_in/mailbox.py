"""The stand-in GPU's side of the mailbox between a GPU and the CPU thread for cold experts."""

import time

import torch

from headroom.kernels.cuda.handover import WORDS, Mailbox

WAIT_S = 20.0  # that an answer is waited for


class MailboxGpu:
    """The GPU's side of the mailbox: plain writes in the GPU's order."""

    def __init__(self, box: Mailbox) -> None:
        self._box, self._words, self.number = box, box.words.numpy(), 0

    def ask(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Write a request, and its number last."""
        floats = self._words.view("float32")
        self._words[WORDS["LAYER"]], self._words[WORDS["ROWS"]] = layer, len(x)
        self._words[WORDS["IDS"] : WORDS["IDS"] + ids.numel()] = ids.flatten().numpy()
        floats[WORDS["WEIGHTS"] : WORDS["WEIGHTS"] + weights.numel()] = weights.flatten().numpy()
        floats[WORDS["INPUTS"] : WORDS["INPUTS"] + x.numel()] = x.flatten().numpy()
        self.number += 1
        self._words[WORDS["REQUEST"]] = self.number

    def answer(self, rows: int) -> torch.Tensor:
        """Wait for the answer to the last request."""
        until = time.monotonic() + WAIT_S
        while self._words[WORDS["ANSWER"]] != self.number:
            assert time.monotonic() < until, "no answer"
            time.sleep(0)
        return self._box.answers[:rows].clone()

    def end_step(self) -> None:
        """Report the end of a step."""
        self._words[WORDS["DONE"]] += 1
