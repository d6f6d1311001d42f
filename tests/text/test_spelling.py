"""How tokens stand for bytes."""

import pytest

from headroom.text.spelling import BYTE_OF, Spelling
from tests.text.reference_bpe import byte_letters


def test_the_byte_alphabet_is_gpt2_s() -> None:
    assert [BYTE_OF[letter] for letter in byte_letters()] == list(range(256))


@pytest.mark.parametrize(
    ("spelling", "token", "expected"),
    [
        (Spelling.BYTE_LEVEL, "Ġhi", b" hi"),
        (Spelling.BYTE_LEVEL, "Ċ", b"\n"),
        (Spelling.BYTE_LEVEL, "Ã©", "é".encode()),
        (Spelling.BYTE_LEVEL, "漢", "漢".encode()),
        (Spelling.BLANK_MARKS, "▁hi", b" hi"),
        (Spelling.BLANK_MARKS, "<0xe9>", b"\xe9"),
        (Spelling.BLANK_MARKS, "<0xE9> ", b"<0xE9> "),
        (Spelling.BLANK_MARKS, "é", "é".encode()),
    ],
)
def test_tokens_stand_for_the_expected_bytes(
    spelling: Spelling, token: str, expected: bytes
) -> None:
    assert spelling.to_bytes(token) == expected
