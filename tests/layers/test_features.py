"""Features of one stage: what is kept, in which type, and that captured steps keep it, too."""

from collections.abc import Iterator

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.reference.quantise import quantise
from headroom.layers.batch import Batch
from headroom.layers.features import ModelFeatures, StageFeatures
from headroom.plan.settings import FeatureRequest
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.tensors import no_waits

HIDDEN, ROWS = 64, 80


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    with torch.inference_mode():
        yield torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))


def add_one(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    return x.add_(1)


def batch() -> Batch:
    none = torch.empty(0, dtype=torch.int64)
    return Batch(none, none, none, (), none)


def test_only_layers_that_are_asked_for_are_wrapped(x: torch.Tensor) -> None:
    features = StageFeatures([4], "f32", ROWS, HIDDEN, "cpu")
    assert features.keeping(3, add_one) is add_one
    kept = features.keeping(4, add_one)
    assert kept is not add_one
    before = x.clone()
    assert torch.equal(kept(x, batch()), before + 1)
    x.zero_()  # the next layer changes the stream in place
    assert torch.equal(features.read(4, ROWS), before + 1)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_rows_are_kept_in_the_bits_of_their_type(kind: str, x: torch.Tensor) -> None:
    features = StageFeatures([0, 7], kind, ROWS, HIDDEN, "cpu")
    assert features.nbytes == 2 * ROWS * BY_NAME[kind].bytes_for(HIDDEN)
    for layer in (7, 0):
        features.keeping(layer, lambda rows, batch: rows)(x * (1 + layer), batch())
    for layer in (0, 7):
        wanted = quantise(x * (1 + layer), BY_NAME[kind])
        assert torch.equal(features.stored(layer, ROWS), wanted)
        assert torch.equal(features.stored(layer, 3), wanted[:3])
        error = (features.read(layer, ROWS) - x * (1 + layer)).abs().max()
        assert float(error) <= (0 if kind == "f32" else 0.2)


def test_layers_of_several_stages_are_read_in_the_order_of_the_request(x: torch.Tensor) -> None:
    stages = [StageFeatures(own, "f32", ROWS, HIDDEN, "cpu") for own in ([0, 2], [5])]
    for stage in stages:
        for layer in stage.layers:
            stage.keeping(layer, lambda rows, batch: rows)(x + layer, batch())
    found = ModelFeatures(FeatureRequest((5, 0, 2)), stages).read(9, "cpu")
    assert torch.equal(found, torch.stack([x[:9] + 5, x[:9], x[:9] + 2], dim=1))


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_a_captured_step_keeps_its_rows_at_every_replay(
    kind: str, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in_gpu(monkeypatch):
        stream = x[:32].to("cuda")
        features = StageFeatures([0], kind, ROWS, HIDDEN, "cuda")
        layer = features.keeping(0, add_one)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), no_waits():
            layer(stream, batch())
        for value in (2.0, -3.0):
            stream.fill_(value)
            graph.replay()
            found = features.read(0, 32).cpu()
            # The scale of a q8_0 block is an f16 value.
            rounding = 2**-11 if kind == "q8_0" else 0
            torch.testing.assert_close(
                found, torch.full((32, HIDDEN), value + 1), atol=0, rtol=rounding
            )
