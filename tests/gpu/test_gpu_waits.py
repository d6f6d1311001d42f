"""Long steps on a GPU let the host wait for nothing before their tokens are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.request import SamplingParams
from headroom.engine.scheduler import Turn
from headroom.layers.draws import Draw
from headroom.split.pipeline import Pipeline
from headroom.split.stage import StepResult
from tests.gpu.cold_cases import free_memory
from tests.gpu.running import open_pipeline, sequence
from tests.synth_models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# Linear attention with a dense part and with experts; windows with experts, and wide heads.
MODELS = ("qwen35-wide", "qwen35moe-wide", "laguna", "gemma4-wide")
SETTINGS = {"context": 1024, "parallel": 2, "chunk": 512, "dtype": "bf16", "kv_type": "bf16"}
PAGE, PAGES = 64, 16
# Steps of sequences with (rows, tokens before): many rows an expert and few, one that decodes, too.
STEPS = (((500, 0),), ((400, 500), (1, 300)), ((40, 0),))
LIKELIEST = SamplingParams(temperature=0)


@contextmanager
def waits_refused() -> Iterator[None]:
    """Let torch raise an error where the host would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(pipeline: Pipeline, step: tuple[tuple[int, int], ...]) -> StepResult:
    """Start one step that draws the token after its last row."""
    turns = []
    for slot, (rows, start) in enumerate(step):
        one = sequence(range(start + rows), range(slot * PAGES, (slot + 1) * PAGES), slot)
        one.cached = start
        turns.append(Turn(one, rows))
    batch = make_batch(turns, PAGE)
    draws: list[Draw | None] = [None] * len(batch.output_rows)
    draws[-1] = Draw(LIKELIEST, turns[-1].sequence.tokens)
    with torch.inference_mode():
        return pipeline.step(batch, draws)


@pytest.mark.parametrize("name", MODELS)
def test_a_long_step_waits_for_nothing_before_its_tokens_are_read(
    name: str, tmp_path: Path
) -> None:
    path = write_model(name, "q4_k_m", tmp_path, few_layers=True)
    pipeline, _ = open_pipeline(path, device="cuda:0", **SETTINGS)
    for step in STEPS:  # what is only done once may wait
        run(pipeline, step).tokens()
    found = []
    for step in STEPS:
        with waits_refused():
            result = run(pipeline, step)
        found.append(result.tokens()[-1])
    pipeline.close()
    del pipeline, result
    free_memory()
    assert len(found) == len(STEPS)
    assert None not in found  # they were drawn on the GPU


def test_waits_of_torch_are_noticed() -> None:
    x = torch.arange(3, device="cuda")
    for wait in (x.tolist, x.nonzero, lambda: x[x > 1], lambda: torch.tensor([1]).to("cuda")):
        with waits_refused(), pytest.raises(RuntimeError, match="synchronizing"):
            wait()
