"""Texts of a mapped file: a list of texts, decoded when asked for."""

import struct
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.formats.mapped import MappedStrings, MappedText

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=6)


def mapped(texts: list[bytes], before: bytes = b"head") -> MappedStrings:
    """Lay texts out as a GGUF file does: each after its length."""
    raw, ends = before, array("Q")
    for text in texts:
        raw += struct.pack("<Q", len(text)) + text
        ends.append(len(raw))
    return MappedStrings(memoryview(raw + b"tail"), len(before), ends, "m.gguf: tokens")


@given(TEXTS, st.slices(6))
def test_texts_are_a_list_of_what_was_written(texts: list[str], part: slice) -> None:
    found = mapped([text.encode() for text in texts])
    assert list(found) == texts
    assert len(found) == len(texts)
    assert [found[i] for i in range(len(texts))] == texts
    assert [found[-i - 1] for i in range(len(texts))] == texts[::-1]
    assert found[part] == texts[part]
    for text in texts:
        assert text in found


def test_an_index_beyond_the_texts_is_an_error() -> None:
    found = mapped([b"a", b"b"])
    for index in (2, -3):
        with pytest.raises(IndexError):
            found[index]


def test_a_text_that_is_not_utf_8_is_named_by_its_number() -> None:
    found = mapped([b"good", b"\xff", b"also good"])
    assert (found[0], found[2]) == ("good", "also good")
    reads: list[Callable[[], object]] = [lambda: found[1], lambda: list(found), lambda: found[0:2]]
    for read in reads:
        with pytest.raises(FormatError, match="tokens: text 1 is not UTF-8"):
            read()


def test_a_single_text_is_decoded_or_refused() -> None:
    assert MappedText(memoryview("né".encode()), "m.gguf: name").text == "né"
    with pytest.raises(FormatError, match="name is not UTF-8 text"):
        _ = MappedText(memoryview(b"\xff"), "m.gguf: name").text
