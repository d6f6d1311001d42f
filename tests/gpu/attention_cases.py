"""Random caches and steps for the checks of attention, and what their results should be."""

from dataclasses import dataclass, replace

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.attention import DecodeShape
from headroom.kernels.ops import PagedKv, StepTables
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES

PAGE = 16


@dataclass(frozen=True)
class Heads:
    """The heads of a case, and the types of its cache."""

    heads: int
    kv_heads: int
    dim: int
    k_type: str = "f16"
    v_type: str = "f16"


def random_rows(kind: str, slots: int, kv_heads: int, dim: int) -> torch.Tensor:
    """Cached rows of a type with values around one."""
    if kind in PLAIN_TYPES:
        return torch.randn(slots, kv_heads, dim).to(PLAIN_TYPES[kind])
    quant = BY_NAME[kind]
    blocks = dim // quant.block
    data = torch.randint(0, 256, (slots, kv_heads, blocks, quant.block_bytes), dtype=torch.uint8)
    wide = 60 if kind == "q8_0" else 8
    scale = (0.5 + torch.rand(slots, kv_heads, blocks, 1)) / wide
    data[..., :2] = scale.half().view(torch.uint8)
    if kind in ("q4_1", "q5_1"):
        data[..., 2:4] = (-scale * wide / 2).half().view(torch.uint8)
    return data.flatten(2)


def floats(stored: torch.Tensor, kind: str, dim: int) -> torch.Tensor:
    """What cached rows stand for, in float64."""
    if kind in PLAIN_TYPES:
        return stored.double()
    return dequantise(stored, BY_NAME[kind], dim).double()


def random_cache(heads: Heads, slots: int) -> PagedKv:
    """A cache on the CPU."""
    return PagedKv(
        random_rows(heads.k_type, slots, heads.kv_heads, heads.dim),
        random_rows(heads.v_type, slots, heads.kv_heads, heads.dim),
        BY_NAME[heads.k_type],
        BY_NAME[heads.v_type],
        PAGE,
    )


def on_gpu(cache: PagedKv) -> PagedKv:
    """Return a copy of a cache on the GPU."""
    return replace(cache, keys=cache.keys.cuda(), values=cache.values.cuda())


def make_tables(
    spans: list[tuple[int, int]], padding: int, slots: int, tree: bool = False
) -> StepTables:
    """Tables on the CPU of spans (start, rows), then rows of padding; pages in random order."""
    most = max(-(-(start + rows) // PAGE) for start, rows in spans)
    free = torch.randperm(slots // PAGE)
    assert len(free) >= most * len(spans)
    pages = free[: most * len(spans)].view(len(spans), most)
    sequence, index, place, bits, positions = [], [], [], [], []
    for number, (start, rows) in enumerate(spans):
        seen: list[int] = []
        for row in range(rows):
            parent = int(torch.randint(-1, row, ())) if row else -1
            own = 1 << row | (seen[parent] if parent >= 0 else 0)
            seen.append(own if tree else (2 << row) - 1)
            key = start + row
            sequence.append(number)
            index.append(key)
            positions.append(start + seen[row].bit_count() - 1)
            place.append(int(pages[number, key // PAGE]) * PAGE + key % PAGE)
        bits += [word - (1 << 64) if word >> 63 else word for word in seen]
    return StepTables(
        rows=len(sequence) + padding,
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int32),
        sequence=torch.tensor(sequence + [-1] * padding, dtype=torch.int32),
        index=torch.tensor(index + [0] * padding, dtype=torch.int32),
        starts=torch.tensor([start for start, _ in spans], dtype=torch.int32),
        pages=pages.int(),
        kv_slots=torch.tensor(place + [0] * padding, dtype=torch.int64),
        state_slots=torch.arange(len(spans), dtype=torch.int32),
        trees=torch.tensor(bits + [0] * padding, dtype=torch.int64) if tree else None,
    )


def tables_on_gpu(tables: StepTables) -> StepTables:
    """Return a copy of a step's tables on the GPU."""
    names = ("positions", "sequence", "index", "starts", "pages", "kv_slots", "state_slots")
    moved = {name: getattr(tables, name).cuda() for name in names}
    trees = None if tables.trees is None else tables.trees.cuda()
    return replace(tables, **moved, trees=trees)


def wanted(
    queries: torch.Tensor, cache: PagedKv, tables: StepTables, shape: DecodeShape
) -> torch.Tensor:
    """Attention in float64, row by row: [rows, heads * dim]."""
    out = torch.zeros(shape.rows, shape.heads, shape.dim, dtype=torch.float64)
    stored = (floats(cache.keys, cache.k_type.name, shape.dim),
              floats(cache.values, cache.v_type.name, shape.dim))  # fmt: skip
    for row in range(shape.rows):
        s = int(tables.sequence[row])
        if s < 0:
            continue
        limit, start = int(tables.index[row]), int(tables.starts[s])
        key = torch.arange(limit + 1)
        position, seen, own = key.clone(), torch.ones(limit + 1, dtype=torch.bool), limit
        if tables.trees is not None:
            word, first = int(tables.trees[row]), row - (limit - start)
            for j in range(limit + 1 - start):
                position[start + j] = int(tables.positions[first + j])
                seen[start + j] = bool(word >> j & 1)
            own = int(tables.positions[row])
        if shape.window:
            seen &= own - position < shape.window
        key = key[seen]
        slots = tables.pages[s].long()[key // PAGE] * PAGE + key % PAGE
        keys, values = (part[slots] for part in stored)  # [keys, kv_heads, dim]
        q = queries[row].double().view(shape.kv_heads, -1, shape.dim)
        scores = torch.einsum("kgd,nkd->kgn", q, keys)
        mixed = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values)
        out[row] = mixed.reshape(shape.heads, shape.dim)
    return out.flatten(1)
