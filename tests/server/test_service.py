"""Tests of the service: how conversations become requests of the engine."""

import asyncio
import threading
from typing import Any, cast

import pytest

from headroom.errors import CapacityError, ContextLengthError, RequestError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server import service
from headroom.server.holding import HoldModels
from headroom.server.metrics import Metrics
from headroom.server.refusals import RefusalError
from headroom.server.request_log import WatchRequests, current_record
from headroom.server.service import (
    LARGE_BODY_BYTES,
    MOST_BIASES,
    MOST_EMBEDDED_NUMBERS,
    MOST_LOGPROBS,
    UNREAD_EVENTS,
    UNREAD_EVENTS_PER_ANSWER,
    Answers,
    Service,
    make_requests,
)
from headroom.server.shelf import Shelf
from headroom.text.conversation import Conversation
from headroom.text.long_texts import CHARACTERS
from tests.server.fakes import HIDDEN, FakeLLM

OPTIONS = Options(model="fake")
CHAT = Conversation(messages=[{"role": "user", "content": "Hi"}])


def make_service(llm: LLM, options: Options = OPTIONS) -> Service:
    shelf = Shelf.of_loaded(llm, options)
    return Service(shelf, options, Metrics(shelf.engines))


def start_chat(
    llm: FakeLLM, settings: dict[str, Any], chat: Conversation = CHAT, n: int = 1
) -> Answers:
    async def run() -> Answers:
        model = cast(LLM, llm)
        service = make_service(model)
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
    service = make_service(model)
    shelved = service.shelf.models[0]
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await service.model("fake") is model
        shelved.leaving = True  # a second lease would wait for this request to end
        assert await service.model("fake") is model
        seen.append(shelved.leases)

    async def nothing(*message: Any) -> Any:
        raise AssertionError

    async def run() -> None:
        await asyncio.wait_for(HoldModels(app)({"type": "http"}, nothing, nothing), 10)

    asyncio.run(run())
    assert seen == [1]
    assert shelved.leases == 0


def test_an_answer_that_nobody_reads_is_cancelled_with_bounded_memory() -> None:
    llm = FakeLLM()
    llm.engine.words = "x" * 3000
    model = cast(LLM, llm)

    async def run() -> tuple[str, RefusalError]:
        service = make_service(model)
        answers = await service.start_chat(model, CHAT, {"logprobs": 20})
        while not answers.is_cut:
            await asyncio.sleep(0.01)
        read = ""
        try:
            async for delta in answers.deltas():
                read += delta.text
        except RefusalError as error:
            return read, error
        raise AssertionError("the stream ended without an error")

    read, error = asyncio.run(run())
    # The events up to then are still delivered, then the error.
    assert read == "x" * (UNREAD_EVENTS + UNREAD_EVENTS_PER_ANSWER)
    assert (error.status, error.code) == (503, "slow_client")
    assert f"left {len(read)} events unread" in error.message
    assert llm.engine.was_cancelled(llm.engine.requests[0].id)


