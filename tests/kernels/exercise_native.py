"""Run every C++ operation on all instruction sets; started by the sanitizer tests.

It does not import torch, whose threads and memory would flood the sanitizer's report.
"""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np

KINDS = {  # GGUF's number of a type: values and bytes of a block
    0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24),
    8: (32, 34), 12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18), 39: (32, 17),
}  # fmt: skip
RANDOM = np.random.default_rng(0)


def load(folder: Path):
    """Import the C++ module of a build folder."""
    spec = importlib.util.spec_from_file_location("_native", next(folder.glob("_native*.so")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def aligned(size: int) -> np.ndarray:
    """Return bytes aligned to 64, as torch's are.

    They end where their memory does wherever that can be had, as it can under the address
    sanitizer, which then sees who reads beyond them.
    """
    for before in range(0, 64, 16):
        data = np.zeros(before + size, dtype=np.uint8)
        if (address(data) + before) % 64 == 0:
            return data[before:]
    data = np.zeros(size + 64, dtype=np.uint8)
    first = -address(data) % 64
    return data[first : first + size]


def address(array: np.ndarray) -> int:
    """Return the address of an array's data."""
    return array.ctypes.data


def packed(native, ops, kind: int, rows: int, columns: int) -> np.ndarray:
    """Return random panels of a matrix; bytes are small, so that scales stay finite."""
    block, size = KINDS[kind]
    file = RANDOM.integers(0, 0x3B, rows * columns // block * size, dtype=np.uint8)
    panels = aligned(native.panel_bytes(kind, rows, columns))
    ops.pack(kind, rows, columns, address(file), address(panels))
    return panels


def products(native, ops) -> None:
    """Pack, unpack and multiply every type, with full and partial panels and records."""
    for kind in KINDS:
        last = 512 if KINDS[kind][0] == 256 else 352 if KINDS[kind][0] == 32 else 35
        for rows, out, columns in ((1, 16, 256), (15, 37, 512), (15, 17, last), (33, 17, last)):
            panels = packed(native, ops, kind, out, columns)
            ids, back = np.arange(out), np.empty((out, columns), dtype=np.float32)
            ops.unpack(address(panels), kind, out, columns, address(ids), out, address(back))
            x = RANDOM.standard_normal((rows, columns)).astype(np.float32)
            result = np.empty((rows, out), dtype=np.float32)
            scratch = aligned(native.matmul_scratch(rows, columns))
            for products, largest in enumerate((None, 32767, 127)):
                ops.matmul(address(panels), kind, out, columns, address(x), rows, products,
                           address(result), address(scratch), scratch.size)  # fmt: skip
                # The error of a sum follows the magnitude of its terms, which may cancel.
                read = x.astype(np.float64)
                if largest and KINDS[kind][0] > 1:
                    read = rounded(x, largest)
                terms = np.abs(read) @ np.abs(back.T.astype(np.float64))
                error = np.abs(result - read @ back.T.astype(np.float64)) / terms
                assert error.max() < 1e-6, (kind, products, error.max())


def rounded(x: np.ndarray, largest: int) -> np.ndarray:
    """Round rows to whole numbers up to `largest` with one scale per 32 columns."""
    blocks = x.reshape(len(x), -1, 32)
    peaks = np.abs(blocks).max(2, keepdims=True)
    steps = np.round(blocks * (np.float32(largest) / peaks)).astype(np.float64)
    return (steps * (peaks / np.float32(largest))).reshape(x.shape)


def layers(native, ops) -> None:
    """Run whole layers: prompts and single tokens, in all cache types."""
    hidden, heads, kv_heads, dim, width, slots = 256, 6, 2, 32, 512, 2048
    shapes = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden),
              (hidden, heads * dim), (width, hidden), (width, hidden), (hidden, width)]  # fmt: skip
    weights = [packed(native, ops, 8, *shape) for shape in shapes]
    views = [native.Matrix(address(w), 8, *shape) for w, shape in zip(weights, shapes, strict=True)]
    norms = np.ones(hidden, dtype=np.float32)
    sizes_of_heads = ((0, 128), (1, 64), (30, 64), (8, 34), (7, 24), (6, 22), (3, 20), (2, 18))
    tree = np.tril(np.ones((13, 13), dtype=np.uint8))
    for kind, head_bytes in sizes_of_heads:
        keys, values = (aligned(slots * kv_heads * head_bytes) for _ in range(2))
        cache = native.KvCache(address(keys), kind, head_bytes, address(values), kind, head_bytes,
                               kv_heads, 16)  # fmt: skip
        sizes = (heads, kv_heads, dim, 40)
        layer = native.Layer(views, address(norms), address(norms), 1e-5, sizes,
                             0.2, cache, kind % 3)  # fmt: skip
        pages = np.arange(100, dtype=np.int64)
        for table in (
            [(0, 20, 0, 0, -1)],
            [(0, 1, 20, 0, -1), (1, 13, 0, 60, 0), (14, 1, 600, 0, -1)],
            [(0, 5, 600, 0, 0)],
        ):
            spans = np.array(table, dtype=np.int64)
            rows = int(spans[:, 1].sum())
            x = RANDOM.standard_normal((rows, hidden)).astype(np.float32)
            cos = sin = np.full((rows, dim // 2), 0.7, dtype=np.float32)
            at = np.arange(rows, dtype=np.int64)
            size = layer.scratch_bytes(ops, (rows, dim // 2), address(spans), len(spans))
            size += (rows == 5) << 16  # enough to split the keys of few rows
            scratch = aligned(size)
            where = [address(array) for array in (x, cos, sin, at, spans)]
            layer.run(ops, (rows, dim // 2), *where, len(spans), address(pages), address(tree),
                      address(scratch), size)  # fmt: skip
            assert np.isfinite(x).all()


def experts(native, ops) -> None:
    """Pick experts by every rule, and run them."""
    count, used, hidden, width = 10, 3, 256, 64
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    parts = [[packed(native, ops, 8, *shape) for shape in shapes] for _ in range(count)]
    table = np.array([[address(w) for w in expert] for expert in parts], dtype=np.int64)
    like = [native.Matrix(0, 8, *shape) for shape in shapes]
    counts, bias = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.float32)
    for rows, sigmoid in ((1, False), (40, True)):
        logits = RANDOM.standard_normal((rows, count)).astype(np.float32)
        ids = np.empty((rows, used), dtype=np.int32)
        weights = np.empty((rows, used), dtype=np.float32)
        where = [address(array) for array in (logits, bias, counts, ids, weights)]
        ops.route((rows, count, used), (sigmoid, True), (1.0, 5.0), *where)
        assert np.abs(weights.sum(1) - 1).max() < 1e-5
        x = RANDOM.standard_normal((rows, hidden)).astype(np.float32)
        out = np.empty_like(x)
        scratch = aligned(native.experts_scratch(rows, used, hidden, width, count))
        for products in (0, 1, 2):
            native.experts(ops, like, address(table), count, address(ids), address(weights),
                           (rows, used), address(x), products == 2, products, address(out),
                           address(scratch), scratch.size)  # fmt: skip
            assert np.isfinite(out).all()
    assert counts.sum() == 41 * used


def cold(native, ops) -> None:
    """Send requests for cold experts to a ColdWorker, with pauses between some steps."""
    count, used, hidden, width, most = 10, 3, 256, 64, 8
    size = 8 * 34 * 16  # bytes of a tile of sixteen rows and 256 columns
    sizes = (width // 16 * size, width // 16 * size, hidden // 16 * size)
    parts = [[aligned(part) for part in sizes] for _ in range(count)]
    for part in (part for expert in parts for part in expert):
        part[:] = RANDOM.integers(0, 0x3B, part.size, dtype=np.uint8)
    table = np.array([[address(w) for w in expert] for expert in parts], dtype=np.int64)
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    like = [native.Matrix(0, 8, *shape, True) for shape in shapes]
    layer = native.ColdLayer(like, address(table), (count, used), False, True)
    flags = np.zeros((6, 32), dtype=np.uint32)  # request, answer, layer, rows, done, failed
    ids = np.zeros((most, used), dtype=np.int32)
    weights, x = np.ones((most, used), dtype=np.float32), floats(most * hidden)
    out = np.zeros((most, hidden), dtype=np.float32)
    where = [address(array) for array in (*flags, ids, weights, x, out)]
    worker = native.ColdWorker(ops, where, [layer], most)
    for step in range(1, 40):
        if step % 10 == 0:
            time.sleep(0.005)  # long enough to fall asleep
        worker.begin_step()
        flags[3, 0] = 1 + step % most
        ids[:] = RANDOM.integers(-1, count, ids.shape)
        flags[0, 0] = step
        while flags[1, 0] != step:
            time.sleep(0)
        assert np.isfinite(out[: 1 + step % most]).all()
        assert len(worker.counts()) == 6
        flags[4, 0] = step
    assert worker.failure() == ""


def states(native, ops) -> None:
    """Run gated DeltaNet: prompts, single tokens and guesses, with full and partial vectors."""
    parents = np.array([-1, 0, 0, 1, -1, 2], dtype=np.int64)
    for keys, heads, dim, taps in ((2, 6, 33, 4), (1, 1, 128, 1), (4, 4, 16, 4)):
        channels, slots = (2 * keys + heads) * dim, 3
        conv, decay, bias = floats(channels * taps), -np.abs(floats(heads)), floats(heads)
        memory, inputs = floats(slots * heads * dim * dim), floats(slots * (taps - 1) * channels)
        for table in (
            [(0, 9, 0, 0, -1)],
            [(0, 1, 9, 0, -1), (1, 2, 0, 2, -1), (3, 5, 4, 1, -1)],
            [(0, 1, 9, 0, -1), (1, 6, 4, 1, 0)],
        ):
            spans = np.array(table, dtype=np.int64)
            rows = int(spans[:, 1].sum())
            sizes = (channels, heads, heads, channels, 2 * heads, heads * dim)
            arrays = [floats(rows * size) for size in sizes]
            weights = [address(array) for array in (conv, decay, bias)]
            ops.delta_net((keys, heads, dim, taps), True, weights,
                          [address(memory), address(inputs)], address(spans), len(spans),
                          address(parents), [address(array) for array in arrays])  # fmt: skip
            assert np.isfinite(arrays[-1]).all()
            norm = floats(dim)
            ops.gated_norm(address(arrays[-1]), address(arrays[-1]), address(norm),
                           (rows * heads, dim), 1e-6, address(arrays[-1]))  # fmt: skip


def floats(count: int) -> np.ndarray:
    """Return random numbers."""
    return RANDOM.standard_normal(count).astype(np.float32)


def main() -> None:
    """Run all operations of the module in the given build folder."""
    native = load(Path(sys.argv[1]))
    for isa in native.isas():
        ops = native.Ops(3, False, isa)
        products(native, ops)
        layers(native, ops)
        experts(native, ops)
        cold(native, ops)
        states(native, ops)
    sys.stdout.write("exercised\n")


main()
