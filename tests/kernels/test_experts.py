"""Routed experts and top-k routing against plain definitions."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from headroom.formats.quants import BY_NAME
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Case, ExpertBiases, ExpertTable, RouterRule
from headroom.kernels.reference.experts import experts
from headroom.kernels.reference.matmul import unpack_rows
from headroom.kernels.reference.route import route
from headroom.kernels.registry import KERNELS, pick
from tests.kernels.cases import plain_weight, random_choice, random_experts

EXPERTS, HIDDEN, WIDTH = 10, 64, 32
KINDS = tuple(BY_NAME[name] for name in ("q8_0", "q4_0", "f16"))
SOFTMAX = RouterRule(used=2, scores="softmax", normalise=True, scale=1.0)
SIGMOID = RouterRule(used=2, scores="sigmoid", normalise=True, scale=2.5)


def expected(
    table: ExpertTable, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gelu: bool
) -> torch.Tensor:
    out = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up, down = (
                unpack_rows(part[expert], slice(None)).double() for part in table.parts
            )
            inner = gate @ row
            act = (
                torch.nn.functional.gelu(inner, approximate="tanh")
                if gelu
                else inner.sigmoid() * inner
            )
            out[token] += weight * (down @ (act * (up @ row)))
    return out


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("tokens", [1, 30])
def test_the_reference_equals_a_plain_loop(tokens: int, gelu: bool) -> None:
    torch.manual_seed(tokens)
    table = random_experts(KINDS, EXPERTS, HIDDEN, WIDTH)
    x = torch.randn(tokens, HIDDEN)
    ids, weights = random_choice(tokens, EXPERTS, 3)
    wanted = expected(table, x, ids, weights, gelu)
    result = experts(x, ids, weights, table, "gelu" if gelu else "silu", "f32")
    assert float((result - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_biases_and_limits_are_those_of_transformers() -> None:
    torch.manual_seed(2)
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    model = GptOssExperts(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False).copy_(2 * torch.randn_like(parameter))
    gate_up, biases = model.gate_up_proj.mT, model.gate_up_proj_bias
    parts = gate_up[:, ::2], gate_up[:, 1::2], model.down_proj.mT
    table = ExpertTable(
        *(tuple(plain_weight(matrix.contiguous()) for matrix in part) for part in parts),
        biases=ExpertBiases(biases[:, ::2], biases[:, 1::2], model.down_proj_bias),
    )
    x = torch.randn(20, HIDDEN)  # gates and ups go far beyond the limits
    ids, weights = random_choice(20, EXPERTS, 3)
    theirs = model(x, ids.long(), weights)
    result = experts(x, ids, weights, table, "clamped", "f32")
    torch.testing.assert_close(result, theirs, atol=1e-2, rtol=1e-5)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_the_fused_kernel_leaves_experts_with_biases_to_the_next() -> None:
    kinds = (BY_NAME["mxfp4"],) * 3
    assert pick("experts", Case(experts=kinds)).backend == "native-f32"
    assert pick("experts", Case(experts=kinds, biases=True)).backend == "native-in-turn"


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_an_expert_that_does_not_exist_is_refused() -> None:
    kernel = pick("experts", Case(experts=KINDS))
    table = kernel.prepare(random_experts(KINDS, EXPERTS, HIDDEN, WIDTH))
    reason = f"a row picks expert {EXPERTS}, but the layer has {EXPERTS}"
    with pytest.raises(IndexError, match=reason):
        kernel.run(
            torch.randn(1, HIDDEN), torch.tensor([[EXPERTS]]).int(), torch.ones(1, 1), table,
            "silu", "f32",
        )  # fmt: skip


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_lent_scratch_gives_the_same_bits_and_too_little_of_it_is_refused() -> None:
    kernel = pick("experts", Case(experts=KINDS))
    table = kernel.prepare(random_experts(KINDS, EXPERTS, HIDDEN, WIDTH))
    inputs = (torch.randn(4, HIDDEN), *random_choice(4, EXPERTS, 3), table, "silu", "f32")
    lent = torch.empty(MODULE.experts_scratch(4, 3, HIDDEN, WIDTH, EXPERTS), dtype=torch.uint8)
    assert torch.equal(kernel.run(*inputs), kernel.run(*inputs, lent))
    with pytest.raises(ValueError, match="scratch memory of a kernel is smaller"):
        kernel.run(*inputs, lent[:64])


@pytest.mark.parametrize("dtype", ["int8", "int24", "f32"])
@pytest.mark.parametrize("name", ["f32", "q4_0"])
@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_experts_compute_in_the_type_that_products_do(dtype: str, name: str) -> None:
    quant = BY_NAME[name]
    chosen = pick("experts", Case(experts=(quant,) * 3, dtype=dtype)).backend
    assert chosen == pick("matmul", Case(quant=quant, dtype=dtype)).backend


def test_a_softmax_router_weighs_the_best_by_their_share() -> None:
    counts = torch.zeros(4, dtype=torch.int64)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    ids, weights = route(logits, SOFTMAX, None, counts)
    assert ids.tolist() == [[1, 3], [0, 1]]
    first, second = 1 / (1 + torch.exp(torch.tensor([-1.0, -5.0])))
    torch.testing.assert_close(weights[:, 0], torch.stack((first, second)))
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert counts.tolist() == [1, 2, 0, 1]


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    ids, weights = route(logits, SIGMOID, bias, torch.zeros(4, dtype=torch.int64))
    assert ids.tolist() == [[3, 0]]
    scores = logits[0, [3, 0]].sigmoid()
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.op == "route"], ids=str)
def test_the_lower_id_wins_a_tie_in_every_kernel(kernel) -> None:
    if kernel.refuses(Case()):
        pytest.skip(kernel.refuses(Case()))
    counts = torch.zeros(40, dtype=torch.int64)
    ids, _ = kernel.run(torch.zeros(3, 40), SOFTMAX, None, counts)
    assert ids.tolist() == [[0, 1]] * 3
    assert counts[:2].tolist() == [3, 3]
    assert counts.sum() == 6


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    counts, ids, weights = torch.zeros(1).long(), torch.zeros(2).int(), torch.zeros(2)
    with pytest.raises(ValueError, match="a row picks 2 experts, but the layer has 1"):
        POOL.ops.route((1, 1, 2), (False, True), (1.0, 0.0), torch.zeros(1).data_ptr(), 0,
                       counts.data_ptr(), ids.data_ptr(), weights.data_ptr())  # fmt: skip
