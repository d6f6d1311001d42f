"""Per-layer inputs: a second embedding of each token that Gemma gives to every layer separately."""

import torch

from headroom.kernels.ops import GatedActivationOp
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.modules import Embedding, Linear, RmsNorm
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource


class PerLayerInputs:
    """The inputs of all layers, computed once per step from the tokens and their embedding."""

    def __init__(self, table: Weight, get: WeightSource, eps: float, rows: int) -> None:
        weight = get.norm("per_layer.norm")
        width = len(weight)
        self._table = Embedding(table, get.case, width**0.5)
        self._norm = RmsNorm(weight, eps, get.case)
        self._proj = Linear(get("per_layer.proj"), get.case)
        # float32 [rows, layers, width]: valid until the next step
        self._inputs = torch.empty(
            rows, table.columns // width, width, device=get.case.torch_device
        )
        get.count("staging", self._inputs.nbytes)

    def prepare(self, tokens: torch.Tensor, embedded: torch.Tensor) -> None:
        """Compute a step's inputs from its tokens and the stream before the first layer."""
        inputs = self._inputs[: len(tokens)]
        self._table(tokens, inputs.flatten(1))
        projected = self._proj(embedded).mul_(embedded.shape[1] ** -0.5)
        inputs.add_(self._norm(projected.view(inputs.shape))).mul_(0.5**0.5)

    def of_layer(self, layer: int, rows: int) -> torch.Tensor:
        """Return one layer's inputs `[rows, width]`."""
        return self._inputs[:rows, layer]


class PerLayerPart:
    """The part of a layer that reads its per-layer inputs, gated by the residual stream."""

    def __init__(self, inputs: PerLayerInputs, layer: int, get: WeightSource, eps: float) -> None:
        self._inputs = inputs
        self._layer = layer
        self._gate = Linear(get("per_layer.gate"), get.case)
        self._proj = Linear(get("per_layer.proj"), get.case)
        self._norm = RmsNorm(get.norm("per_layer.norm"), eps, get.case)
        self._activate: GatedActivationOp = pick("gated_activation", get.case).run

    @part_of_step("dense")
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's output for rows of the residual stream."""
        inputs = self._inputs.of_layer(self._layer, len(x))
        return self._norm(self._proj(self._activate(self._gate(x), inputs, "gelu")))
