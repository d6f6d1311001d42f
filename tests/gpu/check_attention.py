"""Compares a GPU's attention with plain torch on the CPU, and times it with --bench."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from headroom.kernels.cuda import attention, attention_scratch
from headroom.kernels.cuda.attention import DecodeShape, Gate, HeadNorms, Projected
from headroom.kernels.ops import PagedKv, Span, StepTables
from headroom.kernels.reference import norms
from headroom.kernels.reference.quantise import CACHE_TYPES, quantise
from tests.gpu.attention_cases import (
    PAGE,
    Heads,
    floats,
    make_tables,
    on_gpu,
    random_cache,
    tables_on_gpu,
    wanted,
)
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

ALL_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def report(name: str, error: float, limit: float) -> None:
    print(f"{'PASS' if error <= limit else 'FAIL'} {name}: {error:.2e} (limit {limit:.0e})")


def attempt(name: str, run: Callable[[], None]) -> None:
    try:
        run()
        torch.cuda.synchronize()
    except Exception:
        print("FAIL", name)
        traceback.print_exc(limit=4)


def shape_of(heads: Heads, tables: StepTables, spans: list, **more: int | bool) -> DecodeShape:
    longest = max(start + rows for start, rows in spans)
    return DecodeShape(
        rows=tables.rows,
        sequences=len(tables.starts),
        span_rows=max(rows for _, rows in spans),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        dim=heads.dim,
        max_context=longest + 700,
        **more,
    )


def captured(tables: StepTables) -> StepTables:
    """Return a step's tables with room for as many sequences as rows, as captured steps have."""
    more = tables.rows - len(tables.starts)
    pages = torch.zeros(more, tables.pages.shape[1], dtype=torch.int32)
    return replace(
        tables,
        starts=torch.cat([tables.starts, torch.zeros(more, dtype=torch.int32)]),
        pages=torch.cat([tables.pages, pages]),
    )


def run_decode(
    queries: torch.Tensor,
    cache: PagedKv,
    tables: StepTables,
    shape: DecodeShape,
    gate: Gate | None = None,
) -> torch.Tensor:
    scratch = torch.full((shape.scratch_floats,), float("nan"), device="cuda")
    return attention.decode(
        queries.cuda(), on_gpu(cache), tables_on_gpu(tables), shape, scratch, gate
    )


