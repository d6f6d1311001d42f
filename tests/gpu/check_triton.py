"""Compares Triton's kernels, compiled for the GPU at hand, with the plain ones of the CPU.

`--part 2/3` takes every third case from the second on, `--bench` times packed products of one row
and of sixteen.
"""

import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.ops import ExpertTable, Kernel, PagedKv, RecurrentState, Span
from headroom.kernels.registry import KERNELS
from headroom.kernels.triton import matmul
from headroom.kernels.weight import Weight
from tests.gpu.timing import time_us
from tests.kernels.cases import Sized, all_cases, make_inputs, random_weight

SHARE = {"f32": 2e-5, "bf16": 0.02, "f16": 0.004}  # of the largest value, by the type of products
DTYPE_AT = {"matmul": 2, "experts": 5}
BENCHED = (("q4_k", 17408, 5120), ("q6_k", 5120, 17408), ("q8_0", 17408, 5120))
SECONDS = 100.0  # compiling a kernel takes about one; cases that time does not allow are told


def on_gpu(value: Any) -> Any:
    """The same input on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):
        return tuple(on_gpu(one) for one in value)
    if isinstance(value, Weight):
        return replace(value, data=value.data.cuda())
    if isinstance(value, PagedKv):
        return replace(value, keys=value.keys.cuda(), values=value.values.cuda())
    if isinstance(value, RecurrentState):
        return RecurrentState(value.memory.cuda(), value.inputs.cuda())
    if isinstance(value, Span):
        tree = None if value.tree is None else value.tree.cuda()
        return replace(value, pages=value.pages.cuda(), tree=tree)
    if hasattr(value, "conv"):
        small = {name: getattr(value, name).cuda() for name in ("conv", "decay", "dt_bias")}
        return replace(value, **small)
    return value


def results(sized: Sized, inputs: tuple[Any, ...], returned: Any) -> list[torch.Tensor]:
    """What an operation returned and changed."""
    if sized.op == "route":
        return [*returned, inputs[3]]
    if sized.op == "delta_net":
        return [returned, inputs[4].memory, inputs[4].inputs]
    return [inputs[0].keys, inputs[0].values] if sized.op == "kv_write" else [returned]


def check(kernel: Kernel, sized: Sized, dtype: str) -> None:
    """One case against the reference in float32 on the CPU."""
    reference = next(k for k in KERNELS if k.op == sized.op and k.backend == "reference")
    theirs = make_inputs(sized)
    wanted = results(sized, theirs, reference.run(*theirs))
    ours = [kernel.prepare(x) if isinstance(x, ExpertTable) else x for x in make_inputs(sized)]
    if sized.op in DTYPE_AT:
        ours[DTYPE_AT[sized.op]] = dtype
    moved = tuple(on_gpu(value) for value in ours)
    found = results(sized, moved, kernel.run(*moved))
    worst = 0.0
    for result, expected in zip(found, wanted, strict=True):
        assert result.shape == expected.shape
        if not expected.numel():
            continue
        largest = max(float(expected.float().abs().max()), 1e-30)
        error = float((result.cpu().float() - expected.float()).abs().max()) / largest
        exact = not expected.is_floating_point()
        worst = max(worst, (0.0 if error == 0 else 1.0) if exact else error)
    verdict = "PASS" if worst <= SHARE[dtype] else "FAIL"
    print(f"{verdict} {sized} {dtype}: {worst:.1e}", flush=True)


def dtypes_of(sized: Sized) -> tuple[str, ...]:
    """The types to check a case in; none where other cases say as much."""
    sizes, kind = sized.sizes, sized.case.quant.name
    usual = kind in ("q4_k", "q6_k", "q8_0") or "--all" in sys.argv
    if sized.op == "matmul":
        if sizes[:2] == (3, 37):
            return ("f32", "bf16", "f16") if usual else ("bf16",)
        return ("bf16",) if usual and sizes[:2] in ((1, 37), (40, 37)) else ()
    if sized.op == "experts":
        return ("f32", "bf16") if sizes[0] == 7 or (sizes[0] == 90 and usual) else ()
    if sized.op == "attention":
        few = ((6, 2, 64, 5, 1), (4, 2, 256, 0, 0), (8, 1, 512, 130, 1), (7, 1, 33, 0, 0))
        usual = sizes in few and sized.case.k_type in ("f16", "q8_0", "q4_0")
        return ("f32",) if usual or "--all" in sys.argv else ()
    return ("f32",)


def chosen() -> list[tuple[Sized, str]]:
    """Cases and their types; attention, which takes longest to compile, comes last."""
    cases = [(sized, dtype) for sized in all_cases() for dtype in dtypes_of(sized)]
    cases.sort(key=lambda case: case[0].op == "attention")
    part = sys.argv[sys.argv.index("--part") + 1] if "--part" in sys.argv else "1/1"
    number, parts = (int(word) for word in part.split("/"))
    return cases[number - 1 :: parts]


def run_all() -> None:
    """Every chosen case, as far as the time goes."""
    started, left_out = time.perf_counter(), 0
    for sized, dtype in chosen():
        if time.perf_counter() - started > SECONDS and "--all" not in sys.argv:
            left_out += 1
            continue
        kernel = next(k for k in KERNELS if k.op == sized.op and k.backend == "triton")
        case = replace(sized.case, device="cuda", dtype=dtype)
        if (reason := kernel.refuses(case)) is not None:
            print("SKIP", sized, reason)
            continue
        try:
            check(kernel, sized, dtype)
        except Exception:
            print("FAIL", sized, dtype)
            traceback.print_exc(limit=4)
    if left_out:
        print(f"LEFT OUT {left_out} cases for want of time; --all runs them")


def bench(name: str, rows: int, columns: int, tokens: int) -> None:
    """Median time of a product with weights that no cache holds."""
    one = random_weight(BY_NAME[name], min(rows, 1024), columns).data.cuda()
    data = one.repeat(rows // len(one), 1)
    copies = max(2, (400 << 20) // data.nbytes)
    weights = [Weight(data.clone(), BY_NAME[name], rows, columns) for _ in range(copies)]
    x = torch.randn(tokens, columns, device="cuda")
    out = torch.empty(tokens, rows, device="cuda")
    turns = [lambda w=weight: matmul.matmul(x, w, "bf16", out) for weight in weights]
    us = time_us(turns)
    print(f"BENCH {name} {rows}x{columns} x{tokens}: {us:.1f} us {data.nbytes / us / 1e3:.0f} GB/s")


def main() -> None:
    """Check, then time if asked."""
    run_all()
    if "--bench" not in sys.argv:
        return
    for name, rows, columns in BENCHED:
        for tokens in (1, 16):
            try:
                bench(name, rows, columns, tokens)
            except Exception:
                print("FAIL bench", name, tokens)
                traceback.print_exc(limit=4)


if __name__ == "__main__":
    main()
