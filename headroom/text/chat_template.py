"""ChatTemplate: renders messages to a prompt with the Jinja template of a model."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from headroom.errors import ModelError, RequestError
from headroom.text.template_sandbox import MAX_CHARACTERS, TemplateEnvironment, plain_data

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the standard name first
REMINDER = "<system-reminder>\n{text}\n</system-reminder>"
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

        Many templates want one system message at the beginning and roles that alternate. Where a
        template refuses the messages as they are, it gets them in that form.
        """
        if not messages:
            raise RequestError("There are no messages.", param="messages")
        chat = [_with_reasoning(plain_data(message)) for message in messages]
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
        """Return the prompt up to the last word of the last message, which the model continues.

        The text of the last message gets a mark at its end, and the prompt is cut at the mark, so
        that whatever the template writes after a message is left out.
        """
        last = messages[-1] if messages else {}
        content = last.get("content") or ""
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise RequestError(
                "Only a last message of the assistant that is a text can be continued.",
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
            for piece in self._template.generate(variables):
                pieces.append(piece)
                characters += len(piece)
                if characters > MAX_CHARACTERS:
                    raise TemplateError(f"the prompt has more than {MAX_CHARACTERS} characters")
        except Exception as error:  # template code can raise anything
            raise RequestError(
                f"The chat template refused the messages: {error}", param="messages"
            ) from error
        return "".join(pieces)

    def _with_readable_parts(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the chat, with lists of parts joined to texts where the template expects texts."""
        if self._reads_parts is None:
            self._reads_parts = self._probe_parts()
        if self._reads_parts:
            return chat
        return [{**message, "content": _joined_text(message.get("content"))} for message in chat]

    def _probe_parts(self) -> bool:
        """Whether the template renders a list of parts as their text, tested by a probe."""
        part = {"type": "text", "text": PROBE}
        chat = [{"role": "user", "content": [part]}]
        variables = {"messages": chat, "tools": None, "documents": None, **self._tokens}
        try:
            prompt = self._run({**variables, "add_generation_prompt": False})
        except RequestError:
            return False
        return PROBE in prompt and repr(PROBE) not in prompt and f'"{PROBE}"' not in prompt


def _with_reasoning(message: Any) -> dict[str, Any]:
    """Return a message whose reasoning has both names that templates read."""
    if not isinstance(message, dict):
        raise RequestError("A message is not an object with role and content.", param="messages")
    thoughts = (message[name] for name in REASONING_FIELDS if message.get(name) is not None)
    if (thought := next(thoughts, None)) is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _alternating(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in which texts of one role in a row are one message.

    A system message after the beginning becomes a part of the user's text, between marks.
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
