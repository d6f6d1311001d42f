"""ToolFormat: how a model writes tool calls, found in its chat template and vocabulary.

A format has the marks with which calls begin and a reader: a generator that reads the calls of one
block from a `CallScanner`. Readers are lenient where the meaning is certain (a missing end mark, a
comma too many), and raise NotACallError where it is not.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from headroom.text.call_scanner import (
    BLANKS,
    CallScanner,
    NotACallError,
    Reading,
    read_json,
    read_string,
    read_string_value,
    whole_json,
)
from headroom.text.chat_template import ChatTemplate
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_values import argument_types, json_value

FormatName = Literal[
    "json_tags",
    "function_tags",
    "argument_tags",
    "plain_keys",
    "bare_json",
    "json_list",
    "named_json",
]
_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type")
_QUOTE = '<|"|>'  # around strings in Gemma 4's calls
_PLAIN_END = BLANKS + ",:{}[]<"
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # of a call, as Mistral's templates demand
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: FormatName
    starts: tuple[str, ...]  # marks with which a block of calls begins
    end: str = ""  # the mark that ends a block of calls; "": the end of the answer
    read: Callable[[CallScanner], Reading[None]]  # reads one block, from its start mark on
    begins_bare: bool = False  # an answer may begin with a call's JSON, without a mark
    short_ids: bool = False  # ids are nine letters and digits, as Mistral's templates demand
    native: bool = True  # the model's own; False: the prompt must explain it to the model
    writes_ids: bool = False  # the model gives its calls ids
    marks: frozenset[int] = frozenset()  # tokens of the markup; some are control tokens
    # Markup that is control tokens, with their ids: a grammar cannot spell these as text.
    control: Mapping[str, int] = field(default_factory=dict)

    def new_id(self) -> str:
        """Return an id for a call to which the model gave none."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def read_tagged(scan: CallScanner) -> Reading[None]:
    """Read <tool_call>...</tool_call>, around any of the three ways to write a call.

    Qwen3-Coder and its successors at times leave out <tool_call> before <function=.
    """
    if (yield from scan.starts_with("<function=")):
        yield from _read_function_tag(scan)
    else:
        yield from scan.expect("<tool_call>")
        yield from scan.skip_blanks()
        character = yield from scan.peek()
        if character == "{":
            yield from _read_json_call(scan, ["</tool_call>"])
        elif character == "[":  # several calls between one pair of tags
            yield from _read_call_list(scan, ["]", "</tool_call>"])
        elif character == "<":
            yield from _read_function_tag(scan)
        else:
            yield from _read_argument_tags(scan)
    yield from _end_block(scan, "</tool_call>")


def _end_block(scan: CallScanner, mark: str) -> Reading[None]:
    """Read the mark after calls, with white space before it, if it is there."""
    yield from scan.skip_blanks()
    if (yield from scan.take(mark)):
        scan.commit()


def _read_function_tag(scan: CallScanner) -> Reading[None]:
    """Read <function=NAME><parameter=KEY>VALUE</parameter></function>."""
    yield from scan.expect("<function=")
    name = yield from scan.take_name("><\n")
    yield from scan.expect(">")
    scan.begin(name)
    follows = ("<parameter=", "</function>", "</tool_call>")
    separator = "{"
    while True:
        yield from scan.skip_blanks()
        if (yield from scan.take("<parameter=")):
            key = yield from scan.take_through(">")
            yield from _read_value(
                scan, name, key, separator, end="</parameter>", follows=follows, trims=True
            )
            separator = ", "
        elif (yield from scan.take("</function>")) or (yield from scan.starts_with("</tool_call>")):
            break
        elif separator == "{" and (yield from scan.starts_with("{")):
            yield from read_json(scan, scan.add, ["</function>", "</tool_call>"])
            yield from scan.skip_blanks()
            yield from scan.take("</function>")
            scan.end_call()
            return
        else:
            raise NotACallError("A parameter or the end of the function is missing.")
    scan.add("{}" if separator == "{" else "}")
    scan.end_call()


