"""POST /v1/embeddings: returns vectors of texts, in OpenAI's format."""

import base64
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import PlainValidator

from headroom.engine.pooling import Vector
from headroom.server.schemas import Body, Positive, prompt_list, read_body
from headroom.server.service import Service
from headroom.server.sse import while_connected

router = APIRouter()

MAX_EMBEDDED_TEXTS = 2048  # in one request; OpenAI's limit


def _check_input(value: object) -> list[str | list[int]]:
    texts = prompt_list(value)
    if len(texts) > MAX_EMBEDDED_TEXTS:
        raise ValueError(f"{len(texts)} texts were given; at most {MAX_EMBEDDED_TEXTS} are allowed")
    if any(len(text) == 0 for text in texts):
        raise ValueError("a text is empty")
    return texts


class EmbeddingBody(Body):
    """The body of /v1/embeddings."""

    input: Annotated[list[str | list[int]], PlainValidator(_check_input)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request) -> dict[str, Any]:
    """Answer with a vector of length 1 for each text."""
    service: Service = request.app.state.service
    body = await read_body(request, EmbeddingBody, service.options.max_body)
    llm = await service.model(body.model)
    work = service.embed(llm, body.input, dimensions=body.dimensions)
    found = await while_connected(request, work)
    as_base64 = body.encoding_format == "base64"
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _base64(vector) if as_base64 else vector.tolist(),
            }
            for index, vector in enumerate(found.vectors)
        ],
        "model": llm.name,
        "usage": {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens},
    }


def _base64(vector: Vector) -> str:
    """Return the values as little-endian float32 in base64, as OpenAI's clients expect them."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
