"""Stage: a step's tensors go to where its layers are."""

from typing import Any

import torch

from headroom.layers.batch import Batch, Span
from headroom.split.stages import Stage


class Recorder:
    """Stands in for a model."""

    routing = None
    seen: Batch

    def forward(self, batch: Batch) -> torch.Tensor:
        self.seen = batch
        return torch.empty(0)


def test_a_step_is_brought_to_the_stages_device_whole() -> None:
    numbers, tree = torch.arange(3), torch.eye(3, dtype=torch.bool)
    span = Span(0, 3, 5, torch.tensor([4]), slot=2, tree=tree)
    batch, model = Batch(numbers, numbers + 5, numbers + 69, (span,), numbers[2:]), Recorder()
    given: Any = model
    Stage("meta", given).forward(batch)
    seen = model.seen
    for moved in (seen.tokens, seen.positions, seen.slots, seen.output_rows):
        assert moved.device.type == "meta"
    kept = seen.spans[0]
    assert (kept.first_row, kept.rows, kept.start, kept.slot) == (0, 3, 5, 2)
    assert kept.tree is not None
    assert (kept.pages.device.type, kept.tree.device.type) == ("meta", "meta")


def test_a_step_on_the_cpu_stays_as_it_is() -> None:
    numbers, model = torch.arange(1), Recorder()
    batch = Batch(numbers, numbers, numbers, (), numbers)
    given: Any = model
    Stage("cpu", given).forward(batch)
    assert model.seen is batch
