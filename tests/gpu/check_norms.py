"""Compares a GPU's small operations with plain torch on the CPU, and times them with --bench."""

import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import matmul
from headroom.kernels.cuda import norms as cuda_norms
from headroom.kernels.reference import norms
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES, Weight
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4"),
)


def report(name: str, error: float, limit: float) -> None:
    print(f"{'PASS' if error <= limit else 'FAIL'} {name}: {error:.2e} (limit {limit:.0e})")


def attempt(run: Callable[..., None], *args: object) -> None:
    try:
        run(*args)
        torch.cuda.synchronize()
    except Exception:
        print("FAIL", run.__name__, args)
        traceback.print_exc(limit=4)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected.double()).abs().max() / expected.abs().max())


def check_norm(rows: int, width: int) -> None:
    wide = torch.randn(rows, width + 8) * 5
    x, weight = wide[:, :width], torch.randn(width)
    expected = norms.rms_norm(x.double(), weight.double(), 1e-6)
    found = cuda_norms.rms_norm(wide.cuda()[:, :width], weight.cuda(), 1e-6)
    report(f"rms_norm {rows}x{width}", difference(found, expected), 1e-6)
    also, narrow = torch.empty_like(found), torch.empty_like(found, dtype=torch.bfloat16)
    cuda_norms.norm_narrow(wide.cuda()[:, :width], weight.cuda(), 1e-6, narrow, also)
    apart = int((also != found).sum() + (narrow != found.bfloat16()).sum())
    report(f"rms_norm {rows}x{width} in bf16, values that differ", apart, 0)


def check_added_norm(rows: int, width: int) -> None:
    x, weight, residual = torch.randn(rows, width) * 5, torch.randn(width), torch.randn(rows, width)
    expected = residual + norms.rms_norm(x.double(), weight.double(), 1e-6)
    found = cuda_norms.norm_add(residual.cuda(), x.cuda(), weight.cuda(), 1e-6)
    report(f"norm_add {rows}x{width}", difference(found, expected), 1e-6)


def check_heads() -> None:
    x, weight = torch.randn(7, 6, 128), torch.randn(128)
    found = cuda_norms.rms_norm(x.cuda(), weight.cuda(), 1e-6)
    report("rms_norm of heads", difference(found, norms.rms_norm(x, weight, 1e-6)), 1e-6)


def check_gated(activation: str) -> None:
    both = torch.randn(5, 2 * 771) * 4
    device = both.cuda()
    found = cuda_norms.gated_activation(device[:, :771], device[:, 771:], activation)
    expected = norms.gated_activation(both[:, :771].double(), both[:, 771:].double(), activation)
    report(f"gated {activation}", difference(found, expected), 1e-6)
    narrow = torch.empty_like(found, dtype=torch.bfloat16)
    cuda_norms.gated_narrow(device[:, :771], device[:, 771:], activation, narrow)
    apart = int((narrow != found.bfloat16()).sum())
    report(f"gated {activation} in bf16, values that differ", apart, 0)


def random_table(kind: str, rows: int, columns: int) -> Weight:
    quant = BY_NAME[kind]
    if kind in PLAIN_TYPES:
        return Weight(torch.randn(rows, columns).to(PLAIN_TYPES[kind]), quant, rows, columns)
    blocks = columns // quant.block
    data = torch.randint(0, 256, (rows, blocks, quant.block_bytes), dtype=torch.uint8)
    halves = (torch.rand(rows, blocks, 2) + 0.01).half().view(torch.uint8).view(rows, blocks, 4)
    if kind == "q6_k":
        data[..., 208:] = halves[..., :2]
    elif kind != "mxfp4":
        data[..., :2] = halves[..., :2]
        if kind in ("q4_1", "q5_1", "q4_k", "q5_k"):
            data[..., 2:4] = halves[..., 2:]
    return Weight(data.flatten(1), quant, rows, columns)


def check_embed(kind: str, columns: int, pinned: bool) -> None:
    table = random_table(kind, 50, columns)
    ids = torch.tensor([0, 49, 7, 7, 31])
    data = table.data[ids]
    plain = data.float() if kind in PLAIN_TYPES else dequantise(data, table.quant, columns)
    placed = table.data.pin_memory() if pinned else table.data.cuda()
    out = torch.empty(5, columns, device="cuda")
    matmul.embed(ids.cuda(), Weight(placed, table.quant, 50, columns), out)
    other = int((out.cpu() != plain).sum())
    report(f"embed {kind} x{columns} pinned={pinned}, values other than plain", other, 0)


def bench() -> None:
    for rows, width in ((1, 5120), (16, 5120), (1, 2048), (2048, 5120)):
        x = torch.randn(rows, width, device="cuda")
        weight, out = torch.randn(width, device="cuda"), torch.empty(rows, width, device="cuda")
        us = time_us([lambda a=x, w=weight, o=out: cuda_norms.rms_norm(a, w, 1e-6, o)] * 20)
        print(f"BENCH rms_norm {rows}x{width}: {us:.1f} us {rows * width * 8 / us / 1e3:.0f} GB/s")
    table = random_table("q4_k", 1000, 5120)
    placed = Weight(table.data.pin_memory(), table.quant, 1000, 5120)
    ids, out = torch.tensor([5], device="cuda"), torch.empty(1, 5120, device="cuda")
    us = time_us([lambda: matmul.embed(ids, placed, out)] * 20)
    print(f"BENCH embed from the host: {us:.1f} us")
    for rows, width in ((1, 17408), (2048, 17408)):
        both, out = torch.randn(rows, 2 * width, device="cuda"), torch.empty(rows, width).cuda()
        gate, up = both[:, :width], both[:, width:]
        turn = partial(cuda_norms.gated_activation, gate, up, "silu", out)
        us = time_us([turn] * 5)
        print(f"BENCH gated {rows}x{width}: {us:.1f} us {rows * width * 12 / us / 1e3:.0f} GB/s")


def main() -> None:
    keep_code()
    torch.manual_seed(0)
    for rows, width in ((1, 64), (3, 2048), (17, 5120), (2, 100)):
        attempt(check_norm, rows, width)
        attempt(check_added_norm, rows, width)
    attempt(check_heads)
    attempt(check_gated, "silu")
    attempt(check_gated, "gelu")
    for kind in TYPES:
        for columns, pinned in ((256, False), (2304, False), (5120, True)):
            attempt(check_embed, kind, columns, pinned)
    if "--bench" in sys.argv:
        attempt(bench)


if __name__ == "__main__":
    main()
