"""A server over the scripted model."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from headroom.options import Options
from tests.clients.answers import answer
from tests.clients.model import CONTEXT, write_qwen3
from tests.clients.scripted import ScriptedEngine, scripted_model
from tests.server.fakes import serving

MODEL = "scripted"


class Running(NamedTuple):
    """A server and the engine behind it."""

    address: str
    engine: ScriptedEngine


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_qwen3(tmp_path_factory.mktemp("model") / "scripted.gguf")
    with (
        scripted_model(path, answer, context=CONTEXT, name=MODEL) as llm,
        serving(llm, Options(port=0)) as server,
    ):
        assert isinstance(llm.engine, ScriptedEngine)
        yield Running(server.address, llm.engine)
