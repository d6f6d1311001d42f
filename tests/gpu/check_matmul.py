"""Compares the packed products of a GPU with the plain ones, and times them with --bench."""

import sys
import traceback

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import matmul
from headroom.kernels.cuda.unpacked import dequantise as dequantise_tiles
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import Weight

KINDS = ("q4_k", "q6_k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q5_k", "iq4_nl", "mxfp4")

SIZES = (
    (64, 256, 1), (50, 1024, 3), (128, 2048, 16), (96, 5120, 32), (33, 768, 40), (48, 320, 9),
    (70, 2048, 1), (256, 512, 1),
)  # fmt: skip
REAL = (
    ("q4_k", 17408, 5120), ("q4_k", 5120, 17408), ("q6_k", 5120, 17408), ("q4_k", 2048, 4096),
    ("q6_k", 248320, 2048), ("q8_0", 17408, 5120),
)  # fmt: skip


def random_weight(name: str, rows: int, columns: int) -> Weight:
    """Random blocks with small scales."""
    quant = BY_NAME[name]
    blocks = columns // quant.block
    data = torch.randint(0, 256, (rows, blocks, quant.block_bytes), dtype=torch.uint8)
    small = (torch.rand(rows, blocks, 2) * 0.01 + 0.001).half().view(torch.uint8)
    small = small.view(rows, blocks, 4)
    if name == "mxfp4":
        data[..., 0] = 118 + data[..., 0] % 6
    elif name == "q6_k":
        data[..., 208:210] = small[..., :2]
    else:
        data[..., :2] = small[..., :2]
        if name in ("q4_1", "q5_1", "q4_k", "q5_k"):
            data[..., 2:4] = small[..., 2:]
    return Weight(data.view(rows, -1), quant, rows, columns)


def check(name: str, rows: int, columns: int, tokens: int) -> None:
    """One product against float64, on values rounded to 8 bits and on the weights alone."""
    weight = random_weight(name, rows, columns)
    real = dequantise(weight.data, weight.quant, columns).view(rows, columns).double()
    packed = matmul.prepare(weight)
    plain = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    values = dequantise_tiles(packed, plain).cpu().double()
    weight_error = float((values - real).norm() / real.norm())
    x = torch.randn(tokens, columns) * torch.rand(tokens, 1).mul(3).exp()
    wanted = x.double() @ real.T
    found = torch.full((tokens, rows), float("nan"), device="cuda")
    matmul.matmul(x.cuda(), packed, "bf16", found)
    error = float((found.cpu().double() - wanted).norm() / wanted.norm())
    good = error < 0.02 and weight_error < 0.004
    label = f"{'PASS' if good else 'FAIL'} {name} {rows}x{columns} x{tokens}"
    print(f"{label}: weight {weight_error:.1e} product {error:.1e}")


def bench(name: str, rows: int, columns: int, tokens: int) -> None:
    """Median time of a product with weights that no cache holds."""
    one = matmul.prepare(random_weight(name, min(rows, 2048), columns))
    size = matmul.tile_bytes(one.quant, rows, columns)
    count = max(2, (400 << 20) // size)
    data = one.data.repeat(-(-size * count // len(one.data)))
    weights = [
        Weight(data[i * size : (i + 1) * size], one.quant, rows, columns, "tiles")
        for i in range(count)
    ]
    x = matmul.quantise(torch.randn(tokens, columns, device="cuda"))
    out = torch.empty(tokens, rows, device="cuda")
    for weight in weights[:2]:
        matmul.product(x, weight, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            matmul.product(x, weight, out)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    best = sorted(times)[len(times) // 2]
    print(
        f"BENCH {name} {rows}x{columns} x{tokens}: {best * 1e3:.1f} us {size / best / 1e6:.0f} GB/s"
    )


def main() -> None:
    for name in KINDS:
        for rows, columns, tokens in (
            (64, 256, 1),
            (50, 1024, 3),
            (128, 2048, 16),
            (96, 5120, 32),
            (33, 768, 40),
            (48, 320, 9),
        ):
            if columns % BY_NAME[name].block:
                continue
            try:
                check(name, rows, columns, tokens)
            except Exception:
                print("FAIL", name, rows, columns, tokens)
                traceback.print_exc(limit=3)
    if "--bench" not in sys.argv:
        return
    for name, rows, columns in (
        ("q4_k", 17408, 5120),
        ("q4_k", 5120, 17408),
        ("q6_k", 5120, 17408),
        ("q4_k", 12288, 2048),
        ("q4_k", 2048, 4096),
        ("q4_k", 10240, 5120),
        ("q6_k", 248320, 2048),
        ("q8_0", 17408, 5120),
    ):
        for tokens in (1, 4, 16, 32):
            bench(name, rows, columns, tokens)
    weight = matmul.prepare(random_weight("q4_k", 17408, 5120))
    plain = torch.empty(17408, 5120, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(2048, 5120, device="cuda", dtype=torch.bfloat16)
    for what, run in (
        ("dequantise", lambda: dequantise_tiles(weight, plain)),
        ("bf16 product", lambda: x @ plain.T),
        ("both", lambda: matmul.matmul(x.float(), weight, "bf16")),
    ):
        for _ in range(3):
            run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        print(f"BENCH {what} 2048 rows 17408x5120: {start.elapsed_time(end) * 100:.0f} us")


if __name__ == "__main__":
    main()
