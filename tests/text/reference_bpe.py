"""Plain, slow encoders written from the definitions: oracles that share nothing with ours."""

from collections.abc import Sequence
from itertools import pairwise

import regex

# The white space of Unicode, spelled out: libraries do not agree on the separators 1C to 1F.
SPACE = r"[\t-\r \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
NO_SPACE = "[^" + SPACE[1:]


def byte_letters() -> list[str]:
    """Return the printable letter of each byte, in the order GPT-2 gave them out."""
    letters, spare = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173):
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + spare))
            spare += 1
    return letters


class ByteLevelReference:
    """Byte-level BPE: cut by each pattern in turn, then merge by rank, one pair at a time."""

    def __init__(self, ids: dict[str, int], merges: Sequence[tuple[str, str]], patterns: list[str]):
        self.ids = ids
        self.ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        self.letters = byte_letters()
        self.whole_words = False

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        words = [text]
        for pattern in self.patterns:
            words = [piece for word in words for piece in cut(pattern, word)]
        return [token for word in words for token in self._word(word)]

    def _word(self, word: str) -> list[int]:
        letters = [self.letters[byte] for byte in word.encode()]
        parts = [letter for letter in letters if letter in self.ids]  # others cannot be said
        if self.whole_words and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 60))
            if best not in self.ranks:
                break
            merged, index = [], 0
            while index < len(parts):
                if tuple(parts[index : index + 2]) == best:
                    merged.append(best[0] + best[1])
                    index += 2
                else:
                    merged.append(parts[index])
                    index += 1
            parts = merged
        return [self.ids[part] for part in parts]


def slow_pattern(pattern: str) -> str:
    """Spell white space out, so that the slow oracle and the library mean the same by it."""
    inside = pattern.replace(r"[^\s", "[^" + SPACE[1:-1]).replace(r"[^(\s", "[^(" + SPACE[1:-1])
    return inside.replace(r"\S", NO_SPACE).replace(r"\s", SPACE)


def cut(pattern: "regex.Pattern[str]", text: str) -> list[str]:
    """Return matches and what stands between them, in order."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def sentencepiece_encode(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """Merge neighbours into the token with the best score, leftmost first; rest as bytes."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    parts = list(text)
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        known = [(-scores[ids[whole]], index) for index, whole in enumerate(joined) if whole in ids]
        if not known:
            break
        _, index = min(known)
        parts[index : index + 2] = [joined[index]]
    out = []
    for part in parts:
        spelled = [part] if part in ids else [f"<0x{byte:02X}>" for byte in part.encode()]
        out += [ids[piece] for piece in spelled]
    return out
