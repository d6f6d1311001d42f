"""Compares our products of rows sorted by expert with float64, and times them with --bench."""

import sys
import traceback
from functools import partial

import torch

from headroom.kernels.cuda import experts_prefill, grouped
from headroom.kernels.cuda.matmul import narrow_type
from tests.gpu import expert_cases as known
from tests.gpu.check_experts import pick_experts
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

DEVICE = "cuda"
# What may be lost of a product: bf16 is rounded once more; sums of f16 are float32, which tensor
# cores cut off sixteen columns at a time (eight before sm_80): 2**-15 was measured over 2048 of
# them on an H200, where rounding to f16 would lose 2**-11.
LIMITS = {"bf16": 2**-8, "f16": 2**-13}
# Of the columns' root: so much counts as no loss where a sum is near zero.
SMALL = {"bf16": 1 / 16, "f16": 1 / 4}


def check(sizes: tuple[int, int, int], rows: int, used: int, dtype: str = "bf16") -> bool:
    """Tiles of each size: near float64, and with the same bits."""
    experts, outputs, columns = sizes
    ids = pick_experts(rows, experts, used)
    ids[torch.rand(ids.shape, device=DEVICE) < 0.1] = -1
    order, kind = experts_prefill.sort_picks(ids, experts), narrow_type(dtype)
    x = torch.randn(rows, columns, device=DEVICE).to(kind)[order.rows]
    weights = torch.randn(experts, outputs, columns, device=DEVICE).to(kind)
    small, large = (grouped.product(x, weights, order.ends, size) for size in grouped.STAGES)
    again = grouped.product(x, weights, order.ends, next(iter(grouped.STAGES)))
    worst, first = 0.0, 0
    for matrix, end in zip(weights, order.ends.tolist(), strict=True):
        wanted = x[first:end].double() @ matrix.double().T
        apart = (small[first:end] - wanted).abs() / (wanted.abs() + columns**0.5 * SMALL[dtype])
        worst = max(worst, float(apart.max())) if end > first else worst
        first = end
    same = torch.equal(small[:first], large[:first]) and torch.equal(small[:first], again[:first])
    good = worst < LIMITS[dtype] and same
    text = f"{sizes} x{rows} used {used} {dtype}: {worst:.1e}"
    print(f"{'PASS' if good else 'FAIL'} {text} {'same bits' if same else 'DIFFERENT BITS'}")
    return good


def bench(name: str, sizes: tuple[int, int, int], rows: int, used: int, dtype: str) -> None:
    """Times of one product by torch, by ours, and expert by expert."""
    experts, outputs, columns = sizes
    order = experts_prefill.sort_picks(pick_experts(rows, experts, used), experts)
    x = torch.randn(rows * used, columns, device=DEVICE).to(narrow_type(dtype))
    weights = torch.randn(experts, outputs, columns, device=DEVICE, dtype=x.dtype)
    wide = {"out_dtype": torch.float32} if dtype == "f16" else {}
    out = x.new_empty(len(x), outputs, dtype=wide.get("out_dtype"))
    ends = order.ends.tolist()

    def by_expert() -> None:
        for expert, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
            if end > first:
                torch.mm(x[first:end], weights[expert].T, **wide, out=out[first:end])

    ways = {"torch.mm of each expert": by_expert}
    for size in grouped.STAGES:
        ways[f"ours, {size} rows"] = partial(grouped.product, x, weights, order.ends, size)
    if dtype == "bf16" and grouped.product_way(torch.device(DEVICE)) == "library":
        ways["torch._grouped_mm"] = partial(torch._grouped_mm, x, weights.mT, offs=order.ends)
    work, moved = 2 * len(x) * outputs * columns, 2 * weights.numel()
    for way, run in ways.items():
        took = time_us([run])
        speed = f"{work / took / 1e6:.0f} TFLOP/s {moved / took / 1e3:.0f} GB/s of weights"
        print(f"BENCH {name} {sizes} x{rows} {dtype}, {way}: {took:.0f} us {speed}", flush=True)


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    for dtype in LIMITS:
        for case in known.GROUPED:
            try:
                check(*case, dtype)
            except Exception:
                print("FAIL", case, dtype)
                traceback.print_exc(limit=4)
    if "--bench" in sys.argv:
        for dtype in LIMITS:
            for rows in (64, 512, 2048, 8192):
                bench("gates and ups", (256, 1024, 2048), rows, 8, dtype)
                bench("downs", (256, 2048, 512), rows, 8, dtype)


if __name__ == "__main__":
    main()
