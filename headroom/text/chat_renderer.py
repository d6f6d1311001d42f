"""ChatRenderer: renders a conversation as a prompt, with earlier answers as the model wrote them.

`text/tool_memory.py` says why. To put a remembered answer into a prompt, the renderer gives the
chat template a placeholder instead of the answer, and then replaces the placeholder in the
template's text by the answer's own tokens. This is called replaying the answer.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from headroom.errors import RequestError
from headroom.text.chat_template import REASONING_FIELDS, ChatTemplate
from headroom.text.conversation import Message, Tool
from headroom.text.json_schemas import with_plain_types
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

PromptPiece = str | Sequence[int]  # text, or the tokens of an answer
# What the placeholder stands in for: the content of a message, or an argument of its first call.
# With "call", the replayed answer replaces the whole call that the template has written.
Way = Literal["content", "call"]
_CONTEXT = 24  # characters before an answer by which its place is recognised in a later prompt
_MOST_LEFT_OUT = 64  # characters before an answer that a template may leave out in later prompts


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in pieces: text of the template, and answers as the model wrote them."""

    pieces: tuple[PromptPiece, ...]
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


def _with_plain_types(tool: Tool) -> Tool:
    return replace(tool, parameters=with_plain_types(tool.parameters))


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a prompt depends on besides its messages."""

    tools: Sequence[Tool]
    continues: bool  # the last message is the beginning of the answer
    variables: Mapping[str, Any]  # for the template


@dataclass(frozen=True, slots=True)
class _Replay:
    """A remembered answer, and the placeholders that the template gets instead of it."""

    answer: RememberedAnswer
    body: str  # placeholder for what follows the thought
    thought: str  # placeholder for the thought
    is_current: bool  # no message of the user follows the answer


@dataclass(frozen=True, slots=True)
class _ReplayedChat:
    """A prompt with replayed answers."""

    prompt: RenderedChat
    exact: int  # answers before which the prompt is the one that they answered, too


class _Region(NamedTuple):
    """The characters of the template's text that a replayed answer replaces."""

    start: int
    end: int


