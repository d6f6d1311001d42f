"""Experts of a layer: in every layout of files, with shared experts and dense parts."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headroom.experts.ffn import DenseAndExpertsFfn, ExpertsFfn, RoutedExperts, Router
from headroom.families.config import ExpertsConfig
from headroom.formats.quants import BY_NAME
from headroom.formats.tensor import TensorInfo
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Case
from headroom.layers.weights import WeightSource
from tests.kernels.cases import random_weight

EXPERTS, HIDDEN, WIDTH = 16, 64, 64
CONFIG = ExpertsConfig(experts=EXPERTS, used=3, width=WIDTH)
NOTHING = torch.empty(0, dtype=torch.uint8)
KERNELS = pytest.mark.parametrize(
    "reference",
    [
        True,
        pytest.param(False, marks=pytest.mark.skipif(MODULE is None, reason="no C++ module")),
    ],
    ids=["reference", "native"],
)


def info(values: torch.Tensor, quant: str = "f32") -> TensorInfo:
    """A tensor in a separate file: floats, or bytes of packed rows."""
    data = values.contiguous().view(torch.uint8).flatten().numpy()
    kind = BY_NAME[quant]
    columns = values.shape[-1] // kind.block_bytes * kind.block if kind.block > 1 else None
    shape = (*values.shape[:-1], columns or values.shape[-1])
    return TensorInfo("t", shape, kind, Path("t"), 0, np.ascontiguousarray(data))


def tensors(storage: str, quants: tuple[str, str, str] = ("q8_0", "q8_0", "q4_0")) -> dict:
    """The same random layer whatever its storage."""
    torch.manual_seed(0)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    parts = {
        name: torch.stack([random_weight(BY_NAME[quant], *shape).data for _ in range(EXPERTS)])
        for name, quant, shape in zip(("gate", "up", "down"), quants, shapes, strict=True)
    }
    kinds = dict(zip(parts, quants, strict=True))
    found = {
        "ffn.router": info(torch.randn(EXPERTS, HIDDEN)),
        "ffn.score_bias": info(torch.randn(EXPERTS)),
        "ffn.experts_scale": info(torch.rand(EXPERTS) + 0.5),
        "ffn.shared.router": info(torch.randn(1, HIDDEN)),
        "ffn.shared.gate": info(torch.randn(WIDTH, HIDDEN)),
        "ffn.shared.up": info(torch.randn(WIDTH, HIDDEN)),
        "ffn.shared.down": info(torch.randn(HIDDEN, WIDTH)),
    }
    below = "ffn.experts."
    if storage == "one each":
        for name, part in parts.items():
            found |= {f"{below}{e}.{name}": info(part[e], kinds[name]) for e in range(EXPERTS)}
        return found
    if storage == "fused":
        both = torch.cat((parts.pop("gate"), parts.pop("up")), dim=1)
        found[f"{below}gate_up"] = info(both, quants[0])
    return found | {f"{below}{name}": info(part, kinds[name]) for name, part in parts.items()}


def source(
    storage: str = "stacked", reference: bool = True, counted: Counter[str] | None = None
) -> WeightSource:
    lines: Counter[str] = Counter() if counted is None else counted

    def count(line: str, size: int) -> None:
        lines[line] += size

    return WeightSource(tensors(storage), Case(reference=reference), False, count)


def counts() -> torch.Tensor:
    return torch.zeros(EXPERTS, dtype=torch.int64)


@KERNELS
@pytest.mark.parametrize("storage", ["stacked", "fused", "one each"])
def test_every_storage_gives_the_same_experts_and_their_bytes(
    storage: str, reference: bool
) -> None:
    x, counted = torch.randn(5, HIDDEN), Counter[str]()
    ffn = ExpertsFfn(CONFIG, source(storage, reference, counted), counts(), NOTHING)
    plain = ExpertsFfn(CONFIG, source(reference=reference), counts(), NOTHING)
    assert torch.equal(ffn(x), plain(x))
    values = EXPERTS * WIDTH * HIDDEN
    packed = 2 * BY_NAME["q8_0"].bytes_for(values) + BY_NAME["q4_0"].bytes_for(values)
    assert counted == {"hot_experts": packed, "core_weights": 4 * EXPERTS * HIDDEN}


@KERNELS
def test_experts_in_memory_do_not_depend_on_the_file(reference: bool) -> None:
    get = source(reference=reference)
    experts = RoutedExperts(CONFIG, get, NOTHING)
    x, ids, weights = torch.randn(1, HIDDEN), torch.tensor([[1, 2, 3]]).int(), torch.rand(1, 3)
    before = experts(x, ids, weights)
    for tensor in get.tensors.values():
        tensor.source[:] = 0
    assert torch.equal(experts(x, ids, weights), before)


@KERNELS
def test_a_shared_expert_is_weighted_by_its_sigmoid_or_added_as_it_is(reference: bool) -> None:
    x = torch.randn(4, HIDDEN)

    def run(config: ExpertsConfig) -> torch.Tensor:
        return ExpertsFfn(config, source(reference=reference), counts(), NOTHING)(x)

    routed = run(CONFIG)
    shared = run(replace(CONFIG, shared_width=WIDTH)) - routed
    gated = run(replace(CONFIG, shared_width=WIDTH, shared_gate=True)) - routed
    found = tensors("stacked")
    gate, up, down, router = (
        torch.from_numpy(found[f"ffn.shared.{name}"].data()).view(torch.float32).view(rows, -1)
        for name, rows in (("gate", WIDTH), ("up", WIDTH), ("down", HIDDEN), ("router", 1))
    )
    expected = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(shared, expected, atol=1e-2, rtol=1e-4)
    torch.testing.assert_close(gated, expected * (x @ router.t()).sigmoid(), atol=1e-2, rtol=1e-4)


@KERNELS
def test_rows_of_the_whole_part_do_not_depend_on_each_other(reference: bool) -> None:
    config = replace(CONFIG, shared_width=WIDTH, shared_gate=True)
    ffn = ExpertsFfn(config, source(reference=reference), counts(), NOTHING)
    x = torch.randn(37, HIDDEN)
    together = ffn(x)
    for row in (0, 7, 16, 36):
        assert torch.equal(ffn(x[row : row + 1])[0], together[row])


@KERNELS
def test_scales_of_experts_multiply_the_weights_at_the_end(reference: bool) -> None:
    get = source(reference=reference)
    scales = torch.from_numpy(get.tensors["ffn.experts_scale"].data()).view(torch.float32)
    x = torch.randn(6, HIDDEN)
    ids, weights = Router(CONFIG, get, counts())(x)
    scaled_ids, scaled = Router(replace(CONFIG, expert_scales=True), get, counts())(x)
    assert torch.equal(ids, scaled_ids)
    assert torch.equal(scaled, weights * scales[ids])


@KERNELS
def test_a_router_scores_and_counts_as_its_family_says(reference: bool) -> None:
    get, seen = source(reference=reference), counts()
    config = replace(CONFIG, scores="sigmoid", bias=True, scale=2.5, softcap=3.0)
    x = torch.randn(50, HIDDEN)
    ids, weights = Router(config, get, seen)(x)
    router, bias = (
        torch.from_numpy(get.tensors[name].data()).view(torch.float32).double()
        for name in ("ffn.router", "ffn.score_bias")
    )
    logits = x.double() @ router.view(EXPERTS, HIDDEN).t()
    scores = (torch.tanh(logits / 3) * 3).sigmoid()
    best = (scores + bias).topk(3).indices
    assert torch.equal(ids.long(), best)
    chosen = scores.gather(1, best)
    expected = (2.5 * chosen / chosen.sum(1, keepdim=True)).float()
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)
    assert seen.tolist() == [int((best == e).sum()) for e in range(EXPERTS)]


def test_a_dense_part_and_experts_have_norms_of_their_own() -> None:
    get, seen, eps = source(), counts(), 1e-5
    norms = {
        name: torch.rand(HIDDEN) + 0.5
        for name in ("ffn.router_scale", "ffn.experts_norm", "ffn.experts_post_norm")
    }
    get.tensors.update({name: info(weight.clone()) for name, weight in norms.items()})
    x = torch.randn(9, HIDDEN)

    def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(1, keepdim=True) + eps).rsqrt() * weight

    dense = torch.randn(9, HIDDEN)
    both = DenseAndExpertsFfn(lambda rows: dense, CONFIG, get, eps, seen, NOTHING)
    routed_rows = normed(x, norms["ffn.router_scale"] * HIDDEN**-0.5)
    ids, weights = Router(CONFIG, source(), counts())(routed_rows)
    experts = RoutedExperts(CONFIG, source(), NOTHING)
    routed = experts(normed(x, norms["ffn.experts_norm"]), ids, weights)
    expected = dense + normed(routed, norms["ffn.experts_post_norm"])
    torch.testing.assert_close(both(x), expected, atol=1e-4, rtol=1e-4)
    assert seen.sum() == 9 * CONFIG.used
