"""ChatRenderer: a conversation with tools becomes a prompt, with remembered answers in it."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headroom.errors import RequestError
from headroom.text.chat_template import REASONING_FIELDS, ChatTemplate
from headroom.text.conversation import Message, Tool
from headroom.text.reasoning import Reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_formats import ToolFormat
from headroom.text.tool_history import (
    Turn,
    calls_of,
    history_turns,
    merged_turns,
    one_call_each,
    spelled_turns,
    with_objects,
    without_system,
)
from headroom.text.tool_memory import RememberedAnswer, ToolMemory

Piece = str | Sequence[int]  # text, or the tokens of an answer
# An answer is replayed as the content of a message, or in the place of a call.
Way = Literal["content", "call"]
_CONTEXT = 24  # characters of a prompt's end that must recur where an answer is replayed
_MOST_LEFT_OUT = 64  # characters before an answer that a template may leave out of its history


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in pieces: text of the template, and answers as the model wrote them."""

    pieces: tuple[Piece, ...]
    text: str  # the whole prompt

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of the prompt."""
        tokens: list[int] = []
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, str):
                tokens += tokenizer.encode(piece, add_bos=None if number == 0 else False)
            else:
                tokens += piece
        return tokens


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is wanted of a prompt besides its messages."""

    tools: Sequence[Tool]
    continues: bool  # the last message is an answer's beginning, which goes on
    variables: Mapping[str, Any]  # for the template


@dataclass(frozen=True, slots=True)
class _Replay:
    """An answer that is put into the prompt, and what marks its place in the template's text."""

    answer: RememberedAnswer
    body: str  # stands for the part after the thought
    thought: str  # stands for the thought
    is_current: bool  # no user's message follows it


