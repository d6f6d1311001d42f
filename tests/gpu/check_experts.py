"""Compares routed experts of a GPU with the plain ones, and times them with --bench."""

import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import experts as fast
from headroom.kernels.cuda import grouped, picks
from headroom.kernels.cuda.expert_tiles import OwnTiles
from headroom.kernels.cuda.few_experts import choose_few_rows, few_rows
from headroom.kernels.cuda.matmul import half_rows
from headroom.kernels.cuda.narrow import NarrowRows, narrow_rows
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.route import Choice
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.ops import ExpertTable, RouterRule
from headroom.kernels.reference.dequant import dequantise
from tests.gpu.check_matmul import random_weight
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

DEVICE = "cuda"
Kinds = tuple[str, str, str]
Case = tuple[Kinds, tuple[int, int, int], int, int, str]
# Experts of plain types, alone and beside packed ones; sides that fill no tile.
PLAIN: list[Case] = [
    (("bf16", "bf16", "bf16"), (4, 40, 520), 3, 2, "silu"),
    (("f16", "f16", "f16"), (4, 264, 72), 5, 3, "gelu"),
    (("bf16", "f16", "bf16"), (4, 24, 40), 1, 2, "silu"),
    (("q4_k", "q4_k", "bf16"), (4, 96, 256), 9, 2, "silu"),
    (("f16", "bf16", "q8_0"), (4, 32, 72), 2, 2, "gelu"),
]
LARGE_PLAIN: list[Case] = [
    (("bf16", "bf16", "bf16"), (16, 768, 2048), 1, 8, "silu"),
    (("f16", "f16", "f16"), (16, 768, 2048), 32, 8, "silu"),
    (("bf16", "bf16", "bf16"), (16, 704, 2816), 100, 8, "gelu"),
]
# Experts beside one that every row visits, of their types and sizes and of others.
OWN: list[tuple[Kinds, Kinds, tuple[int, int, int], int, int]] = [
    (("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q6_k"), (5, 256, 512), 256, 1),
    (("q4_k", "q4_k", "q6_k"), ("q8_0", "q5_0", "bf16"), (5, 256, 512), 296, 3),
    (("f16", "f16", "bf16"), ("f16", "q4_1", "f16"), (4, 40, 96), 24, 9),
]
# Of our grouped product: experts, outputs and columns; rows; experts of a row.
GROUPED = [
    ((256, 1024, 2048), 2048, 8),
    ((256, 2048, 512), 2048, 8),
    ((256, 1024, 2048), 33, 8),
    ((128, 1536, 2048), 2048, 8),
    ((8, 136, 72), 500, 2),
    ((60, 40, 424), 37, 4),
    ((1, 264, 40), 1000, 1),
    ((1000, 8, 8), 3000, 6),
]


def make_table(kinds: Kinds, experts: int, width: int, hidden: int) -> ExpertTable:
    """Random experts."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertTable(
        *(
            tuple(random_weight(kind, *shape) for _ in range(experts))
            for kind, shape in zip(kinds, shapes, strict=True)
        )
    )


def to_tiles(table: ExpertTable) -> fast.ExpertTiles:
    """The experts in tiles, each part by one launch."""
    pieces = []
    for part in table.parts:
        quant, rows, columns = part[0].quant, part[0].rows, part[0].columns
        tiles = torch.empty(len(part), tile_bytes(quant, rows, columns), dtype=torch.uint8)
        pieces.append(tiles.to(DEVICE))
        pack(torch.stack([w.data for w in part]).to(DEVICE), quant, rows, columns, pieces[-1])
    gate = table.gate[0]
    return fast.table_of(pieces, table.kinds, gate.rows, gate.columns)


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


def forced(way: str) -> AbstractContextManager[object]:
    """Let one way of grouped products be taken on every GPU; "": each GPU's own."""
    if not way:
        return nullcontext()
    return patch.object(picks, "product_way", lambda device: way)


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
    others = fast.Others(residual.to(DEVICE), shared.to(DEVICE), logits.to(DEVICE)[:, 2:])

    def distance(found: torch.Tensor, from_: torch.Tensor) -> float:
        apart = float((found.cpu() - from_).norm() / wanted.norm())
        return apart if apart == apart else float("inf")

    with forced(way):
        errors = [
            distance(fast.many_rows(*moved, tiles, activation, others), wanted + more),
            distance(fast.many_rows(*moved, tiles, activation), wanted),
        ]
    good = max(errors) < 0.015
    halves = narrow_rows(moved[0] * 2**18, torch.float16)  # beyond what f16 itself holds
    halves = NarrowRows(halves.values, halves.powers / 2**18)
    errors.append(distance(fast.many_rows(halves, *moved[1:], tiles, activation), wanted))
    good = good and errors[-1] < 0.003
    if rows <= 32:
        few = few_rows(half_rows(moved[0]), *moved[1:], tiles, activation, others)
        errors.append(distance(few, wanted + more))
        good = good and errors[-1] < 0.001
    text = " ".join(f"{e:.1e}" for e in errors)
    case = f"{kinds} {sizes} x{rows} used {used} {activation} {way}"
    print(f"{'PASS' if good else 'FAIL'} {case}: {text}", flush=True)
    return good


