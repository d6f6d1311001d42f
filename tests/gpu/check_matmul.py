"""Compares the packed products of a GPU with the plain ones, and times them with --bench."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import matmul
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.reference import norms
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.triton import matmul as triton_matmul
from headroom.kernels.weight import PLAIN_TYPES, Weight
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us
from tests.gpu.torch_tiles import pack_tiles

DEVICE = "cuda"
KINDS = (
    *("q4_k", "q6_k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q5_k", "iq4_nl", "mxfp4"),
    *("f16", "bf16"),
)
SIZES = (
    (64, 256, 1), (50, 1024, 3), (128, 2048, 16), (96, 5120, 32), (33, 768, 40), (48, 320, 9),
    (70, 2048, 1), (256, 512, 1), (5136, 512, 24),
)  # fmt: skip
REAL = (
    ("q4_k", 34816, 5120), ("q4_k", 5120, 17408), ("q6_k", 5120, 17408), ("q4_k", 16384, 5120),
    ("q4_k", 5120, 6144), ("q6_k", 248320, 5120), ("q4_k", 12288, 2048), ("q4_k", 2048, 4096),
    ("q8_0", 17408, 5120), ("bf16", 17408, 5120), ("f16", 2048, 4096), ("bf16", 4096, 2560),
)  # fmt: skip
TRITON = (("q4_k", 17408, 5120), ("q6_k", 5120, 17408), ("q8_0", 17408, 5120))

ROWS = ((1, 5120), (9, 2048), (3, 96), (32, 17408), (8, 384))


def random_weight(name: str, rows: int, columns: int) -> Weight:
    """Random blocks with small scales, or small numbers, as the bytes of a file."""
    quant = BY_NAME[name]
    if name in PLAIN_TYPES:
        values = torch.randn(rows, columns) * 0.05
        return Weight(values.to(PLAIN_TYPES[name]).view(torch.uint8), quant, rows, columns)
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


def to_tiles(weight: Weight) -> Weight:
    """The weight as the loader packs it, without a GPU too."""
    tiles = pack_tiles(weight.data.to(DEVICE), weight.quant, weight.columns)
    return Weight(tiles, weight.quant, weight.rows, weight.columns, matmul.TILES)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart two results are; infinity where one has no number."""
    apart = float((found.cpu().double() - wanted).norm() / wanted.norm())
    return apart if apart == apart else float("inf")


def report(name: str, error: float, limit: float) -> bool:
    print(f"{'PASS' if error <= limit else 'FAIL'} {name}: {error:.1e} (limit {limit:.0e})")
    return error <= limit


def check(name: str, rows: int, columns: int, tokens: int, dtype: str = "bf16") -> bool:
    """One product against float64; many tokens are multiplied in `dtype`."""
    weight = random_weight(name, rows, columns)
    real = dequantise(weight.data, weight.quant, columns).view(rows, columns).double()
    x = torch.randn(tokens, columns) * torch.randn(tokens, 1).mul(5).exp()
    found = torch.full((tokens, rows), float("nan"), device=DEVICE)
    matmul.matmul(x.to(DEVICE), to_tiles(weight), dtype, found)
    limit = 6e-4 if tokens <= DECODE_ROWS or dtype == "f16" else 5e-3
    error = distance(found, x.double() @ real.T)
    return report(f"{name} {rows}x{columns} x{tokens} {dtype}", error, limit)


def check_outputs(name: str) -> bool:
    """Matrices that lie one after another, and a sum with what was there."""
    parts = [random_weight(name, rows, 512) for rows in (48, 16, 100)]
    data = torch.cat([to_tiles(part).data for part in parts])
    joined = Weight(data, parts[0].quant, 164, 512, matmul.TILES)
    x = torch.randn(11, 512)
    rows = matmul.half_rows(x.to(DEVICE))
    outs = [torch.full((11, part.rows), float("nan"), device=DEVICE) for part in parts]
    matmul.products(rows, joined, outs)
    wanted = [
        x.double() @ dequantise(p.data, p.quant, 512).view(p.rows, 512).double().T for p in parts
    ]
    error = max(distance(out, its) for out, its in zip(outs, wanted, strict=True))
    add = torch.randn(11, 48)
    out = add.to(DEVICE, copy=True)
    matmul.product(rows, to_tiles(parts[0]), out, add=out)
    return report(f"outputs {name}", max(error, distance(out, add + wanted[0])), 6e-4)


