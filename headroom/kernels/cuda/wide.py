"""Attention of heads too wide for torch's fast fused kernels: cuBLAS's products, part by part."""

import torch

from headroom.formats.quants import BF16, F16
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.sizes import WIDE_ROWS, wide_keys, wide_stride

WEIGH_THREADS = 256
F32 = torch.float32
KINDS = {torch.float16: F16.ggml_id, torch.bfloat16: BF16.ggml_id}


def attend_wide(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from `queries [rows, heads, dim]`, in f16 or bf16, to `[count, kv_heads, dim]`.

    Row i sees the keys up to `count - rows + i`. Scores and sums are float32, weights of 16 bits;
    a part of the scores is held at a time, whatever the context is.
    """
    rows, count = queries.shape[0], keys.shape[0]
    out = torch.empty_like(queries)
    for first in range(0, rows, WIDE_ROWS):
        mine = slice(first, min(first + WIDE_ROWS, rows))
        seen = count - rows + mine.stop
        _attend_rows(queries[mine], keys[:seen], values[:seen], out[mine])
    return out


def _attend_rows(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    """The heads of a key head are rows of one product, so that no key or value is repeated."""
    (rows, heads, dim), (count, kv_heads, _) = queries.shape, keys.shape
    split, lines = (rows, kv_heads, heads // kv_heads, dim), (kv_heads, rows * heads // kv_heads)
    grouped = queries.view(split).transpose(0, 1).reshape(*lines, dim)
    part = min(count, wide_keys(heads, rows))
    places = torch.empty(heads * rows * wide_stride(part), dtype=F32, device=keys.device)
    stats = torch.empty(*lines, 2, dtype=F32, device=keys.device)
    factors = torch.empty(*lines, 1, dtype=F32, device=keys.device)
    sums, more = torch.empty(2, *lines, dim, dtype=F32, device=keys.device)
    kernel = compile_kernel("weigh.cu", "weigh", {"OUT_KIND": KINDS[keys.dtype]})
    for first in range(0, count, part):
        end = min(first + part, count)
        size, stride = end - first, wide_stride(end - first)
        scores = places[: heads * rows * stride].view(*lines, stride)
        torch.bmm(grouped, keys[first:end].permute(1, 2, 0), out_dtype=F32, out=scores[..., :size])
        shape = (size, stride, split[2], count - rows + 1 - first, int(first == 0))
        kernel((lines[1], kv_heads), (WEIGH_THREADS,), (scores, stats, factors, *shape))
        weights, mixed = scores.view(keys.dtype)[..., :size], more if first else sums
        torch.bmm(weights, values[first:end].transpose(0, 1), out_dtype=F32, out=mixed)
        if first:
            torch.addcmul(more, sums, factors, out=sums)
    sums /= stats[..., 1:]
    out.view(split).copy_(sums.view(kv_heads, rows, -1, dim).transpose(0, 1))
