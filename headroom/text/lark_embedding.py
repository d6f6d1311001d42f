"""Rewrites the Lark grammar of a custom tool's text as a part of the grammar of a tool call.

In the call the text is in a JSON string, where some characters are escaped, or between tags, where
it must not contain the end tag. So terminals are rewritten, and names get a prefix. Two more
changes are needed for llguidance's lexer, which takes the longest terminal and never backtracks:

- A rule that is not recursive becomes a terminal. Otherwise the lexer could not tell a line from
  the line break after it in JSON: at the backslash of the line break, the line might continue.
- What the grammar ignores is written explicitly before each terminal. The lexer would also ignore
  it after the last terminal, where it may be the beginning of the end tag. A grammar that ignores
  something becomes one terminal, or keeps all its rules as rules: if some rules became terminals, a
  longer terminal could hide that the text may already end.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headroom.errors import HeadroomError
from headroom.text.json_regex import json_regex

# Terminals of Lark's `common` that match escaped characters or may match a tag.
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+([^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
_TOKEN = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    |(?P<line>(?:\r?\n[ \t]*)+)
    |(?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<keyword>%[a-z]+)
    |(?P<reference><[^<>\s]+>|@[\w-]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9-]*)
    |(?P<repeat>[*+?]|\{[0-9, ]*\}|~[ ]*[0-9]+(?:[ ]*\.\.[ ]*[0-9]+)?)
    |(?P<other>->|.)""",
    re.VERBOSE,
)
_ATOMS = ("string", "regex", "range", "terminal")
_RANGE = re.compile(r'(?<=")\s*\.\.\s*')  # between the ends of a range


