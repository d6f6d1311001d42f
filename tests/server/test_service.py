"""Tests of the service: how conversations become requests of the engine."""

import asyncio
from typing import Any, cast

import pytest

from headroom.errors import ContextLengthError, RequestError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server.holding import HoldModels
from headroom.server.metrics import Metrics
from headroom.server.service import Answers, Service, make_requests
from headroom.text.conversation import Conversation
from tests.server.fakes import FakeLLM

CHAT = Conversation(messages=[{"role": "user", "content": "Hi"}])


def start_chat(
    llm: FakeLLM, settings: dict[str, Any], chat: Conversation = CHAT, n: int = 1
) -> Answers:
    async def run() -> Answers:
        model = cast(LLM, llm)
        service = Service(model, Options(model="fake"), Metrics(lambda: {"fake": model.engine}))
        answers = await service.start_chat(model, chat, settings, n=n, messages_field="input")
        async for _ in answers.deltas():
            pass
        return answers

    return asyncio.run(run())


def test_answers_to_a_conversation_share_a_seed_and_have_their_own_draws() -> None:
    llm = FakeLLM()
    answers = start_chat(llm, {"seed": 7}, n=3)
    assert (answers.count, answers.seed) == (3, 7)
    params = [request.params for request in llm.engine.requests]
    assert [(each.seed, each.draw) for each in params] == [(7, 0), (7, 1), (7, 2)]


def test_draws_are_numbered_across_prompts() -> None:
    requests = make_requests(cast(LLM, FakeLLM()), [[65], [65]], {}, 2, prompt_field="prompt")
    assert [request.params.draw for request in requests] == [0, 1, 2, 3]
    assert len({request.params.seed for request in requests}) == 1


def test_settings_that_are_left_out_are_the_models_own() -> None:
    llm = FakeLLM()
    llm.default_sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    start_chat(llm, {"temperature": None, "top_p": 0.5})
    params = llm.engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}, {"max_tokens": -1}])
def test_an_answer_without_a_limit_goes_on_until_its_end(given: dict[str, Any]) -> None:
    llm = FakeLLM()
    start_chat(llm, given)
    assert llm.engine.requests[0].params.max_tokens is None


def test_a_conversation_beyond_the_context_is_refused_by_the_field_of_the_api() -> None:
    chat = Conversation(messages=[{"role": "user", "content": "x" * 5000}])
    with pytest.raises(ContextLengthError, match="5002 tokens") as caught:
        start_chat(FakeLLM(), {}, chat)
    assert caught.value.param == "input"


def test_a_setting_outside_its_range_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="temperature is -1") as caught:
        start_chat(FakeLLM(), {"temperature": -1.0})
    assert caught.value.param == "temperature"


def test_a_request_gets_the_model_that_it_holds_even_while_that_is_about_to_go() -> None:
    model = cast(LLM, FakeLLM())
    service = Service(model, Options(model="fake"), Metrics(lambda: {"fake": model.engine}))
    place = service.shelf.places[0]
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await service.model("fake") is model
        place.leaving = True  # a second lease would wait for this request to end
        assert await service.model("fake") is model
        seen.append(place.leases)

    async def nothing(*message: Any) -> Any:
        raise AssertionError

    async def run() -> None:
        await asyncio.wait_for(HoldModels(app)({"type": "http"}, nothing, nothing), 10)

    asyncio.run(run())
    assert seen == [1]
    assert place.leases == 0