def _read_argument_tags(scan: CallScanner) -> Reading[None]:
    """Read NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>."""
    name = yield from scan.take_name("<\n")
    scan.begin(name)
    follows = ("<arg_key>", "</tool_call>")
    separator = "{"
    while True:
        yield from scan.skip_blanks()
        if (yield from scan.take("<arg_key>")):
            key = yield from scan.take_through("</arg_key>")
            yield from scan.skip_blanks()
            yield from scan.expect("<arg_value>")
            yield from _read_value(
                scan, name, key, separator, end="</arg_value>", follows=follows, trims=False
            )
            separator = ", "
        elif (yield from scan.starts_with("</tool_call>")):
            break
        else:
            raise NotACallError("An argument or the end of the call is missing.")
    scan.add("{}" if separator == "{" else "}")
    scan.end_call()


def _read_value(
    scan: CallScanner,
    name: str,
    key: str,
    separator: str,  # what comes before the key in the JSON text
    *,
    end: str,
    follows: Collection[str],
    trims: bool,
) -> Reading[None]:
    """Read an argument's plain text as JSON of the type that the tool's schema names."""
    types = argument_types(scan.tools[name], key)
    start = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
    if types == {"string"}:
        scan.add(f'{start}"')
        yield from scan.pieces_before(
            end,
            follows,
            lambda piece: scan.add(json.dumps(piece, ensure_ascii=False)[1:-1]),
            trims=trims,
        )
        scan.add('"')
        return
    pieces: list[str] = []
    yield from scan.pieces_before(end, follows, pieces.append, trims=trims)
    scan.add(start + json_value("".join(pieces), types))


def _read_json_call(scan: CallScanner, ends: Collection[str]) -> Reading[None]:
    """Read {"name": NAME, "arguments": {...}}; the keys may come in another order."""
    call = _JsonCall(scan, ends)
    yield from call.read()
    if not scan.in_call:
        raise NotACallError("The call has no name.")
    if not call.has_arguments:
        scan.add("{}")
    scan.end_call()


class _JsonCall:
    """A call that is written as a JSON object, while it is read."""

    def __init__(self, scan: CallScanner, ends: Collection[str]) -> None:
        self._scan = scan
        self._ends = ends  # marks that may follow the call
        self._early: list[str] = []  # arguments that came before the name
        self._id = ""
        self.has_arguments = False

    def read(self, *, nested: bool = False) -> Reading[None]:
        """Read the object, and in it one more that is named "function"."""
        scan = self._scan
        yield from scan.expect("{")
        first = True
        while True:
            yield from scan.skip_blanks()
            if (yield from scan.take("}")):
                return
            if not first and not (yield from scan.take(",")):
                # Only the last bracket is missing if the arguments are whole.
                if scan.in_call and self.has_arguments and (yield from self._at_end()):
                    return
                raise NotACallError("A comma is missing.")
            yield from scan.skip_blanks()
            if not first and (yield from scan.take("}")):
                return
            first = False
            key = yield from read_string_value(scan)
            if key not in _CALL_KEYS and not scan.in_call:
                raise NotACallError(f"A call has no {key!r}.")
            yield from scan.skip_blanks()
            yield from scan.expect(":")
            yield from scan.skip_blanks()
            yield from self._read_field(key, nested=nested)

    def _at_end(self) -> Reading[bool]:
        for mark in self._ends:
            if (yield from self._scan.starts_with(mark)):
                return True
        return False

    def _read_field(self, key: str, *, nested: bool) -> Reading[None]:
        scan = self._scan
        character = yield from scan.peek()
        if key in _NAME_KEYS and character == '"' and not scan.in_call:
            name = yield from read_string_value(scan)
            scan.begin(name, self._id)
            scan.add("".join(self._early))
        elif key in _ARGUMENT_KEYS and not self.has_arguments:
            yield from self._read_arguments()
            self.has_arguments = True
        elif key == "function" and character == "{" and not nested:
            yield from self.read(nested=True)
        elif key == "id" and character == '"':
            self._id = yield from read_string_value(scan)
        else:
            yield from read_json(scan, lambda piece: None, self._ends)

    def _read_arguments(self) -> Reading[None]:
        scan = self._scan
        emit = scan.add if scan.in_call else self._early.append
        character = yield from scan.peek()
        if character == "{":
            yield from read_json(scan, emit, self._ends)
            return
        # Some models write the object as a string, or null where there is nothing to say.
        pieces: list[str] = []
        yield from read_json(scan, pieces.append, self._ends)
        value = "".join(pieces)
        if value == "null":
            value = '"{}"'
        whole = whole_json(json.loads(value) or "{}") if value.startswith('"') else None
        if whole is None or not whole.startswith("{"):
            raise NotACallError("The arguments are no object.")
        emit(whole)