class LarkError(HeadroomError):
    """A Lark grammar that cannot be used inside a tool call."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # the name of a group of _TOKEN
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedGrammar:
    """A rewritten grammar, to be added to the grammar of a call."""

    definitions: Sequence[str]  # rules and terminals, one to a line
    start: str  # the rule or terminal that matches the whole text
    is_terminal: bool  # whether `start` is a terminal


def embed_lark(
    grammar: str,  # valid by itself
    prefix: str,  # of all names, in lower case; terminals get it in upper case
    *,
    in_json: bool = False,  # the text is in a JSON string, whose quotes the caller writes
    end: str = "",  # the end mark, which the text must not contain
) -> EmbeddedGrammar:
    """Return a grammar rewritten as a part of a call's grammar.

    No terminal of the result matches a text with the end mark. But if the result is a single
    terminal, the caller must exclude the mark itself.
    """
    return _GrammarRewriter(grammar, prefix, in_json=in_json, end=end).write()


class _GrammarRewriter:
    """Rewrites one grammar as a part of another."""

    def __init__(self, grammar: str, prefix: str, *, in_json: bool, end: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._terminals: dict[str, list[_Token]] = {}
        self._imports: dict[str, str] = {}  # names in `common`, by names here
        self._ignored: list[list[_Token]] = []
        for item in _items(list(_tokens(grammar))):
            self._sort(item)
        self._prefix = prefix
        self._in_json = in_json
        self._flat = self._find_flat_rules()
        self._end = "" if "start" in self._flat else end
        self._parts: list[str] = []  # terminals that are added for parts of rules

    def _sort(self, item: list[_Token]) -> None:
        """Record a rule, a terminal or a statement."""
        first = item[0]
        if first.text == "%ignore":
            self._ignored.append(item[1:])
        elif first.text == "%import":
            self._import(item)
        elif first.kind == "keyword":
            raise LarkError(f"{first.text} cannot be used here")
        elif len(item) < 2 or item[1].text != ":":
            raise LarkError(f"{first.text!r} has attributes, which cannot be used here")
        else:
            found = self._terminals if first.kind == "terminal" else self._rules
            found[_name(first)] = item[2:]

    def _import(self, item: list[_Token]) -> None:
        names = [token.text for token in item if token.kind in ("terminal", "rule")]
        if names[0] != "common":
            raise LarkError(f"only terminals of `common` can be imported, not of {names[0]!r}")
        if any(token.text == "->" for token in item):
            self._imports[names[2]] = names[1]
        else:
            self._imports |= {name: name for name in names[1:]}

    def _find_flat_rules(self) -> set[str]:
        """Return the rules that are not recursive and use no recursive rule."""
        needs = {
            rule: {_name(token) for token in body if token.kind == "rule"}
            for rule, body in self._rules.items()
        }
        flat: set[str] = set()
        while more := {rule for rule in needs if rule not in flat and needs[rule] <= flat}:
            flat |= more
        return flat if "start" in flat or not self._ignored else set()

    def write(self) -> EmbeddedGrammar:
        """Return the grammar with its names and terminals rewritten."""
        lines = [
            f"{self._terminal_name(name)}: {self._guarded(self._spelled(body))}"
            for name, body in self._terminals.items()
        ]
        for local, name in self._imports.items():
            if name in _COMMON:
                body = [_Token("regex", f"/{_COMMON[name]}/")]
                lines.append(f"{self._terminal_name(local)}: {self._guarded(self._spelled(body))}")
            else:
                lines.append(f"%import common.{name} -> {self._terminal_name(local)}")
        for name, body in self._rules.items():
            if name in self._flat:
                written = self._guarded(self._spelled(body, woven=True))
            else:
                written = self._rule_body(body)
            lines.append(f"{self._rule_name(name)}: {written}")
        if self._ignored:
            choices = " | ".join(f"({self._spelled(body)})" for body in self._ignored)
            lines.append(f"{self._terminal_name('IGNORED')}: {self._guarded(f'({choices})+')}")
        return EmbeddedGrammar(
            definitions=lines + self._parts,
            start=self._rule_name("start"),
            is_terminal="start" in self._flat,
        )

    def _rule_name(self, name: str) -> str:
        if name in self._flat:
            return self._terminal_name(f"RULE-{name.upper()}")
        return f"{self._prefix}-{name}"

    def _terminal_name(self, name: str) -> str:
        return f"{self._prefix.upper()}-{name}"

    def _spelled(self, body: Sequence[_Token], *, woven: bool = False) -> str:
        """Return a body as text; if `woven`, ignored text is allowed before each terminal."""
        return " ".join(self._token(token, woven=woven) for token in body)

    def _rule_body(self, body: Sequence[_Token]) -> str:
        """Return the body of a rule, with consecutive terminals joined into one terminal."""
        written: list[str] = []
        run: list[_Token] = []
        for token in [*body, _Token("other", "")]:
            if run and not self._ignored and (self._is_atom(token) or token.kind == "repeat"):
                run.append(token)
                continue
            if run:
                written.append(self._part(run))
                run = []
            if self._is_atom(token):
                run.append(token)
            else:
                written.append(self._token(token))
        return " ".join(written).strip()

    def _part(self, run: Sequence[_Token]) -> str:
        """Add a terminal for consecutive terminals, and return its name."""
        name = self._terminal_name(f"PART-{len(self._parts)}")
        self._parts.append(f"{name}: {self._guarded(self._spelled(run, woven=True))}")
        return name

    def _is_atom(self, token: _Token) -> bool:
        return token.kind in _ATOMS or (token.kind == "rule" and _name(token) in self._flat)

    def _guarded(self, body: str) -> str:
        """Return the body of a terminal that does not contain the end mark."""
        return f"({body}) & ~{containing(self._end)}" if self._end else body

    def _token(self, token: _Token, *, woven: bool = False) -> str:
        if token.kind in ("keyword", "reference") or token.text == "~":
            raise LarkError(f"{token.text} cannot be used here")
        if token.kind == "rule":
            return self._rule_name(_name(token))
        text = self._atom(token)
        if woven and self._ignored and token.kind in _ATOMS:
            return f"({self._terminal_name('IGNORED')}? {text})"
        return text

    def _atom(self, token: _Token) -> str:
        """Return a terminal as it is written in the call; other tokens stay unchanged."""
        if token.kind == "terminal":
            return self._terminal_name(token.text)
        if token.kind == "string" and self._end and self._end in _string(token.text):
            raise LarkError(f"the text {token.text} contains {self._end}, which ends the argument")
        if not self._in_json:
            return token.text
        if token.kind == "string" and not token.text.endswith("i"):
            return json.dumps(json.dumps(_string(token.text), ensure_ascii=False)[1:-1])
        if token.kind == "string":
            spelled = coded(_string(token.text))
            return f"/{json_regex(spelled, 'i')}/i" if spelled else '""'
        if token.kind == "range":
            low, high = (coded(_string(end)) for end in _RANGE.split(token.text))
            return f"/{json_regex(f'[{low}-{high}]')}/"
        if token.kind == "regex":
            pattern, _, flags = token.text[1:].rpartition("/")
            return f"/{json_regex(pattern, flags)}/{flags}"
        return token.text


def containing(*texts: str) -> str:
    """Return a regular expression, in Lark, that matches texts which contain one of `texts`."""
    return f"/(?s:.*)({'|'.join(map(coded, texts))})(?s:.*)/"


def coded(text: str) -> str:
    """Return a regular expression that matches a text, with all characters written as codes."""
    return "".join(f"\\x{{{ord(char):X}}}" for char in text)


def _tokens(grammar: str) -> Iterator[_Token]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        assert found is not None, "every character is a token"
        assert found.lastgroup is not None
        if found[0] in ("%json", "%lark", "%regex", "%llguidance"):
            raise LarkError(f"{found[0]} cannot be used here")
        at = found.end()
        if found.lastgroup != "skip":
            yield _Token(found.lastgroup, found[0])


def _items(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield the tokens of each rule, terminal or statement.

    A line that begins with a bar continues the item before it. Names of alternatives (-> name) are
    left out: they only name parts of a parse tree.
    """
    item: list[_Token] = []
    following = [*tokens[1:], _Token("line", "\n")]
    for token, after in zip(tokens, following, strict=True):
        named = bool(item) and item[-1].text == "->" and item[0].text != "%import"
        if named and token.kind == "rule":
            item.pop()
        elif token.kind != "line":
            item.append(token)
        elif item and after.text != "|":
            yield item
            item = []
    if item:
        yield item


def _name(token: _Token) -> str:
    """Return the name of a rule or terminal, without the marks for parse trees."""
    return token.text.lstrip("!?")


def _string(literal: str) -> str:
    """Return the text that a literal stands for."""
    value = re.sub(
        r"\\(.)", lambda found: "\\u00" if found[1] == "x" else found[0], literal.removesuffix("i")
    )
    text = json.loads(value)
    assert isinstance(text, str)
    return text
