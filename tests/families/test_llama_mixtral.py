"""What sets Mixtral apart from other families: names of its experts in files old and new."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import read_dims
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.families import family_gguf
from tests.families.family_gguf import Values
from tests.families.oracles import PROMPT, oracle_logits, variant
from tests.families.test_mistral import gguf_name
from tests.optional import optional
from tests.running import run_steps
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import run_on_gpu

gguf = optional("gguf")


def one_by_one(tensors: dict[str, Values]) -> dict[str, Values]:
    """Cut stacks of experts into one tensor for each expert, as the first converters wrote them."""
    cut: dict[str, Values] = {}
    for name, values in tensors.items():
        if "_exps" not in name:
            cut[name] = values
            continue
        for expert, matrix in enumerate(values):
            cut[name.replace("_exps", f".{expert}")] = np.ascontiguousarray(matrix)
    return cut


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of the first kind."""
    stacked = family_gguf.to_gguf
    monkeypatch.setattr(
        family_gguf, "to_gguf", lambda model, fused: one_by_one(stacked(model, fused))
    )
    return variant("mixtral").save_gguf(tmp_path / "old.gguf", "Q5_0")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_file_with_one_tensor_for_each_expert_equals_one_with_stacks(
    old_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.undo()
    old = open_checkpoint(old_file)
    stacked = variant("mixtral").save_gguf(tmp_path / "new.gguf", "Q5_0")
    new = open_checkpoint(stacked)
    assert "layers.0.ffn.experts.7.down" in old.tensors
    assert "layers.0.ffn.experts.down" in new.tensors
    assert read_dims(old.header) == read_dims(new.header)
    assert logits_of(old, kernels).equal(logits_of(new, kernels))
    expected = oracle_logits(variant("mixtral").dequantised_model(stacked), PROMPT)
    torch.testing.assert_close(logits_of(old, kernels), expected, atol=1e-4, rtol=0)


def test_cold_experts_of_a_file_with_one_tensor_for_each_change_nothing(
    old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, prompts, pieces = open_checkpoint(old_file), [PROMPT[:5]], [4, 1]
    with stand_in_gpu(monkeypatch):
        wanted = run_on_gpu(checkpoint, prompts, pieces, kernels="reference")
        for cold in ("cpu", "gpu"):
            found = run_on_gpu(
                checkpoint, prompts, pieces, kernels="reference", expert_budget="40%", cold=cold
            )
            assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


def logits_of(checkpoint: Checkpoint, kernels: str) -> torch.Tensor:
    return run_steps(checkpoint, [PROMPT], [[20, 1, 3]], kernels=kernels)[0]


def test_saved_names_are_those_of_the_hub_and_names_in_memory_are_read_too(tmp_path: Path) -> None:
    saved = open_header(variant("mixtral").save_safetensors(tmp_path / "m")).tensors
    names = {info.name for info in saved.values()}
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    model = variant("mixtral").model()
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    own = open_checkpoint(tmp_path / "own")
    assert "layers.0.ffn.experts.gate_up" in own.tensors
    torch.testing.assert_close(
        logits_of(own, "auto"), oracle_logits(model, PROMPT), atol=1e-4, rtol=0
    )


def test_the_gguf_package_knows_every_tensor_that_files_have(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(variant("mixtral").save_gguf(tmp_path / "m.gguf"))
    names = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.LLAMA]}
    found = {tensor.name.removesuffix(".weight") for tensor in reader.tensors}
    assert {gguf_name(name) for name in found} <= names


def test_an_expert_that_a_file_lacks_is_named(tmp_path: Path) -> None:
    path = variant("mixtral").save_safetensors(tmp_path) / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts": 8', '"num_local_experts": 9'))
    with pytest.raises(ModelError, match=r"gate\.weight is \[8, 64\], not \[9, 64\]"):
        describe(open_checkpoint(tmp_path))


@pytest.mark.parametrize("setting", ["expert_gating_func", "attention.sliding_window"])
def test_settings_without_arithmetic_are_refused_by_name(setting: str, tmp_path: Path) -> None:
    path = variant("mixtral").save_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    values = {**checkpoint.metadata.values, setting: 2}
    changed = replace(checkpoint, metadata=replace(checkpoint.metadata, values=values))
    with pytest.raises(ModelError, match=f"{setting} is 2, which is not supported for llama"):
        describe(changed)
