"""`headroom bench cpu` measures real kernels and prints their share of the bandwidth."""

import json

import pytest

from headroom.cli.bench import bench
from headroom.errors import KernelError
from headroom.kernels.native import measure, module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take a second, not a minute."""
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
    monkeypatch.setattr(measure, "SIZE", 512)
    monkeypatch.setattr(measure, "EXPERTS", 16)
    monkeypatch.setattr(measure, "ROUNDS", 1)


@pytest.mark.skipif(module.MODULE is None, reason="the C++ module was not built")
def test_every_kernel_has_a_speed_and_a_share(small: None, capsys: pytest.CaptureFixture) -> None:
    bench("cpu", threads=1, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 1
    assert report["isa"] in module.MODULE.isas()
    names = [row["name"] for row in report["kernels"]]
    assert names[0] == "read"
    assert {"q4_k x int8, one row", "q4_k x f32, one row", "f16 x f32, one row"} <= set(names)
    read = report["kernels"][0]["gb_per_s"]
    for row in report["kernels"]:
        assert row["gb_per_s"] > 0
        assert row["share"] == pytest.approx(row["gb_per_s"] / read)


@pytest.mark.skipif(module.MODULE is None, reason="the C++ module was not built")
def test_the_table_names_the_instruction_set(small: None, capsys: pytest.CaptureFixture) -> None:
    bench("cpu", threads=1)
    shown = capsys.readouterr().out
    assert "experts q4_k/q6_k" in shown
    assert "of read bandwidth" in shown


def test_without_the_module_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODULE", None)
    monkeypatch.setattr(module, "MISSING", "not built; there was no C++ compiler")
    with pytest.raises(KernelError, match=r"no C\+\+ kernels to measure.*not built"):
        bench("cpu")
