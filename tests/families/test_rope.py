"""Rotary settings: frequencies as in transformers, kinds of layers in both formats, refusals."""

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headroom.errors import HeadroomError, ModelError
from headroom.families.config import RopeConfig
from headroom.families.files import open_checkpoint
from headroom.families.rope import (
    check_scaling,
    plain_rope,
    rope_kind,
    rope_settings,
    rotated_dims,
    stored_divisors,
    yarn_rope,
)
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata, config_values

PATH = Path("model")
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
NUMBERS = [name for name in YARN if name != "rope_type"]
PLAIN = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def header(values: Mapping[str, object]) -> ModelHeader:
    metadata = Metadata(values, PATH, tied=False)
    return ModelHeader(
        name="model", format="gguf", architecture="laguna", metadata=metadata, tensors={}
    )


def metadata(rope: Mapping[str, Any]) -> Metadata:
    """Return the settings of a config.json with such rope_parameters."""
    return Metadata(config_values({"rope_parameters": dict(rope)}), PATH, tied=False)


def frequencies(rope: RopeConfig) -> torch.Tensor:
    powers = torch.arange(0, rope.dims, 2, dtype=torch.float64) / rope.dims
    divisors = torch.tensor(rope.divisors or 1.0, dtype=torch.float64)
    return 1 / (rope.theta**powers * divisors)


@settings(max_examples=60, deadline=None)
@given(
    head_dim=st.sampled_from([32, 64, 80, 128]),
    share=st.sampled_from([None, 0.5, 0.25]),
    theta=st.floats(100.0, 1e7),
    factor=st.floats(0.5, 64.0),
    original=st.sampled_from([256, 4096, 8192, 32768]),
    fast=st.one_of(st.none(), st.floats(8.0, 64.0)),
    slow=st.one_of(st.none(), st.floats(0.5, 4.0)),
    attention=st.one_of(st.none(), st.floats(0.5, 2.0)),
)
@example(128, None, 1e6, 4.0, 32768, None, None, None)  # as published for Qwen3
def test_yarn_has_the_frequencies_and_the_scale_of_transformers(
    head_dim: int,
    share: float | None,
    theta: float,
    factor: float,
    original: int,
    fast: float | None,
    slow: float | None,
    attention: float | None,
) -> None:
    given = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": fast,
        "original_max_position_embeddings": original, "beta_slow": slow,
        "attention_factor": attention, "partial_rotary_factor": share,
    }  # fmt: skip
    rope = {name: value for name, value in given.items() if value is not None}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(original * max(factor, 1)),
        rope_parameters=rope,
    )
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = yarn_rope(metadata(rope), head_dim)
    assert found.dims == int(head_dim * (share or 1.0))
    torch.testing.assert_close(frequencies(found).float(), wanted, rtol=2e-6, atol=0)
    assert found.scale == pytest.approx(scale, rel=1e-12)


@given(st.sampled_from([32, 64, 128]), st.sampled_from([1.0, 0.5, 0.25]), st.floats(2.0, 1e8))
def test_a_plain_rotation_turns_the_given_share_of_a_head(
    head_dim: int, share: float, theta: float
) -> None:
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    found = plain_rope(metadata(rope), head_dim)
    assert found == RopeConfig(theta, int(head_dim * share))


def test_a_stated_number_of_rotated_values_goes_before_a_share() -> None:
    both = {"rope.dimension_count": 48, "rope.scaling.partial_rotary_factor": 0.5}
    assert rotated_dims(Metadata(both, PATH, tied=False), 128) == 48
    assert rotated_dims(Metadata({}, PATH, tied=False), 128) == 128


def test_both_formats_give_each_kind_of_layer_its_own_rotation() -> None:
    nested = config_values(
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}
    )
    keys = {
        "rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.original_context_length": 4096,
        "rope.freq_base_swa": 1e4, "rope.dimension_count_swa": 64,
        "attention.head_count": 8,
    }  # fmt: skip
    for values in (nested, keys):
        full = rope_settings(header(values), "full")
        window = rope_settings(header(values), "window")
        assert (rope_kind(full), rope_kind(window)) == ("yarn", "none")
        assert yarn_rope(full, 128) == yarn_rope(metadata(YARN), 128)
        assert plain_rope(window, 128) == RopeConfig(1e4, 64)


def test_a_kind_of_layer_without_settings_is_refused() -> None:
    values = config_values({"rope_parameters": {"full_attention": YARN}})
    with pytest.raises(ModelError, match="rope_parameters has no 'sliding_attention'"):
        rope_settings(header(values), "window")


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 1.0}, {"factor": 0.0}, {"original_max_position_embeddings": 0}]
)
def test_numbers_that_make_no_rotation_are_refused(rope: dict[str, float]) -> None:
    with pytest.raises(ModelError, match="make no rotation"):
        yarn_rope(metadata(YARN | rope), 64)


@given(st.fixed_dictionaries(dict.fromkeys(NUMBERS, st.floats())))
@example({"original_max_position_embeddings": float("inf")})
@example({"rope_theta": 2.0, "original_max_position_embeddings": 1.0, "factor": float("inf")})
@example({"beta_fast": 0.0})
@example({"beta_slow": -1.0})
@example({"beta_fast": 1.4e-308, "beta_slow": 1.4e-308, "original_max_position_embeddings": 16.0})
@example({"rope_theta": 2.0, "beta_slow": 2.9e307, "original_max_position_embeddings": 1.0})
@example({"rope_theta": 1.0000000000000002, "factor": 5e-324, "beta_fast": 5e-324})
def test_no_numbers_of_a_file_end_in_anything_but_a_refusal(rope: dict[str, float]) -> None:
    try:
        found = yarn_rope(metadata(YARN | rope), 64)
    except HeadroomError:
        return
    assert len(found.divisors) == 32


@pytest.mark.parametrize(
    ("rope", "kind", "message"),
    [
        (PLAIN, "yarn", "scaling 'none' is not supported where 'yarn' is usual"),
        (YARN, "none", "scaling 'yarn' is not supported where 'none' is usual"),
        (PLAIN | {"low_freq_factor": 1.0}, "none", "setting 'low_freq_factor' is not supported"),
        (PLAIN | {"factor": 2.0}, "none", "setting 'factor' is not supported"),
    ],
)
def test_a_scaling_that_a_family_does_not_have_is_refused(
    rope: dict[str, Any], kind: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_scaling(metadata(rope), kind)


@given(st.lists(st.floats(0.5, 100.0, width=32), min_size=1, max_size=8))
def test_stored_divisors_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, divisors: list[float]
) -> None:
    path = tmp_path_factory.mktemp("rope") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert stored_divisors(open_checkpoint(path).header) == tuple(array("f", divisors))


def test_a_file_without_divisors_has_none() -> None:
    assert stored_divisors(header({})) is None
