"""Servers with a scripted model."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from headroom.options import Options
from tests.clients.answers import answers
from tests.clients.model import CONTEXT, MANNERS, Manner, write_model
from tests.clients.scripted import ScriptedEngine, scripted_model
from tests.server.fakes import serving

MODEL = "scripted"


# One of the servers requires a key; the other accepts any.
KEYS = {"qwen3": None, "qwen35": "open-sesame"}


class Running(NamedTuple):
    """A server, the key that clients send, the engine behind it, and how its model writes."""

    address: str
    key: str
    engine: ScriptedEngine
    manner: Manner


@pytest.fixture(scope="module", params=list(MANNERS))
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    manner, key = MANNERS[request.param], KEYS[request.param]
    path = write_model(request.param, tmp_path_factory.mktemp("model") / "scripted.gguf")
    with (
        scripted_model(path, answers(manner), context=CONTEXT, name=MODEL) as llm,
        serving(llm, Options(port=0, api_key=key)) as server,
    ):
        assert isinstance(llm.engine, ScriptedEngine)
        yield Running(server.address, key or "none", llm.engine, manner)
