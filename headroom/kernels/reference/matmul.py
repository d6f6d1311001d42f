"""Matrix products in plain torch whose rows do not depend on each other.

A BLAS chooses its order of summation by the number of rows, so a token's logits would change with
the batch. These products always multiply tiles of exactly ROW_TILE rows: a row has the same bits
alone, in a batch, and in a prompt.
"""

import torch

from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.sizes import ROW_TILE, UNPACK_VALUES
from headroom.kernels.weight import PLAIN_TYPES, Weight, plain_type


def matmul(
    x: torch.Tensor, weight: Weight, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` times the weight's transpose; both are rounded to `dtype`, sums are float32."""
    rows = x.shape[0]
    tiles = -(-rows // ROW_TILE)
    padded = torch.zeros(tiles * ROW_TILE, weight.columns, device=x.device)
    rounded = plain_type(dtype)
    padded[:rows] = x.to(rounded)
    product = torch.empty(tiles * ROW_TILE, weight.rows, device=x.device)
    ready = rounded == torch.float32 == weight.data.dtype  # nothing to unpack or to round
    step = weight.rows if ready else max(1, UNPACK_VALUES // weight.columns)
    for first in range(0, weight.rows, step):
        part = unpack_rows(weight, slice(first, first + step)).to(rounded).float().t()
        for tile in range(0, rows, ROW_TILE):
            product[tile : tile + ROW_TILE, first : first + step] = (
                padded[tile : tile + ROW_TILE] @ part
            )
    return product[:rows] if out is None else out.copy_(product[:rows])


def embed(ids: torch.Tensor, table: Weight, out: torch.Tensor) -> torch.Tensor:
    """Write the table's rows `ids` to `out` as float32."""
    return out.copy_(unpack_rows(table, ids.to(table.data.device)))


def unpack_rows(weight: Weight, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return some rows of a weight as float32, or in their own type if it is plain."""
    if weight.quant.name in PLAIN_TYPES:
        return weight.data[rows]
    return dequantise(weight.data[rows], weight.quant, weight.columns)
