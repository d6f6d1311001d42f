"""The engine: answers depend on the request alone, and no request hurts another."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs
from headroom.engine.sampler import LogitRow, sample, token_logprobs
from headroom.engine.scheduler import Turn
from headroom.errors import CapacityError, ContextLengthError, RequestError
from headroom.layers.batch import Batch
from headroom.layers.draws import Draw
from headroom.llm import LLM
from headroom.split.stage import StepResult
from tests.tiny import llama_config, random_model, save_gguf

SAMPLED = {"temperature": 0.8, "max_tokens": 40, "ignore_eos": True}
PROMPTS = ["a", "hello there", "x" * 70, "0123456789" * 9, "mixed\n\ttext", "zz", "q" * 33, "end"]


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), context=256, parallel=4, chunk=32, threads=1) as opened:
        yield opened


def answer(llm: LLM, prompt: str, **params: object) -> tuple[int, ...]:
    return llm.generate(prompt, SamplingParams(**params))[0].token_ids  # type: ignore[arg-type]


def collect(llm: LLM, request: GenerationRequest) -> list[TokenEvent]:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    llm.engine.submit(request, events.put)
    found = [events.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=30))
    return found


def test_an_answer_does_not_depend_on_who_shares_the_batch(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, **SAMPLED) for seed in range(len(PROMPTS))]
    alone = [
        llm.generate(prompt, p)[0].token_ids for prompt, p in zip(PROMPTS, params, strict=True)
    ]
    streams = [llm.stream(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    together = [tuple(piece.token for piece in stream) for stream in streams]
    assert together == alone
    assert len(set(alone)) == len(alone)


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are as wide as a block of q8_0."""
    model = random_model(llama_config(head_dim=32, tie_word_embeddings=False))
    return save_gguf(model, tmp_path_factory.mktemp("wide") / "wide.gguf")


@pytest.mark.parametrize(
    ("k_type", "v_type"),
    [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "f16")],
)
def test_an_answer_does_not_depend_on_preemption(wide_path: Path, k_type: str, v_type: str) -> None:
    settings = {"context": 256, "parallel": 4, "chunk": 32, "threads": 1}
    settings |= {"k_type": k_type, "v_type": v_type}
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=3)
    with LLM(str(wide_path), **settings) as roomy:
        numbered = [replace(params, draw=draw) for draw in range(len(PROMPTS))]
        alone = [
            roomy.generate(prompt, one)[0].token_ids
            for prompt, one in zip(PROMPTS, numbered, strict=True)
        ]
    with LLM(str(wide_path), cache_tokens=320, **settings) as tight:
        together = [done.token_ids for done in tight.generate(PROMPTS, params)]
        assert tight.engine.stats().preemptions > 0
        assert tight.engine.stats().cache_pages_used == 0
    assert together == alone


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_an_answer_does_not_depend_on_the_chunk(tiny_path: Path, llm: LLM, chunk: int) -> None:
    expected = answer(llm, PROMPTS[3], seed=1, **SAMPLED)
    with LLM(str(tiny_path), context=256, chunk=chunk, threads=1) as other:
        assert answer(other, PROMPTS[3], seed=1, **SAMPLED) == expected


def test_packed_and_unpacked_weights_give_the_same_answer(tiny_path: Path) -> None:
    answers = set()
    for weights in ("packed", "unpacked"):
        with LLM(str(tiny_path), context=128, weights=weights, threads=1) as llm:
            answers.add(answer(llm, "some prompt", seed=1, **SAMPLED))
    assert len(answers) == 1


def test_a_seed_repeats_its_text_and_each_draw_of_it_differs(llm: LLM) -> None:
    first = answer(llm, "p", seed=5, **SAMPLED)
    assert answer(llm, "p", seed=5, **SAMPLED) == first
    assert answer(llm, "p", seed=6, **SAMPLED) != first
    assert answer(llm, "p", seed=5, draw=1, **SAMPLED) != first


def test_the_last_event_has_the_finish_reason_and_the_counts(llm: LLM) -> None:
    request = llm.request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    events = collect(llm, request)
    assert [event.generated_tokens for event in events] == [1, 2, 3, 4]
    assert [event.request_id for event in events] == [request.id] * 4
    assert [event.prompt_tokens for event in events] == [3] * 4
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    assert events[-1].timings is not None
    assert events[-1].timings.decode_s >= 0


