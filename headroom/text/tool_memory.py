"""ToolMemory: what the model wrote for each tool call, so that its history can be replayed.

A client sends calls back as names and JSON arguments. A chat template would write them in its own
way, which is seldom the model's: other white space, another order of keys. Then the prompt differs
from what the model has in its cache. With the remembered tokens the prompt is the same.
"""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.text.answer_parser import ToolCall, WrittenAnswer, join_calls
from headroom.text.conversation import Message
from headroom.text.tool_history import arguments_of, calls_of

MAX_ENTRIES = 50_000
MAX_BYTES = 64 << 20
_CONTEXT = 200  # characters of the prompt's end that are kept with an answer


@dataclass(frozen=True, slots=True, eq=False)
class RememberedAnswer:
    """One answer with tool calls, as the model wrote it."""

    prompt_end: str  # the last characters of the prompt before it
    tokens: Sequence[int]  # without the token that ended the answer
    raw: str  # the text of the tokens, with marks
    rest: int  # where in `raw` the part after the thought begins; 0 without a thought
    thought: str
    text: str  # what the client saw as text
    calls: tuple[ToolCall, ...]

    @property
    def bytes(self) -> int:
        """Memory that the answer takes, in bytes, at most."""
        calls = sum(len(call.arguments) + len(call.name) + 200 for call in self.calls)
        characters = len(self.raw) + len(self.thought) + len(self.text) + calls + _CONTEXT
        return 4 * (characters + len(self.tokens)) + 500

    def is_of(self, message: Message) -> bool:
        """Whether a message has exactly the calls of this answer, and its text or none."""
        calls = calls_of(message)
        if len(calls) != len(self.calls):
            return False
        if not all(map(_same_call, calls, self.calls)):
            return False
        content = message.get("content")
        return not content or (isinstance(content, str) and content.strip() == self.text.strip())


def _same_call(given: Mapping[str, Any], known: ToolCall) -> bool:
    try:
        arguments = json.loads(known.arguments)
    except (ValueError, RecursionError):
        arguments = known.arguments  # a call that broke
    function = given["function"]
    return (
        given.get("id") == known.id
        and isinstance(function, Mapping)
        and function.get("name") == known.name
        and bool(arguments_of(given) == arguments)
    )


class ToolMemory:
    """Remembers answers by the ids of their calls; the least recently used ones are forgotten."""

    def __init__(self, entries: int = MAX_ENTRIES, size: int = MAX_BYTES) -> None:
        self._entries = entries
        self._size = size  # bytes
        self._lock = threading.Lock()  # guards the two fields below
        self._answers: OrderedDict[str, RememberedAnswer] = OrderedDict()  # by the first call's id
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def bytes(self) -> int:
        """Memory that the answers take, in bytes."""
        return self._bytes

    def keeper(self, prompt: str) -> Callable[[WrittenAnswer], None]:
        """Return what remembers an answer to a prompt, if it has calls."""
        end = prompt[-_CONTEXT:]

        def keep(answer: WrittenAnswer) -> None:
            calls = join_calls(answer.parts.calls)
            if calls and answer.rest < len(answer.raw):  # calls inside a thought are not replayed
                self.remember(
                    RememberedAnswer(
                        prompt_end=end,
                        tokens=array("I", answer.tokens),
                        raw=answer.raw,
                        rest=answer.rest,
                        thought=answer.parts.thought,
                        text=answer.parts.text,
                        calls=calls,
                    )
                )

        return keep

    def remember(self, answer: RememberedAnswer) -> None:
        """Remember an answer, and forget others if there are too many."""
        with self._lock:
            key = answer.calls[0].id
            if (old := self._answers.pop(key, None)) is not None:
                self._bytes -= old.bytes
            self._answers[key] = answer
            self._bytes += answer.bytes
            while len(self._answers) > self._entries or self._bytes > self._size:
                _, forgotten = self._answers.popitem(last=False)
                self._bytes -= forgotten.bytes

    def find(self, message: Message) -> RememberedAnswer | None:
        """Return the answer that a message repeats; None if it is not known or was changed."""
        if not (calls := calls_of(message)):
            return None
        with self._lock:
            answer = self._answers.get(str(calls[0].get("id")))
            if answer is None or not answer.is_of(message):
                return None
            self._answers.move_to_end(answer.calls[0].id)
            return answer
