"""Loading experts from the file to their places; the CPU stands in for the GPU."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headroom.experts.placement import ExpertPlacement
from headroom.experts.store import StoreRequest, blob_layout, fill_rows, fill_tiles, open_store
from headroom.families.config import ExpertsConfig
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import experts
from headroom.layers import upload
from headroom.layers.upload import Upload
from headroom.plan.cost_model import ColdSpeeds
from tests.gpu import check_cold_store
from tests.gpu.torch_tiles import pack_tiles
from tests.gpu.weight_file import WeightFile
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.gpu import stand_in_driver
from tests.stand_in.kernels import use_kernels

CONFIG = ExpertsConfig(experts=5, used=2, width=40)
KINDS, COLUMNS = ("q4_k", "q4_k", "q8_0"), (256, 256, 64)
hot_sets = st.sets(st.integers(0, 4), max_size=4).map(lambda ids: tuple(sorted(ids)))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers so small that every layer needs several."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(upload, "LEAST_STAGING_BYTES", 0)
    monkeypatch.setattr(upload, "BUFFER_STEP", 32)


class Layer:
    """A layer's experts in a file, in parts or all gates and ups together."""

    def __init__(self, folder: Path, fused: bool) -> None:
        self.file = WeightFile(folder / "weights")
        if fused:
            both = self.file.add("ffn.experts.gate_up", "q4_k", 5, 2 * 64, 256)
            self.parts = [both[:, :64], both[:, 64:]]
        else:
            names = ("ffn.experts.gate", "ffn.experts.up")
            self.parts = [self.file.add(name, "q4_k", 5, 64, 256) for name in names]
        self.parts.append(self.file.add("ffn.experts.down", "q8_0", 5, 256, 64))

    def blob(self, expert: int, tiles: bool) -> torch.Tensor:
        """The bytes that an expert must have."""
        rows = [part[expert] for part in self.parts]
        if tiles:
            kinds = zip(rows, KINDS, COLUMNS, strict=True)
            rows = [pack_tiles(x, BY_NAME[kind], columns) for x, kind, columns in kinds]
        return torch.cat([x.flatten() for x in rows])


@pytest.fixture(params=[False, True], ids=["in parts", "gates and ups together"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Layer:
    return Layer(tmp_path, request.param)


@pytest.mark.parametrize("tiles", [pytest.param(True, marks=pytest.mark.skipif(
    COMPILER is None, reason="needs g++")), False])  # fmt: skip
@pytest.mark.parametrize("staging", [60_000, 1_000_000])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(hot=hot_sets, keep_copy=st.booleans())
def test_every_expert_lies_where_a_placement_puts_it(
    layer: Layer, tiles: bool, staging: int, hot: tuple[int, ...], keep_copy: bool
) -> None:
    placement = ExpertPlacement((hot,), "drawn")
    made = StoreRequest(
        placement=placement,
        cold="cpu",
        speeds=ColdSpeeds(1e12, 1e10, 1e11, 1e-5),
        pin=False,
        keep_copy=keep_copy,
        staging_bytes=150_000,
    )
    with Upload("cpu", staging) as way:
        get = layer.file.source(way)
        layout = blob_layout(CONFIG, get, tiles=tiles)
        store = open_store([layout], made, "cpu", lambda line, size: None)
        stored = store.layers[0]
        assert stored is not None
        if tiles:
            fill_tiles(stored, get, store.staging)
        else:
            fill_rows(stored, get)
    for expert in range(5):
        places = [stored.slot_of(expert), stored.cold_of(expert)]
        assert (places[0] is not None) == (expert in hot)
        assert (places[1] is not None) == (keep_copy or expert not in hot)
        for place in places:
            assert place is None or torch.equal(place, layer.blob(expert, tiles))
    assert (stored.width, stored.hidden, stored.experts) == (64, 256, 5)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    "kinds",
    [
        ("q8_0", "q8_0", "q8_0"),
        pytest.param(("mxfp4", "mxfp4", "q5_0"), marks=pytest.mark.slow),
    ],
)
def test_the_check_for_a_gpu_passes_where_the_cpu_stands_in(
    kinds: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_cold_store, "DEVICE", "cpu")
    monkeypatch.setattr(check_cold_store, "ROWS", (3,))
    monkeypatch.setattr(check_cold_store, "STEPS_PER_LOOK", 1)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(experts, "shared_bytes_of", lambda device: 64 << 10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(check_cold_store, "captured", lambda step: step)
    with stand_in_driver(monkeypatch):
        assert check_cold_store.check(kinds, (6, 96, 288), pin=True)