def check_decode(heads: Heads, spans: list, tree: bool = False, **more: int | bool) -> None:
    slots = (max(s + r for s, r in spans) // PAGE + 2) * PAGE * len(spans)
    cache = random_cache(heads, slots)
    tables = captured(make_tables(spans, 2, slots, tree))
    shape = shape_of(heads, tables, spans, **more)
    queries = torch.randn(tables.rows, heads.heads, heads.dim) * heads.dim**-0.5 * 2
    expected = wanted(queries, cache, tables, shape)
    found = run_decode(queries, cache, tables, shape).cpu().double()
    exact = shape.exact or "f32" in (heads.k_type, heads.v_type)
    # Packed values are rounded to f16 for the tensor cores.
    packed = not {heads.k_type, heads.v_type} <= {"f32", "f16", "bf16"}
    # A score in float32 is one chain of products, whose roundings add up like its steps' root:
    # of 60 caches each the worst was 2.1e-6 off for heads of 64, 2.0e-6 for 128, 4.6e-6 for 512.
    limit = 5e-7 * heads.dim**0.5 if exact else 3e-3 if packed else 3e-5
    what = f"decode {heads} {spans} tree={tree} {more}"
    report(what, float((found - expected).abs().max() / expected.abs().max()), limit)
    # Alone, in another bucket, a sequence gives the same bits.
    first = sum(rows for _, rows in spans[:-1])
    count, seqs = spans[-1][1], len(spans) - 1
    rows = slice(first, first + count)
    alone = StepTables(
        count,
        *(getattr(tables, n)[rows] for n in ("positions",)),
        torch.zeros(count, dtype=torch.int32),
        tables.index[rows],
        tables.starts[seqs : seqs + 1],
        tables.pages[seqs : seqs + 1].contiguous(),
        tables.kv_slots[rows],
        tables.state_slots[:1],
        None if tables.trees is None else tables.trees[rows],
    )
    small = replace(
        shape, rows=count, sequences=1, span_rows=count, max_context=shape.max_context + 9000
    )
    same = run_decode(queries[rows].contiguous(), cache, alone, small).cpu()
    report(f"  alone: {what}", float((same.double() - found[rows]).abs().max()), 0)
    if not tree:  # one row at a time gives the bits of the span too
        start = spans[-1][0] + count - 1
        single = replace(
            alone,
            rows=1,
            sequence=alone.sequence[:1],
            index=alone.index[-1:],
            positions=alone.positions[-1:],
            starts=torch.tensor([start], dtype=torch.int32),
        )
        small = replace(small, rows=1, span_rows=1)
        same = run_decode(queries[rows][-1:].contiguous(), cache, single, small).cpu()
        report(f"  one row: {what}", float((same.double() - found[rows][-1:]).abs().max()), 0)


def check_gates() -> None:
    heads, spans = Heads(8, 2, 64), [(300, 1), (40, 2)]
    cache, tables = random_cache(heads, 800), make_tables(spans, 1, 800)
    shape = shape_of(heads, tables, spans)
    queries = torch.randn(tables.rows, 8, 64) * 0.2
    plain = wanted(queries, cache, tables, shape)
    for kind, act in (("sigmoid", torch.sigmoid), ("softplus", torch.nn.functional.softplus)):
        for width in (8, 512):
            projected = torch.randn(tables.rows, 512 + width)
            gate = Gate(projected.cuda()[:, 512:], kind)
            found = run_decode(queries, cache, tables, shape, gate).cpu().double()
            by = act(projected[:, 512:].double()).repeat_interleave(512 // width, 1)
            report(f"gate {kind} {width}", float((found - plain * by).abs().max()), 1e-4)


def check_rope(kind: str, heads: Heads, half: int, normed: bool, bf16: bool = False) -> None:
    rows, dim = 5, heads.dim
    tables = make_tables([(7, 3), (20, 2)], 2, 128)
    q = torch.randn(rows + 2, 2 * heads.heads * dim)
    kv = torch.randn(rows + 2, 2 * heads.kv_heads * dim) * 3
    cos, sin = torch.randn(2, rows + 2, half)
    weights = torch.randn(2, dim) if normed else (None, None)
    cache = random_cache(replace(heads, k_type=kind, v_type=kind), 128)
    device = on_gpu(cache)
    width = heads.kv_heads * dim
    out = torch.zeros(rows + 2, heads.heads, dim, dtype=torch.bfloat16 if bf16 else torch.float32)
    found = (
        attention.rope_write(
            Projected(q.cuda(), kv.cuda()[:, :width], kv.cuda()[:, width:], heads.heads, dim),
            HeadNorms(*(None if w is None else w.cuda() for w in weights), normed, 1e-6),
            (cos.cuda(), sin.cuda()),
            tables_on_gpu(tables),
            device,
            out.cuda(),
            0.25,
        )
        .cpu()
        .float()
    )

    def one(x: torch.Tensor, weight: torch.Tensor | None, turn: bool) -> torch.Tensor:
        x = x.reshape(rows + 2, -1, dim)
        if weight is not None:
            x = norms.rms_norm(x, weight, 1e-6)
        return norms.rope(x, cos, sin) if turn else x

    queries = one(q[:, : heads.heads * dim], weights[0], True) * 0.25
    name = f"rope_write {kind} {heads.heads}/{heads.kv_heads}x{dim} half {half} norms {normed}"
    report(name, float((found - queries)[:rows].abs().max()), 2e-2 if bf16 else 3e-6)
    keys = one(kv[:, :width], weights[1], True)
    values = one(kv[:, width:], torch.ones(dim) if normed else None, False)
    for what, stored, before, real in (
        ("keys", device.keys.cpu(), cache.keys, keys),
        ("values", device.values.cpu(), cache.values, values),
    ):
        places = tables.kv_slots[:rows]
        got = floats(stored[places], kind, dim)
        step = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1 / 127}.get(
            kind, 1 / 8 if "4" in kind else 1 / 16
        )
        report(
            f"  {what} near", float((got - real[:rows]).abs().max() / real.abs().max()), step * 1.1
        )
        if kind in CACHE_TYPES:
            expected = quantise(real[:rows], cache.k_type)
            share = float((stored[places] != expected).float().mean())
            # Norms are summed in another order: a few values may round the other way.
            report(f"  {what} other than the plain bits", share, 0.02 if kind != "f32" else 1.0)
        kept = torch.ones(128, dtype=torch.bool)
        kept[places] = False
        report(f"  {what} elsewhere untouched", float((stored[kept] != before[kept]).sum()), 0)


def check_prefill(heads: Heads, spans: list, window: int, dtype: str) -> None:
    slots = (max(s + r for s, r in spans) // PAGE + 2) * PAGE * len(spans)
    cache, tables = random_cache(heads, slots), make_tables(spans, 0, slots)
    shape = shape_of(heads, tables, spans, window=window)
    queries = torch.randn(tables.rows, heads.heads, heads.dim) * heads.dim**-0.5 * 2
    expected = wanted(queries, cache, tables, shape)
    listed, first = [], 0
    for number, (start, rows) in enumerate(spans):
        listed.append(Span(first, rows, start, tables.pages[number].long().cuda()))
        first += rows
    found = attention.prefill(queries.cuda(), on_gpu(cache), tuple(listed), window, dtype).cpu()
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    limit = {"f32": 3e-6, "f16": 5e-3, "bf16": 3e-2}[dtype]
    report(f"prefill {dtype} {heads} {spans} window={window}", error, limit)


def check_wide_parts(heads: Heads, spans: list, dtype: str) -> None:
    """Wide heads with their keys in parts, which would take contexts too long for plain torch."""
    before, attention_scratch.WIDE_SCORES = attention_scratch.WIDE_SCORES, 1 << 17
    try:
        check_prefill(heads, spans, 0, dtype)
    finally:
        attention_scratch.WIDE_SCORES = before


def bench_decode(name: str, heads: Heads, context: int, spans: int, rows: int) -> None:
    slots = (context + rows + PAGE) // PAGE * PAGE * spans
    cell = heads.kv_heads * heads.dim * 4
    count = max(2, (200 << 20) // (slots * cell))
    tables = tables_on_gpu(make_tables([(context, rows)] * spans, 0, slots, rows > 1))
    shape = DecodeShape(
        spans * rows, spans, rows, heads.heads, heads.kv_heads, heads.dim, context + rows
    )
    scratch = torch.empty(shape.scratch_floats, device="cuda")
    queries = torch.randn(spans * rows, heads.heads, heads.dim, device="cuda") * 0.1
    out = torch.empty(spans * rows, heads.heads * heads.dim, device="cuda")
    kind = {"dtype": torch.float16, "device": "cuda"}
    caches = [
        replace(
            random_cache(heads, 1),
            keys=torch.randn(slots, heads.kv_heads, heads.dim, **kind),
            values=torch.randn(slots, heads.kv_heads, heads.dim, **kind),
        )
        for _ in range(count)
    ]
    us = time_us(
        [
            lambda c=c: attention.decode(queries, c, tables, shape, scratch, None, out)
            for c in caches
        ]
    )
    moved = spans * (context + rows) * cell
    print(
        f"BENCH decode {name} context {context} x{spans} rows {rows}: "
        f"{us:.1f} us {moved / us / 1e3:.0f} GB/s"
    )


def bench_prefill(heads: Heads, start: int, rows: int, window: int = 0) -> None:
    slots = start + rows + 2 * PAGE
    cache = on_gpu(random_cache(heads, slots))
    span = (Span(0, rows, start, torch.randperm(slots // PAGE).cuda()),)
    queries = torch.randn(rows, heads.heads, heads.dim, device="cuda") * 0.1
    us = time_us([lambda: attention.prefill(queries, cache, span, window, "bf16")])
    seen = sum(min(start + i + 1, window or start + rows) for i in range(rows))
    flops = 4 * heads.heads * heads.dim * seen
    print(
        f"BENCH prefill {heads.heads}/{heads.kv_heads}x{heads.dim} window {window} "
        f"{rows} after {start}: {us:.0f} us {flops / us / 1e6:.0f} TFLOP/s"
    )


def checks() -> list[tuple[str, Callable[[], None]]]:
    made: list[tuple[str, Callable[[], None]]] = []

    def add(run: Callable[..., None], *args: object, **more: object) -> None:
        made.append((f"{run.__name__} {args} {more}", lambda: run(*args, **more)))

    few = [(0, 1), (5, 3), (127, 1), (128, 2), (200, 1)]
    for kind in ALL_TYPES:
        add(check_rope, kind, Heads(6, 2, 64), 16, True)
        add(check_decode, Heads(8, 2, 64, kind, kind), few)
        add(check_decode, Heads(4, 2, 64, kind, kind), few, exact=True)
    add(check_rope, "f16", Heads(4, 1, 256), 32, True, True)
    add(check_rope, "bf16", Heads(3, 3, 80), 40, False)
    for kind in ("f16", "bf16", "q8_0"):
        add(check_decode, Heads(16, 2, 256, kind, kind), [(3000, 1), (70, 1)])
        add(check_decode, Heads(24, 4, 256, kind, kind), [(900, 16), (129, 3)], True)
    add(check_decode, Heads(16, 2, 256), [(16400, 1), (40000, 1)])
    add(check_decode, Heads(8, 2, 64), [(140000, 2)])
    # More pieces than blocks, of which some get two and some three.
    add(check_decode, Heads(16, 4, 64), [(4000 + 300 * i, 1 + i % 3) for i in range(12)])
    add(check_decode, Heads(8, 8, 128), [(5000, 1)] * 8, window=3000)
    add(check_decode, Heads(8, 4, 512, "bf16", "f16"), [(500, 5), (33, 1)], True)
    add(check_decode, Heads(8, 4, 512, "bf16", "bf16"), [(500, 1)], window=100)
    add(check_decode, Heads(8, 2, 128), [(1000, 1), (50, 4), (511, 8)], window=128)
    add(check_decode, Heads(8, 2, 128), [(1000, 9), (511, 21)], True, window=7)
    add(check_decode, Heads(8, 2, 128, "f32", "f32"), [(1000, 9), (511, 21)], True, window=7)
    add(check_decode, Heads(5, 1, 80), [(300, 2)])
    add(check_decode, Heads(8, 4, 512, "q5_1", "f32"), [(300, 2)])
    add(check_gates)
    for dtype in ("bf16", "f16", "f32"):
        add(check_prefill, Heads(8, 2, 64), [(0, 130), (77, 65)], 0, dtype)
        add(check_prefill, Heads(8, 2, 256, "q8_0", "q4_0"), [(33, 100)], 0, dtype)
        add(check_prefill, Heads(4, 2, 128, "bf16", "bf16"), [(600, 700)], 256, dtype)
        add(check_prefill, Heads(4, 2, 512), [(10, 60)], 0, dtype)
        add(check_prefill, Heads(4, 2, 256), [(0, 540), (600, 65)], 300, dtype)
        add(check_prefill, Heads(2, 1, 64, "q8_0", "q8_0"), [(100, 540)], 1, dtype)
        add(check_prefill, Heads(4, 1, 80), [(70, 130)], 33, dtype)
        add(check_prefill, Heads(4, 1, 512), [(70, 130)], 100, dtype)
        add(check_prefill, Heads(4, 2, 512), [(150, 600)], 100, dtype)
        add(check_wide_parts, Heads(4, 2, 512), [(150, 270)], dtype)
    return made


def main() -> None:
    keep_code()
    torch.manual_seed(0)
    for name, run in checks():
        attempt(name, run)
    if "--bench" not in sys.argv:
        return
    moe, dense = Heads(16, 2, 256), Heads(24, 4, 256)
    for name, heads in (("35B-A3B", moe), ("27B", dense)):
        for context, spans, rows in (
            (128, 1, 1),
            (1024, 1, 1),
            (16384, 1, 1),
            (16384, 1, 16),
            (4096, 16, 1),
            (131072, 1, 1),
        ):
            attempt(
                name,
                lambda n=name, h=heads, c=context, s=spans, r=rows: bench_decode(n, h, c, s, r),
            )
        attempt(name, lambda h=heads: bench_prefill(h, 0, 2048))
        attempt(name, lambda h=heads: bench_prefill(h, 14336, 2048))
    bench_windows()


def bench_windows() -> None:
    """Prompts of families with windows and with wide heads."""
    for name, heads, window in (
        ("gemma-4-31b windows", Heads(32, 16, 256), 1024),
        ("gemma-4-31b full", Heads(32, 4, 512), 0),
        ("gemma-4-26b-a4b windows", Heads(16, 8, 256), 1024),
        ("gemma-4-26b-a4b full", Heads(16, 2, 512), 0),
        ("laguna-xs.2 windows", Heads(64, 8, 128), 512),
        ("laguna-xs.2 full", Heads(48, 8, 128), 0),
    ):
        for start in (0, 14336, 63488):
            attempt(name, lambda h=heads, w=window, s=start: bench_prefill(h, s, 2048, w))


if __name__ == "__main__":
    main()
