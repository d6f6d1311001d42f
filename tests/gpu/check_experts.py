"""Compares routed experts of a GPU with the plain ones, and times them with --bench."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import experts_packed, experts_prefill, experts_scratch, grouped
from headroom.kernels.cuda.experts import (
    NO_ADDENDS,
    Addends,
    ExpertTiles,
    SharedExpertTiles,
    choose_few_rows,
    few_rows,
    table_of,
)
from headroom.kernels.cuda.matmul import NarrowRows, half_rows, narrow_rows
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.ops import ExpertTable, RouterRule
from headroom.kernels.reference.dequant import dequantise
from tests.gpu import expert_cases as known
from tests.gpu.check_matmul import random_weight
from tests.gpu.expert_cases import Kinds
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

DEVICE = "cuda"


def make_table(kinds: Kinds, experts: int, width: int, hidden: int) -> ExpertTable:
    """Random experts."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertTable(
        *(
            tuple(random_weight(kind, *shape) for _ in range(experts))
            for kind, shape in zip(kinds, shapes, strict=True)
        )
    )


def to_tiles(table: ExpertTable) -> ExpertTiles:
    """The experts in tiles, each part by one launch."""
    pieces = []
    for part in table.parts:
        quant, rows, columns = part[0].quant, part[0].rows, part[0].columns
        tiles = torch.empty(len(part), tile_bytes(quant, rows, columns), dtype=torch.uint8)
        pieces.append(tiles.to(DEVICE))
        pack(torch.stack([w.data for w in part]).to(DEVICE), quant, rows, columns, pieces[-1])
    gate = table.gate[0]
    return table_of(pieces, table.kinds, gate.rows, gate.columns)


