"""Routed experts in Triton: an expert's weights are read once per tile of rows that picked it."""

from dataclasses import dataclass, replace

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda.experts_prefill import SortedPicks, sort_picks
from headroom.kernels.ops import Case, ExpertTable
from headroom.kernels.triton import matmul
from headroom.kernels.triton.launch import blocks, find_kernel, language_type
from headroom.kernels.triton.matmul import LANGUAGE_TYPES, TileSizes, tile_sizes
from headroom.kernels.triton.rows import gated_activation
from headroom.kernels.weight import Weight

DEVICE = "cuda"  # where `prepare` puts experts; tests set it to "cpu"
COMBINE_BLOCK = 1024  # columns that one program sums up


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPieces:
    """One layer's experts in the file's layout: one tensor each for gates, ups and downs."""

    pieces: tuple[torch.Tensor, ...]  # gates, ups, downs: [experts, rows, bytes or values of a row]
    kinds: tuple[QuantType, ...]  # their types
    shapes: tuple[tuple[int, int], ...]  # rows and columns

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return sum(piece.nbytes for piece in self.pieces)


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    reasons = (matmul.refuses(replace(case, quant=kind)) for kind in case.experts or (case.quant,))
    return next((reason for reason in reasons if reason), None)


def prepare(table: ExpertTable) -> ExpertPieces:
    """Return the experts on the GPU, with one tensor each for gates, ups and downs."""
    shapes = tuple((part[0].rows, part[0].columns) for part in table.parts)
    return ExpertPieces(tuple(map(_in_one_piece, table.parts)), table.kinds, shapes)


def _in_one_piece(part: tuple[Weight, ...]) -> torch.Tensor:
    like = part[0].data
    piece = torch.empty(len(part), *like.shape, dtype=like.dtype, device=DEVICE)
    for place, weight in zip(piece, part, strict=True):
        place.copy_(weight.data, non_blocking=True)
    return piece


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertPieces,
    activation: str,
    dtype: str,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, the best first."""
    (rows, used), count = ids.shape, len(table.pieces[0])
    out = torch.empty(rows, table.shapes[2][0], device=x.device)
    if not rows:
        return out
    picks = sort_picks(ids, count)
    # Larger tiles pay only if an expert has many rows.
    sizes = tile_sizes(rows * used // count, dtype)
    tiles = _tiles(picks, len(picks.rows), sizes.rows)
    x = x.contiguous()
    gate, up = (_product(x, table, part, tiles, picks.rows, dtype, sizes) for part in range(2))
    inner = gated_activation(gate, up, activation)
    own = torch.arange(len(inner), device=x.device)
    answers = _product(inner, table, 2, tiles, own, dtype, sizes)
    hidden = out.shape[1]
    find_kernel("products", "combine")[blocks(hidden, COMBINE_BLOCK), rows](
        answers, picks.places, weights.contiguous(), out, hidden, used, COMBINE_BLOCK
    )
    return out


def _tiles(picks: SortedPicks, count: int, size: int) -> torch.Tensor:
    """Return int64 [3, tiles]: each tile's expert, first pick, and one past its expert's last pick.

    There are as many tiles as could be needed, so that the host need not wait for the device.
    Unused tiles have an expert number beyond the last.
    """
    ends = picks.ends.long()
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    last = ((ends - starts + size - 1) // size).cumsum(0)  # one past an expert's last tile
    most = min(count, count // size + len(ends))
    tile = torch.arange(most, device=ends.device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=len(ends) - 1)
    before = last[known] - (ends[known] - starts[known] + size - 1) // size
    return torch.stack((expert, starts[known] + (tile - before) * size, ends[known]))


def _product(
    x: torch.Tensor,
    table: ExpertPieces,
    part: int,
    tiles: torch.Tensor,
    sources: torch.Tensor,
    dtype: str,
    sizes: TileSizes,
) -> torch.Tensor:
    """Multiply sorted picks with one matrix of their experts: [picks, rows]."""
    piece, (rows, columns) = table.pieces[part], table.shapes[part]
    out = torch.empty(len(sources), rows, device=x.device)
    find_kernel("products", "expert_product")[blocks(rows, sizes.outs), tiles.shape[1]](
        *(x, piece, out, tiles, sources, len(piece), rows, piece.stride(1)),
        *(columns, table.kinds[part].ggml_id, language_type(LANGUAGE_TYPES[dtype])),
        *(sizes.outs, sizes.rows, sizes.columns),
        num_warps=sizes.warps,
    )
    return out