def test_timings_begin_with_the_first_step_and_the_first_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    events = collect(llm, llm.request([1] * 100, params))  # four steps of 32 tokens, then seven
    times = [event.timings for event in events if event.timings is not None]
    assert len(times) == 8
    assert len({time.queue_s for time in times}) == 1
    assert len({time.prefill_s for time in times}) == 1
    assert times[0].prefill_s > 0
    decode_s = [time.decode_s for time in times]
    assert decode_s == sorted(set(decode_s))


def test_a_stop_token_at_the_last_place_is_a_stop(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={256: 100.0})
    assert [event.finish_reason for event in collect(llm, llm.request([1], params))] == ["stop"]


def test_a_stop_token_ends_the_answer_unless_ignored(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={256: 100.0})
    events = collect(llm, llm.request([1, 2], params))
    assert [(event.token, event.finish_reason) for event in events] == [(256, "stop")]
    ignoring = SamplingParams(temperature=0, max_tokens=5, logit_bias={256: 100.0}, ignore_eos=True)
    events = collect(llm, llm.request([1, 2], ignoring))
    assert [event.token for event in events] == [256] * 5
    assert events[-1].finish_reason == "length"


def test_an_answer_ends_where_the_context_ends(llm: LLM) -> None:
    prompt = [5] * 250
    events = collect(llm, llm.request(prompt, SamplingParams(temperature=0, ignore_eos=True)))
    assert len(events) == 6
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize(("wanted", "given", "cut"), [(5, 5, False), (6, 6, False), (7, 6, True)])
def test_max_tokens_beyond_the_context_is_cut_and_logged(
    llm: LLM, caplog: pytest.LogCaptureFixture, wanted: int, given: int, cut: bool
) -> None:
    caplog.set_level("INFO", "headroom.engine")
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=wanted)
    request = llm.request([5] * 250, params)
    events = collect(llm, request)
    assert (len(events), events[-1].finish_reason) == (given, "length")
    told = (
        f"request: {request.id} may generate 6 tokens, not 7: a prompt of 250 in a context of 256"
    )
    assert (told in caplog.messages) == cut


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(
        ContextLengthError, match="prompt has 256 tokens and the context holds 256"
    ) as caught:
        llm.generate([[1] * 256])
    assert caught.value.param == "prompt"
    assert len(llm.generate([[1] * 255])[0].token_ids) == 1


def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Token id 320 is outside the vocabulary of 320") as got:
        llm.generate([[1, 320]])
    assert got.value.param == "prompt"
    with pytest.raises(RequestError, match="Token id -1 is outside"):
        llm.generate([[-1]])
    with pytest.raises(RequestError, match="Token id 999 is outside") as caught:
        llm.generate("x", SamplingParams(logit_bias={999: 1.0}))
    assert caught.value.param == "logit_bias"


def test_an_empty_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="The prompt is empty"):
        llm.generate("")


def test_cancelling_ends_a_request_and_frees_its_pages(llm: LLM) -> None:
    seen = threading.Event()
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def on_event(event: TokenEvent) -> None:
        events.put(event)
        seen.set()

    request = llm.request([1, 2, 3], SamplingParams(ignore_eos=True))
    llm.engine.submit(request, on_event)
    assert seen.wait(30)
    llm.engine.cancel(request.id)
    llm.engine.cancel("no such request")
    found = [events.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=30))
    *tokens, last = found
    assert (last.request_id, last.finish_reason, last.token, last.error) == (
        request.id,
        "cancelled",
        None,
        "",
    )
    assert (last.prompt_tokens, last.generated_tokens) == (3, len(tokens))
    assert last.timings is not None
    assert last.timings.decode_s > 0
    assert llm.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("pieces", [0, 1])
def test_closing_a_stream_cancels_its_request(llm: LLM, pieces: int) -> None:
    stream = llm.stream("abc", SamplingParams(ignore_eos=True))
    for _ in range(pieces):
        next(stream)
    stream.close()
    llm.generate("after", SamplingParams(max_tokens=1))
    assert llm.engine.stats().requests_finished["cancelled"] == 1


