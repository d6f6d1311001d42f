"""Drafts of a network in which some tokens are right because they are known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.layers.draft_network import Asked, Guessed
from headroom.llm import LLM

Notes = dict[tuple[int, ...], list[int]]  # the likeliest tokens that a network gave after each text


def write_draft(path: Path, taps: tuple[int, ...] = (0, 1, 3), seed: int = 5) -> Path:
    """Write a tiny DFlash draft that reads these layers of its target; its block has 4 tokens."""
    recipe = find_recipe("dflash", "tiny")
    dims = replace(recipe.dims, taps=len(taps))
    write_gguf(Source(replace(recipe, taps=taps, dims=dims), seed), path, "f32")
    return path


class ImposedNetwork:
    """Lets the draft network of an engine guess, and replaces some of its tokens by right ones.

    So accepted paths, and what a network keeps of them, can be tested although the weights are
    random. The network's own guesses are noted by the text before them.
    """

    def __init__(self, llm: LLM, texts: Sequence[Sequence[int]], right: float) -> None:
        self.notes: Notes = {}
        self._texts, self._right, self._chance = [tuple(text) for text in texts], right, Random(1)
        drafter: Any = llm.engine._drafting._drafter
        self._scheduler, self._guess = llm.engine._scheduler, drafter._guess
        drafter._guess = self.guess

    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        running = {sequence.state_slot: sequence for sequence in self._scheduler.running}
        found = []
        for one, guessed in zip(asked, self._guess(asked), strict=True):
            text = tuple(running[one.state_slot].tokens)
            assert (one.start, one.token) == (len(text) - 1, text[-1])
            own = guessed.tokens[:, 0].tolist()
            known = self.notes.setdefault(text, own)
            assert all(a == b for a, b in zip(known, own, strict=False)), len(text)
            self.notes[text] = max(known, own, key=len)
            found.append(replace(guessed, tokens=self._imposed(text, guessed.tokens.clone())))
        return found

    def _imposed(self, text: tuple[int, ...], tokens: torch.Tensor) -> torch.Tensor:
        coming = next((x[len(text) :] for x in self._texts if x[: len(text)] == text), ())
        for row, token in zip(tokens, coming, strict=False):
            if self._chance.random() < self._right and token not in row.tolist():
                row[min(self._chance.choice((0, 0, 1)), len(row) - 1)] = token
        return tokens