def own_tiles(table: ExpertTable) -> OwnTiles:
    """The first of some experts as the one that every row visits."""
    tiles = to_tiles(table)
    gate, up, down = (piece[0] for piece in tiles.memory)
    return OwnTiles(gate, up, down, table.kinds, tiles.width)


def check_own(
    kinds: Kinds, own_kinds: Kinds, sizes: tuple[int, int, int], own_width: int, rows: int
) -> bool:
    """Few rows with an expert that all of them visit, by a weight of its own or by one."""
    experts, width, hidden = sizes
    table, own = (
        make_table(kinds, experts, width, hidden),
        make_table(own_kinds, 1, own_width, hidden),
    )
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(rows)]).int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    inputs = torch.randn(rows, hidden) * 0.3, ids, torch.rand(rows, 2)
    logits, everyone = torch.randn(rows, 3), torch.zeros(rows, 1, dtype=torch.int32)
    x, moved_ids, weights = (t.to(DEVICE) for t in inputs)
    worst, tiles, visited = 0.0, to_tiles(table), own_tiles(own)
    for given in (logits, None):
        by = torch.ones(rows, 1) if given is None else given[:, 2:].sigmoid()
        wanted = wanted_sum(inputs, table, "silu")
        wanted += wanted_sum((inputs[0], everyone, by), own, "silu")
        others = fast.Others(
            shared_logits=None if given is None else given.to(DEVICE)[:, 2:], own=visited
        )
        found = few_rows(half_rows(x), moved_ids, weights, tiles, "silu", others)
        apart = float((found.cpu() - wanted).norm() / wanted.norm())
        worst = max(worst, apart if apart == apart else float("inf"))
    good = worst < 0.001
    case = f"{kinds} {sizes} beside {own_kinds} {own_width} x{rows}"
    print(f"{'PASS' if good else 'FAIL'} {case}: {worst:.1e}", flush=True)
    return good


def check_chosen(sizes: tuple[int, int, int], rule: RouterRule, biased: bool) -> bool:
    """Experts chosen on the way are those that a router's kernel chooses, to the bit."""
    experts, width, hidden = sizes
    kinds = ("q4_k", "q4_k", "q8_0")
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    own, good = own_tiles(make_table(kinds, 1, width, hidden)), True
    for rows in (1, 2):
        x, logits = torch.randn(rows, hidden).to(DEVICE), torch.randn(rows, experts + 1).to(DEVICE)
        bias = torch.randn(experts).to(DEVICE) if biased else None
        counts = torch.zeros(2, experts, dtype=torch.int64, device=DEVICE)
        sequence = torch.arange(0, -rows, -1, dtype=torch.int32, device=DEVICE)  # one of padding
        others = fast.Others(residual=x, shared_logits=logits[:, experts:], own=own)
        choice, later = (Choice(logits, rule, bias, count, sequence) for count in counts)
        wanted = few_rows(half_rows(x), *choice.made(), tiles, "silu", others)
        found = choose_few_rows(half_rows(x), later, tiles, "silu", others)
        good = good and torch.equal(found, wanted) and torch.equal(*counts)
        good = good and int(counts[0].sum()) == rule.used
    print(f"{'PASS' if good else 'FAIL'} {sizes} chosen on the way by {rule} bias={biased}")
    return good


