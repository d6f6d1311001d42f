"""Scratch and tiles of a GPU: the planner counts as the launchers do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.formats.quants import BF16, F16, F32, Q4_K, Q8_0, Q8_K
from headroom.kernels.cuda import attention, experts_scratch, grouped, matmul
from headroom.kernels.cuda import scratch as arena
from headroom.kernels.cuda.attention_scratch import WIDE_ROWS
from headroom.kernels.cuda.buffers import Buffer, Buffers, PeakCount, ScratchCount, aligned, floats
from headroom.kernels.cuda.experts_scratch import ExpertShape, experts_at_once
from headroom.kernels.cuda.matmul_scratch import half_rows_bytes, part_rows
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.catalogue import find_device
from headroom.options import Options
from headroom.plan import device_scratch
from headroom.plan.device_scratch import (
    UPLOAD_BYTES,
    DeviceStep,
    SpanRows,
    StepRows,
    Variant,
    device_phases,
    library_bytes,
    parts_of,
    peak_buffers,
    unpack_bytes_for,
)
from headroom.plan.known import known_shape
from headroom.plan.padding import expert_tile_padding, table_tile_padding, tile_padding
from headroom.plan.plan import make_plan
from headroom.plan.shape import LayerShape
from headroom.units import GIB, MIB
from tests.plan.shapes import host
from tests.stand_in.kernels import no_kernel, use_kernels


@given(rows=st.integers(1, DECODE_ROWS), columns=st.integers(1, 5000))
def test_few_rows_have_room_for_every_half_and_a_power_of_two_per_record(
    rows: int, columns: int
) -> None:
    records = -(-columns // 256)
    size = half_rows_bytes(rows, columns)
    assert size % records == 0
    assert size // records >= rows * (2 * 256 + 4)
    assert size <= half_rows_bytes(1 << (rows - 1).bit_length(), columns)


@given(
    count=st.integers(1, 600),
    width=st.integers(1, 4096),
    hidden=st.integers(1, 8192),
    most=st.integers(1 << 10, 1 << 31),
)
def test_experts_are_unpacked_in_the_planned_groups(
    count: int, width: int, hidden: int, most: int
) -> None:
    each = experts_at_once(count, ExpertShape(width, hidden), most)
    groups = -(-count // each)
    assert 0 <= groups * each - count < groups  # of one size, but for the last
    assert each == 1 or 4 * each * width * hidden <= most


@given(rows=st.integers(1, 300_000), columns=st.integers(1, 20_000), most=st.integers(1, 1 << 31))
def test_parts_of_a_weight_stay_below_the_most_and_begin_with_tiles(
    rows: int, columns: int, most: int
) -> None:
    each = part_rows(rows, columns, most)
    assert each == rows or each % 16 == 0
    assert each <= max(16, most // (2 * columns))


def test_tiles_fill_up_both_sides_and_matrices_of_f32_become_bf16() -> None:
    assert tile_padding({"attn_q.weight": ((32, 512), Q4_K)}).bytes == 0
    assert tile_padding({"attn_q.weight": ((30, 512), Q4_K)}).bytes == 2 * 288
    # A record has 256 columns, of which 96 are there.
    assert tile_padding({"attn_q.weight": ((16, 96), Q8_0)}).bytes == 16 * (272 - 102)
    assert tile_padding({"attn_q.weight": ((3, 5), F32)}).bytes == -30
    assert tile_padding({"attn_q.weight": ((16, 512), F16)}).bytes == 0
    assert tile_padding({"attn_q.weight": ((12, 200), BF16)}).bytes == 2 * (16 * 256 - 12 * 200)
    assert tile_padding({"attn_norm.weight": ((5,), F32)}).bytes == 0
    assert tile_padding({"ffn_gate_inp.weight": ((3, 5), F32)}).bytes == 0
    assert table_tile_padding({"output.weight": ((3, 5), F32)}).bytes == -30
    # A head or table of a type without tiles stays as it is; a layer's matrix does not.
    assert table_tile_padding({"output.weight": ((1, 256), Q8_K)}).bytes == 0
    assert tile_padding({"attn_q.weight": ((1, 256), Q8_K)}).bytes == 512 - 292
    assert table_tile_padding({"output.weight": ((1, 256), Q4_K)}).bytes == 15 * 144
    apart = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), ((4, 24, 256), Q8_0))
    fused = {"ffn_gate_up_exps.weight": ((4, 48, 256), Q8_0)}
    assert expert_tile_padding(apart) == expert_tile_padding(fused) == 2 * 8 * 272


def test_experts_of_16_bits_are_filled_up_and_others_without_tiles_stay_as_they_are() -> None:
    assert expert_tile_padding({"ffn_down_exps.weight": ((4, 32, 512), BF16)}) == 0
    assert expert_tile_padding({"ffn_down_exps.weight": ((4, 8, 8), F16)}) == 8192 - 128
    assert expert_tile_padding({"ffn_down_exps.weight": ((4, 8, 12), F16)}) == 0
    mixed = {"ffn_up_exps.weight": ((4, 24, 256), Q8_0), "ffn_down_exps.weight": ((4, 8, 24), F32)}
    assert expert_tile_padding(mixed) == 0


@pytest.mark.parametrize(
    ("total", "most"), [(4 * GIB, 64 * MIB), (24 * GIB, 192 * MIB), (139 * GIB, GIB)]
)
def test_larger_gpus_unpack_more_at_a_time(total: int, most: int) -> None:
    assert unpack_bytes_for(total) == most


def step(**changes: int) -> DeviceStep:
    values = {"hidden": 5120, "rows": 2049, "spans": 2, "context": 8192, "unpack_bytes": 64 * MIB}
    return DeviceStep(**(values | changes))


def test_scratch_of_the_27b_is_bounded_by_what_is_unpacked_at_a_time() -> None:
    layers = known_shape("qwen3.6-27b:q4_k_m").layers
    phases = device_phases(layers, step())
    assert phases["loading"] == 128 * MIB
    # Normed rows, gates and ups, what goes down, a part of its weight and the part's answers.
    rows, width = 2049, 17408
    part = part_rows(5120, width, 64 * MIB)
    assert 0.9 * 64 * MIB < 2 * part * width <= 64 * MIB
    worked = 2 * rows * (5120 + 4 * width + width + part) + 2 * part * width
    assert 0 <= phases["feed-forward"] - worked < 5 * 256
    whole = device_phases(layers, step(unpack_bytes=GIB))
    assert whole["feed-forward"] - phases["feed-forward"] > 300 * MIB


def test_scratch_of_attention_grows_with_the_context_and_that_of_others_does_not() -> None:
    layers = known_shape("qwen3.6-27b:q4_k_m").layers
    short, long = (device_phases(layers, step(context=context)) for context in (8192, 131072))
    # Keys and values of one layer in bf16, and the queries.
    assert long["attention"] - short["attention"] > 400 * MIB
    assert {**long, "attention": 0} == {**short, "attention": 0}


def steps_within(most: DeviceStep) -> Iterator[StepRows]:
    """Steps of few and many rows, shared out in several ways over few and many sequences."""
    for rows in (2, 31, 32, 33, 40, 41, 65, most.rows):
        for sequences in range(1, min(most.spans, rows) + 1):
            each, rest = divmod(rows, sequences)
            even = [each + (index < rest) for index in range(sequences)]
            uneven = [rows - sequences + 1] + [1] * (sequences - 1)
            for shares in (even, uneven):
                for at in (0, most.context):  # at the beginning, and at the end of the context
                    spans = (SpanRows(n, min(at, most.context - n)) for n in shares)
                    yield StepRows(tuple(spans), most)


VARIANTS = [
    Variant(frozenset(merged), tiled, cold)
    for merged in ((), (1,), (2,), (3,), (1, 2), (2, 3), (1, 3), (1, 2, 3))
    for tiled in (True, False)
    for cold in (True, False)
]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen3.6-27b:q4_k_m", {"attention", "recurrent", "feed-forward"}),
        ("qwen3.6-35b-a3b:q4_k_m", {"attention", "recurrent", "experts"}),
        ("gemma-4-26b-a4b:q4_k_m", {"attention", "experts"}),
        ("gemma-4-e4b:q4_k_m", {"attention", "feed-forward", "per-layer inputs"}),
    ],
)
def test_the_planned_scratch_is_the_most_that_any_step_takes(
    name: str, parts: set[str], halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Packed experts up to 40 of 70 rows, so that both paths of prefill are within reach.
    shape = known_shape(name)
    layers = [replace(layer, window=min(layer.window, 20)) for layer in shape.layers]
    if shape.layers[0].experts:
        monkeypatch.setattr(experts_scratch, "sorted_rows", lambda experts, used: 40)
    most = DeviceStep(shape.hidden, 70, 4, 90, 96 * MIB, halves)
    found: dict[str, int] = {}
    for layer in dict.fromkeys(layers):
        for part_name, part in parts_of(layer).items():
            for taken in steps_within(most):
                for variant in VARIANTS:
                    count = ScratchCount()
                    part(count, layer, taken, variant)
                    found[part_name] = max(found.get(part_name, 0), count.peak_bytes)
    assert set(found) == parts
    assert device_phases(layers, most) == found | {"loading": UPLOAD_BYTES}


@pytest.mark.parametrize(
    "name", ["qwen3.6-35b-a3b:q4_k_m", "gemma-4-26b-a4b:q4_k_m", "qwen3.6-27b:q4_k_m"]
)
def test_the_buffers_that_a_phase_holds_at_its_peak_are_its_bytes(name: str) -> None:
    layers = known_shape(name).layers
    step = DeviceStep(hidden=2048, rows=700, spans=5, context=9000, unpack_bytes=96 * MIB)
    for phase, size in device_phases(layers, step).items():
        if phase == "loading":  # its buffers are no part of a step
            continue
        count = peak_buffers(layers, step, phase)
        assert count.peak_bytes == size
        assert sum(aligned(buffer.nbytes) for _, buffer in count.held) == size
    assert peak_buffers(layers, step, "loading").held == []


def test_buffers_of_a_closed_frame_are_not_held_at_a_later_peak() -> None:
    count = PeakCount()
    count.take(floats(64))
    with count.frame():
        count.take(floats(640))
        assert [buffer.shape for _, buffer in count.held] == [(64,), (640,)]
    count.take(floats(320))  # less than in the frame
    assert [buffer.shape for _, buffer in count.held] == [(64,), (640,)]
    count.take(experts_scratch.decode_buffers(4, 8, 64, 0))
    assert [(name, buffer.shape) for name, buffer in count.held] == [
        ("", (64,)), ("", (320,)), ("inner", (2048,)), ("downs", (32,)),
    ]  # fmt: skip
    assert count.peak_bytes == 256 + 1280 + 8192 + 256


def test_torch_takes_as_much_on_every_gpu_but_for_the_workspace_of_its_products() -> None:
    layers = known_shape("qwen3.6-27b:q4_k_m").layers
    server = device_scratch.library_bytes(layers, step(), 90)
    for sm in (75, 80, 86, 89):
        beside = server - device_scratch.library_bytes(layers, step(), sm)
        assert beside == 2 * (32 * MIB - 8 * MIB - 128 * 1024)
    assert device_scratch.library_bytes(layers, step(), 120) == server


def test_results_of_grouped_products_are_planned_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, no_kernel)
    layers = [layer for layer in known_shape("qwen3.6-35b-a3b:q4_k_m").layers if layer.state_heads]
    rows, width, hidden = 64, layers[0].expert_width, 2048
    picks, results = rows * layers[0].experts_used, 0
    lent = arena.Arena(torch.zeros(0, dtype=torch.uint8))
    with arena.opened(lent), arena.frame():
        for outputs, columns in ((2 * width, hidden), (hidden, width)):
            x = torch.zeros(picks, columns, dtype=torch.bfloat16)
            weights = torch.zeros(2, outputs, columns, dtype=torch.bfloat16)
            results += grouped.product(x, weights, torch.zeros(2, dtype=torch.int32), 64).nbytes
    assert lent.peak_bytes == 0  # no scratch of the step
    taken = library_bytes(layers, step(hidden=hidden, rows=rows), 90)
    beside = device_scratch._cublas_bytes(90) + 4 * 4 * rows * layers[0].key_dim
    assert taken == results + device_scratch.PICK_BYTES * picks + beside


def test_a_frame_gives_back_what_was_taken_within() -> None:
    lent = arena.Arena(torch.zeros(4096, dtype=torch.uint8))
    where = torch.device("cpu")
    with arena.opened(lent):
        outside = arena.take(floats(4), where)
        with arena.frame():
            first = arena.take(floats(3, 5), where)
            with arena.frame():
                second = arena.take(Buffer((7,), "bf16"), where)
            third = arena.take(Buffer((2,), "i64"), where)
    begin = first.data_ptr()
    assert second.data_ptr() == third.data_ptr() == begin + 256
    assert not begin <= outside.data_ptr() < begin + 4096
    assert (lent.peak_bytes, lent.frames) == (512, 0)
    assert arena.unpack_bytes() == arena.UNPACK_BYTES


def test_scratch_beyond_the_plan_is_torchs_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lent = arena.Arena(torch.zeros(1024, dtype=torch.uint8))
    with arena.opened(lent), arena.frame():
        for _ in range(2):
            found = arena.take(floats(300), torch.device("cpu"))
            found.zero_()
    assert caplog.messages == ["memory: a step needs 1280 bytes of scratch and 1024 were planned"]
    assert lent.peak_bytes == 2560


def test_the_types_of_many_rows_are_the_launchers() -> None:
    assert set(device_scratch.NARROW_TYPES) == set(matmul.NARROW_QUANTS)


@pytest.mark.parametrize("name", ["qwen3.5-27b:q4_k_m", "qwen3.6-35b-a3b:q4_k_m"])
def test_a_gpu_without_bf16_runs_the_fused_kernels_in_f16(name: str) -> None:
    card, fixed = find_device("rtx2080ti-22gb"), {"context": 4096, "parallel": 2, "chunk": 512}
    shape = known_shape(name)
    older = make_plan([shape], [card, host(64)], Options(**fixed))  # type: ignore[arg-type]
    assert (older.settings.compute_type, older.settings.k_type) == ("f16", "f16")
    assert older.settings.uses_arena
    later = make_plan([shape], [replace(card, sm=86), host(64)], Options(**fixed))  # type: ignore[arg-type]
    assert later.settings.compute_type == "bf16"
    mine, its = (plan.devices[0].allocated for plan in (older, later))
    for line in ("core_weights", "kv", "recurrent_state", "head", "logits", "staging"):
        assert mine[line] == its[line]  # tiles, and 16 bits a value
    # Answers are float32 until they are summed, and rows have powers of two.
    assert its["workspace"] < mine["workspace"] < 2 * its["workspace"]


def test_experts_in_f16_are_multiplied_to_float32() -> None:
    layers = known_shape("qwen3.6-35b-a3b:q4_k_m").layers
    step = DeviceStep(2048, 512, 5, 4096, 64 * MIB)
    picks, width = 512 * layers[0].experts_used, layers[0].expert_width
    narrow_, wide = (
        device_scratch.library_bytes(layers, replace(step, halves=halves), 80)
        for halves in (False, True)
    )
    assert wide - narrow_ == 2 * picks * (2 * width + 2048)


def test_attention_of_wide_heads_takes_as_much_of_torch_at_any_context() -> None:
    layers = known_shape("gemma-4-31b:q4_k_m").layers
    short, long = (
        library_bytes(layers, step(hidden=5376, rows=513, context=context), 90)
        for context in (16384, 131072)
    )
    assert short == long < 260 * MIB


def test_only_windows_in_f16_take_masks_of_torch() -> None:
    window = next(x for x in known_shape("gemma-4-31b:q4_k_m").layers if x.window)
    for halves, rows in ((False, 0), (True, attention.MASKED_ROWS)):
        mine = replace(step(), halves=halves)
        full, cut = (library_bytes([replace(window, window=w)], mine, 80) for w in (0, 1024))
        # A copy of the results by key heads; and of a chunk's, that are summed in float32.
        copies = 2 * 2049 * 32 * 256 if halves else 0
        assert cut - full == rows * (8 * (1024 + rows) + (2 + 2 + 4) * 32 * 256) - copies


def test_matrices_that_lie_behind_each_other_are_one_weight() -> None:
    outputs = (4, 5, 6)
    assert list(Variant(frozenset()).weight_rows(outputs)) == [4, 5, 6]
    assert list(Variant(frozenset({1})).weight_rows(outputs)) == [9, 6]
    assert list(Variant(frozenset({1, 2})).weight_rows(outputs)) == [15]
    # Unknown: every run of neighbours.
    assert sorted(Variant().weight_rows(outputs)) == [4, 5, 6, 9, 11, 15]


def test_wide_heads_take_queries_and_two_sums_of_their_width() -> None:
    layers = known_shape("gemma-4-31b:q4_k_m").layers
    layer = replace(next(x for x in layers if not x.window), window=0, experts=0)
    mine, rows, heads = step(rows=600, context=700), 600, layer.query_heads
    short, long = (
        library_bytes([replace(layer, key_dim=dim)], mine, 90) for dim in (512, 512 + 64)
    )
    results, rope = 2 * rows * heads, 4 * 4 * rows
    wide = min(rows, WIDE_ROWS) * heads * (2 + 2 * 4)
    assert long - short == 64 * (results + rope + wide)


class ListedBuffers(ScratchCount):
    """Lists all buffers in order, those of a frame in parentheses."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def take(self, *taken: Buffer | Buffers) -> None:
        for one in taken:
            for buffer in (one,) if isinstance(one, Buffer) else one:
                self.words.append(f"{buffer.dtype}:{'x'.join(map(str, buffer.shape))}")
        super().take(*taken)

    def largest(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    @contextmanager
    def frame(self) -> Iterator[None]:
        self.words.append("(")
        with super().frame():
            yield
        self.words.append(")")


DENSE = LayerShape(
    kind="full", core_bytes=0, core_values=0, query_heads=6, kv_heads=2, key_dim=32, value_dim=32,
    ffn_width=256,
)  # fmt: skip
# 600 channels of the convolution, and two heads of 128 values.
RECURRENT = replace(
    DENSE, kind="recurrent", state_heads=2, state_values=2 * 128 * 128, mixer_width=2 * (600 + 256)
)
ROUTED = replace(DENSE, experts=8, experts_used=2, expert_width=48)  # and a shared expert of 256
BOTH = replace(ROUTED, post_norms=True)
WITH_INPUTS = replace(DENSE, side_width=16)


@pytest.mark.parametrize(
    ("layer", "part", "rows", "tiled", "cold", "halves", "buffers"),
    [
        (DENSE, "attention", 2, False, False, False,
            "u8:1104 f32:2x192 f32:2x64 f32:2x64 ( f32:2x64 ) ( f32:2x64 ) ( f32:2x64 ) "
            "f32:2x6x32 f32:408 f32:2x192 u8:1104"),
        (DENSE, "attention", 40, True, True, False,
            "bf16:40x64 f32:40x192 f32:40x64 f32:40x64 ( bf16:40x192 bf16:192x64 ) ( "
            "bf16:40x64 bf16:64x64 ) ( bf16:40x64 bf16:64x64 ) f32:40x6x32 f32:40x192 ( "
            "bf16:45x2x32 bf16:45x2x32 bf16:40x6x32 ) bf16:40x192 ( bf16:40x64 bf16:64x192 )"),
        (DENSE, "attention", 40, True, False, True,
            "f16:40x64 f32:40 ( f32:40x64 ) f32:40x192 f32:40x64 f32:40x64 ( f32:40x192 "
            "f16:192x64 ) ( f32:40x64 f16:64x64 ) ( f32:40x64 f16:64x64 ) f32:40x6x32 "
            "f32:40x192 ( f16:45x2x32 f16:45x2x32 f16:40x6x32 ) f16:40x192 f32:40 ( f32:40x64 "
            "f16:64x192 )"),
        (DENSE, "feed-forward", 2, False, False, False,
            "u8:1104 f32:2x256 f32:2x256 ( f32:2x64 ) ( f32:2x64 ) u8:1104 ( f32:2x256 )"),
        (DENSE, "feed-forward", 40, True, True, False,
            "bf16:40x64 f32:40x256 f32:40x256 ( bf16:40x256 bf16:256x64 ) ( bf16:40x256 "
            "bf16:256x64 ) bf16:40x256 ( bf16:40x64 bf16:64x256 )"),
        (DENSE, "feed-forward", 40, True, False, True,
            "f16:40x64 f32:40 ( f32:40x64 ) f32:40x256 f32:40x256 ( f32:40x256 f16:256x64 ) ( "
            "f32:40x256 f16:256x64 ) f16:40x256 f32:40 ( f32:40x64 f16:64x256 )"),
        (RECURRENT, "recurrent", 2, False, False, False,
            "u8:1104 f32:2x600 f32:2x256 f32:2x2 f32:2x2 ( f32:2x64 ) ( f32:2x64 ) ( f32:2x64 "
            ") ( f32:2x64 ) f32:2x600 f32:2x2x2 f32:2x2x128 u8:1104 ( f32:2x2x128 )"),
        (RECURRENT, "recurrent", 40, True, True, False,
            "bf16:40x64 f32:40x600 f32:40x256 f32:40x2 f32:40x2 ( bf16:40x600 bf16:600x64 ) ( "
            "bf16:40x256 bf16:256x64 ) ( bf16:40x2 bf16:2x64 ) ( bf16:40x2 bf16:2x64 ) "
            "f32:40x2x128 ( f32:40x600 f32:40x2x2 f32:2x1x64x256 f32:2x1x64x64 f32:2x1x64 ) "
            "bf16:40x256 ( bf16:40x64 bf16:64x256 )"),
        (RECURRENT, "recurrent", 40, True, False, True,
            "f16:40x64 f32:40 ( f32:40x64 ) f32:40x600 f32:40x256 f32:40x2 f32:40x2 ( "
            "f32:40x600 f16:600x64 ) ( f32:40x256 f16:256x64 ) ( f32:40x2 f16:2x64 ) ( "
            "f32:40x2 f16:2x64 ) f32:40x2x128 ( f32:40x600 f32:40x2x2 f32:2x1x64x256 "
            "f32:2x1x64x64 f32:2x1x64 ) f16:40x256 f32:40 ( f32:40x2x128 ) ( f32:40x64 "
            "f16:64x256 )"),
        (ROUTED, "experts", 2, False, False, False,
            "( f32:2x64 u8:1104 f32:2x8 f32:2x256 f32:2x256 ( f32:2x64 ) ( f32:2x64 ) u8:1104 "
            "f32:2x64 ( f32:2x256 ) f32:2x2 f32:192 i64:4 )"),
        (ROUTED, "experts", 2, True, False, False,
            "( f32:2x64 u8:1104 f32:2x8 f32:2x2 f32:704 i64:4 )"),
        (ROUTED, "experts", 2, True, True, False,
            "( f32:2x64 u8:1104 f32:2x8 i32:2x2 f32:2x2 f32:704 f32:6x64 )"),
        (ROUTED, "experts", 3, True, False, False,
            "( f32:3x64 u8:2192 f32:3x8 i32:3x2 f32:3x2 f32:1056 i64:6 )"),
        (ROUTED, "experts", 40, True, True, False,
            "( f32:40x64 bf16:40x64 f32:40x8 f32:40x256 f32:40x256 ( bf16:40x256 bf16:256x64 "
            ") ( bf16:40x256 bf16:256x64 ) bf16:40x256 f32:40x64 ( bf16:40x64 bf16:64x256 ) "
            "i32:40x2 f32:40x2 ( bf16:8x96x64 bf16:80x64 bf16:80x48 ) )"),
        (ROUTED, "experts", 40, False, False, False,
            "( f32:40x64 bf16:40x64 f32:40x8 f32:40x256 f32:40x256 ( bf16:40x256 ) ( "
            "bf16:40x256 ) bf16:40x256 f32:40x64 ( bf16:40x64 ) i32:40x2 f32:40x2 ( i32:144 "
            "i64:10x4 u8:78912 ( u8:78912 f32:144x48 ) f32:80x64 ) )"),
        (ROUTED, "experts", 40, True, True, True,
            "( f32:40x64 f16:40x64 f32:40 f32:40x8 f32:40x256 f32:40x256 ( f32:40x256 "
            "f16:256x64 ) ( f32:40x256 f16:256x64 ) f16:40x256 f32:40 f32:40x64 ( f32:40x64 "
            "f16:64x256 ) i32:40x2 f32:40x2 ( f16:8x96x64 f16:80x64 f16:80x48 f32:80 ) )"),
        (BOTH, "experts", 2, False, False, False,
            "f32:2x64 u8:1104 f32:2x8 i32:2x2 f32:2x2 f32:192 i64:4 u8:1104 f32:2x256 "
            "f32:2x256 ( f32:2x64 ) ( f32:2x64 ) u8:1104 f32:2x64 ( f32:2x256 ) f32:2x64"),
        (BOTH, "experts", 40, True, True, False,
            "f32:40x64 bf16:40x64 f32:40x64 f32:40x8 i32:40x2 f32:40x2 ( bf16:8x96x64 "
            "bf16:80x64 bf16:80x48 ) bf16:40x64 f32:40x256 f32:40x256 ( bf16:40x256 "
            "bf16:256x64 ) ( bf16:40x256 bf16:256x64 ) bf16:40x256 f32:40x64 ( bf16:40x64 "
            "bf16:64x256 ) f32:40x64"),
        (BOTH, "experts", 40, True, True, True,
            "f32:40x64 f16:40x64 f32:40 ( f32:40x64 ) f32:40x64 f32:40x8 i32:40x2 f32:40x2 ( "
            "f16:8x96x64 f16:80x64 f16:80x48 f32:80 ) f16:40x64 f32:40 ( f32:40x64 ) "
            "f32:40x256 f32:40x256 ( f32:40x256 f16:256x64 ) ( f32:40x256 f16:256x64 ) "
            "f16:40x256 f32:40 f32:40x64 ( f32:40x64 f16:64x256 ) f32:40x64"),
        (WITH_INPUTS, "per-layer inputs", 2, False, False, False,
            "u8:1104 f32:2x16 u8:1104 f32:2x64 ( f32:2x16 )"),
        (WITH_INPUTS, "per-layer inputs", 40, True, True, False,
            "bf16:40x64 f32:40x16 ( bf16:40x16 bf16:16x64 ) bf16:40x16 f32:40x64 ( bf16:40x64 "
            "bf16:64x16 )"),
        (WITH_INPUTS, "per-layer inputs", 40, True, False, True,
            "f16:40x64 f32:40 f32:40x16 ( f32:40x16 f16:16x64 ) f16:40x16 f32:40 f32:40x64 ( "
            "f32:40x64 f16:64x16 )"),
    ],
)  # fmt: skip
def test_a_part_takes_the_buffers_of_its_launchers_in_their_frames(
    layer: LayerShape, part: str, rows: int, tiled: bool, cold: bool, halves: bool, buffers: str
) -> None:
    """Rows of 64 values after 5 tokens; halves of up to 256 columns lie in records of 1104 bytes.

    A run takes the same buffers: see tests/split/test_model_memory.py.
    """
    most = DeviceStep(hidden=64, rows=100, spans=4, context=90, unpack_bytes=MIB, halves=halves)
    taken = StepRows((SpanRows(rows, 5),), most)
    found = ListedBuffers()
    parts_of(layer)[part](found, layer, taken, Variant(frozenset(), tiled, cold))
    assert " ".join(found.words) == buffers
