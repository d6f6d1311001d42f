"""Products with packed weights and rows of tables, read in the file's own layout."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.ops import Case
from headroom.kernels.triton import launch
from headroom.kernels.triton.launch import blocks, find_kernel, language_type
from headroom.kernels.weight import PLAIN_TYPES, Weight

KINDS = {
    BY_NAME[name]
    for name in (*PLAIN_TYPES, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k",
                 "iq4_nl", "mxfp4")
}  # fmt: skip
LANGUAGE_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
FEW_ROWS = 16
EMBED_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TileSizes:
    """How a product is cut: weight rows and rows of `x` in a tile, columns in a step."""

    outs: int
    rows: int
    columns: int
    warps: int


# Exact sums keep whole tiles in registers without tensor cores, so that their tiles are small.
EXACT = TileSizes(outs=32, rows=16, columns=64, warps=4)
FEW = TileSizes(outs=32, rows=16, columns=128, warps=4)
MANY = TileSizes(outs=128, rows=64, columns=64, warps=8)
SINGLE = TileSizes(outs=8, rows=1, columns=512, warps=4)
SINGLE_WORDS = TileSizes(outs=8, rows=1, columns=1024, warps=4)


def refuses(case: Case) -> str | None:
    """Say why a product cannot run here."""
    if (reason := launch.refuses(case)) is not None:
        return reason
    if case.dtype not in LANGUAGE_TYPES:
        return f"computes in {', '.join(LANGUAGE_TYPES)}, not {case.dtype}"
    return None if case.quant in KINDS else f"{case.quant} is not read"


def refuses_table(case: Case) -> str | None:
    """Say why rows of a table cannot be taken."""
    if case.layout != "rows":
        return f"reads rows, not {case.layout}"
    if (reason := launch.refuses(case)) is not None:
        return reason
    return None if case.quant in KINDS else f"{case.quant} is not read"


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose; both are rounded to `dtype`, sums are float32.

    A single row of other types than float32 is not rounded and summed without tensor cores.
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
    """Return how a product of so many rows is cut; exact ones are always cut alike."""
    if dtype == "f32":
        return EXACT
    return FEW if tokens <= FEW_ROWS else MANY


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
