"""Compares tiles packed on a GPU with those of plain torch; times loading with --bench."""

import sys
import traceback

import torch

from headroom.kernels.cuda.pack import pack, tile_bytes
from tests.gpu.check_matmul import KINDS, random_weight
from tests.gpu.torch_tiles import pack_tiles

DEVICE = "cuda"


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
    print(f"{'FAIL' if wrong else 'PASS'} pack {case}: {wrong} bytes differ", flush=True)
    return wrong == 0
