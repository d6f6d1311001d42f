"""Triton's kernels in Triton's interpreter against the reference, and when they are picked."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from headroom.families.config import AttentionConfig, RopeConfig
from headroom.formats.quants import BY_NAME, F32
from headroom.kernels.ops import Case, Kernel, Span
from headroom.kernels.registry import KERNELS, pick
from headroom.kernels.triton import attention, delta_net, experts, launch, matmul
from headroom.kernels.triton.matmul import TileSizes
from headroom.layers.cuda_block import fits_cuda
from headroom.layers.weights import open_weights
from headroom.plan.settings import PlanSettings
from tests.kernels.cases import (
    CACHE_PAIRS,
    Sized,
    all_cases,
    make_inputs,
    random_experts,
    random_weight,
)
from tests.kernels.test_attention import filled_cache
from tests.kernels.test_registry import results
from tests.kernels.test_registry_extremes import apart

SHARE = 1e-5  # allowed error as a share of the largest value: float32 sums in another order
NO_PAGES = torch.empty(0, dtype=torch.int64)
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
interpreted = pytest.mark.skipif(
    bool(launch.MISSING) or torch.cuda.is_available(), reason="needs triton, and no GPU"
)


def use_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use large tiles: the interpreter's time is spent per program, not per value."""
    monkeypatch.setattr(matmul, "EXACT", TileSizes(outs=64, rows=16, columns=256, warps=1))
    monkeypatch.setattr(matmul, "SINGLE", TileSizes(outs=32, rows=1, columns=256, warps=1))
    monkeypatch.setattr(matmul, "SINGLE_WORDS", TileSizes(outs=32, rows=1, columns=512, warps=1))
    monkeypatch.setattr(attention, "SHORT_QUERIES", 128)
    monkeypatch.setattr(attention, "BLOCK_KEYS", 128)
    monkeypatch.setattr(attention, "BLOCK_VALUES", 1 << 20)
    monkeypatch.setattr(attention, "PIECE_KEYS", 256)
    monkeypatch.setattr(delta_net, "STATE_COLUMNS", 128)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use large tiles and keep experts in host memory."""
    monkeypatch.setattr(experts, "DEVICE", "cpu")
    use_large_tiles(monkeypatch)
    with torch.inference_mode():
        yield


def chosen_cases() -> list[Sized]:
    """Return cases of every type and kind of mask, in few sizes: the interpreter is slow."""
    chosen = []
    for sized in all_cases():
        sizes, case = sized.sizes, sized.case
        if sized.op == "matmul":
            wanted = sizes[:2] in ((3, 37), (0, 1))
            wanted |= sizes[:2] == (40, 37) and case.quant.name == "q8_0"
        elif sized.op == "attention":
            pair = (case.k_type, case.v_type)
            number = CACHE_PAIRS.index(pair) % 3
            wanted = sizes[:3] == (6, 2, 64) and sizes[3:] == ((0, 0), (5, 1), (5, 0))[number]
            wanted |= number == 0 and sizes in ((7, 1, 33, 130, 1), (16, 1, 80, 0, 0))
        elif sized.op == "experts":
            wanted = sizes in ((0, 64, 64, 0), (7, 64, 64, 1), (7, 256, 256, 1), (5, 32, 96, 0))
        elif sized.op == "delta_net":
            wanted = sizes in ((1, 1, 128, 4, 0), (2, 6, 16, 1, 1), (2, 6, 33, 4, 1))
        elif sized.op == "kv_write":
            wanted = sizes in ((0, 2, 64), (5, 2, 64), (3, 1, 33))
        elif sized.op == "route":
            wanted = sizes[:2] == (7, 8) and sizes[3] == sizes[2] % 2
            wanted |= sizes == (90, 60, 2, 0)
        else:
            wanted = True
        if wanted:
            chosen.append(sized)
    return chosen


def compare(result: torch.Tensor, expected: torch.Tensor, share: float = SHARE) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if not result.is_floating_point() or not result.numel():
        assert torch.equal(result, expected)
        return
    largest = float(expected.float().abs().max())
    assert float((result.float() - expected.float()).abs().max()) <= share * largest


def prepared(kernel: Kernel, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if kernel.op != "experts":
        return inputs
    return (*inputs[:3], kernel.prepare(inputs[3]), *inputs[4:])


@interpreted
@pytest.mark.parametrize("sized", chosen_cases(), ids=str)
def test_triton_agrees_with_the_reference(sized: Sized) -> None:
    kernel = next(kernel for kernel in TRITON if kernel.op == sized.op)
    reference = next(k for k in KERNELS if k.op == sized.op and k.backend == "reference")
    assert kernel.refuses(replace(sized.case, device="cuda")) is None
    theirs = make_inputs(sized)
    wanted = results(sized, theirs, reference.run(*theirs))
    ours = prepared(kernel, make_inputs(sized))
    for result, expected in zip(results(sized, ours, kernel.run(*ours)), wanted, strict=True):
        compare(result, expected)


@interpreted
@pytest.mark.parametrize(
    ("sized", "places"),
    [
        (Sized("matmul", Case(), (3, 37, 48)), (0,)),
        (Sized("embed", Case(), (5, 37, 48)), (0,)),
        (Sized("rms_norm", Case(), (7, 33)), (0, 1)),
        (Sized("rope", Case(), (7, 3, 10, 4)), (0, 1, 2)),
        (Sized("gated_activation", Case(), (7, 33, 0)), (0, 1)),
        (Sized("gated_norm", Case(), (7, 6, 33)), (0, 1, 2)),
        (Sized("kv_write", Case(), (3, 1, 33)), (1, 2, 3)),
        (Sized("attention", Case(), (6, 2, 64, 5, 1)), (0, 2)),
        (Sized("route", Case(), (7, 8, 1, 1)), (0, 2)),
        (Sized("experts", Case(experts=(F32,) * 3), (5, 32, 96, 0)), (0, 1, 2)),
        (Sized("delta_net", Case(), (2, 6, 16, 1, 1)), (0, 1, 2)),
    ],
    ids=str,
)
def test_inputs_of_triton_may_be_non_contiguous(sized: Sized, places: tuple[int, ...]) -> None:
    kernel = next(kernel for kernel in TRITON if kernel.op == sized.op)
    together, scattered = (prepared(kernel, make_inputs(sized)) for _ in range(2))
    scattered = tuple(apart(x) if n in places else x for n, x in enumerate(scattered))
    wanted = results(sized, together, kernel.run(*together))
    for result, expected in zip(
        results(sized, scattered, kernel.run(*scattered)), wanted, strict=True
    ):
        assert torch.equal(result, expected)


@interpreted
@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k", "bf16"])
def test_products_in_16_bits_are_near_and_those_of_a_single_row_nearer(name: str) -> None:
    """Products in f16, since the interpreter has none in bf16."""
    torch.manual_seed(0)
    weight, x = random_weight(BY_NAME[name], 37, 512), torch.randn(3, 512)
    reference = next(k for k in KERNELS if str(k) == "matmul-reference")
    expected = reference.run(x, weight, "f32")
    compare(matmul.matmul(x[:1], weight, "bf16"), expected[:1], SHARE)  # sums in float32
    compare(matmul.matmul(x, weight, "f16"), expected, 0.002)


@interpreted
def test_a_row_of_triton_experts_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    kinds = tuple(BY_NAME[name] for name in ("q8_0", "q4_0", "f16"))
    table = experts.prepare(random_experts(kinds, 3, 64, 64))
    x, weights = torch.randn(20, 64), torch.rand(20, 2)
    ids = torch.rand(20, 3).argsort(dim=1)[:, :2].int()
    whole = experts.experts(x, ids, weights, table, "silu", "f32")
    for row in (0, 13, 19):
        own = slice(row, row + 1)
        alone = experts.experts(x[own], ids[own], weights[own], table, "silu", "f32")
        assert torch.equal(alone[0], whole[row])


@interpreted
def test_triton_delta_net_gives_the_same_bits_however_steps_divide_a_sequence() -> None:
    inputs = make_inputs(Sized("delta_net", Case(), (2, 6, 16, 4, 1)))
    *rows, small, state = inputs[:5]
    whole, parts = replace(state, memory=state.memory.clone(), inputs=state.inputs.clone()), []
    expected = delta_net.delta_net(*rows, small, whole, (Span(0, 10, 0, NO_PAGES, state_slot=1),))
    for first, end in ((0, 1), (1, 3), (3, 10)):
        own = [part[first:end] for part in rows]
        spans = (Span(0, end - first, first, NO_PAGES, state_slot=2),)
        parts.append(delta_net.delta_net(*own, small, state, spans))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(state.memory[2], whole.memory[1])
    assert torch.equal(state.inputs[2], whole.inputs[1])


@interpreted
def test_triton_attention_never_reads_keys_outside_the_window() -> None:
    torch.manual_seed(4)
    cache, queries = filled_cache(("f32", "f16"), 1, 32), torch.randn(12, 3, 32)
    pages = torch.randperm(64)
    spans = (Span(0, 11, 300, pages[:30]), Span(11, 1, 400, pages[30:]))
    expected = attention.attention(queries, cache, spans, 0.2, 20)
    seen = torch.zeros(1024, dtype=torch.bool)
    for span in spans:
        position = torch.arange(span.start - 19, span.start + span.rows)
        seen[span.pages[position // 16] * 16 + position % 16] = True
    cache.keys[~seen], cache.values[~seen] = float("nan"), float("nan")
    assert torch.equal(attention.attention(queries, cache, spans, 0.2, 20), expected)
    assert expected.isfinite().all()


def test_every_operation_has_a_triton_kernel() -> None:
    assert {kernel.op for kernel in TRITON} == {kernel.op for kernel in KERNELS}


@pytest.mark.parametrize("kernel", TRITON, ids=str)
def test_triton_refuses_what_it_does_not_run_with_a_reason(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel.refuses(Case()) == "runs on cuda or hip, not cpu"
    plain = Case(device="cuda", reference=True)
    monkeypatch.setattr(launch, "MISSING", "")
    assert kernel.refuses(plain) == "only reference kernels were asked for"
    assert kernel.refuses(Case(device="hip")) is None
    monkeypatch.setattr(launch, "MISSING", "triton is not installed")
    assert kernel.refuses(Case(device="cuda")) == "triton is not installed"


def test_triton_says_which_types_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MISSING", "")
    gpu = Case(device="cuda")
    assert matmul.refuses(replace(gpu, quant=BY_NAME["q8_k"])) == "q8_k is not read"
    assert matmul.refuses(replace(gpu, dtype="int8")) == "computes in f32, f16, bf16, not int8"
    assert matmul.refuses_table(replace(gpu, layout="tiles")) == "reads rows, not tiles"
    assert experts.refuses(replace(gpu, experts=(BY_NAME["q8_k"],))) == "q8_k is not read"
    reason = attention.refuses(replace(gpu, k_type="q4_k"))
    assert reason == "q4_k is not a cache type (f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0)"


def test_cuda_comes_before_triton_unless_triton_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "MISSING", "")
    gpu = Case(device="cuda", quant=BY_NAME["q4_k"], dtype="bf16")
    assert pick("matmul", gpu).backend == "cuda"
    for op in {kernel.op for kernel in KERNELS}:
        for name in ("q4_k", "bf16", "f32"):
            case = replace(gpu, quant=BY_NAME[name], triton=True)
            assert pick(op, case).backend == "triton"


def test_layers_of_triton_kernels_are_not_fused_for_cuda() -> None:
    rope = RopeConfig(theta=10000.0, dims=64)
    mixer = AttentionConfig(heads=4, kv_heads=2, head_dim=64, rope=rope, scale=0.125)
    settings = PlanSettings(
        context=256, parallel=1, chunk=16, cache_tokens=256, k_type="bf16", v_type="bf16",
        compute_type="bf16", weights="packed", threads=1, kernels="triton",
    )  # fmt: skip
    source = open_weights({}, "cuda:0", settings, lambda line, size: None)
    assert source.case.triton
    assert not fits_cuda(mixer, source)
    assert fits_cuda(mixer, replace(source, case=replace(source.case, triton=False)))