def check_alone(name: str, rows: int, columns: int) -> bool:
    """A row's answer has the same bits whatever rows share its step."""
    weight, x = to_tiles(random_weight(name, rows, columns)), torch.randn(32, columns)
    answers = []
    for tokens in (1, 5, 8, 13, 24, 32):
        found = torch.empty(tokens, rows, device=DEVICE)
        answers.append(matmul.matmul(x[-tokens:].to(DEVICE), weight, "bf16", found)[-1].cpu())
    other = sum(int((answer != answers[0]).sum()) for answer in answers)
    return report(f"alone or not {name} {rows}x{columns}, other values", other, 0)


def check_again(name: str, rows: int, columns: int) -> bool:
    """Products one after another, as a step has them, have the same bits every time."""
    weights, other = copies(name, rows, columns)[:4], 0
    for tokens in (1, 8, 16, 32):
        x = matmul.half_rows(torch.randn(tokens, columns, device=DEVICE))
        wanted: list[torch.Tensor] = []
        for _ in range(20):
            outs = [torch.full((tokens, rows), float("nan"), device=DEVICE) for _ in weights]
            for weight, out in zip(weights, outs, strict=True):
                matmul.product(x, weight, out)
            wanted = wanted or outs
            other += sum(int((a != b).sum()) for a, b in zip(outs, wanted, strict=True))
    return report(f"again {name} {rows}x{columns}, other values", other, 0)


def unpack_rows(x: HalfRows, columns: int) -> torch.Tensor:
    """Rows from their pieces, and the sums of blocks of 32 columns."""
    lanes, groups, own = x.lanes, x.groups, x.lanes // 4
    pieces = x.pieces.cpu().view(x.records, groups, -1)
    words, sums, powers, _ = pieces.split((lanes * 128, lanes * 8, lanes, -lanes % 16), dim=2)
    words = words.contiguous().view(torch.float16).double()
    # [record, group, block, g, t, odd, half, pair] holds column 16 half + 4 t + 2 pair + odd.
    words = words.view(x.records, groups, 8, own, 4, 2, 2, 2)
    words[..., 1, :] *= 16
    values = words.permute(1, 3, 0, 2, 6, 4, 7, 5).reshape(groups * own, x.records, 256)
    powers = powers.contiguous().view(torch.float32).permute(1, 2, 0)  # [group, g, record]
    rows = values * powers.reshape(groups * own, x.records, 1)
    sums = sums.contiguous().view(torch.float16).double().view(x.records, groups, own, 4, 2, 2)
    sums = sums.sum(4).permute(1, 2, 0, 3, 4).reshape(groups * own, x.records, 8)
    apart = values.view(*values.shape[:2], 8, 32).sum(-1) - sums
    assert float(apart[: x.rows].abs().max()) <= 2**-7  # of up to 2^15
    return rows.flatten(1)[: x.rows, :columns]


def check_rows(tokens: int, columns: int) -> bool:
    """Rows in f16: as they are, normed, gated, and normed by heads."""
    x, y = (torch.randn(tokens, columns) * torch.rand(columns).mul(8).exp() for _ in range(2))
    weight, device = torch.rand(columns), x.to(DEVICE)
    normed = torch.empty_like(device)
    norm = RowNorm(weight.to(DEVICE), 1e-6, normed)
    wanted = norms.rms_norm(x.double(), weight.double(), 1e-6)
    errors = [
        distance(unpack_rows(matmul.half_rows(device), columns), x),
        distance(unpack_rows(matmul.half_rows(device, norm), columns), wanted),
        distance(normed, wanted) * 1e3,
    ]
    for activation in ("silu", "gelu"):
        rows = matmul.gated_half_rows(device, y.to(DEVICE), activation)
        gated = norms.gated_activation(x.double(), y.double(), activation)
        errors.append(distance(unpack_rows(rows, columns), gated))
    if columns % 128 == 0:
        heads = (x.view(tokens, -1, 128), y.view(tokens, -1, 128), weight[:128])
        rows = matmul.normed_head_rows(*(part.to(DEVICE) for part in heads), 1e-6)
        own, gate, by = (part.double() for part in heads)
        wanted = norms.rms_norm(own, by, 1e-6) * torch.nn.functional.silu(gate)
        errors.append(distance(unpack_rows(rows, columns), wanted.flatten(1)))
    return report(f"rows {tokens} x {columns}", max(errors), 4e-4)