def test_requests_that_are_prepared_count_against_the_queue() -> None:
    model = cast(LLM, FakeLLM())
    go_on = threading.Event()

    async def run() -> None:
        options = Options(model="fake", queue=2)
        service = make_service(model, options)
        running = [asyncio.create_task(service.in_thread(go_on.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="2 requests are being prepared"):
            await service.in_thread(go_on.wait)
        go_on.set()
        assert await asyncio.gather(*running) == [True, True]
        assert await service.in_thread(len, "three") == 5  # the places are free again

    asyncio.run(run())


def test_biases_are_bounded_over_all_answers() -> None:
    bias = dict.fromkeys(range(250), 1.0)
    llm, answers = cast(LLM, FakeLLM()), MOST_BIASES // 250
    settings = {"logit_bias": bias}
    make_requests(llm, [[65]] * answers, settings, 1, prompt_field="prompt")
    with pytest.raises(RequestError, match=f"250 tokens for each of {2 * answers}") as caught:
        make_requests(llm, [[65]] * answers, settings, 2, prompt_field="prompt")
    assert caught.value.param == "logit_bias"


def with_logprobs(top: int, *, n: int = 1, streams: bool = False, **settings: Any) -> None:
    """Make the requests of two prompts that leave room for 4000 tokens each."""
    llm, prompt = cast(LLM, FakeLLM(context=4100)), [65] * 100
    settings["logprobs"] = top
    make_requests(llm, [prompt, prompt], settings, n, prompt_field="prompt", streams=streams)


def test_logprobs_of_a_response_that_is_not_streamed_are_bounded() -> None:
    tokens = MOST_LOGPROBS // (2 * 8 * 21)
    with_logprobs(20, n=8, max_tokens=tokens)
    with pytest.raises(RequestError) as caught:
        with_logprobs(20, n=8, max_tokens=tokens + 1)
    wanted = (tokens + 1) * 2 * 8 * 21
    assert caught.value.param == "logprobs"
    assert str(caught.value) == (
        f"The response may have {wanted} logprobs: {2 * (tokens + 1)} tokens x 8 answers to each "
        f"prompt x 21 for each token; at most {MOST_LOGPROBS} are given at once. Stream the "
        "response, give or lower max_tokens, or ask for fewer answers or logprobs."
    )


def test_without_max_tokens_the_rest_of_the_context_counts_as_logprobs() -> None:
    with_logprobs(20)
    with_logprobs(20, max_tokens=1 << 30)
    for settings in ({}, {"max_tokens": -1}, {"max_tokens": 1 << 30}):
        with pytest.raises(RequestError, match="8000 tokens x 4 answers"):
            with_logprobs(20, n=4, **settings)


@pytest.mark.parametrize("most", [None, -1, 1 << 30])
def test_answers_that_may_fill_a_long_context_are_cut_for_their_logprobs(most: int | None) -> None:
    llm, prompts = cast(LLM, FakeLLM(context=200_100)), [[65] * 100]

    def lengths(n: int, top: int) -> set[int | None]:
        settings = {"max_tokens": most, "logprobs": top}
        made = make_requests(llm, prompts, settings, n, prompt_field="prompt")
        assert len(made) == n
        return {request.params.max_tokens for request in made}

    assert lengths(1, 0) == {most if most != -1 else None}
    assert lengths(2, 0) == {MOST_LOGPROBS // 2}
    assert lengths(3, 20) == {MOST_LOGPROBS // 63}
    with pytest.raises(RequestError, match="200000 tokens x 4 answers"):
        lengths(4, 20)  # LEAST_CUT tokens of each would be too many


def test_logprobs_that_are_streamed_are_not_bounded() -> None:
    with_logprobs(20, n=32, streams=True)


def test_a_text_far_beyond_the_context_is_refused_before_it_is_encoded_whole() -> None:
    llm = FakeLLM()
    longest = 0
    encode = llm.tokenizer.encode

    def watch(text: str, **how: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return cast(list[int], encode(text, **how))

    llm.tokenizer.encode = watch
    chat = Conversation(messages=[{"role": "user", "content": "x" * 10 * CHARACTERS}])
    with pytest.raises(
        ContextLengthError, match=r"has at least \d+ tokens .* holds 4096"
    ) as caught:
        start_chat(llm, {}, chat)
    assert caught.value.param == "input"
    with pytest.raises(ContextLengthError, match="at least"):
        embed(llm, ["x" * 10 * CHARACTERS])
    assert longest == CHARACTERS


def embed(llm: FakeLLM, texts: list[str]) -> int:
    """Return the number of vectors of some texts."""
    model = cast(LLM, llm)
    return len(asyncio.run(make_service(model).embed(model, texts)).vectors)


def test_the_numbers_of_all_vectors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_EMBEDDED_NUMBERS >= 1000 * 4096  # LangChain sends 1000 texts
    monkeypatch.setattr(service, "MOST_EMBEDDED_NUMBERS", 3 * HIDDEN)
    assert embed(FakeLLM(), ["a"] * 3) == 3
    with pytest.raises(RequestError, match=f"4 texts .* of {HIDDEN} numbers, at most 3") as caught:
        embed(FakeLLM(), ["a"] * 4)
    assert caught.value.param == "input"


def test_work_for_large_bodies_shares_one_thread() -> None:
    model = cast(LLM, FakeLLM())
    metrics = Metrics(Shelf.of_loaded(model, OPTIONS).engines)

    async def names(body_bytes: int) -> set[str]:
        found: list[str] = []
        both = threading.Barrier(2)

        def work() -> None:
            found.append(threading.current_thread().name)
            if body_bytes <= LARGE_BODY_BYTES:
                both.wait(10)  # small bodies do not wait for each other

        async def app(*given: Any) -> None:
            current_record().body_bytes = body_bytes
            prepared = make_service(model)
            await asyncio.gather(prepared.in_thread(work), prepared.in_thread(work))

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        await WatchRequests(app, metrics)(scope, cast(Any, None), cast(Any, None))
        return set(found)

    assert len(asyncio.run(names(LARGE_BODY_BYTES))) == 2
    assert asyncio.run(names(LARGE_BODY_BYTES + 1)) == {"prepare-large_0"}
