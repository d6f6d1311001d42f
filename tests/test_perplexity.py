"""8-bit activations cost next to nothing: perplexity over real text against float products."""

import inspect
import math
import textwrap
from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.native.module import MODULE
from headroom.text.tokenizer import Tokenizer
from tests.running import PAGE_SIZE, open_pipeline, running

ROOT = Path(__file__).parents[1]
TEXT_BYTES = 20_000
WINDOW = 512  # tokens that are read together


def perplexity(checkpoint: Checkpoint, tokens: list[int], dtype: str) -> float:
    """Return the model's perplexity over the tokens, in windows that each start anew."""
    pipeline = open_pipeline(
        checkpoint, context=WINDOW, parallel=64, cache_tokens=WINDOW, dtype=dtype
    )
    total, count = 0.0, 0
    for first in range(0, len(tokens) - 1, WINDOW):
        window = tokens[first : first + WINDOW]
        sequence = running(window, list(range(WINDOW // PAGE_SIZE)))
        with torch.inference_mode():
            hidden = pipeline.forward(make_batch([Turn(sequence, len(window))], PAGE_SIZE))
            for row in range(0, len(window) - 1, 64):
                rows = pipeline.logits(hidden[row : row + 64]).log_softmax(-1)
                following = torch.tensor(window[row + 1 : row + 65])
                total -= float(rows[: len(following)].gather(1, following[:, None]).sum())
                count += len(following)
    return math.exp(total / count)


@pytest.mark.slow
@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_8_bit_activations_change_perplexity_by_less_than_half_a_percent(
    smollm2_path: Path,
) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    # Prose and code that do not change with this project.
    text = ((ROOT / "LICENSE").read_text() + inspect.getsource(textwrap))[:TEXT_BYTES]
    assert len(text.encode()) >= TEXT_BYTES
    tokens = Tokenizer.from_checkpoint(checkpoint).encode(text)
    exact, rounded = (perplexity(checkpoint, tokens, dtype) for dtype in ("f32", "int8"))
    assert abs(rounded / exact - 1) < 0.005, (exact, rounded)
