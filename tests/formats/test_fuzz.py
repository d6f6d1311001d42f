"""Hostile files: whatever the bytes, a reader succeeds or raises FormatError, and stays small."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from tests.formats.raw_files import (
    LLAMA_CONFIG,
    entry,
    safetensors_bytes,
    small_gguf,
    write_folder,
)

PEAK_BYTES = 4 << 20  # the files have a few hundred bytes
QUICK = settings(
    max_examples=200,
    deadline=2000,  # milliseconds for one file
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
GGUF = small_gguf()
SAFETENSORS = safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": entry("F32", (2, 2), 0, 16),
        "model.layers.0.self_attn.q_proj.weight": entry("BF16", (4,), 16, 24),
    },
    bytes(24),
)
CONFIG = json.dumps(LLAMA_CONFIG).encode()
NARROW = (0, 0x80, 0xFF)
WIDE = ((1 << 32) - 1, 1 << 63, (1 << 64) - 1)


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


def touch(checkpoint: Checkpoint) -> None:
    """Use everything that is read lazily."""
    for key in checkpoint.metadata.keys():  # noqa: SIM118 (Metadata is not a mapping)
        value = checkpoint.metadata.values[key]
        if not isinstance(value, int | float | str | dict):
            list(value)  # type: ignore[call-overload]
    for info in checkpoint.tensors.values():
        assert info.data().nbytes == info.nbytes


def survives(path: Path, content: bytes, model: Path | None = None) -> bool:
    """Write a file, open the model, and return whether it was accepted."""
    path.write_bytes(content)
    try:
        with bounded_memory():
            touch(open_checkpoint(model or path))
    except FormatError:
        return False
    return True


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def test_the_files_that_are_mutated_are_good_ones(gguf_path: Path, folder: Path) -> None:
    assert survives(gguf_path, GGUF)
    assert survives(folder / "model.safetensors", SAFETENSORS, folder)


def test_a_gguf_file_cut_anywhere_before_its_end_is_refused(gguf_path: Path) -> None:
    last_tensor_end = len(GGUF) - 16  # the rest is padding
    for size in range(len(GGUF)):
        assert survives(gguf_path, GGUF[:size]) == (size >= last_tensor_end), size


def test_a_safetensors_file_cut_anywhere_is_refused(folder: Path) -> None:
    for size in range(len(SAFETENSORS)):
        assert not survives(folder / "model.safetensors", SAFETENSORS[:size], folder), size


def test_every_byte_of_a_gguf_header_may_be_wrong(gguf_path: Path) -> None:
    for position in range(len(GGUF) - 128):
        for value in NARROW:
            survives(gguf_path, GGUF[:position] + bytes([value]) + GGUF[position + 1 :])


def test_every_64_bits_of_a_gguf_header_may_be_wrong(gguf_path: Path) -> None:
    for position in range(len(GGUF) - 136):
        for value in WIDE:
            wide = value.to_bytes(8, "little")
            survives(gguf_path, GGUF[:position] + wide + GGUF[position + 8 :])


def mutated(content: bytes) -> st.SearchStrategy[bytes]:
    """Return the strategy of files with bytes replaced, inserted and cut out."""
    edits = st.tuples(
        st.integers(0, len(content)), st.integers(0, 16), st.binary(max_size=16)
    )  # where, bytes dropped, bytes put there

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        result = content
        for position, dropped, added in changes:
            result = result[:position] + added + result[position + dropped :]
        return result

    return st.lists(edits, min_size=1, max_size=4).map(apply)


@QUICK
@given(content=mutated(GGUF))
def test_a_mutated_gguf_file_never_does_harm(gguf_path: Path, content: bytes) -> None:
    survives(gguf_path, content)


@QUICK
@given(content=st.binary(max_size=300).map(lambda tail: GGUF[:24] + tail))
def test_random_bytes_after_a_gguf_header_never_do_harm(gguf_path: Path, content: bytes) -> None:
    survives(gguf_path, content)


@QUICK
@given(content=mutated(SAFETENSORS))
def test_a_mutated_safetensors_file_never_does_harm(folder: Path, content: bytes) -> None:
    survives(folder / "model.safetensors", content, folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@QUICK
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3"]) | json_values,
                "shape": st.lists(st.integers(-1, 1 << 70), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 1 << 70), max_size=3) | json_values,
            }
        ),
        max_size=3,
    )
)
def test_any_json_as_a_safetensors_header_never_does_harm(folder: Path, header: object) -> None:
    survives(folder / "model.safetensors", safetensors_bytes(header, bytes(24)), folder)


@QUICK
@given(config=st.dictionaries(st.sampled_from([*LLAMA_CONFIG, "text_config"]), json_values))
def test_any_json_as_a_config_never_does_harm(folder: Path, config: object) -> None:
    survives(folder / "config.json", json.dumps(config).encode(), folder)


@QUICK
@given(content=mutated(CONFIG))
def test_a_mutated_config_never_does_harm(folder: Path, content: bytes) -> None:
    survives(folder / "config.json", content, folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_broken_settings_of_a_tokenizer_are_refused(
    folder: Path, name: str, content: bytes
) -> None:
    assert not survives(folder / name, content, folder)


def test_a_sparse_file_that_claims_a_huge_array_is_refused_at_once(gguf_path: Path) -> None:
    claim = (1 << 30).to_bytes(8, "little")
    head = GGUF[:16] + (1).to_bytes(8, "little")
    head += (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
    gguf_path.write_bytes(head + (8).to_bytes(4, "little") + claim)
    with gguf_path.open("r+b") as file:
        file.truncate(16 << 30)  # zero bytes that take no space on the disk
    with bounded_memory(), pytest.raises(FormatError, match="at most 16777216 are read"):
        open_checkpoint(gguf_path)
