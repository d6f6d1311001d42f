"""Models whose prediction head is often right by construction, though their weights are random."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import cut, find_recipe, with_mtp
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf


def write_right_head(family: str, path: Path, *, noise: float, trunk: float = 0.2) -> Path:
    """Write a small model whose head guesses as its own layers do, but for some noise.

    The layers add `trunk` of what they usually add to the embedded token, so that the next token
    is nearly a function of the last one. The head passes the embedding on, and has the model's own
    last norm: without `noise` it is the same function. The noise is what the head's layer and the
    hidden state before the token add; it depends on all that the head knows of the sequence.
    """
    recipe = find_recipe(family, "tiny")
    recipe = with_mtp(replace(recipe, dims=cut(recipe.dims, 4)))
    write_gguf(Source(recipe, seed=3), path, "f32")
    dims, tensors = recipe.dims, open_checkpoint(path).tensors

    def floats(name: str) -> np.ndarray:
        info = tensors[name]
        return np.memmap(info.path, np.float32, "r+", info.offset, info.shape)

    adding = ("attn.out", "delta.out", "ffn.down", "ffn.experts.down", "ffn.shared.down")
    for name in tensors:
        if name.endswith(adding):
            own = name.startswith(f"layers.{dims.layers}.")
            floats(name)[:] *= 4 * noise if own else trunk
    head = f"layers.{dims.layers}.mtp."
    proj = floats(f"{head}proj")
    proj[:, : dims.hidden] = np.eye(dims.hidden)
    proj[:, dims.hidden :] *= noise
    floats(f"{head}embed_norm")[:] = 1
    floats(f"{head}norm")[:] = floats("norm")
    return path
