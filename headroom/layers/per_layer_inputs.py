"""Per-layer inputs: a second embedding of each token that Gemma gives to every layer separately."""

import torch

from headroom.kernels.ops import GatedActivationOp
from headroom.kernels.registry import pick
from headroom.kernels.weight import Weight
from headroom.layers.modules import Embedding, Linear, RmsNorm
from headroom.layers.step_timing import part_of_step
from headroom.layers.weights import WeightSource
from headroom.layers.workspace import copy_rows


class LayerInputs:
    """The per-layer inputs of a step, for the layers of a stage and of all stages after it."""

    def __init__(self, rows: int, first: int, layers: int, width: int, device: str) -> None:
        self._first = first  # the number in the model of the first layer that has inputs here
        # float32 [rows, layers, width]: valid until the next step; padding rows read numbers
        self.values = torch.zeros(rows, layers, width, device=device)

    def of_layer(self, layer: int, rows: int) -> torch.Tensor:
        """Return one layer's inputs `[rows, width]`."""
        return self.values[:rows, layer - self._first]

    def beginning_with(self, layer: int, rows: int) -> torch.Tensor:
        """Return the inputs of a layer and of all layers after it, `[rows, layers, width]`."""
        return self.values[:rows, layer - self._first :]

    def receive(self, inputs: torch.Tensor) -> None:
        """Copy a step's inputs from the stage before."""
        copy_rows(self.values[: len(inputs)], inputs)


class PerLayerInputs(LayerInputs):
    """The inputs of all layers, computed once per step from the tokens and their embedding."""

    def __init__(self, table: Weight, get: WeightSource, eps: float, rows: int) -> None:
        weight = get.norm("per_layer.norm")
        width = len(weight)
        super().__init__(rows, 0, table.columns // width, width, get.case.torch_device)
        self._table = Embedding(table, get.case, width**0.5)
        self._norm = RmsNorm(weight, eps, get.case)
        self._proj = Linear(get("per_layer.proj"), get.case)
        get.count("staging", self.values.nbytes)

    def prepare(self, tokens: torch.Tensor, embedded: torch.Tensor) -> None:
        """Compute a step's inputs from its tokens and the stream before the first layer."""
        inputs = self.values[: len(tokens)]
        self._table(tokens, inputs.flatten(1))
        projected = self._proj(embedded).mul_(embedded.shape[1] ** -0.5)
        inputs.add_(self._norm(projected.view(inputs.shape))).mul_(0.5**0.5)


class PerLayerPart:
    """The part of a layer that reads its per-layer inputs, gated by the residual stream."""

    def __init__(self, inputs: LayerInputs, layer: int, get: WeightSource, eps: float) -> None:
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
