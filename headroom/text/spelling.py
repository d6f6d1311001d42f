"""How a vocabulary spells the bytes of a token."""

import re
from enum import Enum

from headroom.formats.vocabulary import BLANK_MARK

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable_bytes() -> dict[str, int]:
    """Return byte-level BPE's alphabet: one printable character for each of the 256 bytes."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _printable_bytes()


class Spelling(Enum):
    """The two ways in which vocabularies spell bytes."""

    BYTE_LEVEL = "byte-level"  # every byte is one printable character
    BLANK_MARKS = "blank marks"  # plain text; blanks are marks, single bytes are <0xHH>

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that an ordinary token stands for."""
        if self is Spelling.BYTE_LEVEL:
            try:
                return bytes([BYTE_OF[character] for character in token])
            except KeyError:  # not in the alphabet: the vocabulary holds it as plain text
                return token.encode()
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(BLANK_MARK, " ").encode()
