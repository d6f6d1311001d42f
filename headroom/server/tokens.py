"""POST /tokenize and /detokenize: text to token ids and back."""

import asyncio
from typing import Any

from fastapi import Request

from headroom.errors import RequestError
from headroom.server.schemas import DetokenizeBody, TokenizeBody, read_body
from headroom.server.stream import Service


async def tokenize(request: Request) -> dict[str, Any]:
    """Return a text's token ids."""
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody, service.options.max_body)
    text = body.content if body.content is not None else body.text or ""
    tokenizer = service.llm.tokenizer
    tokens = await asyncio.to_thread(
        tokenizer.encode,
        text,
        special=body.parse_special,
        add_bos=None if body.add_special else False,
    )
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    if body.with_pieces:
        answer["pieces"] = [tokenizer.token_text(token) for token in tokens]
    return answer


async def detokenize(request: Request) -> dict[str, str]:
    """Return the text of token ids."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody, service.options.max_body)
    vocab_size = service.llm.vocab_size
    if outside := [token for token in body.tokens if token >= vocab_size]:
        raise RequestError(
            f"There is no token {outside[0]}; the vocabulary has {vocab_size}.", param="tokens"
        )
    return {"content": await asyncio.to_thread(service.llm.tokenizer.decode, body.tokens)}
