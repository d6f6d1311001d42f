"""Written GGUF files, as the `gguf` package reads them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.formats.gguf_writer import GgufValue, TensorEntry, aligned_size, gguf_bytes, gguf_jobs
from headroom.formats.quants import BY_NAME
from headroom.formats.writing import Job

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
F32_NUMBERS = st.floats(width=32, allow_nan=False)
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, (1 << 64) - 1),
    F32_NUMBERS,
    TEXT,
    st.lists(TEXT, min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=4),
    st.lists(F32_NUMBERS, min_size=1, max_size=4),
)


def read(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }


@given(st.dictionaries(st.text("abc.", min_size=1, max_size=6), VALUES, max_size=5))
def test_settings_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    header = gguf_bytes(values, ())
    path.write_bytes(header)
    assert len(header) % 32 == 0
    found = read(path)
    assert found == values
    assert [type(found[key]) for key in values] == [type(values[key]) for key in values]


@pytest.mark.parametrize(("value", "kind"), [((1 << 32) - 1, "UINT32"), (1 << 32, "UINT64")])
def test_whole_numbers_take_the_narrowest_type_that_other_writers_use(
    tmp_path: Path, value: int, kind: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({"n": value}, ()))
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["n"]
    assert field.types == [gguf.GGUFValueType[kind]]


def test_tensors_are_read_back_with_their_shapes_types_and_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    entries = [
        TensorEntry("vector", (5,), BY_NAME["f32"]),  # 20 bytes: padding follows
        TensorEntry("matrix", (3, 64), BY_NAME["q8_0"]),
        TensorEntry("stack", (2, 3, 32), BY_NAME["f16"]),
    ]
    data = {x.name: random.integers(0, 256, x.nbytes, dtype=np.uint8) for x in entries}

    def jobs_of(entry: TensorEntry) -> list[Job]:
        half = entry.nbytes // 2
        return [lambda: data[entry.name][:half], lambda: data[entry.name][half:]]

    values: dict[str, GgufValue] = {"general.architecture": "llama"}
    jobs = list(gguf_jobs(values, entries, jobs_of))
    (tmp_path / "m.gguf").write_bytes(b"".join(bytes(job()) for job in jobs))
    found = {x.name: x for x in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert list(found) == [entry.name for entry in entries]
    for entry in entries:
        tensor = found[entry.name]
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.tensor_type.name.lower() == entry.quant.name
        assert tensor.data.tobytes() == data[entry.name].tobytes()


@given(st.integers(0, 10**12))
def test_the_alignment_is_the_next_multiple_of_32(size: int) -> None:
    assert aligned_size(size) % 32 == 0
    assert 0 <= aligned_size(size) - size < 32
