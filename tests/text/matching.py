"""Whether llguidance accepts a text, byte by byte, and random texts that it accepts."""

import random
from functools import cache

from llguidance import LLMatcher, LLTokenizer


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")  # token t is byte t


def accepts(grammar: str, text: str) -> bool:
    """Return whether a whole text matches a Lark grammar."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    data = list(text.encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    return bool(matcher.consume_tokens(data) and matcher.is_accepting())


def written(grammar: str, dice: random.Random, most: int = 400) -> str | None:
    """Return a random text that a Lark grammar accepts; None if it does not end."""
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    data = b""
    for _ in range(most):
        if matcher.is_accepting() and dice.random() < 0.3:
            break
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if not (allowed := [byte for byte in range(128) if bits >> byte & 1]):
            break
        # Letters make texts long; breaks, marks and brackets end them.
        rare = [byte for byte in allowed if byte in b'\n"\\<>]})*']
        data += bytes([byte := dice.choice(rare if rare and dice.random() < 0.4 else allowed)])
        matcher.consume_token(byte)
    return data.decode() if matcher.is_accepting() else None
