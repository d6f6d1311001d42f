"""RoutingStats: how often each expert is chosen."""

import torch


class RoutingStats:
    """Counts of choices, kept where the routers run; every step adds to them."""

    def __init__(self, layers: int, experts: int, device: str) -> None:
        self._counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)

    def of_layer(self, index: int) -> torch.Tensor:
        """Return a layer's counts `[experts]`, for its router to add to."""
        return self._counts[index]

    def counts(self) -> torch.Tensor:
        """Return the choices so far, `[layers, experts]`, copied to host memory.

        Layers without experts have zeros.
        """
        return self._counts.to("cpu", copy=True)

    def clear(self) -> None:
        """Forget all choices, those of rows that only warmed a device up."""
        self._counts.zero_()
