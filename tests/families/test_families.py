"""Every family and variant against transformers, from both formats, with both sets of kernels."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from headroom.families.registry import RUNNABLE
from headroom.formats.checkpoint import Checkpoint
from tests.families.oracles import PROMPT, VARIANTS, oracle_greedy, oracle_logits, variant
from tests.running import greedy_tokens, run_steps

# The second half repeats the tokens of the first at other positions.
TEXT = PROMPT + PROMPT[::-1]
KERNELS = pytest.mark.parametrize("kernels", ["auto", "reference"])


def _cases() -> list[object]:
    """Return all variants; those of families that do not run are skipped."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                found.architecture not in RUNNABLE, reason=f"{found.architecture} does not run yet"
            ),
        )
        for name, found in VARIANTS.items()
    ]


@pytest.fixture(scope="module", params=_cases())
def name(request: pytest.FixtureRequest) -> str:
    """A variant's name."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def checkpoint(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """The variant's file in one format."""
    folder, found = tmp_path_factory.mktemp(name), variant(name)
    if request.param == "safetensors":
        return open_checkpoint(found.save_safetensors(folder / "m"))
    return open_checkpoint(found.save_gguf(folder / "m.gguf"))


def _assert_equal(logits: torch.Tensor, name: str, tokens: Sequence[int]) -> None:
    expected = oracle_logits(variant(name).model(), tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@KERNELS
@pytest.mark.parametrize("pieces", [[48], [1] * 48], ids=["whole", "decode"])
def test_logits_equal_transformers(
    name: str, checkpoint: Checkpoint, pieces: list[int], kernels: str
) -> None:
    logits = run_steps(checkpoint, [TEXT], [pieces], kernels=kernels)[0]
    _assert_equal(logits, name, TEXT)


@KERNELS
def test_a_mixed_batch_equals_transformers(name: str, checkpoint: Checkpoint, kernels: str) -> None:
    # Prompts are read in chunks while others decode; one begins and one ends between.
    prompts = [TEXT[:40], TEXT[5:36], TEXT[30:]]
    pieces = [[17, 1, 1, 1, 20], [1, 1, 29], [2, 13, 1, 1, 1]]
    steps = run_steps(checkpoint, prompts, pieces, kernels=kernels)
    for tokens, logits in zip(prompts, steps, strict=True):
        _assert_equal(logits, name, tokens)


def test_greedy_tokens_equal_transformers_over_64_tokens(name: str, checkpoint: Checkpoint) -> None:
    expected = oracle_greedy(variant(name).model(), PROMPT, 64)
    assert greedy_tokens(checkpoint, PROMPT, 64) == expected


@KERNELS
def test_quantised_weights_equal_their_dequantised_values(
    name: str, tmp_path: Path, kernels: str
) -> None:
    found = variant(name)
    path = found.save_gguf(tmp_path / "m.gguf", "MIXED")
    logits = run_steps(open_checkpoint(path), [TEXT], [[40, 1, 1, 6]], kernels=kernels)[0]
    expected = oracle_logits(found.dequantised_model(path), TEXT)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
