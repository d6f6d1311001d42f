"""Top-k routing in plain torch."""

import torch

from headroom.kernels.ops import Picks, RouterRule
from headroom.kernels.reference.elementwise import sigmoid


def route(
    logits: torch.Tensor, rule: RouterRule, bias: torch.Tensor | None, counts: torch.Tensor
) -> Picks:
    """Return the ids and weights of each row's experts, the best first, and count the picks."""
    if rule.softcap:
        logits = torch.tanh(logits / rule.softcap) * rule.softcap
    scores = sigmoid(logits) if rule.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    # A stable sort puts the lower id first on ties; topk does not promise that.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.used]
    weights = scores.gather(1, ids)
    if rule.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    counts += torch.bincount(ids.flatten(), minlength=len(counts))
    return Picks(ids.int(), weights * rule.scale)
