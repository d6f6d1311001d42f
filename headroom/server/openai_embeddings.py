"""POST /v1/embeddings: returns vectors of texts, in OpenAI's format."""

import base64
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import PlainValidator
from starlette.responses import Response

from headroom.engine.pooling import Vector
from headroom.server.answer_fields import VECTOR_FIELDS
from headroom.server.json_values import write_with_list
from headroom.server.schemas import CheckedBody, Positive, prompt_list, read_body
from headroom.server.service import MAX_EMBEDDED_TEXTS, Embeddings, Service
from headroom.server.sse import while_connected

router = APIRouter()


def _check_input(value: object) -> list[str | list[int]]:
    texts = prompt_list(value)
    if len(texts) > MAX_EMBEDDED_TEXTS:
        raise ValueError(f"{len(texts)} texts were given; at most {MAX_EMBEDDED_TEXTS} are allowed")
    if any(len(text) == 0 for text in texts):
        raise ValueError("a text is empty")
    return texts


class EmbeddingBody(CheckedBody):
    """The body of /v1/embeddings."""

    known_fields = VECTOR_FIELDS

    input: Annotated[list[str | list[int]], PlainValidator(_check_input)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request) -> Response:
    """Answer with a vector of length 1 for each text."""
    service: Service = request.app.state.service
    body = await read_body(request, EmbeddingBody, service.options.max_body)
    llm = await service.model(body.model)
    work = service.embed(llm, body.input, dimensions=body.dimensions)
    found = await while_connected(request, work)
    write = partial(_write, found, llm.name, as_base64=body.encoding_format == "base64")
    return Response(await service.in_thread(write), media_type="application/json")


def _write(found: Embeddings, model: str, *, as_base64: bool) -> bytes:
    """Return the answer as JSON."""
    counts = {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens}
    entries = (
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_base64 else vector.tolist(),
        }
        for index, vector in enumerate(found.vectors)
    )
    return write_with_list({"object": "list", "model": model, "usage": counts}, "data", entries)


def _base64(vector: Vector) -> str:
    """Return the values as little-endian float32 in base64, as OpenAI's clients expect them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
