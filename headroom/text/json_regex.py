"""Rewrites a regular expression so that it matches the same texts inside a JSON string."""

import re
from functools import cache

from llguidance import LLMatcher, LLTokenizer

from headroom.errors import HeadroomError

# Characters that a JSON string cannot hold as they are, each with its escape sequence.
_ESCAPES = {chr(code): f"u{code:04x}" for code in range(32)} | {
    '"': '"',
    "\\": "\\",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}
_ESCAPED = r'["\\\x00-\x1F]'  # the class of these characters
_GROUP = re.compile(r"\(\?(?:P?<\w+>|(?P<flags>[A-Za-z-]*)(?P<end>[:)]))")
_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)",
    re.DOTALL,
)
_ZERO_WIDTH = ("\\b", "\\B", "\\A", "\\z")


class RegexError(HeadroomError):
    """A regular expression that cannot be rewritten."""


def json_regex(pattern: str, flags: str = "") -> str:
    """Return a regular expression for the JSON strings, without quotes, that `pattern` matches.

    Each character has one spelling: an escape sequence only if JSON requires one, and then the
    shortest. The syntax is that of Rust's `regex`.
    """
    written: list[str] = []
    scopes = [flags]  # the flags that hold in each of the groups around this place
    at = 0
    while at < len(pattern):
        character = pattern[at]
        atom = character
        if character == "\\":
            found = _ESCAPE.match(pattern, at)
            atom = found[0] if found else character
            written.append(atom if atom in _ZERO_WIDTH else _json_atom(atom, scopes[-1]))
        elif character == "[":
            atom = _read_class(pattern, at)
            written.append(_json_atom(atom, scopes[-1]))
        elif character == "(":
            atom = _open_group(pattern, at, scopes)
            written.append(atom)
        elif character == ")" and len(scopes) > 1:
            scopes.pop()
            written.append(atom)
        elif character == "." or character in _ESCAPES:
            written.append(_json_atom(atom, scopes[-1]))
        else:
            written.append(atom)
        if "x" in scopes[-1].partition("-")[0]:
            raise RegexError("the flag x of a regular expression cannot be used here")
        at += len(atom)
    return "".join(written)


def _open_group(pattern: str, at: int, scopes: list[str]) -> str:
    """Return the beginning of a group; add the flags that it sets to `scopes`."""
    found = _GROUP.match(pattern, at)
    if found is None or found["flags"] is None:
        scopes.append(scopes[-1])
        return "(" if found is None else found[0]
    on, _, off = found["flags"].partition("-")
    now = "".join(sorted((set(scopes[-1]) | set(on)) - set(off)))
    if found["end"] == ")":  # such flags hold for the rest of the group around them
        scopes[-1] = now
    else:
        scopes.append(now)
    return found[0]


def _read_class(pattern: str, start: int) -> str:
    """Return the character class that begins at a bracket."""
    depth, at = 0, start
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # a bracket at the beginning is a plain character
        elif character == "]":
            depth -= 1
            if depth == 0:
                return pattern[start : at + 1]
        at += 1
    raise RegexError("a character class of a regular expression has no end")


def _json_atom(atom: str, flags: str) -> str:
    """Return the expression for one character in JSON; the atom is a class, an escape or a dot."""
    escaped = _escaped_members(atom, flags)
    if not escaped:
        return atom
    short = "".join("\\\\" if char == "\\" else _ESCAPES[char] for char in escaped if _short(char))
    choices = [f"[{short}]"] if short else []
    choices += [_ESCAPES[char] for char in escaped if not _short(char)]
    spelled = f"(?-i:\\\\(?:{'|'.join(choices)}))"
    if atom == ".":
        return f"(?:[^{_ESCAPED[1:-1]}]|{spelled})"
    return f"(?:[{atom}--{_ESCAPED}]|{spelled})"


def _short(character: str) -> bool:
    return len(_ESCAPES[character]) == 1


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")  # token t is byte t


@cache
def _escaped_members(atom: str, flags: str) -> tuple[str, ...]:
    """Return the characters of `_ESCAPES` that an atom matches, as llguidance understands it."""
    kept = "".join(flag for flag in flags if flag in "sR")  # others do not matter for these
    text = atom.replace("/", "\\/") if atom[0] != "\\" and "\\/" not in atom else atom
    matcher = LLMatcher(_bytes(), f"start: /(?{kept}:{text})/", log_level=0)
    if matcher.is_error():
        raise RegexError(f"the regular expression {atom!r} cannot be used")
    return tuple(char for char in _ESCAPES if matcher.validate_tokens([ord(char)]) == 1)
