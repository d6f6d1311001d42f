"""ToolFormat: how a model writes tool calls, found in its chat template and vocabulary.

A model writes its calls in blocks: a start mark, one or several calls, and mostly an end mark. A
format names the marks, and has a reader: a generator that reads one block from a `CallScanner`.
Readers accept mistakes that leave the meaning certain (a missing end mark, a comma too many), and
raise NotACallError for all others.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from headroom.text.call_scanner import (
    CallScanner,
    NotACallError,
    Reading,
    read_json_value,
    read_string,
    read_string_value,
)
from headroom.text.chat_template import ChatTemplate
from headroom.text.json_calls import SCALARS, read_json_call, scalar_converters
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
QUOTE = '<|"|>'  # around strings in Gemma 4's calls
# What may follow the end mark of a plain argument; elsewhere the mark is a part of the argument.
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "function_tags": ("<parameter=", "</function>", "</tool_call>"),
    "argument_tags": ("<arg_key>", "</tool_call>"),
    "plain_keys": (",", "}", "]", "<tool_call|>"),
}
# The markup of tags that may follow a call's name or one of its arguments, without names of
# arguments.
_TAGS = (
    "<parameter=>",
    "<arg_key></arg_key><arg_value>",
    "</function></tool_call>",
    "</tool_call>",
    "<tool_call|>",
)
_ARGUMENT_NAME = re.compile("(<parameter=|<arg_key>)[^<>]*")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # the only ids of calls that Mistral's templates accept
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls."""

    name: FormatName
    recognised_by: tuple[str, ...] = ()  # a chat template with all these texts has this format
    starts: tuple[str, ...]  # marks with which a block of calls begins
    end: str = ""  # the mark that ends a block of calls; "": the end of the answer
    read: Callable[[CallScanner], Reading[None]]  # reads one block, from its start mark on
    begins_bare: bool = False  # an answer may begin with a call's JSON, without a mark
    short_ids: bool = False  # the chat template accepts only ids that match SHORT_ID
    native: bool = True  # the model was trained on it; False: the prompt must explain it
    writes_ids: bool = False  # the model writes an id with each call
    marks: frozenset[int] = frozenset()  # ids of the tokens that are markup of calls
    # Markup that is a control token, and its id: a grammar cannot spell these as text.
    control: Mapping[str, int] = field(default_factory=dict)

    def new_id(self) -> str:
        """Return an id for a call without one."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def read_tagged(scan: CallScanner) -> Reading[None]:
    """Read <tool_call>...</tool_call> around JSON, function tags or argument tags.

    Qwen3-Coder and its successors sometimes leave out the <tool_call> before <function=. Some
    models write several JSON objects between one pair of tags, with or without a list around them.
    """
    if (yield from scan.starts_with("<function=")):
        yield from _read_function_tag(scan)
    else:
        yield from scan.expect("<tool_call>")
        yield from scan.skip_blanks()
        character = yield from scan.peek()
        if character == "{":
            while (yield from scan.starts_with("{")):
                yield from read_json_call(scan, ["</tool_call>"])
                yield from scan.skip_blanks()
        elif character == "[":
            yield from _read_call_list(scan, ["]", "</tool_call>"])
        elif character == "<":
            yield from _read_function_tag(scan)
        else:
            yield from _read_argument_tags(scan)
    yield from _end_block(scan, "</tool_call>")


def _end_block(scan: CallScanner, mark: str) -> Reading[None]:
    """Read the end mark of a block with white space before it; it may be missing or repeated."""
    yield from scan.skip_blanks()
    while (yield from scan.take(mark)):
        scan.commit()
        yield from scan.skip_blanks()


def is_cut_markup(text: str) -> bool:
    """Return whether a text that ends an answer is the beginning of markup inside of a block."""
    markup = _ARGUMENT_NAME.sub(r"\1", "".join(text.split()))
    return any(tags.startswith(markup) for tags in _TAGS)


def _read_function_tag(scan: CallScanner) -> Reading[None]:
    """Read <function=NAME><parameter=KEY>VALUE</parameter></function>."""
    yield from scan.expect("<function=")
    name = yield from scan.take_name("><\n")
    yield from scan.expect(">")
    scan.begin_call(name)
    follows = FOLLOWS["function_tags"]
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
            ends, converters = ["</function>", "</tool_call>"], scalar_converters(scan.tools[name])
            yield from read_json_value(scan, scan.add_json, ends, converters)
            yield from scan.skip_blanks()
            yield from scan.take("</function>")
            scan.end_call()
            return
        else:
            raise NotACallError("A parameter or the end of the function is missing.")
    scan.add_json("{}" if separator == "{" else "}")
    scan.end_call()


def _read_argument_tags(scan: CallScanner) -> Reading[None]:
    """Read NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>."""
    name = yield from scan.take_name("<\n")
    scan.begin_call(name)
    follows = FOLLOWS["argument_tags"]
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
    scan.add_json("{}" if separator == "{" else "}")
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
    """Read an argument that is plain text, and emit it as JSON of the type in the tool's schema.

    Text is emitted as it comes. A value of any other type is emitted when it is complete.
    """
    types = argument_types(scan.tools[name], key)
    start = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
    if types == {"string"}:
        scan.add_json(f'{start}"')
        yield from scan.stream_until(end, follows, scan.add_string_piece, trims=trims)
        scan.add_json('"')
        return
    opens = ("{" if "object" in types else "") + ("[" if "array" in types else "")
    text = yield from scan.take_value(end, follows, opens=opens, trims=trims)
    scan.add_json(start + json_value(text, types))


def read_bare_json(scan: CallScanner) -> Reading[None]:
    """Read Llama 3's calls: bare JSON objects, after <|python_tag|> or at the answer's start."""
    marked = yield from scan.take("<|python_tag|>")
    yield from scan.skip_blanks()
    yield from read_json_call(scan, ["<|python_tag|>"], marked=marked)
    while True:  # semicolons separate several calls
        yield from scan.skip_blanks()
        if not (yield from scan.take(";")):
            return
        yield from scan.skip_blanks()
        if (yield from scan.peek()) != "{":
            return
        yield from read_json_call(scan, ["<|python_tag|>"], marked=marked)


def read_marked_list(scan: CallScanner) -> Reading[None]:
    """Read Mistral's calls: [TOOL_CALLS] and a list of objects, or a name and [ARGS]."""
    yield from scan.expect("[TOOL_CALLS]")
    yield from scan.skip_blanks()
    character = yield from scan.peek()
    if character == "{":
        yield from read_json_call(scan, ["[TOOL_CALLS]"])
    elif character == "[":
        yield from _read_call_list(scan, ["]", "[TOOL_CALLS]"])
    else:
        yield from _read_named_arguments(scan)


