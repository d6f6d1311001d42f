"""Activation functions in plain torch whose values do not depend on their place in a tensor.

torch computes an element-wise function with vector instructions and the rest of a tensor, less
than one vector, with scalar ones. For `sigmoid`, `silu`, `softplus`, `gelu` and `logaddexp` the
two differ in the last bits (measured with AVX2 and AVX-512, torch 2.13), so a row's result would
change with the number of rows beside it. The functions here use only operations for which the
vector and the scalar code agree to the bit: `exp`, `log1p` and the basic arithmetic.
"""

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return `1 / (1 + exp(-x))`."""
    return _one_plus_exp_of_minus(x).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return `x * sigmoid(x)`."""
    return x / _one_plus_exp_of_minus(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh form of GELU: `x * (1 + tanh(u)) / 2`, `u = sqrt(2/pi) (x + 0.044715 x^3)`.

    `(1 + tanh(u)) / 2` is computed as `sigmoid(2 u)`, which does not cancel for negative `u`.
    """
    u = (2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))
    return x / _one_plus_exp_of_minus(2 * u)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return `log(1 + exp(x))`, computed as `max(x, 0) + log(1 + exp(-|x|))`: no overflow."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))


def _one_plus_exp_of_minus(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1)
