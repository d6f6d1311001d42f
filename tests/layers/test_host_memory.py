"""Tables in host memory that a GPU reads: of just their size, and given back; or a refusal."""

import gc
from pathlib import Path

import pytest
import torch

from headroom.errors import DeviceError
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers import host_memory
from headroom.layers.upload import Upload
from tests.gpu.weight_file import WeightFile
from tests.stand_in.gpu import stand_in_driver


@pytest.mark.parametrize("kind", ["q4_k", "f16", "f32"])
def test_a_table_in_host_memory_is_pinned_in_just_its_size_and_given_back_with_its_last_holder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in_driver(monkeypatch) as driver:
        file = WeightFile(tmp_path / "weights")
        data = file.add("embed", kind, 50, 768)
        with Upload("cpu") as way:
            table = file.source(way).at("", "embeddings").table("embed", pinned=True)
        assert driver.pinned == {table.data.data_ptr(): data.nbytes}
        assert file.counted == {"embeddings": data.nbytes}  # as the plan counts it
        assert table.data.dtype == PLAIN_TYPES.get(kind, torch.uint8)
        assert torch.equal(table.data.view(torch.uint8), data)
        del table
        gc.collect()
        assert not driver.pinned


def test_a_table_that_the_driver_does_not_pin_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "pinnable_bytes", lambda limits: 8 << 20)
    file = WeightFile(tmp_path / "weights")
    file.add("embed", "q8_0", 64, 256)
    with stand_in_driver(monkeypatch) as driver, Upload("cpu") as way:
        driver.refuse_to_pin()
        with pytest.raises(DeviceError) as refused:
            file.source(way).table("embed", pinned=True)
    assert str(refused.value) == (
        "The GPU's driver does not pin 17.0 KiB of host memory for the token table: out of memory; "
        "the control group allows 8.0 MiB. Free host memory, raise the limit of the control group, "
        "or leave room for the table on the GPU, with a shorter --context say."
    )


def test_memory_that_is_dropped_is_not_pinned_and_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stand_in_driver(monkeypatch) as driver:
        one = host_memory.HostMemory(3 << 20, pin=True)
        one.bytes.fill_(5)
        assert one.pinned
        for _ in range(2):
            one.drop()
            assert not one.pinned
            assert not driver.pinned
        assert not one.bytes[8192:].any()
        one.bytes.fill_(6)
        del one
        gc.collect()
