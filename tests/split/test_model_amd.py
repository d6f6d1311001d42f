"""A model on the stand-in for an AMD GPU, from its file to its tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.request import SamplingParams
from headroom.engine.scheduler import Turn
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.triton import launch
from headroom.layers.modules import Embedding
from headroom.layers.weights import open_weights
from headroom.llm import LLM
from headroom.machine.devices import detect_cpu
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split.launch import start_pipeline
from tests.families.oracles import PROMPT, variant
from tests.running import PAGE_SIZE, running
from tests.stand_in.gpu import RADEON, Card, stand_in_gpu

pytestmark = pytest.mark.skipif(
    bool(launch.MISSING) or torch.cuda.is_available(), reason="needs triton, and no GPU"
)
RADEON_PRO = Card(product="AMD Radeon Pro VII", gfx="gfx906")  # the policy's type is f16
SMALL = {"context": 128, "parallel": 2, "chunk": 16, "dtype": "f32", "kv_type": "f32", "threads": 2}


def answers(path: Path, device: str, home: Path) -> list[tuple[int, ...]]:
    """Tokens of a greedy request and of a drawn one."""
    settings = {**SMALL, "device": device, "home": str(home)}
    if device == "cpu":
        settings["kernels"] = "reference"
    params = [SamplingParams(temperature=t, seed=3, max_tokens=3, ignore_eos=True) for t in (0, 1)]
    with LLM(str(path), **settings) as llm:
        return [llm.generate(PROMPT[:12], one)[0].token_ids for one in params]


def test_a_llama_has_the_tokens_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = variant("llama").save_gguf(tmp_path / "m.gguf", "MIXED")
    wanted = answers(path, "cpu", tmp_path)
    with stand_in_gpu(monkeypatch, RADEON) as gpu:
        assert answers(path, "hip:0", tmp_path) == wanted
    assert {"product", "attend", "rms_norm", "rope", "gated", "write", "embed"} <= gpu.kernels
    assert "hip:0 runs Triton's kernels and plain ones, which have run on no AMD GPU" in caplog.text
    assert "planned were" not in caplog.text


def logits_of(checkpoint: Checkpoint, **settings: str) -> torch.Tensor:
    """Read a prompt in several steps on stages of an AMD GPU; return the logits of each's end."""
    given = {"context": 128, "parallel": 2, "chunk": 16, "threads": 1, "kernels": "reference"}
    options, model = Options(**given, **settings), describe(checkpoint)  # type: ignore[arg-type]
    plan = make_plan([model.shape], plan_devices(options), options)
    assert {device.settings.compute_type for device in plan.devices} == {"f16"}
    if len(plan.devices) > 1:
        wanted = settings.get("activation_dtype", "f16")
        assert {device.settings.handover_type for device in plan.devices} == {wanted}
    pipeline = start_pipeline(plan, model)
    staging = sum(device.allocated["staging"] for device in plan.devices)
    assert pipeline.allocated["staging"] == staging  # with the buffers for rows in f16
    sequence, found = running(PROMPT, [1, 0]), []
    for rows in (9, 1, 6, 8):
        with torch.inference_mode():
            result = pipeline.step(make_batch([Turn(sequence, rows)], PAGE_SIZE))
            found += [result.logits([row]).clone() for row in range(len(result.tokens()))]
        sequence.cached += rows
    pipeline.close()
    return torch.cat(found)


@pytest.mark.parametrize("name", ["mistral", "qwen35moe"])
def test_stages_of_a_card_that_hands_rows_over_in_f16_have_the_logits_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf"))
    with stand_in_gpu(monkeypatch, RADEON_PRO):
        whole = logits_of(checkpoint, device="hip:0")
        split = logits_of(checkpoint, device="hip:0,hip:0")
        exact = logits_of(checkpoint, device="hip:0,hip:0", activation_dtype="f32")
    assert torch.equal(exact, whole)
    assert not torch.equal(split, whole)
    # One rounding of the stream to 11 bits; the layers after it enlarge the error.
    assert float((split - whole).norm() / whole.norm()) < 16 * 2**-11


def test_a_token_table_in_host_memory_is_not_pinned_and_its_rows_are_copied(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe(open_checkpoint(tiny_path))
    host = replace(detect_cpu(), name="host", runs_layers=False)
    settings = make_plan(
        [model.shape], [RADEON.spec, host], Options(context=128, dtype="f32")
    ).settings
    assert settings.kernels == "triton"
    tensors, ids = model.checkpoint.tensors, torch.tensor([5, 0, 7])
    wanted = open_weights(tensors, "cpu", settings, lambda line, size: None).table("embed")
    with stand_in_gpu(monkeypatch, RADEON) as gpu:
        source = open_weights(tensors, "hip:0", settings, lambda line, size: None)
        assert (source.case.device, source.case.torch_device) == ("hip", "cuda")
        table = source.table("embed", pinned=True)
        assert table.data.device.type == "cpu"
        out = torch.empty(3, table.columns, device="cuda")
        found = Embedding(table, source.case)(ids.to("cuda"), out).cpu()
    assert torch.equal(found, wanted.data[ids].float())
    assert not gpu.kernels
