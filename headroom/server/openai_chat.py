"""POST /v1/chat/completions: answers a conversation, in OpenAI's format."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from headroom.answers import AnswerDelta, AnswerToken, Completion
from headroom.engine.request import MAX_LOGPROBS, TokenLogprobs
from headroom.server.openai_shared import (
    Envelope,
    GenerationCall,
    logprob_number,
    respond,
    token_text,
)
from headroom.server.openai_tools import (
    CalledFunctionBody,
    NonEmpty,
    ToolCallBody,
    ToolFields,
)
from headroom.server.output_formats import FormatFields
from headroom.server.schemas import (
    Body,
    GenerationBody,
    MaxTokens,
    invalid,
    read_body,
    short,
    unsupported,
    wrong_type,
)
from headroom.server.service import Service
from headroom.server.thinking_fields import ThinkingFields
from headroom.text.answer_parser import CallDelta
from headroom.text.conversation import Conversation
from headroom.text.tokenizer import Tokenizer

router = APIRouter()

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
# Calls of the older form have no id, and a function's result follows its call at once.
FUNCTION_CALL_ID = "call_function"


def _check_content(value: object) -> str | None:
    """Return a message's text; several text parts are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("a text or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong_type("a text or a list of text parts")
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"parts of type {short(part['type'])!r} cannot be read, only text")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong_type("a text part with its text")
    return text


class MessageBody(Body):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str | None, PlainValidator(_check_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = None
    tool_call_id: NonEmpty | None = None
    function_call: CalledFunctionBody | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # other servers' name of `reasoning_content`
    refusal: str | None = None
    audio: None = None
    prefix: bool | None = None  # the answer continues this message, which is the last

    @model_validator(mode="after")
    def _is_complete(self) -> "MessageBody":
        if self.content is None and not (self.role == "assistant" and self._says_something):
            raise ValueError("a message needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role 'tool' needs a tool_call_id")
        if self.role == "function" and self.name is None:
            raise ValueError("a message of the role 'function' needs a name")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} cannot have tool calls")
        return self

    @property
    def _says_something(self) -> bool:
        thought = self.reasoning_content or self.reasoning
        return bool(self.tool_calls or self.function_call or thought or self.refusal)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        # Few templates know "developer", the newer name of the role "system".
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        turn: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        if self.name is not None:
            turn["name"] = self.name
        if (thought := self.reasoning_content or self.reasoning) is not None:
            turn["reasoning_content"] = thought
        if self.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        elif self.function_call:
            call = ToolCallBody(id=FUNCTION_CALL_ID, function=self.function_call)
            turn["tool_calls"] = [call.model_dump()]
        if self.role == "function":
            turn["tool_call_id"] = FUNCTION_CALL_ID
        elif self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class ChatBody(ThinkingFields, FormatFields, ToolFields, GenerationBody):
    """The body of /v1/chat/completions."""

    also_not_honoured: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "chat_template": (),
        "documents": (),
        "echo": (),
        "best_of": (1,),
        "suffix": (),
        "mm_processor_kwargs": (),
    }

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
        """Whether the answer goes on with the last message."""
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

    def conversation(self) -> Conversation:
        """Return what the body asks for, in the words that all chat APIs share."""
        tools, choice = self.offered_tools()
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tools=tools,
            tool_choice=choice,
            output_format=self.output_format(),
            thinking=self.asked_thinking(),
            template_variables=self.template_variables(),
            continues=self.continues,
        )


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.options.max_body)
    chat = body.conversation()
    llm = await service.model(body.model, streams=body.stream)
    answers = await service.start_chat(llm, chat, body.sampling(), n=body.n or 1)
    envelope = Envelope(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=llm.name,
    )
    writer = ChatWriter(
        llm.tokenizer,
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
        *,
        with_logprobs: bool,
        with_thoughts: bool = True,
        as_functions: bool = False,  # calls are written in the older form
    ) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_thoughts = with_thoughts
        self._as_functions = as_functions
        self._calling: set[int] = set()  # streamed answers that have called a tool

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice that names the speaker."""
        return _streamed(index, {"role": "assistant", "content": ""})

    def piece(self, delta: AnswerDelta) -> dict[str, Any] | None:
        """Return the choice that adds to thought, text and calls; None if nothing is added."""
        parts: dict[str, Any] = {}
        if delta.thought and self._with_thoughts:
            parts["reasoning_content"] = delta.thought
        if delta.calls:
            self._calling.add(delta.index)
            parts |= self._streamed_calls(delta.calls)
        logprobs = self._logprobs(delta.shown_tokens)
        if delta.text or (logprobs is not None and delta.shown_tokens and not parts):
            parts["content"] = delta.text
        return _streamed(delta.index, parts, logprobs) if parts else None

    def last(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        reason = self._reason(delta.finish_reason, called=delta.index in self._calling)
        choice = {**_streamed(delta.index, {}), "finish_reason": reason}
        return choice | _details(delta)

    def whole(self, index: int, answer: Completion) -> dict[str, Any]:
        """Return the choice of a whole answer."""
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
        functions = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
        if functions and self._as_functions:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(answer.tool_calls, functions, strict=True)
            ]
        return message

    def _streamed_calls(self, calls: Sequence[CallDelta]) -> dict[str, Any]:
        """Return what a piece adds to calls: first identity and name, then arguments."""
        if self._as_functions:
            first = [call for call in calls if call.index == 0]
            function = {"arguments": "".join(call.arguments for call in first)}
            name = "".join(call.name for call in first)
            return {"function_call": {"name": name, **function} if name else function}
        return {"tool_calls": [_streamed_call(call) for call in calls]}

    def _reason(self, reason: str | None, *, called: bool) -> str | None:
        if reason != "stop" or not called:
            return reason
        return "function_call" if self._as_functions else "tool_calls"

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: AnswerToken) -> dict[str, Any]:
        known = token.logprobs or TokenLogprobs(0.0, ())
        top = [self._entry(alternative, logprob) for alternative, logprob in known.top]
        return {**self._entry(token.id, known.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": logprob_number(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _details(answer: AnswerDelta | Completion) -> dict[str, Any]:
    """Return how long the model thought and what ended its thought, if it can think."""
    if answer.finish_details is None:
        return {}
    return {"finish_details": asdict(answer.finish_details)}


def _streamed_call(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _streamed(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