def wanted_sum(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: ExpertTable,
    activation: str,
) -> torch.Tensor:
    """The sum in float64, expert by expert; negative ids give nothing."""
    x, ids, weights = inputs
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(table.gate)):
        rows, at = torch.nonzero(ids == expert, as_tuple=True)
        if not len(rows):
            continue
        gate, up, down = (
            dequantise(w.data, w.quant, w.columns).view(w.rows, w.columns).double()
            for w in (part[expert] for part in table.parts)
        )
        own = x[rows].double()
        act = torch.nn.functional.silu(own @ gate.T)
        if activation == "gelu":
            act = torch.nn.functional.gelu(own @ gate.T, approximate="tanh")
        out.index_add_(0, rows, weights[rows, at, None] * ((act * (own @ up.T)) @ down.T))
    return out


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Let one way be taken by any number of rows: "sorted", experts as they lie; else unpacked.

    And then one of grouped products on every GPU; "": each GPU's own.
    """
    most = 1 << 20 if way == "sorted" else 0  # picks of an expert
    product_way = grouped.product_way if way in ("", "sorted") else lambda device: way
    with (
        patch.object(experts_scratch, "SORTED_PICKS", most),
        patch.object(grouped, "product_way", product_way),
    ):
        yield


@contextmanager
def reading_once(once: bool) -> Iterator[None]:
    """Let steps of any number of rows read each distinct expert once, or once for each row."""
    rows = 1 if once else 1000
    with (
        patch.object(experts_scratch, "SHARED_ROWS", rows),
        patch.object(experts_scratch, "SHARED_ROWS_OVER_LINK", rows),
    ):
        yield


def check(
    kinds: Kinds,
    sizes: tuple[int, int, int],
    rows: int,
    used: int,
    activation: str,
    way: str = "",
) -> bool:
    """One layer with missing picks, a residual and a shared expert."""
    experts, width, hidden = sizes
    table = make_table(kinds, experts, width, hidden)
    ids = torch.stack([torch.randperm(experts)[:used] for _ in range(rows)]).int()
    ids[torch.rand(ids.shape) < 0.1] = -1
    inputs = torch.randn(rows, hidden) * 0.3, ids, torch.rand(rows, used)
    wanted = wanted_sum(inputs, table, activation)
    scale = float(wanted.norm() / (rows * hidden) ** 0.5)
    residual, shared = (torch.randn(rows, hidden) * scale for _ in range(2))
    logits = torch.randn(rows, 3)
    more = residual + shared * logits[:, 2:].sigmoid()
    tiles = to_tiles(table)
    moved = tuple(t.to(DEVICE) for t in inputs)
    addends = Addends(residual.to(DEVICE), shared.to(DEVICE), logits.to(DEVICE)[:, 2:])

    def distance(found: torch.Tensor, from_: torch.Tensor) -> float:
        apart = float((found.cpu() - from_).norm() / wanted.norm())
        return apart if apart == apart else float("inf")

    with forced(way):
        errors = [
            distance(experts_prefill.many_rows(*moved, tiles, activation, addends), wanted + more),
            distance(experts_prefill.many_rows(*moved, tiles, activation), wanted),
        ]
        good = max(errors) < (0.005 if way == "sorted" else 0.015)
        halves = narrow_rows(moved[0] * 2**18, torch.float16)  # beyond what f16 itself holds
        halves = NarrowRows(halves.values, halves.powers / 2**18)
        errors.append(
            distance(experts_prefill.many_rows(halves, *moved[1:], tiles, activation), wanted)
        )
        good = good and errors[-1] < (0.001 if way == "sorted" else 0.003)
    for once in (False, True) if rows <= 32 else ():
        with reading_once(once):
            few = few_rows(half_rows(moved[0]), *moved[1:], tiles, activation, addends)
        errors.append(distance(few, wanted + more))
        good = good and errors[-1] < 0.001
    text = " ".join(f"{e:.1e}" for e in errors)
    case = f"{kinds} {sizes} x{rows} used {used} {activation} {way}"
    print(f"{'PASS' if good else 'FAIL'} {case}: {text}", flush=True)
    return good


def shared_expert_tiles(table: ExpertTable) -> SharedExpertTiles:
    """Return the first of some experts as the shared expert, which every row visits."""
    tiles = to_tiles(table)
    gate, up, down = (piece[0] for piece in tiles.memory)
    return SharedExpertTiles(gate, up, down, table.kinds, tiles.width)


def check_shared(
    kinds: Kinds, shared_kinds: Kinds, sizes: tuple[int, int, int], shared_width: int, rows: int
) -> bool:
    """Few rows with a shared expert, weighted by its gate or by one."""
    experts, width, hidden = sizes
    table, shared = (
        make_table(kinds, experts, width, hidden),
        make_table(shared_kinds, 1, shared_width, hidden),
    )
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(rows)]).int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    inputs = torch.randn(rows, hidden) * 0.3, ids, torch.rand(rows, 2)
    logits, everyone = torch.randn(rows, 3), torch.zeros(rows, 1, dtype=torch.int32)
    x, moved_ids, weights = (t.to(DEVICE) for t in inputs)
    worst, tiles, shared_tiles = 0.0, to_tiles(table), shared_expert_tiles(shared)
    for given in (logits, None):
        by = torch.ones(rows, 1) if given is None else given[:, 2:].sigmoid()
        wanted = wanted_sum(inputs, table, "silu")
        wanted += wanted_sum((inputs[0], everyone, by), shared, "silu")
        gate_logits = None if given is None else given.to(DEVICE)[:, 2:]
        addends = Addends(shared_logits=gate_logits, shared_tiles=shared_tiles)
        found = few_rows(half_rows(x), moved_ids, weights, tiles, "silu", addends)
        apart = float((found.cpu() - wanted).norm() / wanted.norm())
        worst = max(worst, apart if apart == apart else float("inf"))
    good = worst < 0.001
    case = f"{kinds} {sizes} with {shared_kinds} {shared_width} x{rows}"
    print(f"{'PASS' if good else 'FAIL'} {case}: {worst:.1e}", flush=True)
    return good


def check_once(
    kinds: Kinds, shared_kinds: Kinds, sizes: tuple[int, int, int], shared_width: int, rows: int
) -> bool:
    """Rows that share experts have the bits that they have if each reads its own."""
    experts, width, hidden = sizes
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    shared = shared_expert_tiles(make_table(shared_kinds, 1, shared_width, hidden))
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(rows)]).int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    ids[rows // 2] = -1  # a row of padding
    x, weights, logits = (torch.randn(rows, size).to(DEVICE) for size in (hidden, 3, 3))
    different = 0
    for addends in (Addends(residual=x), Addends(shared_logits=logits[:, 2:], shared_tiles=shared)):
        found = []
        for once in (False, True):
            with reading_once(once):
                rows_in = half_rows(x), ids.to(DEVICE), weights
                found.append(few_rows(*rows_in, tiles, "silu", addends))
        different += int((found[0] != found[1]).sum())
    case = f"{kinds} {sizes} with {shared_kinds} {shared_width} x{rows}"
    print(f"{'FAIL' if different else 'PASS'} {case} read once: {different} numbers differ")
    return not different


def check_chosen(sizes: tuple[int, int, int], rule: RouterRule, biased: bool) -> bool:
    """Experts picked by the fused kernel are those of the router's kernel, to the bit."""
    experts, width, hidden = sizes
    kinds = ("q4_k", "q4_k", "q8_0")
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    shared, good = shared_expert_tiles(make_table(kinds, 1, width, hidden)), True
    for rows in (1, 2):
        x, logits = torch.randn(rows, hidden).to(DEVICE), torch.randn(rows, experts + 1).to(DEVICE)
        bias = torch.randn(experts).to(DEVICE) if biased else None
        counts = torch.zeros(2, experts, dtype=torch.int64, device=DEVICE)
        sequence = torch.arange(0, -rows, -1, dtype=torch.int32, device=DEVICE)  # one of padding
        addends = Addends(residual=x, shared_logits=logits[:, experts:], shared_tiles=shared)
        choice, later = (RouterLogits(logits, rule, bias, count, sequence) for count in counts)
        wanted = few_rows(half_rows(x), *choice.top_k(), tiles, "silu", addends)
        found = choose_few_rows(half_rows(x), later, tiles, "silu", addends)
        good = good and torch.equal(found, wanted) and torch.equal(*counts)
        good = good and int(counts[0].sum()) == rule.used
    print(f"{'PASS' if good else 'FAIL'} {sizes} chosen on the way by {rule} bias={biased}")
    return good


