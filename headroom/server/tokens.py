"""POST /tokenize and /detokenize: text to token ids and back."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import PlainValidator, model_validator
from starlette.responses import JSONResponse, Response

from headroom.engine.request import check_token_ids
from headroom.server.invalid_bodies import wrong_type
from headroom.server.refusals import RefusalError
from headroom.server.schemas import Body, read_body, token_ids
from headroom.server.service import Service
from headroom.text.tokenizer import Tokenizer

router = APIRouter()


def _check_tokens(value: object) -> list[int]:
    expected = "a list of token ids"
    if not isinstance(value, list):
        raise wrong_type(expected)
    return token_ids(value, expected)


class TokenizeBody(Body):
    """The body of /tokenize."""

    model: str | None = None
    content: str | None = None
    text: str | None = None  # another name for `content`
    add_special: bool = False  # begin with the model's BOS token, if it uses one
    parse_special: bool = True  # read the text of a special token as that token
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> "TokenizeBody":
        if self.content is None and self.text is None:
            raise RefusalError(
                400,
                "missing_required_parameter",
                "`content` is required.",
                param="content",
            )
        return self


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_check_tokens)]


@router.post("/tokenize", response_model=None)
async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text."""
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody, service.options.max_body)
    llm = await service.model(body.model)
    return await service.in_thread(_tokenized, llm.tokenizer, body)


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody) -> Response:
    text = body.content if body.content is not None else body.text or ""
    add_bos = None if body.add_special else False
    tokens = tokenizer.encode(text, special=body.parse_special, add_bos=add_bos)
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    if body.with_pieces:
        answer["pieces"] = [tokenizer.token_text(token) for token in tokens]
    return JSONResponse(answer)


@router.post("/detokenize", response_model=None)
async def detokenize(request: Request) -> dict[str, str]:
    """Answer with the text of token ids."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody, service.options.max_body)
    llm = await service.model(body.model)

    def decode() -> str:
        check_token_ids(body.tokens, llm.vocab_size, "tokens")
        return llm.tokenizer.decode(body.tokens)

    return {"content": await service.in_thread(decode)}
