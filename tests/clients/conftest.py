"""A server over a scripted model."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from headroom.options import Options
from tests.clients.answers import answers
from tests.clients.model import CONTEXT, MANNERS, Manner, write_model
from tests.clients.scripted import ScriptedEngine, scripted_model
from tests.server.fakes import serving

MODEL = "scripted"


class Running(NamedTuple):
    """A server, the engine behind it, and how its model writes."""

    address: str
    engine: ScriptedEngine
    manner: Manner


@pytest.fixture(scope="module", params=list(MANNERS))
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    manner = MANNERS[request.param]
    path = write_model(request.param, tmp_path_factory.mktemp("model") / "scripted.gguf")
    with (
        scripted_model(path, answers(manner), context=CONTEXT, name=MODEL) as llm,
        serving(llm, Options(port=0)) as server,
    ):
        assert isinstance(llm.engine, ScriptedEngine)
        yield Running(server.address, llm.engine, manner)
