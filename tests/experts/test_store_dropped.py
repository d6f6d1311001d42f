"""Cold experts that are left out take no memory, and nothing of them is read."""

from pathlib import Path

import pytest
import torch

from headroom.experts.cold import stored_tiles
from headroom.experts.layer_store import NOWHERE, initial_residency
from headroom.experts.placement import ExpertPlacement
from headroom.experts.store import StoreRequest, fill_rows, fill_tiles, open_store
from headroom.experts.store import blob_layout as layout_of
from headroom.families.config import ExpertsConfig
from headroom.layers import upload
from headroom.layers.upload import Upload
from headroom.plan.cost_model import ColdSpeeds
from tests.experts.stores import blob_layout, contents, small_store
from tests.gpu.weight_file import WeightFile
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

EXPERTS, HOT = 5, (0, 1, 3)
NO_CPU = ColdSpeeds(gpu=1e12, link=0.0, cpu=0.0, handover_s=1e-5)


def test_a_store_of_dropped_experts_holds_the_hot_ones_alone() -> None:
    store = small_store(
        [blob_layout(4), None, blob_layout(3), blob_layout(2)], [(1, 2), (), (), (0, 1)],
        cold="drop", staging_bytes=0,
    )  # fmt: skip
    mixed, _, none_hot, all_hot = store.layers
    assert mixed is not None
    assert none_hot is not None
    assert all_hot is None
    assert (store.cold_bytes, len(store.memory), len(store.staging)) == (0, 0, 0)
    assert [len(layer.slots) for layer in (mixed, none_hot)] == [2, 0]
    assert store.current_placement().hot == ((1, 2), (), (), (0, 1))
    for layer in (mixed, none_hot):
        assert not layer.host_addresses.any()
        assert not layer.addresses[layer.is_hot == 0].any()
        assert not layer.keeps_copy
    for expert in (0, 3):
        assert mixed.slot_of(expert) is None
        assert mixed.cold_of(expert) is None
    for expert in (1, 2):
        slot = mixed.slot_of(expert)
        assert slot is not None
        assert torch.equal(slot, contents(0, expert, mixed.expert_bytes))
        assert mixed.addresses[expert, 0] == slot.data_ptr()


def test_without_rows_cold_experts_are_nowhere() -> None:
    found = initial_residency(4, [2], 0)
    assert found.slot.tolist() == [NOWHERE, NOWHERE, 0, NOWHERE]
    assert found.row.tolist() == [NOWHERE] * 4


def test_kernels_that_need_all_memory_on_the_gpu_see_that_it_is() -> None:
    for cold, pieces in (("drop", 1), ("gpu", 2)):
        store = small_store([blob_layout(4)], [(1, 2)], cold=cold)
        assert store.layers[0] is not None
        assert len(stored_tiles(store.layers[0]).memory) == pieces


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("apart", [False, True], ids=["in one tensor", "each in its own"])
def test_loading_reads_nothing_of_dropped_experts(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(upload, "BUFFER_STEP", 32)
    reads: list[tuple[int, int]] = []
    read = upload._read

    def watched(file: int, room: memoryview, offset: int, source: object) -> None:
        reads.append((offset, offset + len(room)))
        read(file, room, offset, source)  # type: ignore[arg-type]

    monkeypatch.setattr(upload, "_read", watched)
    file = _weights(tmp_path, apart)
    with Upload("cpu", 200_000) as way:
        get = file.source(way)
        store = open_store(
            [layout_of(ExpertsConfig(experts=EXPERTS, used=2, width=64), get, tiles=True)],
            _request(), "cpu", lambda line, size: None,
        )  # fmt: skip
        stored = store.layers[0]
        assert stored is not None
        fill_tiles(stored, get, store.staging)
        parts = get.locate_experts(EXPERTS)
    wanted = set()
    for part in parts:
        flat = [
            (one.offset + number * one.matrix_bytes, one.matrix_bytes)
            for one in part
            for number in range(one.count)
        ]
        wanted |= {byte for expert in HOT for byte in _bytes(*flat[expert])}
    assert {byte for first, end in reads for byte in range(first, end)} == wanted
    held = _load_all(file)
    for expert in HOT:
        slot, whole = stored.slot_of(expert), held.slot_of(expert)
        assert slot is not None
        assert whole is not None
        assert torch.equal(slot, whole)


def test_experts_as_in_the_file_are_left_out_as_well(tmp_path: Path) -> None:
    file, counted = _weights(tmp_path, False), {}
    with Upload("cpu", 200_000) as way:
        get = file.source(way)
        layout = layout_of(ExpertsConfig(experts=EXPERTS, used=2, width=64), get, tiles=False)
        store = open_store([layout], _request(), "cpu", counted.__setitem__)
        stored = store.layers[0]
        assert stored is not None
        fill_rows(stored, get)
        parts = get.experts_from_file(EXPERTS).parts
    for expert in range(EXPERTS):
        slot = stored.slot_of(expert)
        assert (slot is not None) == (expert in HOT)
        if slot is not None:
            rows = [part[expert].data.flatten().view(torch.uint8) for part in parts]
            assert torch.equal(slot, torch.cat(rows))
    assert counted == {"expert_staging": 0, "expert_spare": 0}


def _weights(folder: Path, apart: bool) -> WeightFile:
    made = WeightFile(folder / "weights")
    for name, rows, columns in (("gate", 64, 256), ("up", 64, 256), ("down", 256, 64)):
        if apart:
            for expert in range(EXPERTS):
                made.add(f"ffn.experts.{expert}.{name}", "q8_0", 1, rows, columns)
        else:
            made.add(f"ffn.experts.{name}", "q8_0", EXPERTS, rows, columns)
    return made


def _request(cold: str = "drop", staging: int = 0) -> StoreRequest:
    return StoreRequest(
        placement=ExpertPlacement((HOT,), "drawn"),
        cold=cold,
        speeds=NO_CPU if cold == "drop" else ColdSpeeds(1e12, 1e10, 1e11, 1e-5),
        pin=False,
        keep_copy=False,
        staging_bytes=staging,
    )


def _load_all(file: WeightFile):  # type: ignore[no-untyped-def]
    """The same layer with cold experts that are held."""
    with Upload("cpu", 200_000) as way:
        get = file.source(way)
        layout = layout_of(ExpertsConfig(experts=EXPERTS, used=2, width=64), get, tiles=True)
        store = open_store([layout], _request("cpu", 600_000), "cpu", lambda line, size: None)
        stored = store.layers[0]
        assert stored is not None
        fill_tiles(stored, get, store.staging)
    return stored


def _bytes(offset: int, size: int) -> range:
    return range(offset, offset + size)
