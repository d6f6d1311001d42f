"""ModelShape: sums over layers, padding, and the widths of projections."""

from dataclasses import replace

import pytest

from headroom.plan.known import known_shape
from headroom.plan.shape import (
    LayerPadding,
    LayerRange,
    LayerShape,
    OuterPadding,
    Padding,
    PlanSource,
)
from tests.plan.shapes import EMBED, HEAD, LOOKUP, NORM, laguna, layered, smollm2

LAYER = LayerShape(
    kind="full", core_bytes=1000, core_values=500, float_values=10, query_heads=8, kv_heads=2,
    key_dim=64, value_dim=32, experts=4, expert_bytes=100,
)  # fmt: skip


def test_a_range_counts_both_ends() -> None:
    assert LayerRange(3, 3).size == 1
    assert LayerRange(0, 39).size == 40


@pytest.mark.parametrize("tied", [False, True])
def test_all_bytes_of_a_model_are_counted_once(tied: bool) -> None:
    model = layered((4, 0, 16), tied, lookup=True)
    experts = sum(layer.experts * layer.expert_bytes for layer in model.layers)
    core = sum(layer.core_bytes for layer in model.layers)
    assert model.weight_bytes == core + experts + EMBED + LOOKUP + NORM + (0 if tied else HEAD)
    assert (model.expert_bytes, model.total_experts) == (experts, 20)
    assert (model.tied, model.window) == (tied, 512)
    assert smollm2().window == 0


def test_padding_is_added_once_and_to_its_own_layout() -> None:
    padded = replace(
        LAYER,
        panels=LayerPadding(Padding(bytes=7, values=8, float_values=9), expert_bytes=10),
        tiles=LayerPadding(Padding(bytes=70), expert_bytes=100),
    )
    outer = OuterPadding(embed=Padding(1, 2), head=Padding(3, 4), norm=Padding(5, 6))
    model = replace(layered((4,), False, False), layers=(padded,), panels=outer)
    panels = model.in_panels()
    (found,) = panels.layers
    assert (found.core_bytes, found.core_values, found.float_values) == (1007, 508, 19)
    assert found.expert_bytes == 110
    added = (panels.embed_bytes - EMBED, panels.head_bytes - HEAD, panels.norm_bytes - NORM)
    assert added == (1, 3, 5)
    assert (panels.embed_values - EMBED, panels.head_values - HEAD) == (2, 4)
    assert panels.norm_matrix_values == 6  # padding of matrices is not always kept in f32
    assert panels.in_panels() == panels.in_tiles() == panels
    tiles = model.in_tiles()
    assert tiles.weight_bytes == model.weight_bytes + 70 + 4 * 100


def test_a_token_adds_keys_and_values_only_to_a_cache_of_the_layers_own() -> None:
    assert LAYER.kv_values == (128, 64)
    assert replace(LAYER, owns_kv=False).kv_values == (0, 0)
    assert replace(LAYER, kind="recurrent").kv_values == (0, 0)


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({}, (512, 128, 64)),
        ({"keys_are_values": True}, (512, 128)),
        ({"owns_kv": False}, (512,)),
        ({"gate_width": 8}, (512, 128, 64, 8)),
        ({"gate_width": 512, "gate_in_queries": True}, (1024, 128, 64)),
    ],
)
def test_projections_are_the_matrices_that_read_attentions_input(
    changes: dict[str, object], widths: tuple[int, ...]
) -> None:
    assert replace(LAYER, **changes).projections == widths  # type: ignore[arg-type]


def test_a_router_may_score_the_shared_expert_too() -> None:
    assert LAYER.router_outputs == 4
    assert replace(LAYER, shared_gate=True).router_outputs == 5
    assert LAYER.all_expert_bytes == 400


def test_a_known_model_has_no_file() -> None:
    source = PlanSource(known_shape("laguna-xs.2:q4_k_m"))
    assert source.shape == laguna()
    assert (source.checkpoint, source.gguf_path) == (None, None)
