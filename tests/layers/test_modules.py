"""The modules of blocks, against float64."""

import pytest
import torch

from headroom.families.config import Activation
from headroom.formats.quants import F32
from headroom.kernels.ops import Case
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.modules import Embedding, Head, Linear, Mlp, RmsNorm
from headroom.layers.weights import WeightSource

HIDDEN, WIDTH, VOCABULARY = 64, 96, 48
KERNELS = pytest.mark.parametrize("reference", [True, False], ids=["reference", "native"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def matrix(values: torch.Tensor, case: Case) -> Weight:
    rows, columns = values.shape
    prepare = pick("matmul", case).prepare
    weight: Weight = prepare(Weight(values.clone(), F32, rows, columns))
    return weight


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)


@KERNELS
def test_a_linear_writes_to_the_memory_it_is_given(reference: bool) -> None:
    case = Case(reference=reference)
    values, x = torch.randn(WIDTH, HIDDEN), torch.randn(5, HIDDEN)
    linear, out = Linear(matrix(values, case), case), torch.zeros(5, WIDTH)
    assert linear(x, out) is out
    assert_near(out, x.double() @ values.double().T)
    assert torch.equal(linear(x), out)


@KERNELS
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_norm_scales_rows_to_unit_mean_square(reference: bool, eps: float) -> None:
    weight, x = torch.randn(HIDDEN), 3 * torch.randn(5, HIDDEN)
    found = RmsNorm(weight, eps, Case(reference=reference))(x)
    assert_near(found, normed(x, weight, eps))


@KERNELS
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_feed_forward_network_is_gated(reference: bool, activation: Activation) -> None:
    case = Case(reference=reference)
    parts = {
        "gate": torch.randn(WIDTH, HIDDEN) / 8,
        "up": torch.randn(WIDTH, HIDDEN) / 8,
        "down": torch.randn(HIDDEN, WIDTH) / 8,
    }

    class Source(WeightSource):
        def __call__(self, name: str, order: torch.Tensor | None = None) -> Weight:
            assert order is None
            return matrix(parts[name.removeprefix("ffn.")], case)

    get = Source({}, case, False, lambda line, size: None)
    x = torch.randn(5, HIDDEN)
    gate, up, down = (part.double() for part in parts.values())
    inner = x.double() @ gate.T
    if activation == "silu":
        inner = torch.nn.functional.silu(inner)
    else:
        inner = torch.nn.functional.gelu(inner, approximate="tanh")
    assert_near(Mlp(get, activation)(x), (inner * (x.double() @ up.T)) @ down.T)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_an_embedding_looks_rows_up_and_scales_them(scale: float) -> None:
    table, ids = torch.randn(VOCABULARY, HIDDEN), torch.tensor([3, 0, 3, VOCABULARY - 1])
    out = torch.empty(4, HIDDEN)
    weight = Weight(table, F32, VOCABULARY, HIDDEN)
    found = Embedding(weight, Case(reference=True), scale)(ids, out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found, table[ids] * scale)


@KERNELS
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_head_norms_multiplies_and_caps(reference: bool, softcap: float) -> None:
    case = Case(reference=reference)
    weight, values, x = torch.rand(HIDDEN), torch.randn(VOCABULARY, HIDDEN), torch.randn(3, HIDDEN)
    head = Head(RmsNorm(weight, 1e-6, case), matrix(values, case), case, softcap)
    found = head(x, torch.empty(3, VOCABULARY))
    wanted = normed(x, weight, 1e-6) @ values.double().T
    if softcap:
        wanted = softcap * (wanted / softcap).tanh()
        assert float(found.abs().max()) <= softcap
    assert_near(found, wanted)
