"""Top-k routing on the CPU."""

import torch

from headroom.kernels.native.module import POOL
from headroom.kernels.ops import Picks, RouterRule


def route(
    logits: torch.Tensor, rule: RouterRule, bias: torch.Tensor | None, counts: torch.Tensor
) -> Picks:
    """Return the ids and weights of each row's experts, the best first, and count the picks."""
    logits, bias = logits.contiguous(), None if bias is None else bias.contiguous()
    rows, experts = logits.shape
    ids = torch.empty(rows, rule.used, dtype=torch.int32)
    weights = torch.empty(rows, rule.used)
    assert counts.dtype == torch.int64
    assert counts.shape == (experts,)
    assert counts.is_contiguous()
    POOL.ops.route(
        (rows, experts, rule.used), (rule.scores == "sigmoid", rule.normalise),
        (rule.scale, rule.softcap), logits.data_ptr(), 0 if bias is None else bias.data_ptr(),
        counts.data_ptr(), ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return Picks(ids, weights)
