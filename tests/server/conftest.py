"""Servers over a fake model, and clients of them."""

from collections.abc import Iterator

import httpx
import pytest

from headroom.options import Options
from tests.server.fakes import FakeLLM, serving

JSON = {"content-type": "application/json"}  # also for tests that write bodies by hand


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def options() -> Options:
    return Options(port=0)


@pytest.fixture
def client(llm: FakeLLM, options: Options) -> Iterator[httpx.Client]:
    with (
        serving(llm, options) as server,
        httpx.Client(base_url=server.address, headers=JSON) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """A server that all tests of a file may ask, as long as they change nothing."""
    with (
        serving(FakeLLM(), Options(port=0)) as server,
        httpx.Client(base_url=server.address, headers=JSON, timeout=10) as http,
    ):
        yield http
