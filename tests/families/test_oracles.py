"""The small models that families are tested against: sound, and read alike from both formats."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headroom.families.files import open_header
from headroom.families.registry import read_dims
from headroom.plan.shape import ModelShape
from headroom.plan.sources import header_shape
from tests.families.family_gguf import from_gguf, pieces, read_gguf
from tests.families.oracles import PROMPT, VARIANTS, Variant, oracle_greedy, oracle_logits, variant

Saved = tuple[Variant, Path, Path]


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A variant in both formats."""
    found = variant(request.param)
    folder = tmp_path_factory.mktemp(found.name)
    return found, found.save_safetensors(folder / "m"), found.save_gguf(folder / "m.gguf")


def test_both_formats_have_the_same_dimensions(saved: Saved) -> None:
    found, safetensors, gguf = saved
    one, other = read_dims(open_header(safetensors)), read_dims(open_header(gguf))
    assert one.architecture == other.architecture == found.architecture
    # How experts lie in a file is the file's choice.
    assert replace(one, fused_experts=other.fused_experts) == other


def test_both_formats_have_the_same_shape_for_the_planner(saved: Saved) -> None:
    _, safetensors, gguf = saved
    one, other = (_bare(header_shape(open_header(path))) for path in (safetensors, gguf))
    assert one == other


def _bare(shape: ModelShape) -> ModelShape:
    return replace(shape, name="")


def test_every_tensor_of_both_formats_has_a_name_of_ours(saved: Saved) -> None:
    for path in saved[1:]:
        tensors = open_header(path).tensors
        assert not [info.name for name, info in tensors.items() if name == info.name]


def test_conversion_to_gguf_and_back_returns_every_tensor(saved: Saved) -> None:
    found, _, gguf = saved
    model = found.model()
    state = model.state_dict()
    back = from_gguf(model, read_gguf(gguf))
    left = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert back.keys() == state.keys() - left
    for name, values in back.items():
        # The logarithm of an exponential is not the same number to the last bit.
        tolerance = 3e-7 if name.endswith("A_log") else 0
        torch.testing.assert_close(values, state[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_differs_from_what_it_is_at_the_start(name: str) -> None:
    model = variant(name).model()
    fresh = type(model)(model.config).state_dict()
    for key, values in model.state_dict().items():
        assert (values == fresh[key]).float().mean() < 0.1, key


@pytest.mark.parametrize("name", VARIANTS)
def test_the_oracle_decodes_what_it_reads_at_once(name: str) -> None:
    """Two ways through transformers agree well within what families are held to."""
    model = variant(name).model()
    past, rows = None, []
    with torch.inference_mode():
        for token in PROMPT:
            out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0, -1])
    torch.testing.assert_close(torch.stack(rows), oracle_logits(model, PROMPT), atol=4e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_greedy_choice_of_the_oracle_is_a_close_one(name: str) -> None:
    model = variant(name).model()
    tokens = oracle_greedy(model, PROMPT, 64)
    logits = oracle_logits(model, [*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    best, second = logits.topk(2).values.T
    assert logits.argmax(-1).tolist() == tokens
    assert float((best - second).min()) > 4e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_a_quantised_file_changes_the_model_and_its_dequantised_one_has_its_values(
    name: str, tmp_path: Path
) -> None:
    found = variant(name)
    path = found.save_gguf(tmp_path / "m.gguf", "MIXED")
    rounded = found.dequantised_model(path)
    change = oracle_logits(rounded, PROMPT) - oracle_logits(found.model(), PROMPT)
    assert float(change.abs().max()) > 0.01
    tensors, state = read_gguf(path), rounded.state_dict()
    for piece in pieces(rounded, found.fused):
        if piece.change is None and len(piece.ours) == 1:
            assert (state[piece.theirs].numpy() == tensors[piece.ours[0]]).all()


def test_settings_of_layer_kinds_reach_a_family_from_a_config(tmp_path: Path) -> None:
    laguna = open_header(variant("laguna").save_safetensors(tmp_path / "laguna")).metadata
    full = laguna.values["hf.rope_parameters"]["full_attention"]  # type: ignore[index]
    assert (full["rope_type"], full["attention_factor"], full["factor"]) == ("yarn", 1.0, 2.0)
    assert laguna.values["hf.num_attention_heads_per_layer"] == [4, 6, 6, 6] * 2
    assert laguna.get_float("hf.moe_routed_scaling_factor") == 2.5
    gemma = open_header(variant("gemma4-31b").save_safetensors(tmp_path / "gemma")).metadata
    own = gemma.values["hf.per_layer_config"]
    assert own == {key: {"head_dim": 64, "num_key_value_heads": 1} for key in ("05", "11")}
    assert gemma.get_float("hf.final_logit_softcapping") == 30
    qwen = open_header(variant("qwen35").save_safetensors(tmp_path / "qwen")).metadata
    assert qwen.get_float("rope.scaling.partial_rotary_factor") == 0.25
