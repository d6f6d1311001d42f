"""TensorInfo: views of a mapped file; files that cannot be mapped; tensors that overlap."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.formats.quants import BY_NAME, F32
from headroom.formats.tensor import TensorInfo, check_no_overlap, map_file

PATH = Path("model.gguf")


def info(name: str, offset: int, *shape: int, kind: str = "f32", file: bytes = b"") -> TensorInfo:
    return TensorInfo(name, shape, BY_NAME[kind], PATH, offset, np.frombuffer(file, np.uint8))


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("f32", 4 * 128), ("bf16", 2 * 128), ("q8_0", 34 * 4), ("q4_0", 18 * 4)]
)
def test_a_tensor_takes_the_blocks_of_its_type(kind: str, nbytes: int) -> None:
    assert info("a", 0, 2, 64, kind=kind).nbytes == nbytes


def test_the_bytes_of_a_tensor_are_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(64)))
    mapped = np.frombuffer(map_file(path), np.uint8)
    found = TensorInfo("a", (2, 3), F32, path, 5, mapped).data()
    assert found.tobytes() == bytes(range(5, 29))
    assert np.shares_memory(found, mapped)
    assert not found.flags.writeable


def test_a_tensor_beyond_what_was_read_is_refused() -> None:
    assert len(info("a", 8, 2, file=bytes(16)).data()) == 8
    with pytest.raises(FormatError, match=r"Only the header of model\.gguf was read, not 'a'"):
        info("a", 9, 2, file=bytes(16)).data()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "There is no file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.touch(), "is empty"),
    ],
)
def test_what_cannot_be_mapped_is_refused(tmp_path: Path, make, told: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "file"
    make(path)
    with pytest.raises(FormatError, match=told):
        map_file(path)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=6))
def test_tensors_are_refused_exactly_if_two_claim_a_byte(places: list[tuple[int, int]]) -> None:
    tensors = [info(f"t{i}", 4 * start, values) for i, (start, values) in enumerate(places)]
    claims = [set(range(x.offset, x.offset + x.nbytes)) for x in tensors]
    if any(one & other for one, other in combinations(claims, 2)):
        with pytest.raises(FormatError, match="overlap at byte"):
            check_no_overlap(tensors, PATH)
    else:
        check_no_overlap(tensors, PATH)