def check_alone(kinds: Kinds, sizes: tuple[int, int, int], used: int) -> bool:
    """A row has the same bits with others beside it, in pieces of any size, and without."""
    experts, width, hidden = sizes
    tiles = to_tiles(make_table(kinds, experts, width, hidden))
    own = fast.Others(own=own_tiles(make_table(kinds, 1, width, hidden)))
    ids = torch.stack([torch.randperm(experts)[:used] for _ in range(11)]).int().to(DEVICE)
    x, weights = torch.randn(11, hidden).to(DEVICE), torch.rand(11, used).to(DEVICE)
    together = few_rows(half_rows(x), ids, weights, tiles, "silu", own)
    different = 0
    for rows in (slice(0, 1), slice(4, 6), slice(7, 10), slice(10, 11)):
        alone = few_rows(half_rows(x[rows]), ids[rows], weights[rows], tiles, "silu", own)
        different += int((alone != together[rows]).sum())
    print(f"{'FAIL' if different else 'PASS'} {kinds} {sizes} alone: {different} numbers differ")
    return not different


def check_grouped(sizes: tuple[int, int, int], rows: int, used: int) -> bool:
    """Our grouped product in tiles of each size: near float64, and with the same bits."""
    experts, outputs, columns = sizes
    ids = pick_experts(rows, experts, used)
    ids[torch.rand(ids.shape, device=DEVICE) < 0.1] = -1
    order = picks.sort_picks(ids, experts)
    x = torch.randn(rows, columns, device=DEVICE).bfloat16()[order.rows]
    weights = torch.randn(experts, outputs, columns, device=DEVICE).bfloat16()
    small, large = (grouped.product(x, weights, order.ends, size) for size in grouped.STAGES)
    again = grouped.product(x, weights, order.ends, next(iter(grouped.STAGES)))
    worst, first = 0.0, 0
    ends = order.ends.tolist()
    for matrix, end in zip(weights, ends, strict=True):
        wanted = x[first:end].double() @ matrix.double().T
        apart = (small[first:end] - wanted).abs() / (wanted.abs() + columns**0.5 / 16)
        worst = max(worst, float(apart.max())) if end > first else worst
        first = end
    same = torch.equal(small[:first], large[:first]) and torch.equal(small[:first], again[:first])
    good = worst < 2**-8 and same
    bits = "same bits" if same else "DIFFERENT BITS"
    print(f"{'PASS' if good else 'FAIL'} grouped {sizes} x{rows} used {used}: {worst:.1e} {bits}")
    return good


