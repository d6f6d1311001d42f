"""Anthropic's messages and their blocks, and their conversion to messages of a chat template."""

import base64
import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from headroom.server.invalid_bodies import short, wrong_type
from headroom.server.openai_tools import NonEmpty, ToolName
from headroom.server.schemas import LEFT_OUT_PART, Body, invalid

# The start of a line in Claude Code's system prompt that changes with every release and session.
BILLING = "x-anthropic-billing-header:"
HIDDEN = "hidden."  # begins the signature that carries the text of a thought that is not shown
MOST_THOUGHT_BYTES = 4 << 20  # of one thought in a signature
# What Anthropic's servers did in earlier answers; the model does not see it. The types of the
# results of such calls, such as web_search_tool_result, end with HOSTED_RESULT.
HOSTED_CALLS = ("server_tool_use", "mcp_tool_use")
HOSTED_RESULT = "_tool_result"
MESSAGE_BLOCKS = (
    *("text", "document", "search_result"),
    *("thinking", "redacted_thinking", "tool_use", "tool_result"),
)


def as_blocks(value: object) -> object:
    """Return content as a list of blocks; a text becomes one block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong_type("a text or a list of blocks")
    return value


def is_hosted(kind: str) -> bool:
    """Whether blocks of a type tell what Anthropic's servers did."""
    return kind in HOSTED_CALLS or kind.endswith(HOSTED_RESULT)


def _known(kinds: Sequence[str], *, hosted: bool = False) -> BeforeValidator:
    """Return a check that refuses blocks of any other type; `hosted` ones may pass, too."""

    def check(block: object) -> object:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise wrong_type("a block with a type")
        if kind not in kinds and not (hosted and is_hosted(kind)):
            allowed = ", ".join(kinds)
            raise ValueError(
                f"blocks of type {short(kind)!r} are not supported here, only: {allowed}"
            )
        return block

    return BeforeValidator(check)


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""

    @property
    def thought(self) -> str:
        """The text of the thought; if it was not shown, the signature has it."""
        return self.thinking or hidden_thought(self.signature)


class RedactedThinkingBlock(Body):
    """A thought that only Anthropic's servers can read; the prompt leaves it out."""

    type: Literal["redacted_thinking"]


class HostedBlock(Body):
    """What Anthropic's servers did in an earlier answer; the prompt leaves it out."""

    type: str


def _as_input(value: object) -> object:
    """Return the input of an earlier call as an object; clients send JSON text and null, too."""
    if value is None:
        return {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return from_json(value, allow_inf_nan=False)
    return value


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: NonEmpty
    name: ToolName
    input: Annotated[dict[str, Any], BeforeValidator(_as_input)]

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


TextBlocks = Annotated[
    list[Annotated[TextBlock, _known(["text"])]],
    Field(fail_fast=True),
    BeforeValidator(as_blocks),
]


class TextSource(Body):
    """The text of a document."""

    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class BlocksSource(Body):
    """The text of a document as blocks."""

    type: Literal["content"]
    content: TextBlocks

    @property
    def text(self) -> str:
        """The text, with line breaks between the blocks."""
        return join_texts(self.content)


READABLE = ("text", "content")  # types of a document's source


def _check_source(source: object) -> object:
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(kind, str) and kind not in READABLE:
        raise ValueError(
            f"documents from a source of type {short(kind)!r} are not supported, only of text: "
            "send the text with a source of type 'text' or 'content'"
        )
    return source


class DocumentBlock(Body):
    """A document of text."""

    type: Literal["document"]
    source: Annotated[
        TextSource | BlocksSource, Field(discriminator="type"), BeforeValidator(_check_source)
    ]
    title: str | None = None
    context: str | None = None  # what the client says of the document

    @property
    def text(self) -> str:
        """The document as the model reads it."""
        return "\n".join(part for part in (self.title, self.context, self.source.text) if part)


class SearchResultBlock(Body):
    """A text that the client found."""

    type: Literal["search_result"]
    source: str  # usually an address
    title: str
    content: TextBlocks

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        parts = (self.title, self.source, join_texts(self.content))
        return "\n".join(part for part in parts if part)


class UnreadableBlock(Body):
    """A picture or a document without text that a tool returned."""

    type: Literal["image", "document"]

    @property
    def text(self) -> str:
        """The text that the model gets instead of the block."""
        return LEFT_OUT_PART.format(kind=self.type)


Readable = TextBlock | DocumentBlock | SearchResultBlock


def join_texts(blocks: Sequence[Readable | UnreadableBlock]) -> str:
    """Return blocks of text as one text, with line breaks between them."""
    return "\n".join(block.text for block in blocks if block.text)


def _tag_of(block: object) -> str:
    """Return the tag of the class that reads a block, whose type `_known` has checked."""
    if isinstance(block, Body):  # already read
        return "hosted" if isinstance(block, HostedBlock) else getattr(block, "type", "")
    assert isinstance(block, dict)
    return "hosted" if is_hosted(block["type"]) else str(block["type"])


def _result_tag_of(block: object) -> str:
    """Return the tag of the class that reads a block of a result; clients cannot change those."""
    if isinstance(block, UnreadableBlock):
        return "unreadable"
    if isinstance(block, dict):
        source = block.get("source")
        kind = source.get("type") if isinstance(source, dict) else None
        if block["type"] == "image" or (block["type"] == "document" and kind not in READABLE):
            return "unreadable"
    return _tag_of(block)


ResultBlocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("text")]
            | Annotated[DocumentBlock, Tag("document")]
            | Annotated[SearchResultBlock, Tag("search_result")]
            | Annotated[UnreadableBlock, Tag("unreadable")],
            Discriminator(_result_tag_of),
            _known(["text", "image", "document", "search_result"]),
        ]
    ],
    Field(fail_fast=True),
    BeforeValidator(as_blocks),
]


