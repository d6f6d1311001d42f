"""Attention of prompts with windows and with wide heads, as far as it runs without a GPU."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from headroom.formats.quants import F32
from headroom.kernels.cuda import attention, attention_scratch
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.reference.attention import attention as reference_attention
from headroom.plan.device_scratch import DeviceStep, _attention_bytes
from headroom.plan.known import known_shape
from headroom.units import MIB
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import no_kernel, use_kernels

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
FLASH = torch.ops.aten._flash_attention_forward.default
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(heads: tuple[int, int, int], start: int, rows: int, dtype: torch.dtype) -> Parts:
    """Queries, keys and values of one sequence whose last `rows` tokens are new."""
    torch.manual_seed(rows)
    count, kv_heads, dim = heads
    queries = torch.randn(rows, count, dim) * 2 * dim**-0.5
    keys, values = torch.randn(2, start + rows, kv_heads, dim)
    return queries.to(dtype), keys.to(dtype), values.to(dtype)


def expected(parts: Parts, window: int = 0) -> torch.Tensor:
    queries, keys, values = (part.float() for part in parts)
    rows, count = len(queries), len(keys)
    cache = PagedKv(keys, values, F32, F32, page_size=1)
    span = Span(0, rows, count - rows, torch.arange(count))
    return reference_attention(queries, cache, (span,), 1.0, window)


def far(found: torch.Tensor, parts: Parts, window: int = 0) -> float:
    return float((found.float() - expected(parts, window)).abs().max())


def _batches(a: Any, b: Any, *, out_dtype: torch.dtype, out: Any) -> torch.Tensor:
    """Stand in for cuBLAS's product of 16 bits to float32, which a CPU has not."""
    assert a.dtype == b.dtype in TOLERANCE
    assert out_dtype == out.dtype == torch.float32
    filled: torch.Tensor = out.copy_(a.float() @ b.float())
    return filled


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", _batches)
    use_kernels(monkeypatch, compile_on_cpu)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 37), (1500, 3), (90, 41)])
def test_wide_heads_attend_as_the_plain_kernel_does(
    products: None, dtype: torch.dtype, start: int, rows: int
) -> None:
    parts = inputs((4, 2, 264), start, rows, dtype)
    assert far(attention.attend(*parts, 0), parts) < TOLERANCE[dtype]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("heads", [(2, 2, 264), (6, 2, 264), (3, 1, 512)])
def test_wide_heads_attend_in_parts_of_rows_and_of_keys(
    products: None, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(attention, "WIDE_ROWS", 16)
    monkeypatch.setattr(attention_scratch, "WIDE_SCORES", 1)
    assert attention_scratch.wide_keys(heads[0], 16) == 64
    parts = inputs(heads, 150, 37, torch.float16)
    parts[1][70] *= 8  # a later part's peak is beyond the first's
    assert far(attention.attend(*parts, 0), parts) < TOLERANCE[torch.float16]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("dim", "window"), [(264, 0), (264, 50), (16, 50), (16, 600)])
def test_a_prompt_may_be_cut_anywhere(products: None, dim: int, window: int) -> None:
    queries, keys, values = inputs((4, 2, dim), 0, 130, torch.float16)
    whole = attention.attend(queries, keys, values, window)
    for cut in (1, 64, 77):
        first = attention.attend(queries[:cut], keys[:cut], values[:cut], window)
        rest = attention.attend(queries[cut:], keys, values, window)
        assert (torch.cat([first, rest]) - whole).abs().max() < TOLERANCE[torch.float16]


def test_a_chunk_reads_only_the_keys_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = inputs((4, 2, 16), 3000, 1100, torch.float16)
    read = []

    def watched(queries: Any, keys: Any, values: Any, seen: Any) -> torch.Tensor:
        read.append((len(queries), *keys.shape))
        return run(queries, keys, values, seen)

    run = attention._attend_by_key_head
    monkeypatch.setattr(attention, "_attend_by_key_head", watched)
    found = attention.attend(*parts, 100)
    assert read == [(512, 611, 2, 16), (512, 611, 2, 16), (76, 175, 2, 16)]
    assert far(found, parts, 100) < TOLERANCE[torch.float16]


class _Flash(TorchDispatchMode):
    """Stands in for torch's flash attention: sides of a window count from the last key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not FLASH:
            return func(*args, **(kwargs or {}))
        q, k, v = (part[0].float().transpose(0, 1) for part in args[:3])
        rows, count = q.shape[1], k.shape[1]
        assert args[3:] == (None, None, rows, count, 0.0, True, False)
        left, right = kwargs["window_size_left"], kwargs["window_size_right"]
        ahead = torch.arange(count) - torch.arange(count - rows, count)[:, None]
        group = len(q) // len(k)
        scores = kwargs["scale"] * q @ k.repeat_interleave(group, 0).transpose(1, 2)
        scores.masked_fill_((ahead > right) | (ahead < -left), float("-inf"))
        mixed = scores.softmax(-1) @ v.repeat_interleave(group, 0)
        return mixed.transpose(0, 1)[None].to(args[0].dtype), *(4 * [torch.empty(0)])


@pytest.mark.parametrize("window", [1, 5, 40, 300])
@pytest.mark.parametrize(("start", "rows"), [(0, 37), (90, 41)])
def test_windows_in_bf16_are_those_of_flash_attention(
    monkeypatch: pytest.MonkeyPatch, start: int, rows: int, window: int
) -> None:
    monkeypatch.setattr(attention, "_has_flash", lambda keys: True)
    parts = inputs((6, 2, 16), start, rows, torch.bfloat16)
    first = max(0, start - window + 1)  # what `prefill` gathers
    with _Flash():
        found = attention.attend(parts[0], parts[1][first:], parts[2][first:], window)
    assert found.dtype == torch.bfloat16
    assert far(found, parts, window) < TOLERANCE[torch.bfloat16]


def test_torch_takes_the_arguments_of_windows() -> None:
    parts = (part.to("meta") for part in inputs((4, 2, 64), 10, 40, torch.bfloat16))
    assert attention._attend_window(*parts, 5).shape == (40, 4, 64)


class _Held(TorchDispatchMode):
    """Counts the bytes of the memory that was taken within and is still held."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._given = {StorageWeakRef(x.untyped_storage()).cdata for x in given}
        self._taken: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            held = StorageWeakRef(made.untyped_storage())
            if held.cdata not in self._given:
                self._taken[held.cdata] = (held, made.untyped_storage().nbytes())
        self._taken = {key: x for key, x in self._taken.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._taken.values()))
        return made


@pytest.mark.parametrize("context", [1000, 20000, 131072])
@pytest.mark.parametrize("rows", [33, 250, 513])
def test_wide_heads_take_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, rows: int, context: int
) -> None:
    use_kernels(monkeypatch, no_kernel)
    layer = next(x for x in known_shape("gemma-4-31b:q4_k_m").layers if not x.window)
    shape = {"dtype": torch.bfloat16, "device": "meta"}
    queries = torch.empty(rows, layer.query_heads, layer.key_dim, **shape)  # type: ignore[arg-type]
    keys = torch.empty(context, layer.kv_heads, layer.key_dim, **shape)  # type: ignore[arg-type]
    with _Held(queries, keys) as held:
        out = attention.attend_wide(queries, keys, keys)
    step = DeviceStep(5376, rows, 1, context, 64 * MIB)
    taken, planned = held.peak - out.nbytes, _attention_bytes(layer, step, 90)
    assert 0.9 * planned < taken <= planned < 200 * MIB