def read_bare_json(scan: CallScanner) -> Reading[None]:
    """Read Llama 3's calls: bare JSON objects, after <|python_tag|> or at the answer's start."""
    if (yield from scan.take("<|python_tag|>")):
        yield from scan.skip_blanks()
    yield from _read_json_call(scan, ["<|python_tag|>"])
    while True:  # several calls come with semicolons between them
        yield from scan.skip_blanks()
        if not (yield from scan.take(";")):
            return
        yield from scan.skip_blanks()
        if (yield from scan.peek()) != "{":
            return
        yield from _read_json_call(scan, ["<|python_tag|>"])


def read_marked_list(scan: CallScanner) -> Reading[None]:
    """Read Mistral's calls: [TOOL_CALLS] and a list of objects, or a name and [ARGS]."""
    yield from scan.expect("[TOOL_CALLS]")
    yield from scan.skip_blanks()
    character = yield from scan.peek()
    if character == "{":
        yield from _read_json_call(scan, ["[TOOL_CALLS]"])
    elif character == "[":
        yield from _read_call_list(scan, ["]", "[TOOL_CALLS]"])
    else:
        yield from _read_named_arguments(scan)


def _read_call_list(scan: CallScanner, ends: Collection[str]) -> Reading[None]:
    """Read [{"name": NAME, "arguments": {...}}, ...]."""
    yield from scan.expect("[")
    yield from scan.skip_blanks()
    while True:
        yield from _read_json_call(scan, ends)
        yield from scan.skip_blanks()
        if (yield from scan.take("]")):
            scan.commit()
            return
        if not (yield from scan.take(",")):
            return
        yield from scan.skip_blanks()


def _read_named_arguments(scan: CallScanner) -> Reading[None]:
    """Read NAME[CALL_ID]ID[ARGS]{...}; the id may be missing, and [ARGS] in some files, too."""
    name = yield from scan.take_name("[{")
    call_id = ""
    if (yield from scan.take("[CALL_ID]")):
        call_id = yield from scan.take_before("[{")
    yield from scan.take("[ARGS]")
    yield from scan.skip_blanks()
    if (yield from scan.peek()) != "{":
        raise NotACallError("The arguments are no object.")
    scan.begin(name, call_id if SHORT_ID.fullmatch(call_id) else "")
    yield from read_json(scan, scan.add, ["[TOOL_CALLS]"])
    scan.end_call()


def read_plain_keys(scan: CallScanner) -> Reading[None]:
    """Read Gemma 4's <|tool_call>call:NAME{key:value}<tool_call|>."""
    yield from scan.expect("<|tool_call>")
    yield from scan.skip_blanks()
    yield from scan.expect("call:")
    name = yield from scan.take_name("{<\n")
    scan.begin(name)
    yield from _read_plain_keys_object(scan, name)
    scan.end_call()
    yield from _end_block(scan, "<tool_call|>")


def _read_plain_keys_object(scan: CallScanner, name: str) -> Reading[None]:
    """Read an object whose keys are bare and whose strings stand between quote tokens."""
    stack: list[str] = []  # the brackets to close
    gap = ""  # a comma that waits for what follows it
    key = ""  # of the call's argument
    wants = "value"  # or "key", "next"
    while True:
        yield from scan.skip_blanks()
        character = yield from scan.peek()
        if stack and character == stack[-1] and (wants != "value" or character == "]"):
            scan.advance(1)
            scan.add(stack.pop())
            wants, gap = "next", ""
        elif wants == "next":
            if character != ",":
                if not (yield from scan.starts_with("<tool_call|>")):
                    raise NotACallError("A comma or a bracket is missing.")
                scan.add("".join(reversed(stack)))
                return
            scan.advance(1)
            gap = ", "
            wants = "key" if stack[-1] == "}" else "value"
        elif wants == "key":
            word = yield from _read_plain_keys_key(scan)
            key = word if len(stack) == 1 else key
            yield from scan.skip_blanks()
            yield from scan.expect(":")
            scan.add(f"{gap}{json.dumps(word, ensure_ascii=False)}: ")
            wants, gap = "value", ""
        elif character in ("{", "["):
            scan.advance(1)
            scan.add(gap + character)
            stack.append("}" if character == "{" else "]")
            wants, gap = ("key" if character == "{" else "value"), ""
        else:
            # The schema says what a bare word at the top is; below, its look does.
            types = argument_types(scan.tools[name], key) if len(stack) == 1 else None
            yield from _read_plain_keys_value(scan, gap, types)
            wants, gap = "next", ""
        if not stack:
            return


