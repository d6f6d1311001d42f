"""Shapes from dimensions: what each kind of layer has besides its bytes, worked out by hand."""

from dataclasses import replace

import pytest

from headroom.formats.mixes import find_mix
from headroom.plan.shape import LayerShape
from headroom.plan.shaping import shape_of
from tests.plan.files import SMALL


def layer_of(family: str, kind: str, mix: str = "q8_0") -> LayerShape:
    """Return the last layer of a kind of a small model."""
    shape = shape_of("small", SMALL[family], find_mix(mix))
    return next(layer for layer in reversed(shape.layers) if layer.kind == kind)


@pytest.mark.parametrize(
    ("family", "kind", "width", "in_queries"),
    [
        ("llama", "full", 0, False),
        ("qwen35", "full", 4 * 64, True),  # one gate for each value of a query
        ("qwen35", "recurrent", 0, False),
        ("laguna", "full", 4, False),  # one gate for each head, in a matrix of its own
        ("laguna", "window", 6, False),
    ],
)
def test_gates_of_attention_are_found_in_queries_or_apart(
    family: str, kind: str, width: int, in_queries: bool
) -> None:
    layer = layer_of(family, kind)
    assert (layer.gate_width, layer.gate_in_queries) == (width, in_queries)


def test_the_parts_of_a_layer_are_those_of_its_family() -> None:
    full, window = layer_of("gemma4", "full"), layer_of("gemma4", "window")
    assert (full.keys_are_values, window.keys_are_values) == (True, False)
    assert (full.window, window.window) == (0, 64)
    assert full.post_norms
    assert not layer_of("llama", "full").post_norms
    assert layer_of("gemma4 E", "full").side_width == 32
    assert layer_of("gemma4", "full").side_width == 0
    assert layer_of("qwen35moe", "full").shared_gate
    assert not layer_of("laguna", "full").shared_gate


def test_experts_that_panels_and_tiles_fill_up_are_counted() -> None:
    dims = replace(SMALL["qwen3moe"], expert_ffn=100)
    layer = shape_of("odd", dims, find_mix("bf16")).layers[0]
    # Panels have 16 rows: 12 more for gate and up, of 256 columns; rows of 100 stay as they are.
    assert layer.panels.expert_bytes == 2 * 2 * 12 * 256
    whole = shape_of("even", SMALL["qwen3moe"], find_mix("bf16")).layers[0]
    assert whole.panels.expert_bytes == whole.tiles.expert_bytes == 0


def test_a_recurrent_layer_has_the_state_and_the_convolution_of_its_family() -> None:
    layer = layer_of("qwen35", "recurrent")
    heads, key_heads, dim = 6, 2, 32
    channels = (heads + 2 * key_heads) * dim
    assert (layer.state_heads, layer.state_values) == (heads, heads * dim * dim)
    assert layer.conv_values == channels * 3
    assert layer.mixer_width == 2 * channels + 2 * heads * dim
    assert layer.verify_values == channels + 2 * heads  # the inputs of a row


def test_a_table_that_is_only_looked_up_is_not_filled_up() -> None:
    dims = replace(SMALL["llama"], vocab=321)  # panels and tiles of 16 rows have 15 more
    apart, tied = (
        shape_of("odd", replace(dims, tied=tied), find_mix("bf16")) for tied in (False, True)
    )
    more = 2 * 15 * dims.hidden
    assert (apart.panels.embed.bytes, apart.panels.head.bytes) == (0, more)
    assert (tied.panels.embed.bytes, tied.panels.head.bytes) == (more, 0)
    assert (apart.tiles.embed.bytes, tied.tiles.embed.bytes) == (0, more)
