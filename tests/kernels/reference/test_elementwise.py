"""The activation functions of the reference: accurate, and the same bits at every place."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from headroom.kernels.reference.elementwise import gelu, sigmoid, silu, softplus

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS = [sigmoid, silu, gelu, softplus]
# Rows of less than a vector, of whole vectors, and of whole vectors and a rest; the last shape is
# more than torch gives to one thread.
SHAPES = [(90, 1), (90, 3), (90, 8), (90, 60), (90, 257), (7, 12, 33), (300, 130)]
UNDERFLOW = 1e-36  # exp(-x) overflows below x = -88.7, where the results are as small as this


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(
    function: Function, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(shape)
    beside = torch.cat((torch.randn(shape), x), dim=-1)
    together = function(x)
    assert torch.equal(function(beside[..., shape[-1] :]), together)  # rows apart from each other
    for row in range(shape[0]):
        assert torch.equal(function(x[row : row + 1]), together[row : row + 1]), row


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (sigmoid, torch.sigmoid),
        (silu, functional.silu),
        (softplus, lambda x: functional.softplus(x, threshold=100)),
    ],
    ids=["sigmoid", "silu", "softplus"],
)
def test_values_are_within_three_roundings_of_float64(function: Function, exact: Function) -> None:
    x = torch.linspace(-100, 100, 100_001)
    wanted = exact(x.double())
    rounding = wanted.abs() * 2**-23  # one unit in the last place, or up to two
    assert bool(((function(x).double() - wanted).abs() <= 3 * rounding + UNDERFLOW).all())


def test_gelu_is_as_accurate_as_its_exponent_allows() -> None:
    """A rounding of the exponent `2 u` changes the result by a share of `2 u` roundings."""
    x = torch.linspace(-10, 10, 100_001)
    wanted = functional.gelu(x.double(), approximate="tanh")
    exponent = 2 * (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
    # float64's tanh form cancels, too: below -5 it is itself wrong by a share of 1e-16.
    allowed = wanted.abs() * 2**-23 * (3 + 3 * exponent.abs()) + 2e-15
    assert bool(((gelu(x).double() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_nan_stays_nan_and_large_values_reach_their_limits(function: Function) -> None:
    x = torch.tensor([torch.nan, 1e30, -1e30, 0.0])
    result = function(x)
    assert torch.isnan(result[0])
    expected = {sigmoid: (1.0, 0.0, 0.5), softplus: (1e30, 0.0, 0.6931472)}
    torch.testing.assert_close(
        result[1:], torch.tensor(expected.get(function, (1e30, 0.0, 0.0))), rtol=1e-6, atol=0.0
    )
