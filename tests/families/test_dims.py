"""Dims: numbers of a header are checked before sizes are computed from them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError, HeadroomError, ModelError
from headroom.families.dims import (
    MAX_LAYERS,
    MAX_SIZE,
    Dims,
    Facts,
    common_dims,
    expert_dims,
    mtp_dims,
    named_kinds,
    pattern,
    window_flags,
)
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.quants import F32
from headroom.formats.tensor import TensorInfo

PLAIN: dict[str, object] = {
    "block_count": 3, "embedding_length": 64, "context_length": 128, "vocab_size": 100,
    "attention.head_count": 4,
}  # fmt: skip
EXPERTS: dict[str, object] = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
}  # fmt: skip


def facts(shapes: dict[str, tuple[int, ...]] | None = None, **values: object) -> Facts:
    given = {name.replace("__", "."): value for name, value in values.items()}
    return of(PLAIN | given, shapes)


def of(values: dict[str, object], shapes: dict[str, tuple[int, ...]] | None = None) -> Facts:
    tensors = {
        name: TensorInfo(name, shape, F32, Path("m"), 0, None)  # type: ignore[arg-type]
        for name, shape in (shapes or {}).items()
    }
    return Facts(
        ModelHeader(
            name="m",
            format="gguf",
            architecture="llama",
            metadata=Metadata(values, Path("m"), tied=True),
            tensors=tensors,
        )
    )


def test_left_out_sizes_follow_from_the_others() -> None:
    found = common_dims(facts())
    assert found == Dims(
        architecture="llama", layers=3, hidden=64, vocab=100, context=128, tied=True,
        heads=4, kv_heads=4, head_dim=16,
    )  # fmt: skip


def test_given_sizes_go_before_computed_ones_and_the_table_before_the_setting() -> None:
    more = facts({"embed": (96, 64)}, attention__key_length=24, attention__head_count_kv=2)
    found = common_dims(more, ffn=7)
    assert (found.vocab, found.head_dim, found.kv_heads, found.ffn) == (96, 24, 2, 7)
    assert common_dims(more, vocab=5, heads=1, kv_heads=1, head_dim=8).vocab == 5


def test_layers_that_predict_further_ahead_are_not_counted() -> None:
    assert facts(block_count=5, nextn_predict_layers=2).layers == 3
    for found in (facts(nextn_predict_layers=3), facts(block_count=MAX_LAYERS + 1)):
        with pytest.raises(ModelError, match=f"layers, not 1 to {MAX_LAYERS}"):
            _ = found.layers
    assert facts(block_count=MAX_LAYERS).layers == MAX_LAYERS


def test_lists_may_have_entries_for_layers_that_predict_further_ahead() -> None:
    found = facts(block_count=5, nextn_predict_layers=1, flags=[1, 0, 1, 0, 1])
    assert found.entries("flags", found.layers) == [1, 0, 1, 0]
    found = facts(block_count=5, nextn_predict_layers=1, flags=[1, 0, 1, 0])
    assert found.entries("flags", found.layers) == [1, 0, 1, 0]


HEAD = {"layers.4.mtp.proj": (8, 16), "layers.4.attn.q": (8, 8)}


@pytest.mark.parametrize(
    ("tensors", "settings", "expected"),
    [
        (HEAD, {"block_count": 5, "nextn_predict_layers": 1}, (True, "")),
        (HEAD, {"block_count": 4, "hf__mtp_num_hidden_layers": 1}, (True, "")),
        # Settings without tensors promise what transformers has dropped, or what nobody has seen.
        ({"norm": (8,)}, {"block_count": 4, "hf__mtp_num_hidden_layers": 1}, (False, "")),
        ({}, {"block_count": 4, "hf__mtp_num_hidden_layers": 1}, (True, "")),
        (HEAD, {"block_count": 5}, (False, "")),
        (
            HEAD,
            {"block_count": 6, "nextn_predict_layers": 2},
            (False, "there are 2 of them, and one is supported"),
        ),
        (
            {"layers.4.mtp.proj": (8, 16)},
            {"block_count": 5, "nextn_predict_layers": 1},
            (False, "it has no tensor layers.4.attn.q"),
        ),
        (
            HEAD | {"layers.4.mtp.embed": (96, 8)},
            {"block_count": 5, "nextn_predict_layers": 1},
            (False, "it has an embedding or a head of its own, layers.4.mtp.embed"),
        ),
    ],
)
def test_a_prediction_head_is_found_by_settings_and_tensors(
    tensors: dict[str, tuple[int, ...]], settings: dict[str, int], expected: tuple[bool, str]
) -> None:
    found = mtp_dims(facts(tensors, **settings), ("mtp.proj", "attn.q"))
    assert (found.get("mtp", False), found.get("mtp_refused", "")) == expected


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, f"it must be 1 to {MAX_SIZE - 1}"),
        (-1, f"it must be 1 to {MAX_SIZE - 1}"),
        (MAX_SIZE, f"it must be 1 to {MAX_SIZE - 1}"),
        (True, "whole number"),
        (1.5, "whole number"),
        ("8", "whole number"),
    ],
)
def test_sizes_that_no_model_has_are_refused(value: object, told: str) -> None:
    with pytest.raises(HeadroomError, match=told):
        common_dims(facts(embedding_length=value))


def test_the_largest_size_is_taken_and_a_missing_one_is_named() -> None:
    assert facts(context_length=MAX_SIZE - 1).size("context_length") == MAX_SIZE - 1
    with pytest.raises(FormatError, match="no key 'context_length'"):
        of({}).size("context_length")
    assert of({"b": 3}).size("a", "b") == 3
    assert of({}).size("a", "b", default=0) == 0


def test_one_number_stands_for_all_layers() -> None:
    assert of({"x": 4}).sizes("x", 3) == (4, 4, 4)
    assert of({"x": [1, 0, 2]}).sizes("x", 3) == (1, 0, 2)
    assert of({}).sizes("x", 2, default=7) == (7, 7)
    with pytest.raises(FormatError, match="has 2 numbers, not 3"):
        of({"x": [1, 2]}).sizes("x", 3)


def test_experts_are_read_where_there_are_any() -> None:
    assert expert_dims(facts()) == {}
    fused = of(PLAIN | EXPERTS, {"layers.0.ffn.experts.gate_up": (8, 64, 64)})
    assert expert_dims(fused) == {
        "experts": 8, "experts_used": 2, "expert_ffn": 32, "fused_experts": True,
    }  # fmt: skip
    shared = of(PLAIN | EXPERTS | {"expert_shared_feed_forward_length": 40})
    assert expert_dims(shared, shared=True)["shared_ffn"] == 40
    assert expert_dims(of(PLAIN | EXPERTS | {"expert_used_count": 8}))["experts_used"] == 8
    with pytest.raises(ModelError, match="a token visits 9 of 8 experts"):
        expert_dims(of(PLAIN | EXPERTS | {"expert_used_count": 9}))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 8))
def test_a_pattern_has_a_full_layer_in_each_turn(layers: int, every: int, offset: int) -> None:
    found = pattern(layers, every, "window", offset)
    assert len(found) == layers
    assert [i for i, kind in enumerate(found) if kind == "full"] == [
        i for i in range(layers) if (i + offset) % every == 0
    ]


def test_kinds_are_read_by_name_and_by_flag() -> None:
    names = ["full_attention", "sliding_attention", "linear_attention"]
    assert named_kinds(facts(hf__layer_types=names)) == ("full", "window", "recurrent")
    assert named_kinds(facts()) == ()
    assert window_flags(facts(x=[True, False, True]), "x") == ("window", "full", "window")
    assert window_flags(facts(), "x") is None
    with pytest.raises(ModelError, match="layer type 'odd' is none of full_attention"):
        named_kinds(facts(hf__layer_types=["odd"] * 3))
    for wrong in ([True], "abc", 3):
        with pytest.raises(ModelError, match="x is not a list of 3 entries"):
            window_flags(facts(x=wrong), "x")


def test_sizes_of_layers_follow_their_lists() -> None:
    dims = Dims(
        architecture="x", layers=2, hidden=8, vocab=8, context=8, ffn=5, kinds=("full", "window"),
        ffn_by_layer=(3, 4), state_heads=6, state_key_heads=2, state_dim=16,
    )  # fmt: skip
    assert [dims.kind(i) for i in range(2)] == ["full", "window"]
    assert [dims.ffn_width(i) for i in range(2)] == [3, 4]
    assert (dims.state_width, dims.conv_channels) == (96, 2 * 2 * 16 + 96)