def test_requests_beyond_the_queue_are_refused_and_the_others_served(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_path), context=128, parallel=1, queue=2, threads=1) as llm:
        params, refused = SamplingParams(max_tokens=30, ignore_eos=True), threading.Event()
        step = llm.engine._pipeline.step

        def wait_and_step(batch: Batch, draws: Sequence[Draw | None]) -> StepResult:
            assert refused.wait(30)  # or the first request might have ended by then
            return step(batch, draws)

        monkeypatch.setattr(llm.engine._pipeline, "step", wait_and_step)
        streams = [llm.stream("abc", params) for _ in range(3)]
        with pytest.raises(CapacityError, match="3 requests are running or waiting"):
            llm.stream("abc", params)
        refused.set()
        assert all(len(list(stream)) == 30 for stream in streams)


def test_a_failing_step_ends_its_requests_with_an_error_and_no_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine._pipeline.step

    def break_once(batch: object, draws: object) -> StepResult:
        monkeypatch.setattr(llm.engine._pipeline, "step", step)
        raise MemoryError("out of memory")

    monkeypatch.setattr(llm.engine._pipeline, "step", break_once)
    request = llm.request([1, 2], SamplingParams(max_tokens=3))
    events = collect(llm, request)
    assert (events[-1].request_id, events[-1].finish_reason) == (request.id, "error")
    assert "MemoryError: out of memory" in events[-1].error
    assert len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert llm.engine.stats().cache_pages_used == 0


