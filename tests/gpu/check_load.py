"""Compares weights brought to a GPU with plain torch's; times loading with --bench [GB].

`--bench 20 --no-cases` leaves the comparison out: what bounds a load, in less than a minute.
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from headroom.experts.cuda_ffn import upload_experts
from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.layers import upload as loading
from headroom.layers.cuda_rows import load_merged
from headroom.layers.upload import Upload
from headroom.plan.device_scratch import UPLOAD_BYTES
from headroom.units import MIB
from tests.gpu.check_matmul import KINDS, random_weight
from tests.gpu.kept import keep_code
from tests.gpu.load_parts import (
    READER_COUNTS,
    Buffers,
    copy_speed,
    pack_speed,
    reader_speeds,
)
from tests.gpu.torch_tiles import pack_tiles
from tests.gpu.weight_file import WeightFile

DEVICE = "cuda"
EXPERTS = (256, 512, 2048)  # of one layer of Qwen3.5-35B-A3B: 151 MB in Q4_K
DENSE = (17408, 5120)  # of Qwen3.5-27B: 50 MB
STAGINGS = (16 * MIB, 128 * MIB)


def check(name: str, rows: int, columns: int, matrices: int = 1, ordered: bool = False) -> bool:
    """Matrices packed in one launch against each by itself, byte by byte."""
    weights = [random_weight(name, rows, columns) for _ in range(matrices)]
    quant, order = weights[0].quant, torch.randperm(rows) if ordered else torch.arange(rows)
    wanted = torch.cat([pack_tiles(weight.data[order], quant, columns) for weight in weights])
    source = torch.cat([weight.data.flatten() for weight in weights]).to(DEVICE)
    size = tile_bytes(quant, rows, columns) * matrices
    found = torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE)
    pack(source, quant, rows, columns, found, order.int().to(DEVICE) if ordered else None)
    wrong = int((found.cpu() != wanted).sum())
    case = f"{name} {matrices} x {rows}x{columns}{' ordered' if ordered else ''}"
    return report(f"pack {case}: {wrong} bytes differ", wrong == 0)


def report(text: str, good: bool) -> bool:
    """Print one case."""
    print(f"{'PASS' if good else 'FAIL'} {text}", flush=True)
    return good


def check_upload(folder: Path, staging: int) -> bool:
    """Load matrices of every kind at the same time, through buffers smaller than they are."""
    file = WeightFile(folder / f"small-{staging}")
    q, k = file.add("q", "q4_k", 3072, 2048), file.add("k", "q4_k", 520, 2048)
    v, halves = file.add("v", "q6_k", 777, 2048), file.add("halves", "f16", 999, 2048)
    floats, table = file.add("floats", "f32", 999, 2048), file.add("embed", "q6_k", 9999, 2048)
    gates = [file.add(f"ffn.experts.{name}", "q4_k", 64, 96, 512) for name in ("gate", "up")]
    down = file.add("ffn.experts.down", "q8_0", 64, 512, 96)
    order = torch.arange(3072).view(6, 2, 256).transpose(0, 1).flatten()
    back = torch.arange(999).flip(0)
    with Upload(DEVICE, staging) as way:
        get = file.source(way)
        joined, other = load_merged(get, ["q", "k", "v"], [order, None, None]).weights
        (tiled,), (rows,) = (
            load_merged(get, [name], [back]).weights for name in ("halves", "floats")
        )
        embedded, experts = get.table("embed"), upload_experts(get, 64)
    wanted = {
        "joined": torch.cat([pack_tiles(part, joined.quant, 2048) for part in (q[order], k)]),
        "other": pack_tiles(v, other.quant, 2048),
        "halves": pack_tiles(halves[back], tiled.quant, 2048),
        "floats": floats[back].view(torch.float32).bfloat16(),
        "table": table,
    }
    found, good = (joined.data, other.data, tiled.data, rows.data, embedded.data), []
    for (name, right), data in zip(wanted.items(), found, strict=True):
        same = torch.equal(data.cpu(), right)
        good.append(report(f"upload {name}, buffers {staging // MIB} MiB", same))
    for part, memory in zip((*gates, down), experts.memory, strict=True):
        kind = experts.kinds[2] if part is down else experts.kinds[0]
        right = torch.stack([pack_tiles(one, kind, 96 if part is down else 512) for one in part])
        good.append(report(f"upload experts {kind}", torch.equal(memory.cpu(), right)))
    return all(good)


def bench(folder: Path, size_bytes: int) -> None:
    """Loads experts and dense matrices from a file in the page cache, by several settings."""
    started = time.perf_counter()
    file = WeightFile(folder / "large")
    layer = EXPERTS[0] * EXPERTS[1] * EXPERTS[2] // 256 * 144
    layers = max(1, size_bytes // 2 // layer)
    file.add("experts", "q4_k", *EXPERTS[1:], repeats=EXPERTS[0] * layers)
    file.add("dense", "q4_k", *DENSE, repeats=3 * layers)
    written = time.perf_counter() - started
    print(f"BENCH file of {file.path.stat().st_size / 1e9:.2f} GB written in {written:.1f} s")
    bench_parts(file)
    default = UPLOAD_BYTES // MIB
    for readers in READER_COUNTS:
        load_all(file, layers, readers, default * MIB)
    for readers, staging in ((8, default // 2), (16, 2 * default)):
        load_all(file, layers, readers, staging * MIB)
    print(f"BENCH all of that in {time.perf_counter() - started:.1f} s", flush=True)


def load_all(file: WeightFile, layers: int, readers: int, staging: int) -> None:
    """Load everything once, and hold the peak of device memory to what is kept and the buffers."""
    loading.READERS = readers
    size, before = file.path.stat().st_size, taken()
    if DEVICE != "cpu":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with Upload(DEVICE, staging) as way:
        get, kept = file.source(way), []
        experts = replace(get.locate("experts"), rows=EXPERTS[1], count=EXPERTS[0])
        dense = replace(get.locate("dense"), rows=DENSE[0])
        for _ in range(layers):
            kept.append(way.tiles([experts]))
            experts = replace(experts, offset=experts.offset + EXPERTS[0] * experts.matrix_bytes)
            for count in (2, 1):  # gate and up lie together
                kept.append(way.tiles([replace(dense, count=count)]))
                dense = replace(dense, offset=dense.offset + count * dense.matrix_bytes)
    seconds = time.perf_counter() - started
    extra = taken("max_memory_allocated") - taken()
    speed = f"{seconds:.3f} s, {size / seconds / 1e9:.1f} GB/s"
    print(f"BENCH load {size / 1e9:.2f} GB, {readers} readers, {staging // MIB} MiB: {speed}")
    held = sum(tensor.nbytes for tensor in kept)
    report(f"peak is {extra / MIB:.1f} MiB above what is kept", extra <= staging)
    report("nothing else stays", abs(taken() - before - held) < MIB * len(kept) or DEVICE == "cpu")


def taken(what: str = "memory_allocated") -> int:
    """Bytes on the device."""
    return 0 if DEVICE == "cpu" else int(getattr(torch.cuda, what)())


def bench_parts(file: WeightFile) -> None:
    """Readers, copies and packing, each by itself: the slowest bounds a load."""
    buffers = Buffers(DEVICE)
    for readers in READER_COUNTS:
        speeds = reader_speeds(file.path, readers, buffers)
        shown = ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
        print(f"BENCH {readers} readers, GB/s: {shown}", flush=True)
    print(f"BENCH copies: {copy_speed(buffers):.1f} GB/s")
    print(f"BENCH packing q4_k: {pack_speed(buffers):.1f} GB/s", flush=True)


def packings() -> list[tuple[str, int, int, int, bool]]:
    """Types, sizes and numbers of matrices, and whether their rows come in another order."""
    sizes = ((64, 512, 1, False), (37, 5120, 1, True), (100, 768, 7, False), (1, 256, 1, False))
    cases = [(name, *size) for name in KINDS for size in sizes]
    cases += [(name, *size) for name in ("f16", "bf16") for size in (*sizes, (21, 40, 3, False))]
    return cases + [(name, 48, 320, 3, False) for name in ("q8_0", "q4_1", "mxfp4")]


def main(folder: Path) -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    cases: list[Callable[[], object]] = []
    if "--no-cases" not in sys.argv:
        cases += [partial(check, *case) for case in packings()]
        cases += [partial(check_upload, folder, size) for size in STAGINGS]
    if "--bench" in sys.argv:
        given = [word for word in sys.argv[1:] if not word.startswith("--")]
        cases.append(partial(bench, folder, int(float(given[0] if given else 4) * 1e9)))
    for case in cases:
        try:
            case()
        except Exception:
            report(str(case), good=False)
            traceback.print_exc(limit=6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