def attempt(run: Callable[..., object], *args: object) -> None:
    try:
        run(*args)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except Exception:
        print("FAIL", run.__name__, args)
        traceback.print_exc(limit=4)


def copies(name: str, rows: int, columns: int) -> list[Weight]:
    """Weights of one size, more than any cache holds."""
    one = to_tiles(random_weight(name, min(rows, 1024), columns))
    size = matmul.tile_bytes(one.quant, rows, columns)
    count = max(2, (300 << 20) // size)
    data = one.data.repeat(-(-size * count // len(one.data)))
    return [
        Weight(data[i * size : (i + 1) * size], one.quant, rows, columns, matmul.TILES)
        for i in range(count)
    ]


def bench(name: str, rows: int, columns: int) -> None:
    """Median times of a product with weights that no cache holds."""
    weights, texts = copies(name, rows, columns), []
    for tokens in (1, 2, 4, 8, 16, 32):
        x = matmul.half_rows(torch.randn(tokens, columns, device=DEVICE))
        out = torch.empty(tokens, rows, device=DEVICE)
        took = time_us([partial(matmul.product, x, weight, out) for weight in weights], 5)
        texts.append(f"x{tokens} {took:.1f} us {weights[0].data.nbytes / took / 1e6:.2f} TB/s")
    print(f"BENCH {name} {rows}x{columns}: {'; '.join(texts)}", flush=True)


def bench_triton(name: str, rows: int, columns: int) -> None:
    """Times of the same product by Triton's kernel, which reads rows as the file has them."""
    data = random_weight(name, 1024, columns).data.to(DEVICE).repeat(rows // 1024, 1)
    count, quant, texts = max(2, (400 << 20) // data.nbytes), BY_NAME[name], []
    weights = [Weight(data.clone(), quant, rows, columns) for _ in range(count)]
    for tokens in (1, 16):
        x = torch.randn(tokens, columns, device=DEVICE)
        out = torch.empty(tokens, rows, device=DEVICE)
        took = time_us([partial(triton_matmul.matmul, x, one, "bf16", out) for one in weights])
        texts.append(f"x{tokens} {took:.1f} us {data.nbytes / took / 1e6:.2f} TB/s")
    print(f"BENCH triton {name} {rows}x{columns}: {'; '.join(texts)}", flush=True)


def bench_rows() -> None:
    """Times of the kernels that make rows ready."""
    for tokens in (1, 16):
        for columns in (5120, 17408):
            x = torch.randn(tokens, columns, device=DEVICE)
            norm = RowNorm(torch.randn(columns, device=DEVICE), 1e-6, torch.empty_like(x))
            turns = {
                "plain": partial(matmul.half_rows, x),
                "norm": partial(matmul.half_rows, x, replace(norm, out=None)),
                "norm kept": partial(matmul.half_rows, x, norm),
                "gated": partial(matmul.gated_half_rows, x, x, "silu"),
            }
            took = {name: time_us([turn] * 20) for name, turn in turns.items()}
            text = " ".join(f"{name} {us:.1f} us" for name, us in took.items())
            print(f"BENCH rows {tokens} x {columns}: {text}")


def bench_many() -> None:
    """Times of a product of many rows and its parts."""
    weight = to_tiles(random_weight("q4_k", 17408, 5120))
    plain = torch.empty(17408, 5120, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(2048, 5120, device=DEVICE, dtype=torch.bfloat16)
    for what, run in (
        ("dequantise", lambda: matmul.dequantise(weight, plain)),
        ("bf16 product", lambda: x @ plain.T),
        ("both", lambda: matmul.matmul(x.float(), weight, "bf16")),
    ):
        print(f"BENCH {what} 2048 rows 17408x5120: {time_us([run]):.0f} us")


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    for name in KINDS:
        for rows, columns, tokens in SIZES:
            if columns % BY_NAME[name].block == 0:
                attempt(check, name, rows, columns, tokens)
        attempt(check, name, 33, 768, 40, "f16")
        attempt(check_outputs, name)
        attempt(check_alone, name, 144, 2048)
    for tokens, columns in ROWS:
        attempt(check_rows, tokens, columns)
    for name, rows, columns in REAL[:5]:
        attempt(check_again, name, rows, columns)
    if "--bench" in sys.argv:
        for name, rows, columns in REAL:
            attempt(bench, name, rows, columns)
        for name, rows, columns in TRITON:
            attempt(bench_triton, name, rows, columns)
        attempt(bench_rows)
        attempt(bench_many)


if __name__ == "__main__":
    main()
