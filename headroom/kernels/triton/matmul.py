"""Products with packed weights in Triton, and embedding rows; weights stay in the file's layout."""

from dataclasses import dataclass

import torch

from headroom.kernels.ops import Case
from headroom.kernels.triton import launch
from headroom.kernels.triton.launch import blocks, find_kernel, language_type
from headroom.kernels.types import PRODUCT_TYPES
from headroom.kernels.weight import Weight

LANGUAGE_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
EMBED_BLOCK = 512  # columns that one program unpacks


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The tile of a product that one program computes."""

    outs: int  # weight rows, which are outputs
    rows: int  # rows of x
    columns: int  # columns per step of the sum
    warps: int


# float32 products use no tensor cores and keep whole tiles in registers, so their tiles are small.
EXACT = TileSizes(outs=32, rows=16, columns=64, warps=4)
NARROW = TileSizes(outs=32, rows=16, columns=128, warps=4)
WIDE = TileSizes(outs=128, rows=64, columns=64, warps=8)
# One row, without tensor cores; Q4_K and Q5_K are read in 32-bit words.
SINGLE = TileSizes(outs=8, rows=1, columns=512, warps=4)
SINGLE_WORDS = TileSizes(outs=8, rows=1, columns=1024, warps=4)


def refuses(case: Case) -> str | None:
    """Return why a product cannot run here; None if it can."""
    if (reason := launch.refuses(case)) is not None:
        return reason
    if case.dtype not in LANGUAGE_TYPES:
        return f"computes in {', '.join(LANGUAGE_TYPES)}, not {case.dtype}"
    return None if case.quant in PRODUCT_TYPES else f"{case.quant} is not read"


def refuses_table(case: Case) -> str | None:
    """Return why an embedding table cannot be read; None if it can."""
    if case.layout != "rows":
        return f"reads rows, not {case.layout}"
    if (reason := launch.refuses(case)) is not None:
        return reason
    return None if case.quant in PRODUCT_TYPES else f"{case.quant} is not read"


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose; both are rounded to `dtype`, sums are float32.

    A single row with a `dtype` other than f32 is not rounded, and is summed without tensor cores.
    """
    tokens = x.shape[0]
    if out is None:
        out = torch.empty(tokens, weight.rows, device=x.device)
    assert out.shape == (tokens, weight.rows)
    assert out.stride(1) == 1
    x = x.contiguous()
    if not tokens:
        return out
    if tokens == 1 and dtype != "f32":
        _single(x, weight, out)
        return out
    sizes = tile_sizes(tokens, dtype)
    find_kernel("products", "product")[blocks(weight.rows, sizes.outs), blocks(tokens, sizes.rows)](
        *(x, weight.data, out, tokens, weight.rows, weight.data.stride(0), weight.columns),
        *(out.stride(0), weight.quant.ggml_id, language_type(LANGUAGE_TYPES[dtype])),
        *(sizes.outs, sizes.rows, sizes.columns),
        num_warps=sizes.warps,
    )
    return out


def tile_sizes(tokens: int, dtype: str) -> TileSizes:
    """Return the tiles of a product of `tokens` rows; those of f32 products are always the same."""
    if dtype == "f32":
        return EXACT
    return NARROW if tokens <= NARROW.rows else WIDE


def _single(x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    words = weight.quant.name in ("q4_k", "q5_k")
    sizes = SINGLE_WORDS if words else SINGLE
    find_kernel("products", "single_words" if words else "single")[(
        blocks(weight.rows, sizes.outs),
    )](
        *(x, weight.data, out, weight.rows, weight.data.stride(0), weight.columns),
        *(weight.quant.ggml_id, sizes.outs, sizes.columns),
        num_warps=sizes.warps,
    )  # fmt: skip


def embed(ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write the table's rows `ids` to `out` as float32."""
    assert out.shape == (len(ids), table.columns)
    assert out.stride(1) == 1
    if not len(ids):
        return out
    ids = ids.to(table.data.device).contiguous()
    find_kernel("products", "embed")[blocks(table.columns, EMBED_BLOCK), len(ids)](
        *(table.data, ids, out, table.data.stride(0), table.columns),
        *(out.stride(0), table.quant.ggml_id, EMBED_BLOCK),
    )
    return out
