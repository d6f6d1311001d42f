"""POST /v1/chat/completions: answers a conversation, in OpenAI's format."""

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, ValidationInfo, model_validator
from starlette.responses import Response

from headroom.answers import AnswerDelta, AnswerToken, Completion
from headroom.engine.request import MAX_LOGPROBS
from headroom.server.custom_input import InputText
from headroom.server.invalid_bodies import short, wrong_type
from headroom.server.offered_tools import OfferedTools
from headroom.server.openai_shared import (
    Envelope,
    GenerationCall,
    respond,
    scored_token,
)
from headroom.server.openai_tools import (
    CalledFunctionBody,
    ChatToolCall,
    ToolCallBody,
    ToolFields,
)
from headroom.server.output_formats import FormatFields
from headroom.server.schemas import (
    LEFT_OUT_PART,
    Body,
    GenerationBody,
    MaxTokens,
    invalid,
    read_body,
    unsupported,
)
from headroom.server.service import Service
from headroom.server.thinking_fields import ThinkingFields
from headroom.text.answer_parser import CallDelta, ToolCall
from headroom.text.conversation import Conversation
from headroom.text.tokenizer import Tokenizer

router = APIRouter()

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
# `function_call`, the older form of a call, has no id: its result is the next message.
FUNCTION_CALL_ID = "call_function"
# Parts of a tool's result that are replaced by a line of text, and what the line calls them.
UNREADABLE_PARTS = {"image_url": "image", "input_audio": "audio", "file": "file"}
# Clients send an answer without text, or the result of a tool that returned nothing, as null.
MAY_BE_NULL = ("assistant", "tool", "function")