def _read_call_list(scan: CallScanner, ends: Collection[str]) -> Reading[None]:
    """Read [{"name": NAME, "arguments": {...}}, ...]."""
    yield from scan.expect("[")
    yield from scan.skip_blanks()
    while True:
        yield from read_json_call(scan, ends)
        yield from scan.skip_blanks()
        if (yield from scan.take("]")):
            scan.commit()
            return
        if not (yield from scan.take(",")):
            return
        yield from scan.skip_blanks()
        scan.commit()


def _read_named_arguments(scan: CallScanner) -> Reading[None]:
    """Read NAME[CALL_ID]ID[ARGS]{...}; [CALL_ID]ID and [ARGS] may be missing."""
    name = yield from scan.take_name("[{")
    call_id = ""
    if (yield from scan.take("[CALL_ID]")):
        call_id = yield from scan.take_before("[{")
    yield from scan.take("[ARGS]")
    yield from scan.skip_blanks()
    call_id = call_id if SHORT_ID.fullmatch(call_id) else ""
    if (yield from scan.peek()) != "{":
        if scan.ended and any(mark.startswith(scan.rest) for mark in ("[CALL_ID]", "[ARGS]")):
            scan.advance(len(scan.rest))  # the answer breaks off before the arguments
            scan.begin_call(name, call_id)
        raise NotACallError("The arguments are not an object.")
    scan.begin_call(name, call_id)
    converters = scalar_converters(scan.tools[name])
    yield from read_json_value(scan, scan.add_json, ["[TOOL_CALLS]"], converters)
    scan.end_call()


