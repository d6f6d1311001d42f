"""The bytes of each line, against figures worked out by hand."""

import re
from dataclasses import replace
from typing import Literal

import pytest

from headroom.errors import PlanError
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.calibration import gpu_runtime
from headroom.plan.lines import (
    feature_ring_bytes,
    held_bytes,
    kv_bytes,
    kv_token_bytes,
    logits_rows,
    published_activation,
    recurrent_bytes,
    snapshot_bytes,
    stage_lines,
    staging_bytes,
    staging_line,
)
from headroom.plan.settings import PlanRequest
from headroom.plan.shape import LayerRange, LayerShape
from headroom.units import GIB, MIB, parse_size
from tests.plan.shapes import gpu, laguna, qwen35_27b, settings, smollm2


def test_rows_and_pages_follow_from_the_settings() -> None:
    made = settings(context=100, parallel=3, cache_tokens=384)
    assert (made.rows, made.pages, made.sequence_pages, made.page_size) == (515, 6, 2, 64)


def test_a_captured_step_has_logits_of_all_its_rows() -> None:
    assert logits_rows(settings(parallel=4)) == 4
    assert logits_rows(settings(parallel=4, kernels="cuda")) == DECODE_ROWS
    many = settings(parallel=DECODE_ROWS + 1, kernels="cuda")
    assert logits_rows(many) == DECODE_ROWS + 1


def test_a_step_with_guesses_has_a_row_for_each_and_at_most_32() -> None:
    assert settings(parallel=2).verify_rows == 0
    guessing = settings(parallel=2, draft_tokens=8)
    assert (guessing.verify_rows, logits_rows(guessing)) == (18, 18)
    assert settings(parallel=4, draft_tokens=8).verify_rows == DECODE_ROWS
    assert settings(parallel=2, chunk=3, draft_tokens=8).verify_rows == 5  # of the largest step
    assert logits_rows(settings(parallel=40, draft_tokens=8)) == 40