def check_alone(kinds: Kinds, sizes: tuple[int, int, int], used: int) -> bool:
    """A row has the same bits alone, with other rows, and in pieces of any size."""
    experts, width, hidden = sizes
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    addends = Addends(shared_tiles=shared_expert_tiles(make_table(kinds, 1, width, hidden)))
    ids = torch.stack([torch.randperm(experts)[:used] for _ in range(11)]).int().to(DEVICE)
    x, weights = torch.randn(11, hidden).to(DEVICE), torch.rand(11, used).to(DEVICE)
    together = few_rows(half_rows(x), ids, weights, tiles, "silu", addends)
    different = 0
    for rows in (slice(0, 1), slice(4, 6), slice(7, 10), slice(10, 11)):
        alone = few_rows(half_rows(x[rows]), ids[rows], weights[rows], tiles, "silu", addends)
        different += int((alone != together[rows]).sum())
    print(f"{'FAIL' if different else 'PASS'} {kinds} {sizes} alone: {different} numbers differ")
    return not different


def check_sorted_alone(kinds: Kinds, sizes: tuple[int, int, int], rows: int, used: int) -> bool:
    """A row sorted by expert has the same bits alone and with more rows than one product takes."""
    experts, width, hidden = sizes
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    ids = torch.stack([torch.randperm(experts)[:used] for _ in range(rows)]).int().to(DEVICE)
    ids[rows // 3 :, 0] = 0  # many rows of one expert, which some have twice
    x, weights = torch.randn(rows, hidden).bfloat16().to(DEVICE), torch.rand(rows, used).to(DEVICE)
    different = 0
    with forced("sorted"):
        together = experts_prefill.many_rows(x, ids, weights, tiles, "silu")
        again = experts_prefill.many_rows(x, ids, weights, tiles, "silu")
        for part in (slice(0, 1), slice(rows // 3, rows - 3), slice(rows - 2, rows)):
            alone = experts_prefill.many_rows(x[part], ids[part], weights[part], tiles, "silu")
            different += int((alone != together[part]).sum())
    different += int((again != together).sum())
    case = f"{kinds} {sizes} x{rows} used {used} sorted, alone"
    print(f"{'FAIL' if different else 'PASS'} {case}: {different} numbers differ")
    return not different


def check_sorted(rows: int, experts: int, used: int, each: int) -> bool:
    """Picks in the order in which torch sorts them, and their rows group by group."""
    ids = pick_experts(rows, experts, used)
    ids[torch.rand(ids.shape, device=DEVICE) < 0.1] = -1
    found, wanted = (
        experts_prefill.sort_in_groups(ids, experts, each),
        experts_prefill.sort_picks(ids, experts),
    )
    pairs = ((found.rows, wanted.rows), (found.places, wanted.places), (found.ends, wanted.ends))
    good = all(torch.equal(*pair) for pair in pairs)
    x = torch.randn(rows, 64, device=DEVICE).bfloat16()
    for first in range(0, experts, each):
        group = experts_prefill.expert_group(found, first, each)
        own = experts_prefill.gather_rows(
            x, group, torch.zeros(rows * used, 64, device=DEVICE).bfloat16()
        )
        start = int(wanted.ends[first - 1]) if first else 0
        count = int(wanted.ends[group.last]) - start
        good = good and int(group.ends[-1]) == count
        good = good and torch.equal(own[:count], x[wanted.rows[start : start + count]])
        good = good and not own[count:].any()
    print(f"{'PASS' if good else 'FAIL'} sorted {experts} x{rows} used {used} in groups of {each}")
    return good


def bench_shapes(tiles: ExpertTiles, used: int) -> None:
    """Times of rows sorted by expert, by the shape of blocks."""
    shapes = experts_packed.PACKED_SHAPES
    for rows in (128, 512, 1024):
        x = torch.randn(rows, tiles.hidden, device=DEVICE).bfloat16()
        weights = torch.rand(rows, used, device=DEVICE)
        ids = pick_experts(rows, len(tiles.addresses), used)
        run = partial(experts_prefill.many_rows, x, ids, weights, tiles, "silu")
        for shape in shapes[:4]:
            experts_packed.packed_shape_for.cache_clear()
            with patch.object(experts_packed, "PACKED_SHAPES", (shape,)), forced("sorted"):
                print(f"BENCH sorted x{rows}, {shape} warps and stages: {time_us([run]):.0f} us")
    experts_packed.packed_shape_for.cache_clear()


def bench(name: str, kinds: Kinds, sizes: tuple[int, int, int], used: int) -> None:
    """Times of a layer whose experts no cache holds."""
    count, width, hidden = sizes
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    pieces = []
    for kind, shape in zip(kinds, shapes, strict=True):
        one = random_weight(kind, *shape)
        packed = torch.empty(tile_bytes(one.quant, *shape), dtype=torch.uint8, device=DEVICE)
        pack(one.data.to(DEVICE), one.quant, *shape, packed)
        pieces.append(packed.repeat(count).view(count, -1))
    tiles = table_of(pieces, tuple(BY_NAME[kind] for kind in kinds), width, hidden)
    bytes_of_one = sum(piece.shape[1] for piece in pieces)
    for rows in (1, 2, 4, 8, 16, 32):
        x = half_rows(torch.randn(rows, hidden, device=DEVICE))
        weights = torch.rand(rows, used, device=DEVICE)
        chosen = [pick_experts(rows, count, used) for _ in range(max(4, 64 // rows))]
        shared = SharedExpertTiles(*(piece[0] for piece in pieces), tiles.kinds, width)
        for addends in (NO_ADDENDS, Addends(shared_tiles=shared)):
            turns = [partial(few_rows, x, ids, weights, tiles, "silu", addends) for ids in chosen]
            also = " and one" if addends.shared_tiles else ""
            distinct = sum(len(ids.unique()) for ids in chosen) / len(chosen)
            for once in (False, True):
                with reading_once(once):
                    took = time_us(turns)
                moved = bytes_of_one * (distinct if once else used * rows)
                how = "once" if once else "by each row"
                speed = f"{took:.1f} us {moved / took / 1e3:.0f} GB/s"
                print(f"BENCH {name}{also} x{rows}, {distinct:.0f} experts read {how}: {speed}")
    if "--shapes" in sys.argv and kinds[0] not in ("bf16", "f16"):  # which fit one of them only
        bench_shapes(tiles, used)
    for rows in (64, 128, 256, 512, 1024, 2048, 4096):
        x_many = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        weights = torch.rand(rows, used, device=DEVICE)
        ids = pick_experts(rows, count, used)
        chosen = len(ids.unique())
        for way in ("sorted", ""):
            with forced(way):
                took = time_us(
                    [partial(experts_prefill.many_rows, x_many, ids, weights, tiles, "silu")]
                )
            speed = f"{bytes_of_one * chosen / took / 1e3:.0f} GB/s of {chosen} experts"
            print(f"BENCH {name} x{rows}, {way or 'unpacked'}: {took:.0f} us a layer {speed}")


def pick_experts(rows: int, experts: int, used: int) -> torch.Tensor:
    """Random choices without repeats."""
    return torch.rand(rows, experts, device=DEVICE).topk(used).indices.int()


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    small = DEVICE == "cpu"
    cases = known.FEW if small else [*known.FEW, *known.LARGE]
    runs = [partial(check, *case) for case in cases]
    runs += [partial(check, *case, "own") for case in cases]
    runs += [
        partial(check, *case, "sorted")
        for case in (known.SORTED if small else [*known.SORTED, *known.REAL])
    ]
    runs += [partial(check_sorted_alone, *case) for case in known.SORTED_ALONE]
    runs += [partial(check_shared, *case) for case in known.SHARED]
    runs += [partial(check_once, *case) for case in known.ONCE]
    runs += [partial(check_chosen, *case) for case in known.CHOSEN]
    for kind in ("q4_k", "f16", "bf16"):
        runs.append(partial(check_alone, (kind, kind, kind), (6, 256, 512), 3))
    runs += [partial(check_sorted, *case) for case in known.PICKS if not small]
    for run in runs:
        try:
            run()
        except Exception:
            print("FAIL", run.args)
            traceback.print_exc(limit=4)
    if "--bench" in sys.argv:
        bench("35B-A3B q4_k q6_k", known.MIXED, (256, 512, 2048), 8)
        bench("35B-A3B q4_k", ("q4_k", "q4_k", "q4_k"), (256, 512, 2048), 8)
        for kind in ("bf16", "f16"):
            bench(f"30B-A3B {kind}", (kind, kind, kind), (128, 768, 2048), 8)


if __name__ == "__main__":
    main()
