"""ChatTemplate: renders messages to a prompt with the Jinja template of a model."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from headroom.errors import ModelError, RequestError
from headroom.text.template_limits import MAX_CHARACTERS, new_budget
from headroom.text.template_sandbox import TemplateEnvironment, plain_data

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the most usual name first
REMINDER = "<system-reminder>\n{text}\n</system-reminder>"  # a system message in the user's text
PROBE = "a probe of parts"


class ChatTemplate:
    """A model's chat template, compiled once."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source = source
        try:
            self._template = TemplateEnvironment().build(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"The chat template is wrong in line {error.lineno}: {error.message}."
            ) from error
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"The chat template cannot be used: {error}.") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._reads_parts: bool | None = None  # not known until a message has parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt; whatever the template raises becomes a RequestError.

        Many templates accept only one system message, at the beginning, and alternating roles. A
        template that refuses the messages is tried again with messages in that form.
        """
        if not messages:
            raise RequestError("There are no messages.", param="messages")
        chat = [_template_message(plain_data(message)) for message in messages]
        if any(isinstance(message.get("content"), list) for message in chat):
            chat = self._with_readable_parts(chat)
        settings = {
            "documents": None,
            **plain_data(variables),
            **self._tokens,
            "tools": plain_data(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run({**settings, "messages": chat})
        except RequestError:
            alternating = _alternating(chat)
            if alternating == chat:
                raise
            with suppress(RequestError):
                return self._run({**settings, "messages": alternating})
            raise

    def render_start(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt up to the end of the last message's text, which the model continues.

        The last message is rendered with a mark at the end of its text, and the prompt is cut
        there: what the template writes after a message is left out.
        """
        last = messages[-1] if messages else {}
        content = last.get("content") or ""
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise RequestError(
                "Only a last message with the role assistant and text as content can be continued.",
                hint="Let the conversation end with such a message, or do not ask to continue.",
                param="messages",
            )
        mark = f"[{uuid.uuid4().hex}]"
        marked = {**last, "content": content + mark}
        prompt, found, _ = self.render(
            [*messages[:-1], marked], tools=tools, add_generation_prompt=False, **variables
        ).rpartition(mark)
        if not found:
            raise RequestError(
                "The chat template leaves out the last message, so it cannot be continued.",
                hint="Let the conversation end with a message of the user.",
                param="messages",
            )
        return prompt

    def _run(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        characters = 0
        try:
            with new_budget():
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    characters += len(piece)
                    if characters > MAX_CHARACTERS:
                        raise TemplateError(f"the prompt has more than {MAX_CHARACTERS} characters")
        except Exception as error:  # template code can raise anything
            raise RequestError(_failure(error), param="messages") from error
        return "".join(pieces)

    def _with_readable_parts(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the chat with lists of parts joined to text, unless the template reads lists."""
        if self._reads_parts is None:
            self._reads_parts = self._probe_parts()
        if self._reads_parts:
            return chat
        return [
            {key: _joined_text(value) if key == "content" else value for key, value in x.items()}
            for x in chat
        ]

    def _probe_parts(self) -> bool:
        """Whether the template writes the text of a list of parts; tested with a short message."""
        part = {"type": "text", "text": PROBE}
        chat = [{"role": "user", "content": [part]}]
        variables = {"messages": chat, "tools": None, "documents": None, **self._tokens}
        try:
            prompt = self._run({**variables, "add_generation_prompt": False})
        except RequestError:
            return False
        return PROBE in prompt and repr(PROBE) not in prompt and f'"{PROBE}"' not in prompt


def _failure(error: Exception) -> str:
    """Return what a client is told of an error that a template raised."""
    if type(error) is TemplateError:  # the template's own words, or one of our limits
        return f"The chat template refused the messages: {error}"
    if isinstance(error, RecursionError):
        return "The chat template failed on this request: it calls itself without end."
    return f"The chat template failed on this request: {type(error).__name__}: {error}"


def _template_message(message: Any) -> dict[str, Any]:
    """Return a message without fields that are null, and with its thought under both usual names.

    Clients send `"content": null` beside tool calls. Many templates would write "None" for it, and
    nothing for a field that is missing.
    """
    if not isinstance(message, dict):
        raise RequestError("A message is not an object with role and content.", param="messages")
    given: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    thoughts = (given[name] for name in REASONING_FIELDS if name in given)
    if (thought := next(thoughts, None)) is None:
        return given
    return {"thinking": thought, **given, "reasoning_content": thought}


def _alternating(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in which consecutive texts of one role are one message.

    A system message after the beginning becomes a part of the user's text, between tags.
    """
    turns: list[dict[str, Any]] = []
    for message in chat:
        role, text = message.get("role"), message.get("content")
        at_start = all(turn["role"] == "system" for turn in turns)
        if role == "system" and not at_start and isinstance(text, str):
            message = {"role": "user", "content": REMINDER.format(text=text)}
        last = turns[-1] if turns else {}
        if _says_only_text(message) and _says_only_text(last) and last["role"] == message["role"]:
            turns[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            turns.append(message)
    return turns


def _says_only_text(message: dict[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _joined_text(content: Any) -> Any:
    """Return a list of text parts as one text with a line for each; other content unchanged."""
    if not isinstance(content, list):
        return content
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) < len(content):
        raise RequestError("This model takes only text parts in messages.", param="messages")
    return "\n".join(texts)
