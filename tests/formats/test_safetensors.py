"""The safetensors reader: what the library writes reads back, what is wrong is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headroom.errors import FormatError
from headroom.formats.quants import BF16, F16, F32, I64
from headroom.formats.safetensors import (
    find_safetensors,
    read_indexed,
    read_json,
    read_safetensors,
)
from tests.formats.raw_files import entry, safetensors_bytes


def test_tensors_that_the_library_writes_read_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    written = {
        "wide": torch.randn(3, 5),
        "half": torch.randn(2, 2, 2).half(),
        "brain": torch.randn(7).bfloat16(),
        "count": torch.tensor(4),
        "none": torch.zeros(0, 3),
    }
    save_file(written, path, metadata={"format": "pt"})
    tensors = read_safetensors(path).tensors
    assert tensors.keys() == written.keys()
    types = {"wide": F32, "half": F16, "brain": BF16, "count": I64, "none": F32}
    for name, tensor in written.items():
        info = tensors[name]
        assert (info.shape, info.quant) == (tuple(tensor.shape), types[name])
        assert info.data().tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert np.shares_memory(info.data(), info.source) or info.nbytes == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"1234567", "has 7 bytes; it is not a safetensors file"),
        (b"\xff" * 8 + b"{}", "says that its header has 18446744073709551615 bytes"),
        (b"\x10" + bytes(7) + b"{}", "says that its header has 16 bytes"),
        (safetensors_bytes(b"\xff{}"), "does not hold valid JSON"),
        (safetensors_bytes(b"[" * 100_000), "does not hold valid JSON"),
        (safetensors_bytes(b"[1]"), "holds a JSON list, not an object"),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), "the name 'a' is there twice"),
        (safetensors_bytes(b'{"a": NaN}'), "NaN is not a JSON number"),
        (safetensors_bytes({"a": 1}), "the entry of tensor 'a' lacks dtype"),
        (safetensors_bytes({"a": {"dtype": "F32"}}), "the entry of tensor 'a' lacks dtype"),
        (
            safetensors_bytes({"a": entry("F8_E5M2", (1,), 0, 1)}, b"1"),
            "tensor 'a' has type F8_E5M2, which is not supported. Supported types: F32, F16, BF16",
        ),
        (safetensors_bytes({"a": entry("F32", (-1,), 0, 4)}, bytes(4)), "are not numbers"),
        (safetensors_bytes({"a": entry("F32", (1 << 64,), 0, 4)}, bytes(4)), "are not numbers"),
        (safetensors_bytes({"a": entry("F32", (True,), 0, 4)}, bytes(4)), "are not numbers"),
        (
            safetensors_bytes({"a": entry("F32", (2,), 0, 8)}, bytes(4)),
            "tensor 'a' spans data bytes 0 to 8, but the file has 4",
        ),
        (safetensors_bytes({"a": entry("F32", (0,), 4, 0)}, bytes(4)), "spans data bytes 4 to 0"),
        (
            safetensors_bytes({"a": entry("F32", (1 << 40, 1 << 40), 0, 4)}, bytes(4)),
            "needs 4835703278458516698824704 bytes and has 4",
        ),
        (
            safetensors_bytes(
                {"a": entry("F32", (2,), 0, 8), "b": entry("F32", (2,), 4, 12)}, bytes(12)
            ),
            "tensors 'a' and 'b' overlap at byte",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_wrong_file_is_refused_in_clear_words(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_safetensors(path)


def write_index(folder: Path, weight_map: object) -> Path:
    for number in (1, 2):
        save_file(
            {f"t{number}": torch.ones(number)}, folder / f"model-0000{number}-of-00002.safetensors"
        )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    files = {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    index = write_index(tmp_path, files)
    parts = read_indexed(index)
    assert {name: part.path.name for part in parts for name in part.tensors} == files
    assert find_safetensors(tmp_path) == index
    assert find_safetensors(tmp_path / files["t2"]) == index


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"t": "../secret.safetensors"}, "lies in '../secret.safetensors', which is not a file"),
        ({"t": "/etc/passwd"}, "which is not a file name"),
        ({"t": ".."}, "which is not a file name"),
        ({"t": 3}, "lies in 3, which is not a file name"),
        ({"t": "absent.safetensors"}, "There is no file"),
        ({"t9": "model-00001-of-00002.safetensors"}, "has no tensor 't9', which model.safetensors"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_indexed(write_index(tmp_path, weight_map))


def test_a_folder_without_a_single_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no model file"):
        find_safetensors(tmp_path)
    for name in ("a", "b"):
        save_file({"t": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match=r"holds several safetensors files \(a.safetensors, b"):
        find_safetensors(tmp_path)


def test_json_of_more_than_64_mib_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(FormatError, match="has 67108865 bytes; at most 67108864 are read"):
        read_json(path)


@pytest.mark.parametrize(("size", "fits"), [(17, True), (16, True), (15, False)])
def test_a_tensor_may_end_exactly_where_the_file_ends(
    tmp_path: Path, size: int, fits: bool
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry("F32", (4,), 0, 16)}, bytes(size)))
    if fits:
        assert read_safetensors(path).tensors["a"].data().nbytes == 16
    else:
        with pytest.raises(FormatError, match="spans data bytes 0 to 16, but the file has 15"):
            read_safetensors(path)