@pytest.mark.parametrize(
    ("kernels", "kind", "pools"),
    [
        ("cuda", "cuda", "64.0 MiB for pools of captured graphs (up to 51 MiB measured "),
        ("triton", "cuda", "64.0 MiB for pools of captured graphs (up to 51 MiB measured "),
        ("triton", "hip", "0 B for captured graphs (AMD's GPUs run steps without capturing them)"),
    ],
)
def test_the_line_of_graphs_shows_every_part_that_it_counts(
    kernels: str, kind: Literal["cuda", "hip"], pools: str
) -> None:
    device = replace(gpu(24), kind=kind)
    made = settings(kernels=kernels, compute_type="bf16")
    lines = stage_lines(smollm2(), LayerRange(0, 29), device, made, PlanRequest())
    (line,) = [line for line in lines if line.name == "graphs"]
    assert line.why.startswith(pools)
    shown = [parse_size(size) for size in re.findall(r"([\d.]+ (?:B|KiB|MiB)) for ", line.why)]
    assert len(shown) == 3
    assert sum(shown) == pytest.approx(line.bytes, abs=MIB // 5)  # each is rounded to 0.1 MiB


def test_a_line_of_one_sequence_says_so_in_the_singular() -> None:
    lines = stage_lines(
        qwen35_27b(),
        LayerRange(0, 0),
        gpu(24),
        settings(parallel=1, kernels="cuda"),
        PlanRequest(),
    )
    (line,) = [line for line in lines if line.name == "recurrent_state"]
    assert line.why == "1 sequence x 1 layer, f32"


@pytest.mark.parametrize(
    ("kv_type", "per_token"),
    [("f32", 46080), ("f16", 23040), ("bf16", 23040), ("q8_0", 12240)],
)
def test_a_token_of_smollm2_takes_its_published_bytes(kv_type: str, per_token: int) -> None:
    assert sum(kv_token_bytes(x, kv_type, kv_type) for x in smollm2().layers) == per_token


@pytest.mark.parametrize(("kv_type", "per_token"), [("f16", 65536), ("q8_0", 34816)])
def test_a_token_of_the_27b_is_kept_by_its_attention_layers_only(
    kv_type: str, per_token: int
) -> None:
    assert sum(kv_token_bytes(x, kv_type, kv_type) for x in qwen35_27b().layers) == per_token


def test_keys_and_values_have_types_of_their_own() -> None:
    layer = smollm2().layers[0]
    assert kv_token_bytes(layer, "f32", "q8_0") == 3 * (64 * 4 + 68)


def test_a_head_that_is_not_whole_blocks_is_refused_by_name() -> None:
    layer = LayerShape(
        kind="full", core_bytes=0, core_values=0, kv_heads=2, key_dim=48, value_dim=48
    )
    with pytest.raises(PlanError) as caught:
        kv_token_bytes(layer, "q8_0", "f16")
    assert str(caught.value) == (
        "A key head has 48 values, which are not whole q8_0 blocks of 32. "
        "Choose f32, f16 or bf16 for it."
    )


def test_a_window_layer_never_costs_the_whole_context() -> None:
    window = laguna().layers[1]
    short, long = settings(), settings(context=131072, cache_tokens=131072)
    # (512 + 512) / 64 pages and one for the edges, 4096 bytes a token.
    assert kv_bytes(window, short) == kv_bytes(window, long) == 17 * 64 * 4096
    assert kv_bytes(laguna().layers[0], long) == 131072 * 4096


def test_a_window_layer_takes_no_more_than_a_full_one() -> None:
    made = settings(context=512, cache_tokens=512)
    assert kv_bytes(laguna().layers[1], made) == kv_bytes(laguna().layers[0], made)


def test_a_layer_that_shares_a_cache_owns_none() -> None:
    layer = LayerShape(
        kind="full", core_bytes=0, core_values=0, kv_heads=2, key_dim=64, value_dim=64,
        owns_kv=False,
    )  # fmt: skip
    assert kv_bytes(layer, settings()) == 0


def test_recurrent_state_of_the_27b_has_its_published_size() -> None:
    size = sum(recurrent_bytes(layer, settings()) for layer in qwen35_27b().layers)
    assert size == 150_994_944 + 48 * 3 * 10240 * 4
    four = sum(recurrent_bytes(layer, settings(parallel=4)) for layer in qwen35_27b().layers)
    assert four == 4 * size


@pytest.mark.parametrize(
    ("weights", "compute_type", "size"),
    [("packed", "f32", 77), ("unpacked", "f32", 400), ("unpacked", "bf16", 2 * 90 + 4 * 10)],
)
def test_unpacked_weights_take_the_compute_type_and_norms_stay_f32(
    weights: str, compute_type: str, size: int
) -> None:
    assert held_bytes(77, 100, 10, settings(weights=weights, compute_type=compute_type)) == size


def test_the_published_reserve_of_gemma_4_31b_is_2625_mebibytes() -> None:
    assert published_activation(5376, 21504, 1, 2).bytes == 2_818_572_288 == int(2.625 * GIB)


@pytest.mark.parametrize(
    ("hidden", "width", "batch", "value_bytes", "graphs", "expected"),
    [
        (2560, 10240, 1, 2, False, 8 * 8192 * 10240 * 2),  # below the flat reserve
        (5376, 21504, 10**6, 2, False, 15 * GIB),  # never above it
        (5376, 21504, 10**6, 1, False, 30 * GIB),  # which follows the cached type
        (0, 0, 1, 2, False, 15 * GIB),  # and stands in where dimensions are unknown
        (5376, 21504, 8192, 2, False, int(2.625 * GIB)),  # batches to 8192 change nothing
        (5376, 21504, 1, 2, True, int(4.625 * GIB)),  # captured graphs add 2 GiB
        (5376, 21504, 16384, 2, False, int(5.25 * GIB)),
    ],
)
def test_the_published_formula_holds_in_every_case(
    hidden: int, width: int, batch: int, value_bytes: int, graphs: bool, expected: int
) -> None:
    assert published_activation(hidden, width, batch, value_bytes, graphs).bytes == expected


def test_the_published_reserve_is_counted_in_bytes_not_rounded() -> None:
    assert published_activation(2048, 0, 1, 4).bytes == 256 * MIB


@pytest.mark.parametrize(
    ("size", "mebibytes", "how"),
    [
        (141 * GIB, 784, "up to"),
        (int(139.8 * GIB), 784, "up to"),  # as its driver counts
        (80 * GIB, 784, "an estimate from"),
        (12 * GIB, 448, "an estimate from"),
    ],
)
def test_what_a_driver_takes_of_a_card_of_another_size_is_reported_as_an_estimate(
    size: int, mebibytes: int, how: str
) -> None:
    taken = gpu_runtime(size)
    assert taken.bytes == mebibytes * MIB
    assert taken.source == (
        f"CUDA's context and kernels; {how} 778 MiB measured 2026-11 on an H200"
    )


@pytest.mark.parametrize(
    ("hidden", "buffers", "f32_mib", "half_mib", "chunked_mib"),
    [(5120, 2, 10240, 5120, 20), (2048, 2, 4096, 2048, 8), (5376, 3, 16128, 8064, 31.5)],
)
def test_staging_has_its_published_size(
    hidden: int, buffers: int, f32_mib: float, half_mib: float, chunked_mib: float
) -> None:
    assert staging_bytes(hidden, 262144, "f32", buffers) == f32_mib * MIB
    assert staging_bytes(hidden, 262144, "bf16", buffers) == half_mib * MIB
    assert staging_bytes(hidden, 262144, "f16", buffers) == half_mib * MIB
    assert staging_bytes(hidden, 512, "f32", buffers) == chunked_mib * MIB


@pytest.mark.parametrize(
    ("feature_type", "gibibytes", "small_mib"),
    [("f32", 25.0, 400), ("f16", 12.5, 200), ("bf16", 12.5, 200), ("q8_0", 6.640625, 106.25)],
)
def test_a_feature_ring_has_its_published_size(
    feature_type: str, gibibytes: float, small_mib: float
) -> None:
    assert feature_ring_bytes(262144, 25600, feature_type) == gibibytes * GIB
    assert feature_ring_bytes(4096, 25600, feature_type) == small_mib * MIB


def test_a_feature_row_must_be_whole_blocks() -> None:
    with pytest.raises(PlanError, match="has 100 values, which are not whole q8_0 blocks of 32"):
        feature_ring_bytes(16, 100, "q8_0")


def test_the_published_reserve_says_its_terms_and_that_nobody_calibrated_it() -> None:
    told = "published formula, an uncalibrated heuristic: "
    assert published_activation(5376, 21504, 1, 2, graphs=True).why == (
        told + "8 x 8192 rows x 21504 values x 2 bytes = 2.62 GiB + 2.00 GiB for captured graphs"
    )
    assert published_activation(576, 1536, 9000, 4).why == (
        told + "8 x 9000 rows x 1536 values x 2 bytes = 210.9 MiB"
    )
    assert published_activation(0, 0, 1, 2).why == told + "a flat 15.00 GiB"
    # 8 x rows x 16384 x 2 bytes reach the flat 15 GiB at 61440 rows exactly.
    assert published_activation(16384, 0, 61440, 2).why.endswith("2 bytes = 15.00 GiB")
    assert published_activation(16384, 0, 61441, 2).why == told + "a flat 15.00 GiB"


@pytest.mark.parametrize(("handover_type", "width"), [("f32", 0), ("bf16", 2), ("f16", 2)])
@pytest.mark.parametrize(
    ("layers", "streams", "neighbours"),
    [((0, 29), 2, 0), ((0, 9), 1, 1), ((10, 19), 1, 2), ((20, 29), 2, 1)],
)
def test_a_device_has_one_buffer_for_each_neighbour_that_rows_are_narrowed_for(
    layers: tuple[int, int], streams: int, neighbours: int, handover_type: str, width: int
) -> None:
    made = settings(handover_type=handover_type, compute_type="bf16")
    line = staging_line(smollm2(), LayerRange(*layers), made)
    # The last device has one more f32 buffer than the others: of the rows that get logits.
    assert line.bytes == (4 * streams + width * neighbours) * 513 * 576
    assert ("hand rows over" in line.why) == bool(neighbours and width)


@pytest.mark.parametrize(
    ("window", "context", "pages"),
    [
        (0, 8192, 0),  # layers that see the whole context have pages of their own
        (512, 8192, 9),  # a window that begins within a page
        (512, 513, 9),
        (512, 512, 8),
        (512, 448, 7),  # a context shorter than the window
        (513, 8192, 10),  # pages are saved whole
    ],
)
def test_a_snapshot_has_the_pages_that_a_window_sees_and_no_others(
    window: int, context: int, pages: int
) -> None:
    shape, kind = smollm2(), "window" if window else "full"
    layers = (replace(layer, kind=kind, window=window) for layer in shape.layers[:2])  # type: ignore[arg-type]
    recurrent = LayerShape(
        kind="recurrent", core_bytes=0, core_values=0, state_values=1000, conv_values=24
    )
    model = replace(shape, layers=(*layers, recurrent))
    token = 2 * 3 * 64 * 2  # keys and values of three heads in f16
    made = settings(context=context, cache_tokens=8192)
    assert snapshot_bytes(model.layers, made) == 2 * pages * 64 * token + 1024 * 4