def _check_content(value: object, info: ValidationInfo) -> str | None:
    """Return a message's text; text parts are joined with line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("a text or a list of text parts")
    is_result = info.data.get("role") == "tool"
    return "\n".join(_part_text(part, is_result=is_result) for part in value)


def _part_text(part: object, *, is_result: bool) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong_type("a text or a list of text parts")
    if is_result and part["type"] in UNREADABLE_PARTS:
        return LEFT_OUT_PART.format(kind=UNREADABLE_PARTS[part["type"]])
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"parts of type {short(part['type'])!r} are not supported, only text")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong_type("a text part with its text")
    return text


class MessageBody(Body):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str | None, PlainValidator(_check_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[ChatToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunctionBody | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what other servers call `reasoning_content`
    refusal: str | None = None
    audio: None = None
    prefix: bool | None = None  # the answer continues this message, which must be the last

    @model_validator(mode="after")
    def _is_complete(self) -> "MessageBody":
        if self.content is None and self.role not in MAY_BE_NULL:
            raise ValueError("a message needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role 'tool' needs a tool_call_id")
        if self.role == "function" and self.name is None:
            raise ValueError("a message of the role 'function' needs a name")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} cannot have tool calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        # Few templates have the role "developer", OpenAI's newer name of "system".
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        turn: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        if self.name is not None:
            turn["name"] = self.name
        if (thought := self.reasoning_content or self.reasoning) is not None:
            turn["reasoning_content"] = thought
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        elif self.function_call:
            call = ToolCallBody(id=FUNCTION_CALL_ID, function=self.function_call)
            turn["tool_calls"] = [call.for_template()]
        if self.role == "function":
            turn["tool_call_id"] = FUNCTION_CALL_ID
        elif self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class ChatBody(ThinkingFields, FormatFields, ToolFields, GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise invalid(
                "continue_final_message", "Only a last message of the assistant can be continued."
            )
        if self.add_generation_prompt is False and not self.continues:
            raise unsupported(
                "add_generation_prompt",
                "`add_generation_prompt` can be false only with `continue_final_message`.",
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.messages[-1]
        return bool(self.continue_final_message or (last.role == "assistant" and last.prefix))

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, by name."""
        settings = super().sampling()
        if self.max_completion_tokens is not None:
            settings["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            settings["logprobs"] = self.top_logprobs or 0
        return settings

    def conversation(self, offered: OfferedTools) -> Conversation:
        """Return the body as a `Conversation`."""
        offer = self.tool_offer(offered)
        return Conversation(
            messages=with_call_ids([message.for_template() for message in self.messages]),
            tools=offer.tools,
            tool_choice=offer.choice,
            output_format=self.output_format(),
            thinking=self.asked_thinking(),
            template_variables=self.template_variables(),
            continues=self.continues,
        )


def with_call_ids(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which all calls have ids.

    Some clients lose the ids of earlier calls. Results without an id belong to such calls in order.
    """
    open_calls: deque[dict[str, Any]] = deque()  # calls that came without an id
    for number, turn in enumerate(turns):
        for index, call in enumerate(turn.get("tool_calls", ())):
            if not call["id"]:
                call["id"] = f"call_{number}_{index}"
                open_calls.append(call)
        if turn["role"] != "tool" or turn["tool_call_id"]:
            continue
        where = f"messages[{number}].tool_call_id"
        if not open_calls:
            raise invalid(where, f"`{where}` is empty, and no call before it has no id.")
        turn["tool_call_id"] = open_calls.popleft()["id"]
    return turns


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.options.max_body)
    offered = body.offered_tools()
    chat = await service.in_thread(body.conversation, offered)
    llm = await service.model(body.model, streams=body.stream)
    answers = await service.start_chat(
        llm, chat, body.sampling(), n=body.n or 1, streams=bool(body.stream)
    )
    envelope = Envelope(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=llm.name,
    )
    writer = ChatWriter(
        llm.tokenizer,
        offered,
        with_logprobs=bool(body.logprobs),
        with_thoughts=body.shows_thoughts,
        as_functions=body.calls_functions,
    )
    return await respond(request, service, GenerationCall(body, answers, envelope, writer))


class ChatWriter:
    """Writes choices of /v1/chat/completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: OfferedTools,
        *,
        with_logprobs: bool,
        with_thoughts: bool = True,
        as_functions: bool = False,  # write calls in the older form, as `function_call`
    ) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_thoughts = with_thoughts
        self._as_functions = as_functions
        self._tools = tools
        self._calling: set[int] = set()  # streamed answers that have called a tool
        # The texts of streamed calls of custom tools, by answer and call.
        self._inputs: dict[tuple[int, int], InputText] = {}

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice with the role of the answer."""
        return _streamed(index, {"role": "assistant", "content": ""})

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """Return what a delta adds to thought, text and calls.

        Each choice adds to one call at most, because clients read only the first of a chunk.
        """
        parts: dict[str, Any] = {}
        later: list[dict[str, Any]] = []
        if delta.thought and self._with_thoughts:
            parts["reasoning_content"] = delta.thought
        if delta.calls:
            self._calling.add(delta.index)
            first, *later = self._streamed_calls(delta) or [{}]
            parts |= first
        logprobs = self._logprobs(delta.shown_tokens)
        if delta.text or (logprobs is not None and delta.shown_tokens and not parts):
            parts["content"] = delta.text
        pieces = [_streamed(delta.index, parts, logprobs)] if parts else []
        return pieces + [_streamed(delta.index, part) for part in later]

    def last(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        reason = self._reason(delta.finish_reason, called=delta.index in self._calling)
        texts = [
            {"index": call, "custom": {"input": text}}
            for (answer, call), reader in self._inputs.items()
            if answer == delta.index and (text := reader.finish())
        ]
        parts = {"tool_calls": texts} if texts else {}
        choice = {**_streamed(delta.index, parts), "finish_reason": reason}
        return choice | _details(delta)

    def whole(self, index: int, answer: Completion) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        choice = {
            "index": index,
            "message": self._message(answer),
            "logprobs": self._logprobs(answer.shown_tokens),
            "finish_reason": self._reason(answer.finish_reason, called=bool(answer.tool_calls)),
        }
        return choice | _details(answer)

    def _message(self, answer: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if answer.tool_calls and not answer.text else answer.text,
            "refusal": None,
            "annotations": [],
        }
        if answer.thought and self._with_thoughts:
            message["reasoning_content"] = answer.thought
        if answer.tool_calls and self._as_functions:
            first = answer.tool_calls[0]
            message["function_call"] = {"name": first.name, "arguments": first.arguments}
        elif answer.tool_calls:
            message["tool_calls"] = [self._whole_call(call) for call in answer.tool_calls]
        return message

    def _whole_call(self, call: ToolCall) -> dict[str, Any]:
        if self._tools.called(call.name).kind == "custom":
            text = InputText.of(call.arguments)
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _streamed_calls(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """Return what a delta adds to calls: first the id and the name, then the arguments."""
        if self._as_functions:
            first = [call for call in delta.calls if call.index == 0]
            function = {"arguments": "".join(call.arguments for call in first)}
            name = "".join(call.name for call in first)
            return [{"function_call": {"name": name, **function} if name else function}]
        calls = [self._streamed_call(delta.index, call) for call in delta.calls]
        return [{"tool_calls": [call]} for call in calls if call]

    def _streamed_call(self, answer: int, call: CallDelta) -> dict[str, Any] | None:
        """Return what a piece adds to one call; None if it adds nothing yet."""
        place = (answer, call.index)
        if call.name and self._tools.called(call.name).kind == "custom":
            self._inputs[place] = InputText()
        if (reader := self._inputs.get(place)) is not None:
            kind, what = "custom", {"input": reader.push(call.arguments)}
        else:
            kind, what = "function", {"arguments": call.arguments}
        if not call.name:
            return {"index": call.index, kind: what} if any(what.values()) else None
        return {"index": call.index, "id": call.id, "type": kind, kind: {"name": call.name, **what}}

    def _reason(self, reason: str | None, *, called: bool) -> str | None:
        if reason != "stop" or not called:
            return reason
        return "function_call" if self._as_functions else "tool_calls"

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [scored_token(self._tokenizer, token) for token in tokens]
        return {"content": content, "refusal": None}


def _details(answer: AnswerDelta | Completion) -> dict[str, Any]:
    """Return the field about the thought's length and end; no field if the model cannot think."""
    if answer.finish_details is None:
        return {}
    return {"finish_details": asdict(answer.finish_details)}


def _streamed(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
