"""Routed experts on the CPU: each picked expert is read once for all rows that picked it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native import matmul
from headroom.kernels.native.memory import WEIGHTS
from headroom.kernels.native.module import MODULE, POOL, PRODUCTS
from headroom.kernels.native.scratch import experts_scratch
from headroom.kernels.ops import Case, ExpertTable, Picks
from headroom.kernels.weight import PLAIN_TYPES

MatrixShape = tuple[int, int]  # rows, columns


@dataclass(frozen=True, slots=True, eq=False)
class PanelTable:
    """The addresses of a layer's experts; all have the same types and shapes."""

    addresses: torch.Tensor  # int64 [experts, 3]: gate, up, down
    kinds: Sequence[QuantType]  # types of gate, up and down
    shapes: Sequence[MatrixShape]
    blobs: torch.Tensor  # the memory that the addresses point into
    tiles: bool = False  # the matrices are in the GPU's tiles, else in panels

    @classmethod
    def of_blobs(
        cls, blobs: torch.Tensor, kinds: Sequence[QuantType], shapes: Sequence[MatrixShape]
    ) -> "PanelTable":
        """Return the table of experts `[experts, bytes]`, each with its three matrices in panels.

        An expert is one piece of memory, so that one copy moves it.
        """
        sizes = _panel_sizes(kinds, shapes)
        assert blobs.is_contiguous()
        assert blobs.shape[1] == sum(sizes)
        first = torch.arange(len(blobs)) * blobs.shape[1] + blobs.data_ptr()
        columns = [first, first + sizes[0], first + sizes[0] + sizes[1]]
        return cls(torch.stack(columns, dim=1), kinds, shapes, blobs)

    @property
    def nbytes(self) -> int:
        """The bytes of all experts."""
        return self.blobs.nbytes


def refuses_int8(case: Case) -> str | None:
    """Return why a case cannot run with 8-bit activations; None if it can."""
    return _refuses_rounded(case, "int8")


def refuses_int24(case: Case) -> str | None:
    """Return why a case cannot run with 24-bit activations; None if it can."""
    return _refuses_rounded(case, "int24")


def _refuses_rounded(case: Case, dtype: str) -> str | None:
    if case.dtype != dtype:
        return f"computes in {dtype}, not {case.dtype}"
    if all(kind.name in PLAIN_TYPES for kind in case.experts):
        return "plain weights are not multiplied with rounded activations"
    return _refuses_kinds(case)


def refuses_f32(case: Case) -> str | None:
    """Return why a case cannot run with float activations; None if it can."""
    packed = any(kind.name not in PLAIN_TYPES for kind in case.experts)
    if case.dtype not in PRODUCTS or (case.dtype != "f32" and packed):
        return f"computes in f32, not {case.dtype}"
    return _refuses_kinds(case)


def _refuses_kinds(case: Case) -> str | None:
    reasons = (matmul.refuses(replace(case, quant=kind)) for kind in case.experts)
    return next((reason for reason in reasons if reason), None)


def prepare(table: ExpertTable) -> PanelTable:
    """Return the experts in panels, packed one by one from the mapped file."""
    shapes = [(part[0].rows, part[0].columns) for part in table.parts]
    sizes = _panel_sizes(table.kinds, shapes)
    blobs = WEIGHTS.take(len(table.gate) * sum(sizes)).view(len(table.gate), -1)
    for blob, expert in zip(blobs, zip(*table.parts, strict=True), strict=True):
        for place, weight in zip(blob.split(sizes), expert, strict=True):
            source = weight.data.contiguous()
            POOL.ops.pack(
                weight.quant.ggml_id, weight.rows, weight.columns, source.data_ptr(),
                place.data_ptr(),
            )  # fmt: skip
    return PanelTable.of_blobs(blobs, table.kinds, shapes)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: PanelTable,
    activation: str,
    dtype: str,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, summed in the order of their ids.

    Picks with a negative id are skipped.
    """
    out = torch.empty(len(ids), table.shapes[0][1])
    if scratch is None:
        scratch = torch.empty(scratch_bytes(ids, table), dtype=torch.uint8)
    experts_into(out, x, Picks(ids, weights), table, activation, dtype, scratch)
    return out


def scratch_bytes(ids: torch.Tensor, table: PanelTable) -> int:
    """Return the bytes of scratch memory that `experts` needs for picks of this shape."""
    (rows, used), (width, hidden) = ids.shape, table.shapes[0]
    count = len(table.addresses)
    return experts_scratch(rows, used, hidden, width, count, tiles=table.tiles)


def experts_into(
    out: torch.Tensor,  # [rows, hidden], contiguous
    x: torch.Tensor,
    picks: Picks,
    table: PanelTable,
    activation: str,
    dtype: str,
    scratch: torch.Tensor,
) -> None:
    """Write the weighted sum of each row's experts to `out`, as `experts` returns it."""
    x, ids, weights = x.contiguous(), picks.ids.contiguous(), picks.weights.contiguous()
    assert out.is_contiguous()
    like = [
        MODULE.Matrix(0, kind.ggml_id, *shape, table.tiles)
        for kind, shape in zip(table.kinds, table.shapes, strict=True)
    ]
    MODULE.experts(
        POOL.ops, like, table.addresses.data_ptr(), len(table.addresses), ids.data_ptr(),
        weights.data_ptr(), tuple(ids.shape), x.data_ptr(), activation == "gelu", PRODUCTS[dtype],
        out.data_ptr(), scratch.data_ptr(), scratch.numel(),
    )  # fmt: skip


def _panel_sizes(kinds: Sequence[QuantType], shapes: Sequence[MatrixShape]) -> list[int]:
    """Return the bytes of an expert's three matrices, all multiples of 64."""
    return [
        MODULE.panel_bytes(kind.ggml_id, *shape) for kind, shape in zip(kinds, shapes, strict=True)
    ]
