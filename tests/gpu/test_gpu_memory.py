"""What an engine takes of a GPU, against its plan, at short and long contexts."""

from pathlib import Path

import pytest
import torch

from tests.gpu.check_memory import CONTEXTS, ENOUGH, Load, run_steps, torch_bytes, written
from tests.gpu.cold_cases import free_memory
from tests.gpu.running import open_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of true width, with experts."""
    return written("35b", tmp_path_factory.mktemp("memory"), full=False)


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_engine_takes_what_is_planned_and_no_more(path: Path, context: int) -> None:
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pipeline, plan = open_pipeline(path, device="cuda:0", **Load(context).settings)
    run_steps(pipeline, plan)
    peak, most = torch.cuda.max_memory_allocated() - before, torch_bytes(plan.devices[0])
    pipeline.close()
    del pipeline
    free_memory()
    assert ENOUGH * most <= peak <= most
