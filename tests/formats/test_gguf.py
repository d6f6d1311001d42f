"""The GGUF reader: what it reads, how fast, and what it refuses in which words."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.gguf import GgufFile, read_gguf, read_split_gguf
from tests.formats.raw_files import (
    ARRAY,
    STRING,
    U32,
    Key,
    Tensor,
    gguf_bytes,
    small_gguf,
    text,
)


def read(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def plain(value: Any) -> Any:
    if isinstance(value, int | float | str):
        return value
    return [plain(item) for item in value]


def test_every_value_type_that_the_gguf_package_writes_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    expected: dict[str, Any] = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31}
    expected |= {"i32": -70000, "u64": 1 << 63, "i64": -(1 << 62), "f32": 0.5, "f64": 0.1}
    for kind, value in expected.items():
        name = {"u": "uint", "i": "int", "f": "float"}[kind[0]] + kind[1:]
        getattr(writer, f"add_{name}")(kind, value)
    expected |= {"bool": True, "text": "naïve ✓", "words": ["a", "", "ß"], "ints": [1, -2]}
    writer.add_bool("bool", True)
    writer.add_string("text", expected["text"])
    writer.add_array("words", expected["words"])
    writer.add_array("ints", expected["ints"])
    writer.add_array("floats", [0.25, -1.0])
    writer.add_array("bools", [True, False])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    found = {key: plain(value) for key, value in file.values.items()}
    expected |= {"floats": [0.25, -1.0], "bools": [True, False], "general.architecture": "llama"}
    assert found == expected
    assert file.tensors["t"].shape == (2, 3)
    assert file.tensors["t"].data().view("<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_the_default_model_reads_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    ours, theirs = read_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.quant.ggml_id, info.offset) == (tensor.tensor_type, tensor.data_offset)
        assert info.nbytes == tensor.n_bytes
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.values) == keys
    for key in keys:
        assert plain(ours.values[key]) == theirs.fields[key].contents(), key


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    assert read(tmp_path, gguf_bytes(version=version)).version == version


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_data_begins_at_the_alignment_that_the_file_names(tmp_path: Path, alignment: int) -> None:
    keys: list[Key] = [("general.alignment", U32, alignment)]
    content = gguf_bytes(keys, [("t", (2,), 0, 0)], b"12345678", alignment=alignment)
    info = read(tmp_path, content).tensors["t"]
    assert info.offset % alignment == 0
    assert info.data().tobytes() == b"12345678"


def test_a_tensor_is_a_read_only_view_of_the_mapped_file(tmp_path: Path) -> None:
    info = read(tmp_path, small_gguf()).tensors["token_embd.weight"]
    assert np.shares_memory(info.data(), info.source)
    assert not info.data().flags.writeable
    assert info.data().tobytes() == bytes(range(68))


def test_arrays_within_arrays_are_read(tmp_path: Path) -> None:
    nested = read(tmp_path, small_gguf()).values["nested"]
    assert plain(nested) == [[1, 2], ["x"]]


@pytest.mark.parametrize(("missing", "fits"), [(-1, True), (0, True), (1, False)])
def test_a_tensor_may_end_exactly_where_the_file_ends(
    tmp_path: Path, missing: int, fits: bool
) -> None:
    data = bytes(64 + 34 * 3 - missing)  # an f32 tensor, then three blocks of q8_0
    content = gguf_bytes([], [("a", (8,), 0, 0), ("b", (32, 3), 8, 64)], data)
    if fits:
        assert read(tmp_path, content).tensors["b"].data().nbytes == 34 * 3
    else:
        end = len(content) + 1
        told = rf"tensor 'b' ends at byte {end}, but the file has {len(content)}"
        with pytest.raises(FormatError, match=told):
            read(tmp_path, content)


def test_arrays_may_be_nested_as_deeply_as_the_limit_and_no_deeper(tmp_path: Path) -> None:
    def nested(depth: int) -> Any:
        value: Any = (U32, [7])
        for _ in range(depth - 1):
            value = (ARRAY, [value])
        return value

    found = plain(read(tmp_path, gguf_bytes([("k", ARRAY, nested(4))])).values["k"])
    assert found == [[[[7]]]]
    with pytest.raises(FormatError, match="nests arrays deeper than 4"):
        read(tmp_path, gguf_bytes([("k", ARRAY, nested(5))]))


@pytest.mark.parametrize(("first", "fits"), [(9, True), (10, True), (11, False)])
def test_arrays_within_arrays_are_counted_over_all_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, fits: bool
) -> None:
    monkeypatch.setattr("headroom.formats.gguf.MAX_NESTED_ARRAYS", 15)
    keys: list[Key] = [
        (name, ARRAY, (ARRAY, [(U32, [1])] * count)) for name, count in (("a", first), ("b", 5))
    ]
    if fits:
        assert len(plain(read(tmp_path, gguf_bytes(keys)).values["a"])) == first
    else:
        with pytest.raises(FormatError, match="arrays within arrays above 15"):
            read(tmp_path, gguf_bytes(keys))


@pytest.mark.parametrize(("size", "fits"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_a_name_has_from_1_to_1024_bytes(tmp_path: Path, size: int, fits: bool) -> None:
    content = gguf_bytes([("k" * size, U32, 3)])
    if fits:
        assert read(tmp_path, content).values["k" * size] == 3
    else:
        with pytest.raises(FormatError, match=f"has {size} bytes, not 1 to 1024"):
            read(tmp_path, content)


def test_no_text_of_a_vocabulary_is_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    broken = [b"\xff"] * 999  # decoding any of them raises an error
    keys: list[Key] = [
        ("general.architecture", STRING, "llama"),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, [*broken, "token999"])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [*broken, "left999 right"])),
        ("tokenizer.ggml.token_type", ARRAY, (5, [1] * 1000)),
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf_bytes(keys))
    vocabulary = open_checkpoint(path).vocabulary
    assert vocabulary is not None
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (1000, 1000)
    assert vocabulary.tokens[999] == "token999"
    assert vocabulary.merges[-1] == "left999 right"
    with pytest.raises(FormatError, match="text 0 is not UTF-8"):
        vocabulary.tokens[0]


def test_texts_of_an_array_index_and_iterate_like_a_list(tmp_path: Path) -> None:
    tokens: Any = read(tmp_path, small_gguf()).values["tokenizer.ggml.tokens"]
    assert list(tokens) == ["a", "b", "ab", "é"]
    assert (tokens[0], tokens[-1], tokens[1:3]) == ("a", "é", ["b", "ab"])
    with pytest.raises(IndexError):
        tokens[4]


def test_a_text_that_is_not_utf8_is_an_error_only_when_it_is_asked_for(tmp_path: Path) -> None:
    keys: list[Key] = [("words", ARRAY, (STRING, [b"ok", b"\xff"])), ("word", STRING, b"\xc3")]
    values = read(tmp_path, gguf_bytes(keys)).values
    words: Any = values["words"]
    assert words[0] == "ok"
    with pytest.raises(FormatError, match="key 'words': text 1 is not UTF-8"):
        list(words)
    with pytest.raises(FormatError, match="key 'word' is not UTF-8 text"):
        values["word"]


HUGE = (1 << 64) - 1
ONE: Tensor = ("t", (2,), 0, 0)
EIGHT = b"12345678"


def header(n_tensors: int, n_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


def nest(depth: int) -> Any:
    return (U32, [1]) if depth == 1 else (ARRAY, [nest(depth - 1)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file: it starts with b'GG'"),
        (b"GGML" + bytes(40), "is not a GGUF file: it starts with b'GGML'"),
        (b"GGUF", "the version takes 4 bytes, but 0 are left"),
        (gguf_bytes(version=1), "GGUF version 1. Versions 2 and 3 are read"),
        (gguf_bytes(version=3 << 24), "is a big-endian GGUF file"),
        (header(HUGE, 0), f"the number of tensors is {HUGE}, at most 262144 are read"),
        (header(0, HUGE), f"the number of keys is {HUGE}, at most 65536 are read"),
        (header(0, 9), "the number of keys is 9, more than the 0 bytes that follow can hold"),
        (header(9, 0), "the number of tensors is 9, more than the 8 bytes that follow can hold"),
        (header(0, 1, struct.pack("<Q", HUGE) + bytes(9)), f"takes {HUGE} bytes, but 9 are left"),
        (header(0, 1, text("") + bytes(9)), "the name of key 0 has 0 bytes, not 1 to 1024"),
        (header(0, 1, text(b"\xff\xfe") + bytes(9)), "the name of key 0 is not UTF-8"),
        (header(0, 1, text("k" * 2000) + bytes(9)), "has 2000 bytes, not 1 to 1024"),
        (header(0, 1, text("k") + struct.pack("<IQ", 13, 0)), "key 'k' has the unknown type 13"),
        (
            header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, 77, 0)),
            "key 'k' is an array of the unknown type 77",
        ),
        (
            header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, U32, HUGE)),
            f"the length of key 'k' is {HUGE}, more than the 0 bytes",
        ),
        (
            header(0, 1, text("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)),
            "text 0 of key 'k' ends outside the file",
        ),
        (
            header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, 7, 2) + b"\1\2"),
            "key 'k' holds booleans that are neither 0 nor 1",
        ),
        (gguf_bytes([("k", U32, 1), ("k", U32, 2)]), "the key 'k' is there twice"),
        (gguf_bytes([("k", ARRAY, nest(5))]), "key 'k' nests arrays deeper than 4"),
        (
            gguf_bytes([("k", ARRAY, (ARRAY, [(U32, [])] * 65537))]),
            "brings the arrays within arrays above 65536",
        ),
        (gguf_bytes([("general.alignment", U32, 0)]), "general.alignment is 0, not a power of two"),
        (gguf_bytes([("general.alignment", U32, 24)]), "general.alignment is 24, not a power"),
        (gguf_bytes([("general.alignment", STRING, "x")]), "general.alignment is not a number"),
        (gguf_bytes([], [ONE, ONE], EIGHT), "the tensor 't' is there twice"),
        (gguf_bytes([], [("t", (2,), 0, 8)], EIGHT), "not a multiple of the alignment 32"),
        (gguf_bytes([], [("t", (2,), 0, 32)], EIGHT), "tensor 't' ends at byte 104, but the file"),
        (gguf_bytes([], [("t", (2,), 0, HUGE - 31)], EIGHT), "tensor 't' ends at byte"),
        (gguf_bytes([], [("t", (1 << 62, 1 << 62), 0, 0)], EIGHT), "tensor 't' ends at byte"),
        (gguf_bytes([], [("t", (HUGE,), 0, 0)], EIGHT), "tensor 't' has the dimensions"),
        (gguf_bytes([], [("t", (0,), 0, 0)], EIGHT), r"tensor 't' has the dimensions \[0\]"),
        (gguf_bytes([], [("t", (1,) * 5, 0, 0)], EIGHT), "tensor 't' has 5 dimensions, at most 4"),
        (gguf_bytes([], [ONE, ("u", (2,), 0, 0)], EIGHT), "tensors 't' and 'u' overlap at byte"),
        (
            gguf_bytes([], [("t", (33,), 8, 0)], bytes(99)),
            "tensor 't' has rows of 33 values, which are not whole q8_0 blocks of 32",
        ),
        (
            gguf_bytes([], [("t", (256,), 9, 0)], bytes(99)),
            r"Tensor 't' has type Q8_1 \(number 9\), which is not supported. Supported types: F32",
        ),
        (gguf_bytes([], [("t", (256,), 31, 0)]), r"has type Q4_0_4_4 \(number 31\)"),
        (gguf_bytes([], [("t", (256,), 36, 0)]), r"has type IQ4_NL_4_4 \(number 36\)"),
        (gguf_bytes([], [("t", (256,), 999, 0)]), "has the unknown type 999, which is not"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_wrong_file_is_refused_in_clear_words(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read(tmp_path, content)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="There is no file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="is not a regular file"):
        read_gguf(tmp_path)


def part(number: int, count: int, names: list[str], total: int | None = None) -> bytes:
    keys: list[Key] = [("split.no", 2, number), ("split.count", 2, count)]
    if total is not None:
        keys += [("split.tensors.count", 5, total), ("general.architecture", STRING, "llama")]
    tensors: list[Tensor] = [(name, (2,), 0, 32 * i) for i, name in enumerate(names)]
    return gguf_bytes(keys, tensors, bytes([number]) * 32 * len(names))


def write_parts(folder: Path, contents: list[bytes]) -> Path:
    count = len(contents)
    paths = [folder / f"model-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths[0]


def test_all_parts_of_a_split_file_are_one_checkpoint(tmp_path: Path) -> None:
    first = write_parts(tmp_path, [part(0, 3, [], 3), part(1, 3, ["a", "b"]), part(2, 3, ["c"])])
    tensors = open_checkpoint(first).tensors
    assert {name: info.data()[0] for name, info in tensors.items()} == {"a": 1, "b": 1, "c": 2}
    assert tensors["c"].path.name == "model-00003-of-00003.gguf"
    assert open_checkpoint(tmp_path).tensors.keys() == tensors.keys()


def test_a_split_file_opened_at_another_part_names_the_first(tmp_path: Path) -> None:
    first = write_parts(tmp_path, [part(0, 2, ["a"], 2), part(1, 2, ["b"])])
    with pytest.raises(FormatError, match=r"not the first of 2 parts. Open .*00001-of-00002.gguf"):
        read_split_gguf(first.with_name("model-00002-of-00002.gguf"))


def test_missing_misnamed_and_mixed_up_parts_are_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path, [part(0, 2, ["a"], 2), part(0, 2, ["b"])])
    with pytest.raises(FormatError, match="says it is part 1 of 2, not part 2 of 2"):
        read_split_gguf(first)
    write_parts(tmp_path, [part(0, 2, ["a"], 7), part(1, 2, ["b"])])
    with pytest.raises(FormatError, match="the parts hold 2 tensors, not 7"):
        read_split_gguf(first)
    write_parts(tmp_path, [part(0, 2, ["a"], 2), part(1, 2, ["a"])])
    with pytest.raises(FormatError, match="'a' and 'a' are the same tensor"):
        open_checkpoint(first)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(FormatError, match=r"1 are missing: model-00002-of-00002.gguf"):
        read_split_gguf(first)
    other = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match="is one of 2 parts, but is not named as one"):
        read_split_gguf(other)
    other.write_bytes(gguf_bytes([("split.count", STRING, "two")]))
    with pytest.raises(FormatError, match=r"split.count is 'two', not a whole number"):
        read_split_gguf(other)
