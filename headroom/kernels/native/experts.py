"""Routed experts on the CPU: each chosen expert is read once for all tokens that chose it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.native.module import MODULE, POOL


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """Where each expert's gate, up and down matrices lie, all experts alike in type and shape."""

    addresses: torch.Tensor  # int64 [experts, 3]
    kinds: tuple[QuantType, QuantType, QuantType]
    shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # rows, columns
    kept: Sequence[torch.Tensor]  # the memory that the addresses point into

    @classmethod
    def stacked(
        cls,
        parts: Sequence[torch.Tensor],
        kinds: tuple[QuantType, QuantType, QuantType],
        shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
        experts: int,
    ) -> "ExpertTable":
        """Return the table of experts whose panels lie one after another in three tensors."""
        columns = [
            torch.arange(experts) * (part.numel() // experts) + part.data_ptr() for part in parts
        ]
        return cls(torch.stack(columns, dim=1), kinds, shapes, parts)

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, gelu: bool, int8: bool
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts: `down(act(gate x) * up x)`.

        `x [tokens, hidden]`, `ids` int32 and `weights` float32 `[tokens, experts per token]`.
        """
        tokens, per_token = ids.shape
        width, hidden = self.shapes[0]
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        out = torch.empty(tokens, hidden)
        size = MODULE.experts_scratch(tokens, per_token, hidden, width, len(self.addresses))
        scratch = torch.empty(size, dtype=torch.uint8)
        like = [
            MODULE.Matrix(0, kind.ggml_id, rows, columns)
            for kind, (rows, columns) in zip(self.kinds, self.shapes, strict=True)
        ]
        MODULE.experts(
            POOL.ops, like, self.addresses.data_ptr(), len(self.addresses), ids.data_ptr(),
            weights.data_ptr(), (tokens, per_token), x.data_ptr(), gelu, int8, out.data_ptr(),
            scratch.data_ptr(), size,
        )  # fmt: skip
        return out