def test_a_failing_sampler_ends_one_request_and_no_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_sevens(logits: LogitRow, history: list[int], *more: Any) -> int:
        if history[0] == 7:
            raise FloatingPointError("no number")
        return sample(logits, history, *more)

    monkeypatch.setattr("headroom.engine.outputs.sample", fail_for_sevens)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    before, after = llm.stream([1, 2], params), llm.stream([3, 4], params)
    events = collect(llm, llm.request([7], params))
    assert (events[-1].finish_reason, events[-1].error) == (
        "error",
        "FloatingPointError: no number",
    )
    assert [len(list(stream)) for stream in (before, after)] == [20, 20]
    assert llm.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_failing_reader_does_not_stop_the_engine(
    llm: LLM, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    request = llm.request([1], SamplingParams(ignore_eos=True))

    def fail(event: TokenEvent) -> None:
        raise error("reader is gone")

    llm.engine.submit(request, fail)
    assert len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    assert llm.engine.alive
    assert f"the reader of request {request.id} failed" in caplog.text


def test_an_engine_that_breaks_ends_its_requests_with_an_error_and_takes_no_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert llm.engine.alive

    def fail() -> list[Turn]:
        raise AssertionError("a page was lent twice")

    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    llm.engine.submit(llm.request([1], SamplingParams(ignore_eos=True)), events.put)
    events.get(timeout=30)
    monkeypatch.setattr(llm.engine._scheduler, "next_turns", lambda parts: fail())
    monkeypatch.setattr(llm.engine._scheduler, "remove", lambda sequence: fail())
    last = events.get(timeout=30)
    while last.finish_reason is None:
        last = events.get(timeout=30)
    assert (last.finish_reason, last.error) == ("error", "AssertionError: a page was lent twice")
    assert not llm.engine.alive
    assert llm.engine.stats().requests_finished["error"] == 1
    with pytest.raises(CapacityError, match="stopped after an error: AssertionError: a page"):
        llm.generate("x")
    assert "engine: stopped by an error" in caplog.text


def test_cancelling_a_request_that_just_ended_does_not_hit_the_next_of_its_id(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = llm.request([1], SamplingParams(max_tokens=2, ignore_eos=True))
    found: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def cancel_too_late(logits: LogitRow, history: list[int], *more: Any) -> int:
        if len(history) == 2:  # this draw ends the request
            monkeypatch.setattr("headroom.engine.outputs.sample", sample)
            llm.engine.cancel(request.id)
        return sample(logits, history, *more)

    def ask_again(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            llm.engine.submit(request, found.put)

    monkeypatch.setattr("headroom.engine.outputs.sample", cancel_too_late)
    llm.engine.submit(request, ask_again)
    assert found.get(timeout=30).finish_reason is None
    assert found.get(timeout=30).finish_reason == "length"


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    request = llm.request([1], SamplingParams(ignore_eos=True))
    llm.engine.submit(request, lambda event: None)
    with pytest.raises(RequestError, match="is running or waiting"):
        llm.engine.submit(request, lambda event: None)


def test_closing_the_engine_cancels_what_runs(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), context=256, threads=1)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    llm.engine.submit(llm.request([1], SamplingParams(ignore_eos=True)), events.put)
    events.get(timeout=30)
    llm.close()
    found = [events.get(timeout=1)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=1))
    assert found[-1].finish_reason in ("cancelled", "length")
    assert not llm.engine.alive
    with pytest.raises(CapacityError, match="shutting down"):
        llm.generate("x")


def test_an_engine_that_nobody_closes_does_not_keep_its_process_alive(llm: LLM) -> None:
    (thread,) = (x for x in threading.enumerate() if x.name == "headroom-engine")
    assert thread.daemon


def test_logprobs_report_the_drawn_token_and_the_likeliest_alternatives(llm: LLM) -> None:
    done = llm.generate("abc", SamplingParams(temperature=0, max_tokens=5, logprobs=3))[0]
    for token, found in zip(done.token_ids, done.logprobs, strict=True):
        assert found.top[0] == (token, found.logprob)
        assert len(found.top) == 3


def test_prompt_logprobs_equal_those_of_drawing_the_prompt_itself(llm: LLM) -> None:
    generated = llm.generate(
        "abc", SamplingParams(temperature=0, max_tokens=50, logprobs=2, ignore_eos=True)
    )[0]
    prompt = [*llm.tokenizer.encode("abc"), *generated.token_ids]
    params = SamplingParams(max_tokens=1, logprobs=2, prompt_logprobs=True)
    first = collect(llm, llm.request(prompt, params))[0]
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    assert first.prompt_logprobs[3:] == generated.logprobs  # the alternatives, too


def test_prompt_logprobs_come_once_and_have_as_many_alternatives_as_asked_for(llm: LLM) -> None:
    for top in (0, 1, 5):
        params = SamplingParams(max_tokens=3, logprobs=top, prompt_logprobs=True, ignore_eos=True)
        events = collect(llm, llm.request([3, 1, 4, 1, 5], params))
        assert [len(event.prompt_logprobs) for event in events] == [5, 0, 0]
        entries = [*events[0].prompt_logprobs[1:], *(event.logprobs for event in events)]
        assert [len(entry.top) for entry in entries if entry] == [top] * 7


def test_answers_to_one_prompt_compute_its_logprobs_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []

    def counted(logits: LogitRow, token: int, top: int) -> TokenLogprobs:
        scored.append(token)
        return token_logprobs(logits, token, top)

    monkeypatch.setattr("headroom.engine.outputs.token_logprobs", counted)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    given = {"max_tokens": 2, "logprobs": 3, "prompt_logprobs": True, "ignore_eos": True}
    first = llm.request(prompt, SamplingParams(**given))
    alone = collect(llm, first)
    assert len(scored) == 7 + 2  # of the prompt and of the answer
    scored.clear()
    shared: list[TokenLogprobs | None] = []
    requests = [
        replace(llm.request(prompt, SamplingParams(draw=draw, **given)), prompt_logprobs=shared)
        for draw in range(3)
    ]
    ended = threading.Semaphore(0)
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}

    def take(event: TokenEvent) -> None:
        events[event.request_id].append(event)
        if event.finish_reason is not None:
            ended.release()

    for request in requests:
        llm.engine.submit(request, take)
    for _ in requests:
        assert ended.acquire(timeout=60)
    assert len(scored) == 7 + 3 * 2
    for request in requests:
        assert events[request.id][0].prompt_logprobs == alone[0].prompt_logprobs


def test_stats_count_running_and_waiting_requests_separately(tiny_path: Path) -> None:
    submitted = threading.Event()
    seen: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    with LLM(str(tiny_path), context=128, parallel=1, threads=1) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)

        def look(event: TokenEvent) -> None:
            assert submitted.wait(30)
            stats = llm.engine.stats()
            seen.put((stats.requests_running, stats.requests_waiting))

        llm.engine.submit(llm.request([1], params), look)
        rest = [llm.stream("abc", params) for _ in range(2)]
        submitted.set()
        assert seen.get(timeout=30) == (1, 2)
        assert [len(list(stream)) for stream in rest] == [2, 2]


def test_stats_count_what_was_done(llm: LLM) -> None:
    llm.generate("abcd", SamplingParams(max_tokens=6, ignore_eos=True))
    stats = llm.engine.stats()
    assert stats.prompt_tokens == 4
    assert stats.generated_tokens == 6
    assert stats.requests_finished == {"length": 1}
    assert stats.requests_running == stats.requests_waiting == 0
    assert stats.steps >= 6