class ChatRenderer:
    """Renders conversations with a model's chat template, which may or may not support tools."""

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
        self._ways: tuple[Way, ...] | None = None  # that work with the template; None: not tested

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        continues: bool = False,  # the last message is the beginning of the answer
        variables: Mapping[str, Any] | None = None,  # for the template
    ) -> RenderedChat:
        """Return the prompt of a conversation."""
        variables = variables or {}
        if taken := sorted({"messages", "tools", "self"} & variables.keys()):
            raise RequestError(
                f"A template variable cannot have the name {taken[0]!r}: headroom sets it itself.",
                hint="Give it another name, or leave it out.",
                param="chat_template_kwargs",
            )
        settings = _Settings(tools, continues, variables)
        if any(calls_of(message) for message in messages):
            messages = merged_turns(messages)
            replayed = self._render_with_answers(messages, settings)
            if replayed is not None:
                return replayed
        text = self._render(messages, settings)
        return RenderedChat((text,), text)

    def _render(self, messages: Sequence[Message], settings: _Settings) -> str:
        """Return the template's text; if the template refuses messages, try changed ones."""
        render = self._template.render_start if settings.continues else self._template.render
        uses_tools = settings.tools or any(
            calls_of(message) or message.get("role") == "tool" for message in messages
        )
        if not uses_tools:
            return render(messages, **settings.variables)
        changes: list[Callable[[Sequence[Turn]], list[Turn]]]
        tools: list[dict[str, Any]] | None = None
        if self._format.native:
            turns = history_turns(messages, self._format)
            changes = [with_objects, one_call_each]
            tools = [tool.for_template() for tool in settings.tools] or None
        else:
            turns = spelled_turns(messages, settings.tools)
            changes = [without_system]
        attempts = [turns]
        for change in changes:
            if (changed := change(attempts[-1])) != attempts[-1]:
                attempts.append(changed)
        offers = [tools]
        if tools:
            offers.append([_with_plain_types(tool).for_template() for tool in settings.tools])
        first: RequestError | None = None
        for offered in offers:
            for attempt in attempts:
                try:
                    return render(attempt, tools=offered, **settings.variables)
                except RequestError as error:
                    first = first or error
        assert first is not None
        raise first

    def _render_with_answers(
        self, messages: Sequence[Message], settings: _Settings
    ) -> RenderedChat | None:
        """Return the prompt with remembered answers; None if none is known or none can be put in.

        Of the ways that work, the one with the most exact replays is taken.
        """
        found = [self._memory.find(message) for message in messages]
        if not any(found):
            return None
        best: _ReplayedChat | None = None
        for way in self._working_ways():
            replayed = self._replay(messages, found, settings, way)
            if replayed is not None and (best is None or replayed.exact > best.exact):
                best = replayed
            if best is not None and best.exact == sum(answer is not None for answer in found):
                break
        return None if best is None else best.prompt

    def _replay(
        self,
        messages: Sequence[Message],
        found: Sequence[RememberedAnswer | None],  # for each message
        settings: _Settings,
        way: Way,
    ) -> _ReplayedChat | None:
        """Return the prompt with the found answers; None if the template loses a placeholder."""
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
            thinks = answer.after_thought > 0 and self._reasoning is not None
            thought = replay.thought if thinks else None
            turns.append(_with_placeholders(message, replay.body, thought, way))
        try:
            text = self._render(turns, settings)
        except RequestError:
            return None
        if any(text.count(replay.body) != 1 for replay in replays):
            return None
        return self._fill(text, replays, way)

    def _fill(self, text: str, replays: Sequence[_Replay], way: Way) -> _ReplayedChat | None:
        """Return the prompt with answers instead of their placeholders; None if one has no place.

        Where the text before an answer can be made as it was, the whole answer is replayed token by
        token. Elsewhere only the text after its thought is.
        """
        pieces: list[PromptPiece] = []
        exact = 0
        for replay in replays:
            region = self._region(text, replay.body, way)
            if region is None:
                return None
            before, after = text[: region.start], text[region.end :]
            original = self._original_start(before, replay)
            if original is not None:
                exact += 1
                pieces += [original, self._piece(replay.answer)]
                stripped = after.lstrip()
                text = stripped if stripped.startswith(tuple(self._stops)) else after
            else:
                before = before.replace(replay.thought, replay.answer.thought)
                body = replay.answer.raw[replay.answer.after_thought :].strip()
                pieces.append(before + body)
                text = after
        pieces.append(text)
        shown = "".join(
            piece if isinstance(piece, str) else self._tokenizer.decode(piece) for piece in pieces
        )
        return _ReplayedChat(RenderedChat(tuple(_joined(pieces)), shown), exact)

    def _piece(self, answer: RememberedAnswer) -> PromptPiece:
        # A SentencePiece tokenizer would add a blank to text that is encoded after the tokens. So
        # the answer stays text, and is encoded together with what surrounds it.
        return answer.raw if self._tokenizer.drops_blank else answer.tokens

    def _original_start(self, before: str, replay: _Replay) -> str | None:
        """Return the text before an answer as it was in the prompt that the model answered.

        None if the template's text differs too much from that prompt.
        """
        answer = replay.answer
        if answer.after_thought:
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
        # The template may leave out what a prompt has right before the answer, such as an empty
        # thought. It is added again, but only for answers after the user's last message.
        least = max(_CONTEXT, len(prompt) - _MOST_LEFT_OUT)
        for place in range(end - 1, least - 1, -1):
            context = prompt[place - _CONTEXT : place]
            if not context[-1].isspace() and before.endswith(context):
                return before + prompt[place:]
        return None

    def _region(self, text: str, placeholder: str, way: Way) -> _Region | None:
        """Return what an answer replaces: a placeholder, or the call around it; None if unclear."""
        place = text.index(placeholder)
        if way == "content":
            return _Region(place, place + len(placeholder))
        start = text.rfind(self._format.starts[0], 0, place)
        ends = [self._format.end] if self._format.end else self._stops
        found = [
            (at + (len(end) if self._format.end else 0))
            for end in ends
            if (at := text.find(end, place)) >= 0
        ]
        return _Region(start, min(found)) if start >= 0 and found else None

    def _working_ways(self) -> tuple[Way, ...]:
        """Return the ways of replaying that work with this template; the first call tests them."""
        if self._ways is None:
            ways: tuple[Way, ...] = ("content", "call")
            self._ways = tuple(way for way in ways if self._works(way))
        return self._ways

    def _works(self, way: Way) -> bool:
        """Whether the template copies placeholders, and goes on after them as after real answers.

        Two calls and their results are rendered once with placeholders and once as they are. What
        stands between a call and its result must be equal.
        """
        settings = _Settings([Tool(name="f")], continues=False, variables={})
        call = {"id": "abcdefghi", "function": {"name": "f", "arguments": "{}"}}
        asked: Turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        bodies = [_new_placeholder(), _new_placeholder()]
        results = [_new_placeholder(), _new_placeholder()]
        usual: list[Message] = [{"role": "user", "content": "q"}]
        marked = list(usual)
        for body, result in zip(bodies, results, strict=True):
            returned = {"role": "tool", "content": result, "tool_call_id": "abcdefghi"}
            marked += [_with_placeholders(asked, body, None, way), returned]
            usual += [asked, returned]
        marked += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
        try:
            text, usual_text = self._render(marked, settings), self._render(usual, settings)
        except RequestError:
            return False
        if any(text.count(placeholder) != 1 for placeholder in bodies + results):
            return False
        for body, result in zip(bodies, results, strict=True):
            region = self._region(text, body, way)
            if region is None or region.end > text.index(result):
                return False
            between = text[region.end : text.index(result)]
            if not usual_text[: usual_text.find(result)].endswith(between):
                return False
        return True


def _with_placeholders(message: Message, body: str, thought: str | None, way: Way) -> Turn:
    """Return a message with placeholders instead of its thought, if it has one, and of the rest."""
    turn = {key: value for key, value in message.items() if key != "tool_calls"}
    if way == "content":
        turn["content"] = body
    else:
        call = calls_of(message)[0]
        function = {"name": call["function"]["name"], "arguments": {"k": body}}
        turn |= {"content": "", "tool_calls": [{**call, "function": function}]}
    if thought is not None:
        turn = {key: value for key, value in turn.items() if key not in REASONING_FIELDS}
        turn["reasoning_content"] = thought
    return turn


def _new_placeholder() -> str:
    return f"placeholder{secrets.token_hex(12)}"


def _joined(pieces: Sequence[PromptPiece]) -> list[PromptPiece]:
    """Return the pieces with adjacent texts joined."""
    joined: list[PromptPiece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