def bench_grouped(name: str, sizes: tuple[int, int, int], rows: int, used: int) -> None:
    """Times of one grouped product by torch, by ours, and expert by expert."""
    experts, outputs, columns = sizes
    order = picks.sort_picks(pick_experts(rows, experts, used), experts)
    x = torch.randn(rows * used, columns, device=DEVICE).bfloat16()
    weights = torch.randn(experts, outputs, columns, device=DEVICE, dtype=torch.bfloat16)
    out, ends = x.new_empty(len(x), outputs), order.ends.tolist()

    def by_expert() -> None:
        for expert, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end > first:
                torch.mm(x[first:end], weights[expert].T, out=out[first:end])

    ways = {"torch.mm of each expert": by_expert}
    for size in grouped.STAGES:
        ways[f"ours, {size} rows"] = partial(grouped.product, x, weights, order.ends, size)
    if picks.product_way(torch.device(DEVICE)) == "library":
        ways["torch._grouped_mm"] = partial(torch._grouped_mm, x, weights.mT, offs=order.ends)
    work, moved = 2 * len(x) * outputs * columns, 2 * weights.numel()
    for way, run in ways.items():
        took = time_us([run])
        speed = f"{work / took / 1e6:.0f} TFLOP/s {moved / took / 1e3:.0f} GB/s of weights"
        print(f"BENCH {name} {sizes} x{rows}, {way}: {took:.0f} us {speed}", flush=True)


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
    tiles = fast.table_of(pieces, tuple(BY_NAME[kind] for kind in kinds), width, hidden)
    bytes_of_one = sum(piece.shape[1] for piece in pieces)
    for rows in (1, 2, 4, 8, 16, 32):
        x = half_rows(torch.randn(rows, hidden, device=DEVICE))
        weights = torch.rand(rows, used, device=DEVICE)
        chosen = [pick_experts(rows, count, used) for _ in range(max(4, 64 // rows))]
        own = OwnTiles(*(piece[0] for piece in pieces), tiles.kinds, width)
        for others in (fast.NO_OTHERS, fast.Others(own=own)):
            turns = [partial(few_rows, x, ids, weights, tiles, "silu", others) for ids in chosen]
            moved = bytes_of_one * used * rows
            took, beside = time_us(turns), " and one" if others.own else ""
            speed = moved / took / 1e3
            print(f"BENCH {name}{beside} x{rows}: {took:.1f} us {speed:.0f} GB/s of picks")
    for rows in (512, 2048):
        x_many = torch.randn(rows, hidden, device=DEVICE)
        weights = torch.rand(rows, used, device=DEVICE)
        ids = pick_experts(rows, count, used)
        took = time_us([partial(fast.many_rows, x_many, ids, weights, tiles, "silu")])
        print(f"BENCH {name} x{rows}: {took:.0f} us")


def pick_experts(rows: int, experts: int, used: int) -> torch.Tensor:
    """Random choices without repeats."""
    return torch.rand(rows, experts, device=DEVICE).topk(used).indices.int()


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    small = DEVICE == "cpu"
    mixed = ("q4_k", "q4_k", "q6_k")
    cases: list[Case] = [
        (mixed, (6, 256, 512), 1, 3, "silu"),
        (mixed, (6, 256, 256), 5, 2, "gelu"),
        (("q4_k", "q5_k", "q8_0"), (5, 96, 256), 3, 2, "silu"),
        (("mxfp4", "q8_0", "q4_0"), (4, 160, 288), 2, 4, "gelu"),
        (("q8_0", "q4_1", "q5_1"), (4, 64, 96), 11, 2, "silu"),
        (("iq4_nl", "q5_0", "iq4_nl"), (4, 64, 320), 2, 2, "silu"),
        (("q6_k", "q6_k", "q4_k"), (4, 256, 512), 2, 2, "silu"),
        *PLAIN,
    ]
    if not small:
        cases += [
            (mixed, (32, 512, 2048), 1, 8, "silu"),
            (mixed, (32, 512, 2048), 32, 8, "silu"),
            (mixed, (16, 768, 2048), 100, 8, "silu"),
            *LARGE_PLAIN,
        ]
    runs = [partial(check, *case) for case in cases]
    runs += [partial(check, *case, "own") for case in cases]
    runs += [partial(check_own, *own) for own in OWN]
    for experts in (5, 128, 256, 1000):
        for scores, used in (("softmax", 4), ("sigmoid", 3)):
            rule = RouterRule(used, scores, True, 1.5)
            runs.append(partial(check_chosen, (experts, 32, 256), rule, scores == "sigmoid"))
    for kind in ("q4_k", "f16", "bf16"):
        runs.append(partial(check_alone, (kind, kind, kind), (6, 256, 512), 3))
    runs += [partial(check_grouped, *case) for case in GROUPED if not small]
    for run in runs:
        try:
            run()
        except Exception:
            print("FAIL", run.args)
            traceback.print_exc(limit=4)
    if "--bench" in sys.argv:
        for rows in (64, 512, 2048, 8192):
            bench_grouped("gates and ups", (256, 1024, 2048), rows, 8)
            bench_grouped("downs", (256, 2048, 512), rows, 8)
        bench("35B-A3B q4_k q6_k", mixed, (256, 512, 2048), 8)
        bench("35B-A3B q4_k", ("q4_k", "q4_k", "q4_k"), (256, 512, 2048), 8)
        for kind in ("bf16", "f16"):
            bench(f"30B-A3B {kind}", (kind, kind, kind), (128, 768, 2048), 8)


if __name__ == "__main__":
    main()