def read_plain_keys(scan: CallScanner) -> Reading[None]:
    """Read Gemma 4's <|tool_call>call:NAME{key:value}<tool_call|>."""
    yield from scan.expect("<|tool_call>")
    yield from scan.skip_blanks()
    yield from scan.expect("call:")
    name = yield from scan.take_name("{<\n")
    scan.begin_call(name)
    yield from _read_plain_keys_object(scan, name)
    scan.end_call()
    yield from _end_block(scan, "<tool_call|>")


def _read_plain_keys_object(scan: CallScanner, name: str) -> Reading[None]:
    """Read an object whose keys have no quotes and whose strings stand between <|"|> tokens."""
    stack: list[str] = []  # the closing brackets that are still to come
    gap = ""  # a comma that was read; it is emitted with what follows it
    key = ""  # the name of the call's argument that is being read
    wants = "value"  # or "key", "next": a comma or a closing bracket
    while True:
        yield from scan.skip_blanks()
        character = yield from scan.peek()
        if not character:  # the answer breaks off: only a comma can have been read
            scan.commit()
            raise NotACallError("The arguments have no end.")
        if stack and character == stack[-1] and (wants != "value" or character == "]"):
            scan.advance(1)
            scan.add_json(stack.pop())
            wants, gap = "next", ""
        elif wants == "next":
            if character != ",":
                if not (yield from scan.starts_with("<tool_call|>")):
                    raise NotACallError("A comma or a bracket is missing.")
                scan.add_json("".join(reversed(stack)))
                return
            scan.advance(1)
            gap = ", "
            wants = "key" if stack[-1] == "}" else "value"
        elif wants == "key":
            word = yield from _read_plain_keys_key(scan)
            key = word if len(stack) == 1 else key
            yield from scan.skip_blanks()
            if not (yield from scan.peek()):  # the answer breaks off in a key, which is markup
                scan.commit()
            yield from scan.expect(":")
            scan.add_json(f"{gap}{json.dumps(word, ensure_ascii=False)}: ")
            wants, gap = "value", ""
        elif character in ("{", "["):
            scan.advance(1)
            scan.add_json(gap + character)
            stack.append("}" if character == "{" else "]")
            wants, gap = ("key" if character == "{" else "value"), ""
        else:
            # The tool's schema tells the type of an argument. The type of a value inside of lists
            # and objects is guessed from its text.
            types = argument_types(scan.tools[name], key) if len(stack) == 1 else _BARE_TYPES
            yield from _read_plain_keys_value(scan, gap, types or _BARE_TYPES)
            wants, gap = "next", ""
        if not stack:
            return


def _read_plain_keys_key(scan: CallScanner) -> Reading[str]:
    if (yield from scan.take(QUOTE)):
        return (yield from scan.take_through(QUOTE))
    if (yield from scan.starts_with('"')):
        return (yield from read_string_value(scan))
    key = (yield from scan.take_before(",:{}[]<")).strip()
    if not key:
        raise NotACallError("A key is missing.")
    return key


