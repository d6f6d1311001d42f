"""Where a GPU's layers ask the CPU for cold experts, and where they do not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headroom.experts.cuda_ffn import CudaDenseAndExpertsFfn, CudaExpertsFfn
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.ops import Picks
from tests.families import family_configs
from tests.families.family_gguf import write_gguf
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import ModelOnGpu, run_spans

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3moe": lambda: family_configs.qwen3_moe(**WIDE, moe_intermediate_size=96),
    "gemma4": lambda: family_configs.gemma4_moe(hidden_size=256),
}


class Recorded:
    """A part that records when it was called."""

    def __init__(self, layer: int, calls: list[tuple[int, str, int]]) -> None:
        self._layer, self._calls = layer, calls

    asks_cpu = True

    def resolve(self, x: torch.Tensor | None, picks: Picks | RouterLogits) -> Picks:
        """Note the request."""
        ids, weights = picks.top_k() if isinstance(picks, RouterLogits) else picks
        assert ids.shape == weights.shape
        assert ids.is_contiguous()
        assert weights.is_contiguous()
        assert x is not None
        assert len(x) == len(ids)
        self._calls.append((self._layer, "before", len(x)))
        return Picks(ids, weights)

    def add_answers(self, out: torch.Tensor) -> None:
        """Note that answers are wanted."""
        assert out.is_contiguous()
        self._calls.append((self._layer, "after", len(out)))


@pytest.mark.parametrize("name", MODELS)
def test_only_steps_of_few_rows_ask_the_cpu_and_every_layer_waits_for_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(MODELS[name](), tmp_path / "m.gguf", "MIXED", fused=False, unused_keys=False)
    with stand_in_gpu(monkeypatch, computes=False):
        settings = {"context": 512, "parallel": 3, "chunk": 100, "dtype": "bf16", "kv_type": None}
        model = ModelOnGpu(open_checkpoint(tmp_path / "m.gguf"), **settings)
        check_calls(model)


def check_calls(model: ModelOnGpu) -> None:
    """Assert that the CPU is asked before a layer's experts run, and answers after them."""
    calls: list[tuple[int, str, int]] = []
    parts = [
        part
        for block in model.model._blocks
        for part in block._parts  # type: ignore[attr-defined]
        if isinstance(part, CudaExpertsFfn | CudaDenseAndExpertsFfn)
    ]
    assert parts
    for layer, part in enumerate(parts):
        part.resolver = Recorded(layer, calls)
    run_spans(model, [(40, 0)])
    assert not calls
    run_spans(model, [(2, 10), (1, 11)])
    assert calls == [
        (layer, word, 3) for layer in range(len(parts)) for word in ("before", "after")
    ]
