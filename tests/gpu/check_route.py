"""Compares the routers of a GPU with the plain ones, and times them with --bench."""

import sys
import traceback
from functools import partial
from unittest.mock import patch

import torch

from headroom.kernels.cuda import route as fast
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.buffers import Buffer
from headroom.kernels.cuda.matmul import RowNorm, half_rows
from headroom.kernels.cuda.route import scored_rows
from headroom.kernels.ops import RouterRule
from headroom.kernels.reference import route as plain
from headroom.kernels.reference.norms import rms_norm as plain_norm
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

DEVICE = "cuda"


def check(experts: int, rows: int, rule: RouterRule, biased: bool, ties: bool) -> bool:
    """One choice with padding rows and a logit too many; ids must be equal, ties included."""
    logits = torch.randn(rows, experts + 1) * 3
    if ties:
        logits = logits.round()
    bias = torch.randn(experts).mul(4).round().div(4) if biased else None
    sequence = torch.zeros(rows, dtype=torch.int32)
    sequence[1::3] = -1
    counts, wanted_counts = (torch.full((experts,), 5, dtype=torch.int64) for _ in range(2))
    real = sequence >= 0
    wanted_ids, wanted = plain.route(logits[real, :experts], rule, bias, wanted_counts)
    mine = counts.to(DEVICE, copy=True)
    ids, weights = fast.route(
        logits.to(DEVICE),
        rule,
        None if bias is None else bias.to(DEVICE),
        mine,
        sequence.to(DEVICE),
    )
    found = weights.cpu()
    error = float((found[real] - wanted).abs().max())
    same = torch.equal(ids.cpu()[real], wanted_ids) and bool((ids.cpu()[~real] == -1).all())
    swapped = int((ids.cpu()[real] != wanted_ids).sum())
    counted = torch.equal(mine.cpu(), wanted_counts) and bool((found[~real] == 0).all())
    good = error < 1e-5 and counted and same
    case = f"{experts} x{rows} {rule} bias={biased} ties={ties}"
    print(f"{'PASS' if good else 'FAIL'} route {case}: {error:.1e} swapped {swapped}")
    return good


def check_scores(outputs: int, hidden: int) -> bool:
    """Logits against float64, and one row's against the same row among others."""
    weight, x = torch.randn(outputs, hidden), torch.randn(33, hidden)
    near = []
    for rows in (1, 2, 5, 32, 33):
        found = fast.score(x[:rows].to(DEVICE), weight.to(DEVICE)).cpu()
        wanted = x[:rows].double() @ weight.double().T
        near.append(float((found - wanted).norm() / wanted.norm()))
    alone = fast.score(x[3:4].to(DEVICE), weight.to(DEVICE)).cpu()
    among = fast.score(x[:7].to(DEVICE), weight.to(DEVICE)).cpu()[3:4]
    good = max(near) < 1e-5 and torch.equal(alone, among)
    print(f"{'PASS' if good else 'FAIL'} score {outputs}x{hidden}: {max(near):.1e}")
    return good


def _zeros(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """Return scratch that holds zeros instead of what was there before."""
    return torch.zeros(buffer.shape, dtype=scratch.TORCH_DTYPES[buffer.dtype], device=device)


def check_scored_rows(outputs: int, hidden: int) -> bool:
    """Rows normed, scored and rounded at once; a row alone has the bits it has among others."""
    weight, seen, by = torch.randn(outputs, hidden), torch.randn(hidden), torch.randn(hidden)
    x = torch.randn(19, hidden) * 10.0 ** torch.arange(-9, 10)[:, None]
    moved = weight.to(DEVICE), by.to(DEVICE), seen.to(DEVICE)
    worst, wanted_rows = 0.0, plain_norm(x, by, 1e-20).double()
    wanted = plain_norm(x, seen, 1e-20).double() @ weight.double().T
    found = {}
    for rows in ((0, 19), (3, 4), (5, 7), (0, 3), (10, 18)):
        own = x[slice(*rows)].to(DEVICE)
        normed = torch.full_like(own, float("nan"))
        norm = RowNorm(moved[1], 1e-20, normed)
        with patch.object(scratch, "take", _zeros):  # not every byte of halves is written
            halves, logits = scored_rows(own, moved[0], norm, moved[2])
            again = half_rows(normed)
        found[rows] = logits.cpu(), normed.cpu(), torch.equal(halves.pieces, again.pieces)
        for one, its in zip(found[rows], (wanted, wanted_rows), strict=False):
            apart = (one - its[slice(*rows)]).norm(dim=1) / its[slice(*rows)].norm(dim=1)
            worst = max(worst, float(apart.nan_to_num(1.0).max()))
    whole = found[0, 19]
    same = all(
        torch.equal(found[rows][i], whole[i][slice(*rows)]) for rows in found for i in range(2)
    )
    rounded = all(case[2] for case in found.values())
    good = worst < 1e-5 and same and rounded
    said = f"{worst:.1e} same bits {same} rounded alike {rounded}"
    print(f"{'PASS' if good else 'FAIL'} scored rows {outputs}x{hidden}: {said}")
    return good


def bench(experts: int, hidden: int, used: int) -> None:
    """Times of scores and choice, with weights that no cache holds."""
    weights = [torch.randn(experts + 1, hidden, device=DEVICE) for _ in range(40)]
    rule = RouterRule(used, "softmax", True, 1.0)
    counts = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    for rows in (1, 4, 16, 32):
        x = torch.randn(rows, hidden, device=DEVICE)
        took = time_us([partial(fast.score, x, w) for w in weights])
        size = weights[0].nbytes
        print(f"BENCH score {experts}x{hidden} x{rows}: {took:.1f} us {size / took / 1e3:.0f} GB/s")
        norm = RowNorm(torch.ones(hidden, device=DEVICE), 1e-6)
        took = time_us([partial(scored_rows, x, w, norm, norm.weight) for w in weights])
        print(f"BENCH rows normed and scored {experts}x{hidden} x{rows}: {took:.1f} us")
        logits = fast.score(x, weights[0])
        took = time_us([partial(fast.route, logits, rule, None, counts)] * 20)
        print(f"BENCH route {experts} x{rows}: {took:.1f} us")


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    rules = (
        RouterRule(8, "softmax", True, 1.0),
        RouterRule(4, "softmax", False, 2.5),
        RouterRule(8, "sigmoid", True, 2.5, softcap=20.0),
        RouterRule(1, "sigmoid", False, 1.0),
    )
    for experts in (8, 60, 128, 256, 512, 1000):
        for number, rule in enumerate(rules):
            try:
                # Rounded logits tie exactly; whether a bias makes new ties depends on rounding.
                check(experts, 37, rule, biased=number == 2, ties=number != 2)
                check(experts, 3, rule, biased=number == 3, ties=False)
            except Exception:
                print("FAIL", experts, rule)
                traceback.print_exc(limit=4)
    check(64, 5, RouterRule(32, "softmax", True, 1.0), biased=False, ties=False)
    for outputs, hidden in ((8, 64), (257, 2048), (129, 5120), (61, 2052)):
        try:
            check_scores(outputs, hidden)
        except Exception:
            print("FAIL score", outputs, hidden)
            traceback.print_exc(limit=4)
    for outputs, hidden in ((257, 2048), (9, 5120), (128, 2816), (5, 8192), (3, 72)):
        try:
            check_scored_rows(outputs, hidden)
        except Exception:
            print("FAIL scored rows", outputs, hidden)
            traceback.print_exc(limit=4)
    if "--bench" in sys.argv:
        bench(256, 2048, 8)
        bench(128, 2048, 8)


if __name__ == "__main__":
    main()
