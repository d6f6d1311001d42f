"""The memory of a step: nothing is written beyond it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.errors import CapacityError
from headroom.families.config import ModelConfig
from headroom.families.files import open_checkpoint
from headroom.formats.quants import F32
from headroom.kernels.native import matmul
from headroom.kernels.native.module import MODULE
from headroom.kernels.weight import Weight
from headroom.layers.workspace import Workspace, open_workspace
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.lines import StagePlace
from headroom.plan.plan import make_plan
from headroom.units import MIB
from tests.plan.shapes import gpu, host
from tests.running import run_steps
from tests.tiny import llama_config, random_model, save_gguf


def workspace(rows: int, sequences: int) -> Workspace:
    return Workspace(*(torch.empty(rows, 4) for _ in range(3)), torch.empty(sequences, 9),
                     torch.empty(0))  # fmt: skip


def test_a_step_of_more_rows_than_planned_is_refused() -> None:
    workspace(3, 1).check(3)
    with pytest.raises(CapacityError, match=r"has 4 rows and memory was planned for 3\..*smaller"):
        workspace(3, 1).check(4)


def test_more_logits_than_planned_are_refused() -> None:
    assert workspace(3, 2).logits_for(2).shape == (2, 9)
    with pytest.raises(CapacityError, match=r"3 rows of logits.*planned for 2\..*smaller runs"):
        workspace(3, 2).logits_for(3)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_model_refuses_a_step_that_its_plan_has_no_memory_for(
    tmp_path: Path, kernels: str
) -> None:
    checkpoint = open_checkpoint(save_gguf(random_model(llama_config()), tmp_path / "m.gguf"))
    with pytest.raises(CapacityError, match="A step has 60 rows"):
        run_steps(checkpoint, [list(range(60))], [[60]], kernels=kernels, chunk=16)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_no_kernel_writes_beyond_the_memory_that_it_is_given() -> None:
    weight = matmul.prepare(Weight(torch.randn(5, 8), F32, 5, 8))
    with pytest.raises(ValueError, match=r"\(3, 5\) does not fit into memory of \(2, 5\)"):
        matmul.matmul_f32(torch.randn(3, 8), weight, "f32", torch.empty(2, 5))
    with pytest.raises(ValueError, match=r"\(3, 8\) does not fit into memory of \(2, 8\)"):
        matmul.embed(torch.tensor([0, 1, 2]), weight, torch.empty(2, 8))


@pytest.mark.parametrize(
    ("name", "whole_mib", "handed_mib", "embeds"),
    [
        # The published figures are of 262144 rows: 10240, 4096 and 16128 MiB in f32.
        ("qwen3.6-27b", 10240 / 512, 5, False),
        ("laguna-xs.2", 4096 / 512, 2, False),
        ("gemma-4-31b", 16128 / 512, 5.25, True),
    ],
)
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_the_buffers_between_stages_have_the_published_sizes_a_chunk_and_not_a_prompt(
    name: str, whole_mib: float, handed_mib: float, embeds: bool, kind: str
) -> None:
    shape = known_shape(f"{name}:q4_k_m")
    config = ModelConfig("any", name, shape.hidden, 8, 1e-6, 262144, tied=False, layers=(),
                         keeps_embedding=embeds)  # fmt: skip
    options = Options(context=shape.context_limit, parallel=1, chunk=511, activation_dtype=kind)
    sizes: dict[int, list[float]] = {}
    for stages in (1, 2, 3):
        devices = [gpu(80, f"cuda:{number}") for number in range(stages)]
        plan = make_plan([shape], [*devices, host(64)], options)
        sizes[stages] = []
        for device in plan.devices:
            taken: Counter[str] = Counter()
            place = StagePlace.of(device.layers, len(shape.layers))
            open_workspace(config, place, device.settings, 0, _counter(taken))
            assert taken["staging"] == device.allocated["staging"]
            sizes[stages].append(taken["staging"] / MIB)
    stream = shape.hidden * 512 * 4 / MIB
    handed = handed_mib if kind != "f32" else 0
    assert sizes[1] == [whole_mib]
    assert sizes[2] == [whole_mib - stream + handed, 2 * stream + handed]
    assert sizes[3] == [sizes[2][0], stream + 2 * handed, sizes[2][1]]


def _counter(taken: "Counter[str]") -> Callable[[str, int], None]:
    def count(line: str, size: int) -> None:
        taken[line] += size

    return count
