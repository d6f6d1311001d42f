"""Routers on a GPU: logits of all experts, and the choice of each row's top-k."""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda import matmul_scratch, route_scratch, scratch
from headroom.kernels.cuda.compile import compile_kernel
from headroom.kernels.cuda.matmul import HalfRows, RowNorm
from headroom.kernels.cuda.route_scratch import ROUTER_THREADS
from headroom.kernels.cuda.sizes import DECODE_ROWS, RECORD_COLUMNS
from headroom.kernels.ops import RouterRule

MAX_EXPERTS, MAX_USED = 1024, 32  # what the lanes of one warp hold


@dataclass(frozen=True, slots=True, eq=False)
class Unchosen:
    """What the experts of some rows will be chosen by."""

    logits: torch.Tensor  # [rows, experts or more]
    rule: RouterRule
    bias: torch.Tensor | None
    counts: torch.Tensor  # of each expert's choices
    sequence: torch.Tensor  # int32 [rows], negative: padding

    @property
    def constants(self) -> dict[str, int]:
        """The macros of kernels that choose."""
        return {"EXPERTS": len(self.counts), "SIGMOID": int(self.rule.scores == "sigmoid")}

    def made(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and weights of each row's experts, by a kernel that does nothing else."""
        return route(self.logits, self.rule, self.bias, self.counts, self.sequence)


def score(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits `[rows, outputs]` of rows for a float32 weight `[outputs, hidden]`."""
    (rows, hidden), outputs = x.shape, len(weight)
    logits = scratch.take(route_scratch.logits(rows, outputs), x.device)
    if rows > DECODE_ROWS or hidden % 4:  # by cuBLAS
        return torch.mm(x, weight.T, out=logits)
    # A sum runs in the same order however many rows share a pass over the weight.
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and weights of each row's experts, the best first, and count them.

    Logits after those of `counts`' experts are passed over. Rows where `sequence [rows]` is
    negative are padding: their ids are -1.
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
    return ids, weights


def scored_rows(
    x: torch.Tensor, weight: torch.Tensor, norm: RowNorm, seen: torch.Tensor
) -> tuple[HalfRows, torch.Tensor]:
    """Return rows in f16 after a norm, and their logits `[rows, outputs]` after that of a router.

    `weight [outputs, hidden]` is the router's, `seen [hidden]` its norm's.
    """
    (rows, hidden), outputs = x.shape, len(weight)
    pieces = scratch.take(matmul_scratch.half_rows(rows, hidden), x.device)
    out = HalfRows(pieces, rows, -(-hidden // RECORD_COLUMNS))
    logits = scratch.take(route_scratch.logits(rows, outputs), x.device)
    # A sum runs in the same order however many rows share a pass over the weight.
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
