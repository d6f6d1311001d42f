"""Routed experts in C++ against a plain loop over tokens and experts."""

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.native.experts import ExpertTable
from headroom.kernels.native.matmul import prepare
from headroom.kernels.native.module import MODULE
from headroom.kernels.reference.matmul import unpack_rows
from tests.kernels.cases import random_weight

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")

EXPERTS, HIDDEN, WIDTH = 10, 256, 64


def make_experts(kinds: tuple[str, str, str]) -> tuple[ExpertTable, list[list[torch.Tensor]]]:
    """A table of random experts, and their matrices as floats."""
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    quants = tuple(BY_NAME[kind] for kind in kinds)
    floats: list[list[torch.Tensor]] = []
    packed: list[list[torch.Tensor]] = []
    for _ in range(EXPERTS):
        weights = [random_weight(q, *shape) for q, shape in zip(quants, shapes, strict=True)]
        floats.append([unpack_rows(weight, slice(None)).float() for weight in weights])
        packed.append([prepare(weight).data for weight in weights])
    parts = [torch.cat(matrices) for matrices in zip(*packed, strict=True)]
    return ExpertTable.stacked(parts, quants, shapes, EXPERTS), floats  # type: ignore[arg-type]


def expected(
    floats: list[list[torch.Tensor]],
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gelu: bool,
) -> torch.Tensor:
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up, down = (matrix.double() for matrix in floats[expert])
            inner = gate @ row
            act = (
                torch.nn.functional.gelu(inner, approximate="tanh")
                if gelu
                else inner.sigmoid() * inner
            )
            out[token] += weight * (down @ (act * (up @ row)))
    return out


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("kinds", [("q4_k", "q4_k", "f16"), ("q8_0", "q4_0", "f32")])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_experts_equal_a_plain_loop(kinds, tokens: int, gelu: bool) -> None:
    torch.manual_seed(tokens)
    table, floats = make_experts(kinds)
    x = torch.randn(tokens, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(tokens)] or [torch.zeros(3)])
    ids, weights = ids[:tokens].int(), torch.rand(tokens, 3)
    wanted = expected(floats, x, ids, weights, gelu)
    result = table.run(x, ids, weights, gelu=gelu, int8=False)
    assert result.shape == wanted.shape
    if tokens:
        assert float((result - wanted).abs().max() / wanted.abs().max()) < 1e-5
        rounded = table.run(x, ids, weights, gelu=gelu, int8=True).double()
        assert float((rounded - wanted).norm() / wanted.norm()) < 0.02


def test_a_token_does_not_depend_on_the_others() -> None:
    table, _ = make_experts(("q4_k", "q4_k", "q8_0"))
    x = torch.randn(20, HIDDEN)
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(20)]).int()
    weights = torch.rand(20, 4)
    together = table.run(x, ids, weights, gelu=False, int8=True)
    for token in range(20):
        one = slice(token, token + 1)
        alone = table.run(x[one], ids[one], weights[one], gelu=False, int8=True)
        assert torch.equal(alone[0], together[token])


def test_an_expert_that_does_not_exist_is_refused() -> None:
    table, _ = make_experts(("q4_k", "q4_k", "f16"))
    with pytest.raises(IndexError, match="no such expert"):
        table.run(
            torch.randn(1, HIDDEN), torch.tensor([[EXPERTS]]).int(), torch.ones(1, 1),
            gelu=False, int8=True,
        )  # fmt: skip