class ToolResultBlock(Body):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: NonEmpty
    content: ResultBlocks = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        text = join_texts(self.content)
        return f"Error: {text}" if self.is_error else text


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[HostedBlock, Tag("hosted")],
    Discriminator(_tag_of),
    _known(MESSAGE_BLOCKS, hosted=True),
]
ROLES_OF = {
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
    "document": ("user",),
    "search_result": ("user",),
}


class AnthropicMessageBody(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), BeforeValidator(as_blocks)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> "AnthropicMessageBody":
        for block in self.content:
            if self.role not in ROLES_OF.get(block.type, (self.role,)):
                raise ValueError(
                    f"a message of the role {self.role!r} cannot have blocks of type {block.type!r}"
                )
        return self

    @property
    def texts(self) -> list[Readable]:
        """The blocks of text, documents included."""
        return [block for block in self.content if isinstance(block, Readable)]

    @property
    def calls(self) -> list[ToolUseBlock]:
        """The calls of an assistant."""
        return [block for block in self.content if isinstance(block, ToolUseBlock)]

    @property
    def results(self) -> list[ToolResultBlock]:
        """The results of calls."""
        return [block for block in self.content if isinstance(block, ToolResultBlock)]

    @property
    def thought(self) -> str:
        """The thoughts of an assistant."""
        blocks = (block for block in self.content if isinstance(block, ThinkingBlock))
        return "\n".join(thought for block in blocks if (thought := block.thought))


def system_text(blocks: Sequence[TextBlock]) -> str:
    """Return the system prompt without Claude Code's billing line.

    The line changes, so that no two prompts would begin alike.
    """
    kept = (_without_billing(block.text) for block in blocks)
    return "\n".join(text for text in kept if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


class History:
    """Converts Anthropic's messages to messages of a chat template, called turns here.

    Consecutive messages of one role become one turn, as in Anthropic's API, because many templates
    require alternating roles. Templates accept one system prompt, at the beginning; a later system
    message becomes a part of the user's turn, between tags.
    """

    def __init__(self, system: str, messages: Sequence[AnthropicMessageBody]) -> None:
        self._system = [system] if system else []
        self._turns: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the called tools, by the id of the call
        for index, message in enumerate(messages):
            self._add(message, f"messages[{index}]")

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns, with the field names of OpenAI's API."""
        if not self._system:
            return self._turns
        return [{"role": "system", "content": "\n".join(self._system)}, *self._turns]

    @property
    def continues(self) -> bool:
        """Whether the conversation ends with the beginning of the assistant's answer."""
        return bool(self._turns) and self._turns[-1]["role"] == "assistant"

    def _add(self, message: AnthropicMessageBody, where: str) -> None:
        text = join_texts(message.texts)
        if message.role == "assistant":
            # Text blocks of one answer follow each other without a line break.
            self._add_answer(message, "".join(block.text for block in message.texts))
        elif message.role == "system" and not self._turns:
            self._system.append(text)
        elif message.role == "system":
            self._say("user", f"<system-reminder>\n{text}\n</system-reminder>")
        else:
            # A template expects results right after the calls, before the user's text.
            for result in message.results:
                self._add_result(result, where)
            if text or not message.results:
                self._say("user", text)

    def _say(self, role: str, text: str) -> dict[str, Any]:
        """Add text to the last turn if it has this role, or else as a new turn."""
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": text})
        elif text:
            turn = self._turns[-1]
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
        return self._turns[-1]

    def _add_answer(self, message: AnthropicMessageBody, text: str) -> None:
        turn = self._say("assistant", text)
        if message.thought:
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = (
                f"{before}\n{message.thought}" if before else message.thought
            )
        for call in message.calls:
            turn.setdefault("tool_calls", []).append(call.for_template())
            self._names[call.id] = call.name

    def _add_result(self, result: ToolResultBlock, where: str) -> None:
        name = self._names.get(result.tool_use_id)
        if name is None:
            raise invalid(
                f"{where}.content",
                f"{where}.content: a tool_result answers the call {short(result.tool_use_id)!r}, "
                "but no tool_use block before it has this id.",
            )
        self._turns.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": name,
                "content": result.text,
            }
        )


def hidden_signature(thought: str) -> str:
    """Return a signature that carries the text of a thought that the client does not see."""
    return HIDDEN + base64.b64encode(zlib.compress(thought.encode())).decode()


def hidden_thought(signature: str) -> str:
    """Return the thought that a signature carries; empty if it carries none."""
    if not signature.startswith(HIDDEN):
        return ""
    try:
        data = base64.b64decode(signature.removeprefix(HIDDEN), validate=True)
        return zlib.decompressobj().decompress(data, MOST_THOUGHT_BYTES).decode(errors="ignore")
    except (ValueError, zlib.error):
        return ""
