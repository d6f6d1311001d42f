"""Routers on a GPU: logits of all experts, and each row's top-k."""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda import matmul_scratch, route_scratch, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.route_scratch import ROUTER_THREADS
from headroom.kernels.cuda.sizes import DECODE_ROWS, RECORD_COLUMNS
from headroom.kernels.ops import Picks, RouterRule

MAX_EXPERTS, MAX_USED = 1024, 32  # what the registers of one warp hold


@dataclass(frozen=True, slots=True, eq=False)
class RouterLogits:
    """Router logits for a top-k that is still to be computed; a fused kernel can do it itself."""

    logits: torch.Tensor  # [rows, experts or more]
    rule: RouterRule
    bias: torch.Tensor | None
    counts: torch.Tensor  # int64 [experts]: picks so far
    sequence: torch.Tensor  # int32 [rows], negative: padding

    @property
    def constants(self) -> dict[str, int]:
        """The macros of kernels that compute the top-k."""
        return {"EXPERTS": len(self.counts), "SIGMOID": int(self.rule.scores == "sigmoid")}

    def top_k(self) -> Picks:
        """Return the ids and weights of each row's top-k, computed by a separate kernel."""
        return route(self.logits, self.rule, self.bias, self.counts, self.sequence)


def score(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits `[rows, outputs]` of a float32 router weight `[outputs, hidden]`."""
    (rows, hidden), outputs = x.shape, len(weight)
    logits = scratch.take(route_scratch.logits(rows, outputs), x.device)
    if rows > DECODE_ROWS or hidden % 4:  # cuBLAS computes them
        return torch.mm(x, weight.T, out=logits)
    # The order of a sum does not depend on how many rows share a pass over the weight.
    each = 1 if rows == 1 else 4
    kernel = compile_kernel("route.cu", "score", {"EXPERTS": 32, "SIGMOID": 0, "ROWS": each})
    kernel(
        (outputs, -(-rows // each)), (128,), (x, weight, logits, rows, outputs, hidden), early=True
    )
    return logits


def route(
    logits: torch.Tensor,
    rule: RouterRule,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    sequence: torch.Tensor | None = None,
) -> Picks:
    """Return the ids and weights of each row's top-k, the best first, and count the picks.

    Logits beyond the number of experts in `counts` are ignored. Rows with a negative `sequence
    [rows]` are padding: their ids are -1.
    """
    rows, stride = logits.shape
    assert len(counts) <= MAX_EXPERTS
    assert rule.used <= MAX_USED
    buffers = route_scratch.picks(rows, rule.used)
    ids, weights = (scratch.take(buffer, logits.device) for buffer in buffers)
    constants = {"EXPERTS": len(counts), "SIGMOID": int(rule.scores == "sigmoid")}
    compile_kernel("route.cu", "route", constants)(
        (-(-rows // 4),),
        (128,),
        (
            *(logits, stride, bias, sequence, ids, weights, counts, rows),
            *(rule.used, int(rule.normalise), float(rule.scale), float(rule.softcap)),
        ),
        early=True,
    )
    return Picks(ids, weights)


def scored_rows(
    x: torch.Tensor, weight: torch.Tensor, norm: RowNorm, seen: torch.Tensor
) -> tuple[HalfRows, torch.Tensor]:
    """Return normed rows in f16, and the logits `[rows, outputs]` of rows after the router's norm.

    `weight [outputs, hidden]` is the router's weight, `seen [hidden]` the weight of its norm.
    """
    (rows, hidden), outputs = x.shape, len(weight)
    pieces = scratch.take(matmul_scratch.half_rows(rows, hidden), x.device)
    out = HalfRows(pieces, rows, -(-hidden // RECORD_COLUMNS))
    logits = scratch.take(route_scratch.logits(rows, outputs), x.device)
    # The order of a sum does not depend on how many rows share a pass over the weight.
    each = 1 if rows == 1 else 4
    defines = {"EACH": -(-hidden // (4 * ROUTER_THREADS)), "ROWS": each, "LANES": out.lanes}
    compile_kernel("router.cu", "score_rows", defines)(
        (outputs + each, -(-rows // each)),
        (ROUTER_THREADS,),
        (
            *(x, weight, seen, norm.weight, norm.eps, logits, norm.out, pieces),
            *(rows, outputs, hidden),
        ),
        early=True,
    )
    return out, logits
