"""The bytes of each line, against figures worked out by hand."""

import pytest

from headroom.errors import PlanError
from headroom.kernels.reference import attention, matmul
from headroom.machine.calibration import gpu_runtime
from headroom.plan.budget import (
    KEY_BLOCK,
    QUERY_TILE,
    ROW_TILE,
    UNPACK_VALUES,
    PlanSettings,
    held_bytes,
    kv_bytes,
    kv_token_bytes,
    published_activation_bytes,
    recurrent_bytes,
    workspace_phases,
)
from headroom.plan.shape import LayerShape
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu, laguna, qwen35_27b, smollm2


def settings(**changes: object) -> PlanSettings:
    values: dict[str, object] = {
        "context": 8192, "parallel": 1, "chunk": 512, "cache_tokens": 8192, "k_type": "f16",
        "v_type": "f16", "dtype": "f32", "activation": "f32", "weights": "packed", "threads": 1,
    }  # fmt: skip
    return PlanSettings(**(values | changes))  # type: ignore[arg-type]


def test_rows_and_pages_follow_from_the_settings() -> None:
    made = settings(context=100, parallel=3, cache_tokens=384)
    assert (made.rows, made.pages, made.sequence_pages, made.page_size) == (515, 6, 2, 64)


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
    ("weights", "dtype", "size"),
    [("packed", "f32", 77), ("unpacked", "f32", 400), ("unpacked", "bf16", 2 * 90 + 4 * 10)],
)
def test_unpacked_weights_take_the_compute_type_and_norms_stay_f32(
    weights: str, dtype: str, size: int
) -> None:
    assert held_bytes(77, 100, 10, settings(weights=weights, dtype=dtype)) == size


def test_workspace_on_a_cpu_follows_the_plain_kernels() -> None:
    model = smollm2()
    phases = workspace_phases(model, model.layers, cpu(8), settings(weights="unpacked"))
    row = 576 * 2 + 384 + 576 * 3 + 3 * 9 * 128 + 3 * 128 * 2 // 4 + 192 * 16
    assert phases == {
        "mixer": 513 * row * 4 + 128 * 4 * 2 * 384,
        "feed-forward": 513 * 4 * 1536 * 4,
        "head": 2 * 16 * 49152 * 4,
    }


def test_packed_weights_on_a_cpu_need_room_to_unpack_into() -> None:
    model = smollm2()
    plain = workspace_phases(model, model.layers, cpu(8), settings(weights="unpacked"))
    packed = workspace_phases(model, model.layers, cpu(8), settings())
    assert packed["feed-forward"] - plain["feed-forward"] == 576 * 1536 * 18
    assert packed["head"] - plain["head"] == (4 << 20) * 18  # the head goes in parts


def test_scratch_never_grows_with_the_context() -> None:
    model = smollm2()
    short = workspace_phases(model, model.layers, cpu(8), settings(context=512, cache_tokens=512))
    assert short == workspace_phases(model, model.layers, cpu(8), settings())


def test_a_gpu_holds_fewer_copies_and_two_cold_experts_on_their_way() -> None:
    model = laguna()
    phases = workspace_phases(model, model.layers, gpu(22), settings(kernels="triton"))
    assert phases == {
        "mixer": 513 * 4 * (2 * 64 * 128 + 2 * 8 * 128),
        "feed-forward": 513 * 4 * 2 * 8192 + 2 * 2_039_808,
    }


def test_plain_kernels_keep_as_many_copies_on_a_gpu_as_on_a_cpu() -> None:
    model, asked = smollm2(), settings(kernels="reference")
    on_cpu, on_gpu = (workspace_phases(model, model.layers, x, asked) for x in (cpu(8), gpu(8)))
    assert on_gpu == on_cpu


def test_the_planner_knows_the_plain_kernels_steps() -> None:
    assert (ROW_TILE, UNPACK_VALUES) == (matmul.ROW_TILE, matmul.UNPACK_VALUES)
    assert (QUERY_TILE, KEY_BLOCK) == (attention.QUERY_TILE, attention.KEY_BLOCK)


def test_the_published_reserve_of_gemma_4_31b_is_2625_mebibytes() -> None:
    assert published_activation_bytes(5376, 21504, 1, 2) == 2_818_572_288 == int(2.625 * GIB)


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
    assert published_activation_bytes(hidden, width, batch, value_bytes, graphs) == expected


def test_the_published_reserve_is_counted_in_bytes_not_rounded() -> None:
    assert published_activation_bytes(2048, 0, 1, 4) == 256 * MIB


@pytest.mark.parametrize(
    ("size", "mebibytes", "how"),
    [
        (141 * GIB, 784, "up to"),
        (int(139.8 * GIB), 784, "up to"),  # as its driver counts
        (80 * GIB, 784, "an estimate from"),
        (12 * GIB, 448, "an estimate from"),
    ],
)
def test_what_a_driver_takes_of_a_card_of_another_size_is_told_as_an_estimate(
    size: int, mebibytes: int, how: str
) -> None:
    taken = gpu_runtime(size)
    assert taken.bytes == mebibytes * MIB
    assert taken.source == (
        f"CUDA's context and kernels; {how} 778 MiB measured 2026-11 on an H200"
    )
