"""The random values of each tensor, by its GGUF name, chosen so that activations stay in range."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from headroom.families.family import Recipe, Synthesis
from headroom.families.registry import find_family
from headroom.families.synth.blocks import (
    Bytes,
    Floats,
    as_plain,
    constant_bytes,
    normal_values,
    random_bytes,
    random_source,
)
from headroom.families.synth.routing import Skew
from headroom.families.tensors import inner_name
from headroom.formats.gguf_writer import TensorEntry
from headroom.formats.mixes import kept_in_f32
from headroom.formats.quants import F32, QuantType
from headroom.formats.writing import Job

PIECE_VALUES = 1 << 22  # about so many values are made by one job
GAIN = 0.5  # standard deviation of a matrix's output for inputs of standard deviation 1
HEAD_GAIN = 3.0  # standard deviation of logits: neither flat nor certain


@dataclass(frozen=True, slots=True)
class Source:
    """The random values of one model, determined by the seed alone in every type and format."""

    recipe: Recipe
    seed: int
    skew: Skew | None = None  # None: the router prefers no expert

    @property
    def _synthesis(self) -> Synthesis:
        return find_family(self.recipe.family).synthesis

    def jobs(self, entry: TensorEntry) -> Iterator[Job]:
        """Yield functions that each make a piece of a tensor's bytes, in order."""
        if is_vector(entry.name, entry.shape):
            yield lambda: as_plain(self.floats(entry.name, entry.shape), entry.quant)
            return
        slabs = entry.shape[0] if len(entry.shape) == 3 else 1
        for slab in range(slabs):
            yield from self.slab_jobs(entry, slab)

    def slab_jobs(self, entry: TensorEntry, slab: int) -> Iterator[Job]:
        """Yield the jobs of a matrix, or of one expert of a stack of matrices."""
        rows, width = entry.shape[-2:]
        step = max(1, PIECE_VALUES // width)
        for index, first in enumerate(range(0, rows, step)):
            count = min(step, rows - first)
            yield lambda index=index, count=count: self._rows(entry, slab, index, count)  # type: ignore[misc]

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return the values of a tensor as f32."""
        if not is_vector(name, shape):
            parts = [job() for job in self.jobs(TensorEntry(name, shape, F32))]
            return np.concatenate(parts).view(np.float32).reshape(shape)
        source = random_source(self.seed, zlib.crc32(name.encode()))
        normal = normal_values(prod(shape), source).reshape(shape)
        values = self._vector(inner_name(name), normal, source)
        return values if self.skew is None else self.skew.changed(name, values, self.seed)

    def _rows(self, entry: TensorEntry, slab: int, index: int, rows: int) -> Bytes:
        source = random_source(self.seed, zlib.crc32(entry.name.encode()), slab, index)
        width = entry.shape[-1]
        made = random_bytes(entry.quant, rows * width, self.spread(entry.name, width), source)
        skew = self.skew
        if skew is not None and not skew.by_bias and entry.name == "token_embd.weight":
            _overwrite(made.reshape(rows, -1), entry.quant, skew)
        return made

    def spread(self, name: str, fan_in: int) -> float:
        """Return the standard deviation of a matrix's values."""
        dims, inner = self.recipe.dims, inner_name(name)
        if inner == "output.weight" or (inner == "token_embd.weight" and dims.tied):
            return float(HEAD_GAIN / fan_in**0.5)
        if inner == "token_embd.weight":
            return 1.0
        if (own := self._synthesis.spread(inner, dims)) is not None:
            return own
        spread = GAIN / fan_in**0.5
        if self.skew is not None and inner.startswith(self.skew.quieted):
            spread *= self.skew.quiet
        return float(spread)

    def _vector(self, name: str, normal: Floats, source: np.random.Generator) -> Floats:
        """Return the values of a tensor that every mix keeps in f32."""
        own = self._synthesis.vector(name, normal, source)
        if own is not None:
            return own
        if name.startswith(("ffn_gate_inp.weight", "ffn_gate_inp_shexp", "ssm_conv1d")):
            return normal * np.float32(GAIN / int(normal.shape[-1]) ** 0.5)
        if name == "output_norm.weight" and self.recipe.dims.tied:
            # Without random signs, the logit of the input token would always be the largest.
            return np.where(source.random(normal.shape) < 0.5, -1 - 0.1 * normal, 1 + 0.1 * normal)
        return 1 + 0.1 * normal  # norms and scales


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is kept in f32 and made in one piece."""
    return kept_in_f32(inner_name(name), shape)


def _overwrite(rows: Bytes, quant: QuantType, skew: Skew) -> None:
    """Set the beacon channels of every row to the beacon's value."""
    blocks = -(-skew.channels // quant.block)
    constant = np.tile(constant_bytes(quant, skew.beacon), blocks)
    rows[:, : len(constant)] = constant