def _read_plain_keys_value(scan: CallScanner, gap: str, types: frozenset[str]) -> Reading[None]:
    follows = FOLLOWS["plain_keys"]
    if types <= SCALARS and (yield from scan.take(QUOTE)):
        text = yield from scan.take_value(QUOTE, follows, opens="", trims=False)
        scan.add_json(gap + json_value(text, types))
    elif (yield from scan.take(QUOTE)):
        scan.add_json(f'{gap}"')
        yield from scan.stream_until(QUOTE, follows, scan.add_string_piece, trims=False)
        scan.add_json('"')
    elif (yield from scan.starts_with('"')):
        scan.add_json(gap)
        yield from read_string(scan, scan.add_json)
    else:
        word = (yield from scan.take_before(",{}[]<")).strip()
        # A value at the very end of the answer is refused: its last digits may be missing.
        if not word or not (yield from scan.peek()):
            raise NotACallError("A value is missing.")
        scan.add_json(gap + json_value(word, types))


_BARE_TYPES = frozenset(("string", "integer", "number", "boolean", "null"))
# A template may fit several formats: the first one is taken.
KNOWN_FORMATS = (
    ToolFormat(
        name="function_tags",
        recognised_by=("<tool_call>", "<function="),
        starts=("<tool_call>", "<function="),
        end="</tool_call>",
        read=read_tagged,
    ),
    ToolFormat(
        name="argument_tags",
        recognised_by=("<tool_call>", "<arg_key>"),
        starts=("<tool_call>",),
        end="</tool_call>",
        read=read_tagged,
    ),
    ToolFormat(
        name="plain_keys",
        recognised_by=("<|tool_call>", "call:"),
        starts=("<|tool_call>",),
        end="<tool_call|>",
        read=read_plain_keys,
    ),
    ToolFormat(
        name="named_json",
        recognised_by=("[TOOL_CALLS]", "[ARGS]"),
        starts=("[TOOL_CALLS]",),
        read=read_marked_list,
        short_ids=True,
    ),
    ToolFormat(
        name="json_list",
        recognised_by=("[TOOL_CALLS]",),
        starts=("[TOOL_CALLS]",),
        read=read_marked_list,
        short_ids=True,
    ),
    ToolFormat(
        name="json_tags",
        recognised_by=("<tool_call>", '{"name"'),
        starts=("<tool_call>",),
        end="</tool_call>",
        read=read_tagged,
    ),
    ToolFormat(
        name="bare_json",
        recognised_by=('"parameters": ', "<|start_header_id|>", "tool_calls"),
        starts=("<|python_tag|>",),
        read=read_bare_json,
        begins_bare=True,
    ),
)
# Markup of calls that is a single token in the vocabularies of the models that use it.
_MARKS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call>", "<tool_call|>", QUOTE),
    *("<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)


def read_any(scan: CallScanner) -> Reading[None]:
    """Read calls of a model without a native format: tags, or bare JSON at the answer's start."""
    if (yield from scan.starts_with("{")):
        yield from read_bare_json(scan)
        yield from _end_block(scan, "</tool_call>")
    else:
        yield from read_tagged(scan)


_FALLBACK = ToolFormat(
    name="json_tags",
    starts=("<tool_call>", "<function="),
    end="</tool_call>",
    read=read_any,
    begins_bare=True,
    native=False,
)


def find_tool_format(tokenizer: Tokenizer, template: ChatTemplate | None) -> ToolFormat:
    """Return the format in which a model writes tool calls.

    If the chat template has none, the prompt explains JSON between <tool_call> tags to the model.
    Calls in other common formats are then read, too.
    """
    found = {mark: token for mark in _MARKS if (token := tokenizer.find(mark)) is not None}
    control = {mark: token for mark, token in found.items() if tokenizer.is_control(token)}
    source = template.source if template is not None else ""
    source = source.replace('\\"', '"')  # quotes in Jinja's strings
    fitting = (form for form in KNOWN_FORMATS if all(text in source for text in form.recognised_by))
    return replace(
        next(fitting, _FALLBACK),
        marks=frozenset(found.values()),
        control=control,
        writes_ids="[CALL_ID]" in source,
    )
