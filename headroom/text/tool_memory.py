"""ToolMemory: remembers the tokens of answers with tool calls, for the prompts that follow.

A client sends earlier calls back as names and JSON arguments. The chat template would write them
with other white space or in another order of keys than the model did, and the prompt would differ
from the tokens that the model has seen. The renderer puts the remembered tokens there instead.
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

MAX_REMEMBERED = 50_000
MAX_REMEMBERED_BYTES = 64 << 20
_CONTEXT = 200  # characters of the prompt's end that are kept with an answer


@dataclass(frozen=True, slots=True, eq=False)
class RememberedAnswer:
    """One answer with tool calls, as the model wrote it."""

    prompt_end: str  # the last characters of the prompt that it answered
    tokens: Sequence[int]  # without the token that ended the answer
    raw: str  # the text of the tokens, markup included
    after_thought: int  # the index in `raw` after the thought's end mark; 0 without a thought
    thought: str
    text: str  # what the client saw as text
    calls: tuple[ToolCall, ...]

    @property
    def bytes(self) -> int:
        """An upper bound of the memory that the answer takes, in bytes."""
        calls = sum(len(call.arguments) + len(call.name) + 200 for call in self.calls)
        characters = len(self.raw) + len(self.thought) + len(self.text) + calls + _CONTEXT
        return 4 * (characters + len(self.tokens)) + 500

    def is_repeated_by(self, message: Message) -> bool:
        """Whether a message has exactly the calls of this answer, and its text or no text."""
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
        arguments = known.arguments  # of a call that broke off: not valid JSON
    function = given["function"]
    return (
        given.get("id") == known.id
        and isinstance(function, Mapping)
        and function.get("name") == known.name
        and bool(arguments_of(given) == arguments)
    )


class ToolMemory:
    """Finds answers by the id of their first call; drops the least recently used ones."""

    def __init__(
        self, max_answers: int = MAX_REMEMBERED, max_bytes: int = MAX_REMEMBERED_BYTES
    ) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
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
        """Return a function that remembers the answer to a prompt if the answer has calls."""
        end = prompt[-_CONTEXT:]

        def keep(answer: WrittenAnswer) -> None:
            calls = join_calls(answer.parts.calls)
            # Calls inside a thought are not remembered: the answer ends with the thought.
            if calls and answer.after_thought < len(answer.raw):
                self.remember(
                    RememberedAnswer(
                        prompt_end=end,
                        tokens=array("I", answer.tokens),
                        raw=answer.raw,
                        after_thought=answer.after_thought,
                        thought=answer.parts.thought,
                        text=answer.parts.text,
                        calls=calls,
                    )
                )

        return keep

    def remember(self, answer: RememberedAnswer) -> None:
        """Remember an answer, and drop old ones if there are too many or they are too large."""
        with self._lock:
            key = answer.calls[0].id
            if (old := self._answers.pop(key, None)) is not None:
                self._bytes -= old.bytes
            self._answers[key] = answer
            self._bytes += answer.bytes
            while len(self._answers) > self._max_answers or self._bytes > self._max_bytes:
                _, dropped = self._answers.popitem(last=False)
                self._bytes -= dropped.bytes

    def find(self, message: Message) -> RememberedAnswer | None:
        """Return the answer that a message repeats; None if it is unknown or was changed."""
        if not (calls := calls_of(message)):
            return None
        with self._lock:
            answer = self._answers.get(str(calls[0].get("id")))
            if answer is None or not answer.is_repeated_by(message):
                return None
            self._answers.move_to_end(answer.calls[0].id)
            return answer