class ChatRenderer:
    """Renders conversations with a model's template, whatever the template knows of tools."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        form: ToolFormat,
        reasoning: Reasoning | None,
        memory: ToolMemory,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._format = form
        self._reasoning = reasoning
        self._memory = memory
        self._stops = [tokenizer.token_text(token) for token in tokenizer.stop_ids]
        # How answers can be replayed with the template. Found when it is first needed.
        self._ways: tuple[Way, ...] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        continues: bool = False,  # the last message is an answer's beginning, which goes on
        variables: Mapping[str, Any] | None = None,  # for the template
    ) -> RenderedChat:
        """Return the prompt of a conversation."""
        variables = variables or {}
        if taken := sorted({"messages", "tools", "self"} & variables.keys()):
            raise RequestError(
                f"A template variable cannot have the name {taken[0]!r}.",
                param="chat_template_kwargs",
            )
        wish = _Wish(tools, continues, variables)
        if any(calls_of(message) for message in messages):
            messages = merged_turns(messages)
            replayed = self._replayed(messages, wish)
            if replayed is not None:
                return replayed
        text = self._render(messages, wish)
        return RenderedChat((text,), text)

    def _render(self, messages: Sequence[Message], wish: _Wish) -> str:
        """Return the template's text; where the template refuses, changed messages are tried."""
        render = self._template.render_start if wish.continues else self._template.render
        uses_tools = wish.tools or any(
            calls_of(message) or message.get("role") == "tool" for message in messages
        )
        if not uses_tools:
            return render(messages, **wish.variables)
        changes: list[Callable[[Sequence[Turn]], list[Turn]]]
        tools: list[dict[str, Any]] | None = None
        if self._format.native:
            turns = history_turns(messages, self._format)
            changes = [with_objects, one_call_each]
            tools = [tool.for_template() for tool in wish.tools] or None
        else:
            turns = spelled_turns(messages, wish.tools)
            changes = [without_system]
        try:
            return render(turns, tools=tools, **wish.variables)
        except RequestError as error:
            first = error
        for change in changes:
            if (changed := change(turns)) == turns:
                continue
            turns = changed
            try:
                return render(turns, tools=tools, **wish.variables)
            except RequestError:
                continue
        raise first

    def _replayed(self, messages: Sequence[Message], wish: _Wish) -> RenderedChat | None:
        """Return the prompt with remembered answers in it; None if there are none."""
        found = [self._memory.find(message) for message in messages]
        if not any(found):
            return None
        best: tuple[int, RenderedChat] | None = None
        for way in self._find_ways():
            filled = self._filled_in(messages, found, wish, way)
            if filled is not None and (best is None or filled[0] > best[0]):
                best = filled
            if best is not None and best[0] == sum(answer is not None for answer in found):
                break
        return None if best is None else best[1]

    def _filled_in(
        self,
        messages: Sequence[Message],
        found: Sequence[RememberedAnswer | None],
        wish: _Wish,
        way: Way,
    ) -> tuple[int, RenderedChat] | None:
        """Return the prompt with answers in it, and how many are as they were in every token."""
        users = [place for place, message in enumerate(messages) if message.get("role") == "user"]
        last_user = max(users, default=-1)
        turns: list[Message] = []
        replays = []
        for place, (message, answer) in enumerate(zip(messages, found, strict=True)):
            if answer is None:
                turns.append(message)
                continue
            replay = _Replay(answer, _new_placeholder(), _new_placeholder(), place > last_user)
            replays.append(replay)
            turns.append(self._marked(message, replay, way))
        try:
            text = self._render(turns, wish)
        except RequestError:
            return None
        if any(text.count(replay.body) != 1 for replay in replays):
            return None
        return self._filled(text, replays, way)

    def _marked(self, message: Message, replay: _Replay, way: Way) -> Turn:
        """Return a message with marks in the place of an answer."""
        turn = {key: value for key, value in message.items() if key != "tool_calls"}
        if way == "content":
            turn["content"] = replay.body
        else:
            call = calls_of(message)[0]
            function = {"name": call["function"]["name"], "arguments": {"k": replay.body}}
            turn |= {"content": "", "tool_calls": [{**call, "function": function}]}
        if replay.answer.rest and self._reasoning is not None:
            turn = {key: value for key, value in turn.items() if key not in REASONING_FIELDS}
            turn["reasoning_content"] = replay.thought
        return turn

    def _filled(
        self, text: str, replays: Sequence[_Replay], way: Way
    ) -> tuple[int, RenderedChat] | None:
        """Return a prompt with the answers in the places of their marks."""
        pieces: list[Piece] = []
        same = 0
        for replay in replays:
            region = self._region(text, replay.body, way)
            if region is None:
                return None
            start, end = region
            before, after = text[:start], text[end:]
            exact = self._exact(before, replay)
            if exact is not None:
                same += 1
                pieces += [exact, self._piece(replay.answer)]
                stripped = after.lstrip()
                text = stripped if stripped.startswith(tuple(self._stops)) else after
            else:
                before = before.replace(replay.thought, replay.answer.thought)
                body = replay.answer.raw[replay.answer.rest :].strip()
                pieces.append(before + body)
                text = after
        pieces.append(text)
        shown = "".join(
            piece if isinstance(piece, str) else self._tokenizer.decode(piece) for piece in pieces
        )
        return same, RenderedChat(tuple(_joined(pieces)), shown)

    def _piece(self, answer: RememberedAnswer) -> Piece:
        # A SentencePiece tokenizer would put a blank before the text that follows tokens.
        return answer.raw if self._tokenizer.drops_blank else answer.tokens

    def _exact(self, before: str, replay: _Replay) -> str | None:
        """Return the text before an answer exactly as it was in the prompt of the answer.

        None if the template does not write what was there, so that only the part of the answer
        after its thought can be replayed.
        """
        answer = replay.answer
        if answer.rest:
            if self._reasoning is None:
                return None
            before, found, between = before.partition(replay.thought)
            if not found or between.strip() != self._reasoning.end:
                return None
            if answer.raw.lstrip().startswith(self._reasoning.start.rstrip()):
                start = self._reasoning.start.rstrip()
                if not before.rstrip().endswith(start):
                    return None
                before = before.rstrip().removesuffix(start)
        before, prompt = before.rstrip(), answer.prompt_end
        end = len(prompt.rstrip())
        if before.endswith(prompt[max(0, end - _CONTEXT) : end]):
            return before + prompt[end:]
        if not replay.is_current:
            return None
        # In the current turn a template may leave out what a prompt has before an answer, such as
        # an empty thought. Older turns are left to the template.
        least = max(_CONTEXT, len(prompt) - _MOST_LEFT_OUT)
        for place in range(end - 1, least - 1, -1):
            context = prompt[place - _CONTEXT : place]
            if not context[-1].isspace() and before.endswith(context):
                return before + prompt[place:]
        return None

    def _region(self, text: str, mark: str, way: Way) -> tuple[int, int] | None:
        """Return where the answer is that a mark stands for."""
        place = text.index(mark)
        if way == "content":
            return place, place + len(mark)
        start = text.rfind(self._format.starts[0], 0, place)
        ends = [self._format.end] if self._format.end else self._stops
        found = [
            (at + (len(end) if self._format.end else 0))
            for end in ends
            if (at := text.find(end, place)) >= 0
        ]
        return (start, min(found)) if start >= 0 and found else None

    def _find_ways(self) -> tuple[Way, ...]:
        """Return how answers can be replayed with this template, tested by a probe."""
        if self._ways is None:
            ways: tuple[Way, ...] = ("content", "call")
            self._ways = tuple(way for way in ways if self._probe(way))
        return self._ways

    def _probe(self, way: Way) -> bool:
        """Whether a template shows marks, and results as they are shown after calls."""
        wish = _Wish([Tool(name="f")], continues=False, variables={})
        marks = [_new_placeholder() for _ in range(4)]
        call = {"id": "abcdefghi", "function": {"name": "f", "arguments": "{}"}}
        asked: Turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        nothing = RememberedAnswer("", (), "", 0, "", "", ())
        chat: list[Message] = [{"role": "user", "content": "q"}]
        plain = list(chat)
        for body, result in (marks[:2], marks[2:]):
            chat.append(self._marked(asked, _Replay(nothing, body, "", is_current=True), way))
            plain.append(asked)
            results = {"role": "tool", "content": result, "tool_call_id": "abcdefghi"}
            chat.append(results)
            plain.append(results)
        chat += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
        try:
            text, usual = self._render(chat, wish), self._render(plain, wish)
        except RequestError:
            return False
        if any(text.count(mark) != 1 for mark in marks):
            return False
        for body, result in (marks[:2], marks[2:]):
            region = self._region(text, body, way)
            if region is None or region[1] > text.index(result):
                return False
            between = text[region[1] : text.index(result)]
            if not usual[: usual.find(result)].endswith(between):
                return False
        return True


def _new_placeholder() -> str:
    return f"placeholder{secrets.token_hex(12)}"


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with neighbouring texts joined."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