def _read_plain_keys_key(scan: CallScanner) -> Reading[str]:
    if (yield from scan.take(_QUOTE)):
        return (yield from scan.take_through(_QUOTE))
    if (yield from scan.starts_with('"')):
        return (yield from read_string_value(scan))
    key = (yield from scan.take_before(",:{}[]<")).strip()
    if not key:
        raise NotACallError("A key is missing.")
    return key


def _read_plain_keys_value(
    scan: CallScanner, gap: str, types: frozenset[str] | None
) -> Reading[None]:
    if (yield from scan.take(_QUOTE)):
        scan.add(f'{gap}"')
        yield from scan.pieces_before(
            _QUOTE,
            (",", "}", "]", "<tool_call|>"),
            lambda piece: scan.add(json.dumps(piece, ensure_ascii=False)[1:-1]),
            trims=False,
        )
        scan.add('"')
    elif (yield from scan.starts_with('"')):
        scan.add(gap)
        yield from read_string(scan, scan.add)
    else:
        word = (yield from scan.take_before(",{}[]<")).strip()
        if not word or not (yield from scan.peek()):  # at the end, digits may be missing
            raise NotACallError("A value is missing.")
        scan.add(gap + json_value(word, types or _BARE_TYPES))


_BARE_TYPES = frozenset(("string", "integer", "number", "boolean", "null"))
# Each format, with texts that all stand in the chat templates of models that write it. The first
# one that fits is taken, so the more particular ones come first.
_KNOWN: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (
        ("<tool_call>", "<function="),
        ToolFormat(
            name="function_tags",
            starts=("<tool_call>", "<function="),
            end="</tool_call>",
            read=read_tagged,
        ),
    ),
    (
        ("<tool_call>", "<arg_key>"),
        ToolFormat(
            name="argument_tags", starts=("<tool_call>",), end="</tool_call>", read=read_tagged
        ),
    ),
    (
        ("<|tool_call>", "call:"),
        ToolFormat(
            name="plain_keys", starts=("<|tool_call>",), end="<tool_call|>", read=read_plain_keys
        ),
    ),
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        ToolFormat(
            name="named_json", starts=("[TOOL_CALLS]",), read=read_marked_list, short_ids=True
        ),
    ),
    (
        ("[TOOL_CALLS]",),
        ToolFormat(
            name="json_list", starts=("[TOOL_CALLS]",), read=read_marked_list, short_ids=True
        ),
    ),
    (
        ("<tool_call>", '{"name"'),
        ToolFormat(name="json_tags", starts=("<tool_call>",), end="</tool_call>", read=read_tagged),
    ),
    (
        ('"parameters": ', "<|start_header_id|>", "tool_calls"),
        ToolFormat(
            name="bare_json", starts=("<|python_tag|>",), read=read_bare_json, begins_bare=True
        ),
    ),
)
# Markup that is one token each in vocabularies of models that know it.
_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call>", "<tool_call|>", _QUOTE),
    *("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)


def read_any(scan: CallScanner) -> Reading[None]:
    """Read calls of a model with no format of its own: tags, or bare JSON at the start."""
    if (yield from scan.starts_with("{")):
        yield from read_bare_json(scan)
    else:
        yield from read_tagged(scan)


def find_tool_format(tokenizer: Tokenizer, template: ChatTemplate | None) -> ToolFormat:
    """Return the format in which a model writes tool calls.

    Where the chat template knows none, the prompt explains <tool_call> with JSON to the model, and
    other common ways to write a call are understood, too.
    """
    found = {mark: token for mark in _MARKS if (token := tokenizer.find(mark)) is not None}
    control = {mark: token for mark, token in found.items() if tokenizer.is_control(token)}
    source = template.source if template is not None else ""
    source = source.replace('\\"', '"')  # quotes in Jinja's strings
    fallback = ToolFormat(
        name="json_tags",
        starts=("<tool_call>", "<function="),
        end="</tool_call>",
        read=read_any,
        begins_bare=True,
        native=False,
    )
    fitting = (form for texts, form in _KNOWN if all(text in source for text in texts))
    return replace(
        next(fitting, fallback),
        marks=frozenset(found.values()),
        control=control,
        writes_ids="[CALL_ID]" in source,
    )
