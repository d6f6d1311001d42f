"""Guesses in the engine: the same tokens as without them, whatever is guessed and asked for."""

import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.errors import FormatError, OptionError, RequestError
from headroom.experts.traces.taps import TraceRecorder
from headroom.families.files import open_checkpoint
from headroom.llm import LLM
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.spec.draft import Draft
from headroom.text.conversation import OutputFormat
from tests.plan.shapes import gpu, host
from tests.scripted import ScriptedDrafter
from tests.synth_models import MODELS, write_model

SETTINGS: dict[str, Any] = {
    "context": 256,
    "parallel": 4,
    "chunk": 32,
    "threads": 1,
    "kv_type": "f32",
    "dtype": "f32",
}
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 3}
KINDS = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "sampled": SamplingParams(seed=2, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, **LONG),
    "penalised": SamplingParams(
        seed=3, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={5: 4.0}, **LONG
    ),
    "schema": SamplingParams(seed=4, **LONG),
}
PROMPTS = {  # the second is longer than the windows and the chunk
    name: list(range(200, 212)) if number % 2 else list(range(90, 170))
    for number, name in enumerate(KINDS)
}
RIGHT = (0.0, 0.5, 0.9, 1.0)
SHAPES = {"chain": (8, False), "tree of 8": (8, True), "tree of 22": (22, True)}


def request_of(llm: LLM, kind: str, prompt: Sequence[int]) -> GenerationRequest:
    constraint = None
    if kind == "schema":
        wanted = OutputFormat(kind="json_schema", value=SCHEMA)
        constraint = llm.grammars.compile([wanted], continues=True).begin()
    return llm.request(prompt, KINDS[kind], constraint)


def answers(llm: LLM, requests: Sequence[GenerationRequest]) -> list[list[TokenEvent]]:
    """Run requests together; return the events of each."""
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    for request in requests:
        llm.engine.submit(request, events.put)
    found: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    running = set(found)
    while running:
        event = events.get(timeout=60)
        found[event.request_id].append(event)
        assert not event.error, event.error
        if event.finish_reason is not None:
            running.discard(event.request_id)
    return list(found.values())


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


@dataclass(frozen=True)
class Recorded:
    """A model, and what it answers to every kind of request without guesses, one at a time."""

    path: Path
    tokens: dict[str, list[int]]

    def text(self, kind: str) -> list[int]:
        return PROMPTS[kind] + self.tokens[kind]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("drafts")

    @cache
    def record(name: str) -> Recorded:
        path = write_model(name, "q8_0", folder, few_layers=True)
        with LLM(str(path), no_prefix_cache=True, **SETTINGS) as llm:
            found = {
                kind: tokens_of(answers(llm, [request_of(llm, kind, prompt)])[0])
                for kind, prompt in PROMPTS.items()
            }
        return Recorded(path, found)

    return record


def cases() -> Iterator[Any]:
    """Yield every model with every shape and device; by default one of them runs for each model."""
    for number, name in enumerate(MODELS):
        for at, (shape, device) in enumerate(product(SHAPES, ["cpu", "cpu,cpu"])):
            rare = (number + at) % (2 * len(SHAPES)) != 0
            yield pytest.param(name, shape, device, marks=[pytest.mark.slow] if rare else [])


@pytest.mark.parametrize(("name", "shape", "device"), cases())
def test_answers_are_the_same_with_right_and_wrong_guesses_of_every_kind(
    name: str, shape: str, device: str, recorded: Any
) -> None:
    known, (guesses, tree) = recorded(name), SHAPES[shape]
    texts = [known.text(kind) for kind in KINDS]
    for right in RIGHT:
        drafter = ScriptedDrafter(texts, right, tree=tree)
        options = {"draft": "ngram", "draft_tokens": guesses, "draft_always": True}
        with LLM(str(known.path), drafter=drafter, device=device, **options, **SETTINGS) as llm:
            for warm in (False, True):  # the second time, prompts begin with known prefixes
                requests = [request_of(llm, kind, prompt) for kind, prompt in PROMPTS.items()]
                found = answers(llm, requests)
                for kind, events in zip(KINDS, found, strict=True):
                    assert tokens_of(events) == known.tokens[kind], (kind, right, warm)
                reused = [events[-1].cached_tokens for events in found]
                assert all(reused[number] > 0 for number in (0, 2)) == warm
            stats = llm.engine.stats()
        assert stats.guessed_tokens == sum(map(len, drafter.drafts)) > 100
        assert (stats.accepted_tokens > 20) == (right > 0)
        if right == 1 and not tree:
            assert stats.accepted_tokens > 0.9 * stats.guessed_tokens


@pytest.fixture(scope="module", params=["llama", "qwen35", "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with full attention, one with recurrent layers and one with windows."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(request.param, "q8_0", folder, few_layers=True)


@pytest.fixture
def plain(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def drafting(model: Path, drafter: ScriptedDrafter, **settings: Any) -> LLM:
    options = {"draft": "ngram", "draft_always": True, "draft_tokens": 6, **SETTINGS, **settings}
    return LLM(str(model), drafter=drafter, **options)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    "types", [{"dtype": "int8", "kv_type": "f16"}, {"kernels": "reference", "kv_type": "bf16"}]
)
def test_answers_are_the_same_in_narrow_types_and_with_the_plain_kernels(
    model: Path, types: dict[str, str], tree: bool
) -> None:
    settings = SETTINGS | types
    with LLM(str(model), **settings) as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS[1:4]]
        params = replace(PARAMS, max_tokens=24)
        wanted = [tokens_of(answers(llm, [llm.request(one, params)])[0]) for one in prompts]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)]
    with drafting(model, ScriptedDrafter(texts, 0.8, tree=tree), **types) as llm:
        requests = [llm.request(one, params) for one in prompts]
        assert [tokens_of(events) for events in answers(llm, requests)] == wanted
        assert llm.engine.stats().accepted_tokens > 10


PARAMS = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=3)
TEXTS = ["a", "hello there", "x" * 70, "0123456789" * 9, "mixed\n\ttext", "zz", "q" * 33, "end"]


def numbered(llm: LLM, params: SamplingParams) -> list[GenerationRequest]:
    return [
        llm.request(llm.tokenizer.encode(text), replace(params, draw=draw))
        for draw, text in enumerate(TEXTS)
    ]


def test_answers_are_the_same_in_batches_that_change_and_after_preemption(
    model: Path, plain: LLM
) -> None:
    params = replace(PARAMS, max_tokens=80)
    wanted = [tokens_of(answers(plain, [one])[0]) for one in numbered(plain, params)]
    texts = [
        [*request.prompt, *tokens]
        for request, tokens in zip(numbered(plain, params), wanted, strict=True)
    ]
    for tree in (False, True):
        drafter = ScriptedDrafter(texts, 0.5, tree=tree)
        with drafting(model, drafter, cache_tokens=320) as llm:
            found = [tokens_of(events) for events in answers(llm, numbered(llm, params))]
            stats, scheduler = llm.engine.stats(), llm.engine._scheduler
            assert found == wanted
            assert stats.preemptions > 0
            assert stats.cache_pages_used == 0
            assert scheduler._state_slots.free == scheduler._state_slots.total
            assert stats.accepted_tokens > 20


def test_logprobs_and_counts_are_those_of_an_answer_without_guesses(
    model: Path, plain: LLM
) -> None:
    params = replace(PARAMS, logprobs=3, prompt_logprobs=True)
    prompt = plain.tokenizer.encode(TEXTS[1])
    wanted = answers(plain, [plain.request(prompt, params)])[0]
    drafter = ScriptedDrafter([[*prompt, *tokens_of(wanted)]], 0.7)
    with drafting(model, drafter) as llm:
        found = answers(llm, [llm.request(prompt, params)])[0]
        stats = llm.engine.stats()

    def told(event: TokenEvent) -> object:
        return replace(event, request_id="", timings=None)

    assert [told(event) for event in found] == [told(event) for event in wanted]
    last = found[-1].timings
    assert last is not None
    assert (last.guessed, last.accepted) == (stats.guessed_tokens, stats.accepted_tokens)
    assert 0 < last.accepted < last.guessed


@pytest.mark.parametrize("most", range(1, 12))
def test_an_answer_ends_at_max_tokens_within_a_draft(model: Path, plain: LLM, most: int) -> None:
    prompt = plain.tokenizer.encode(TEXTS[1])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    with drafting(model, ScriptedDrafter([[*prompt, *whole]], 1.0)) as llm:
        events = answers(llm, [llm.request(prompt, replace(PARAMS, max_tokens=most))])[0]
        assert tokens_of(events) == whole[:most]
        assert events[-1].finish_reason == "length"
        # What the answer leaves in the prefix cache is right, too: another one goes on from it.
        longer = llm.request(prompt + whole[:most], replace(PARAMS, max_tokens=40 - most))
        assert tokens_of(answers(llm, [longer])[0]) == whole[most:]


def test_an_answer_ends_at_a_stop_token_and_at_a_stop_text_within_a_draft(
    model: Path, plain: LLM
) -> None:
    prompt = plain.tokenizer.encode(TEXTS[1])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    at = next(place for place in range(4, 40) if whole[place] not in whole[:place])
    with drafting(model, ScriptedDrafter([[*prompt, *whole]], 1.0)) as llm:
        request = llm.request(prompt, replace(PARAMS, ignore_eos=False))
        events = answers(llm, [replace(request, stop_ids=frozenset({whole[at]}))])[0]
        assert tokens_of(events) == whole[: at + 1]
        assert events[-1].finish_reason == "stop"
        assert llm.engine.stats().accepted_tokens >= at - 1
    text = plain.tokenizer.decode(whole[at : at + 2])
    stopped = replace(PARAMS, stop=(text,))
    wanted = plain.generate([prompt], stopped)[0]
    with drafting(model, ScriptedDrafter([[*prompt, *whole]], 1.0)) as llm:
        found = llm.generate([prompt], stopped)[0]
    assert (found.text, found.token_ids, found.finish_reason) == (
        *(wanted.text, wanted.token_ids),
        "stop",
    )


def test_a_cancelled_answer_leaves_nothing_behind(model: Path, plain: LLM) -> None:
    prompt = plain.tokenizer.encode(TEXTS[3])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    with drafting(model, ScriptedDrafter([[*prompt, *whole]], 0.9)) as llm:
        for pieces in range(1, 6):
            stream = llm.stream(prompt, PARAMS)
            for _ in range(pieces):
                next(stream)
            stream.close()
        assert tokens_of(answers(llm, [llm.request(prompt, PARAMS)])[0]) == whole
        assert llm.engine.stats().cache_pages_used == 0


class FailingRules:
    """Allows every token, and fails before the token of a given number."""

    def __init__(self, fail_at: int) -> None:
        self._fail_at, self._taken = fail_at, 0

    def may_limit(self, unread: int) -> bool:
        return True

    def mask(self) -> None:
        if self._taken == self._fail_at:
            raise ValueError("out of rules")

    def advance(self, token: int) -> None:
        self._taken += 1


def test_rules_that_fail_within_a_draft_end_only_their_own_answer(model: Path, plain: LLM) -> None:
    prompt, other = plain.tokenizer.encode(TEXTS[1]), plain.tokenizer.encode(TEXTS[4])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    healthy = tokens_of(answers(plain, [plain.request(other, PARAMS)])[0])
    drafter = ScriptedDrafter([[*prompt, *whole], [*other, *healthy]], 1.0)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with drafting(model, drafter) as llm:
        failing = llm.request(prompt, PARAMS, FailingRules(5))
        llm.engine.submit(failing, events.put)
        assert tokens_of(answers(llm, [llm.request(other, PARAMS)])[0]) == healthy
        assert tokens_of(answers(llm, [llm.request(prompt, PARAMS)])[0]) == whole
    found = [events.get_nowait() for _ in range(6)]
    assert tokens_of(found) == whole[:5]
    assert (found[-1].finish_reason, found[-1].error) == ("error", "ValueError: out of rules")


def test_a_step_goes_on_without_guesses_if_guessing_fails(
    model: Path, plain: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(ScriptedDrafter):
        def guess(self, tokens: Sequence[int], most: int) -> Draft:
            if len(tokens) % 2:
                raise MemoryError("no room for guesses")
            return super().guess(tokens, most)

    prompt = list(range(200, 212))
    wanted = plain.generate([prompt], PARAMS)[0].token_ids
    with drafting(model, Failing([[*prompt, *wanted]], 1.0)) as llm:
        assert llm.generate([prompt], PARAMS)[0].token_ids == wanted
        assert llm.engine.stats().accepted_tokens > 0
    assert "guessing failed, and the step has no guesses: MemoryError: no room" in caplog.text


def test_a_request_may_do_without_guesses_and_may_not_ask_for_unknown_ones(
    model: Path, plain: LLM
) -> None:
    prompt = plain.tokenizer.encode(TEXTS[1])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    with drafting(model, ScriptedDrafter([[*prompt, *whole]], 1.0)) as llm:
        for draft, guessed in (("none", False), ("ngram", True), (None, True)):
            before = llm.engine.stats().guessed_tokens
            request = llm.request(prompt, replace(PARAMS, draft=draft))
            assert tokens_of(answers(llm, [request])[0]) == whole
            assert (llm.engine.stats().guessed_tokens > before) == guessed
    with pytest.raises(RequestError, match="'ngram', and the engine was started with none"):
        plain.engine.check(plain.request(prompt, replace(PARAMS, draft="ngram")))
    with pytest.raises(
        RequestError, match="draft is 'oracle'; it must be one of ngram, mtp, model, none"
    ):
        replace(PARAMS, draft="oracle")


@pytest.mark.slow
@pytest.mark.parametrize("right", [0.3, 1.0])
def test_20000_short_answers_are_distributed_as_those_without_guesses(
    tmp_path: Path, right: float
) -> None:
    path = write_model("qwen35", "q8_0", tmp_path, few_layers=True)
    prompt, count, length = [300, 301, 302], 20_000, 3
    bias = dict.fromkeys(range(40, 44), 12.0)  # so that few answers are possible

    def counted(llm: LLM, first_seed: int) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(first_seed, first_seed + count, 200):
            requests = [
                llm.request(
                    prompt,
                    SamplingParams(
                        seed=one, top_k=4, max_tokens=length, ignore_eos=True, logit_bias=bias
                    ),
                )
                for one in range(seed, seed + 200)
            ]
            found.update(tuple(tokens_of(events)) for events in answers(llm, requests))
        return found

    settings = SETTINGS | {"parallel": 8}
    with LLM(str(path), **settings) as llm:
        plain = counted(llm, 0)
    likely = [[*prompt, *answer] for answer, _ in plain.most_common(8)]
    drafter = ScriptedDrafter(likely, right, tree=True)
    options = {"draft": "ngram", "draft_tokens": 3, "draft_always": True}
    with LLM(str(path), drafter=drafter, **options, **settings) as llm:
        guessed = counted(llm, 10**6)  # other seeds: equal answers would prove nothing
        assert llm.engine.stats().accepted_tokens > 1000
    kinds = [answer for answer in plain if plain[answer] + guessed[answer] >= 20]
    assert 8 < len(kinds) <= 4**length
    pairs = [(plain[kind], guessed[kind]) for kind in kinds]
    pairs.append(tuple(count - sum(side) for side in zip(*pairs, strict=True)))
    chi = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    freedom = len(kinds)
    # The chi-square distribution has this mean and variance, and is nearly normal.
    assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_name_for_plans_and_workers_are_refused_before_anything_is_loaded(model: Path) -> None:
    with pytest.raises(FormatError, match=r"qwen3.6-27b-dflash is a name for plans"):
        LLM(str(model), draft="qwen3.6-27b-dflash", **SETTINGS)
    with pytest.raises(OptionError, match="Worker processes do not verify guessed tokens"):
        LLM(str(model), draft="ngram", workers="2", **SETTINGS)


def test_picks_of_routers_are_not_replaced_while_tokens_are_guessed(model: Path) -> None:
    with pytest.raises(OptionError, match="not recorded or replaced while tokens are guessed"):
        LLM(str(model), draft="ngram", tap=TraceRecorder(), **SETTINGS)


def test_a_gpu_is_refused_by_the_plan_and_the_rows_of_guesses_are_lines_of_it(model: Path) -> None:
    shape = describe(open_checkpoint(model)).shape
    with pytest.raises(OptionError, match="Only CPUs verify guessed tokens so far, and cuda:0"):
        make_plan([shape], [gpu(24), host(64)], Options(draft="ngram"))
    with LLM(str(model), draft="ngram", **SETTINGS) as llm:
        memory = llm.engine._pipeline._memory["cpu"]
        recurrent = sum(layer.kind == "recurrent" for layer in shape.layers)
        planned = memory.planned.get("verify_scratch", 0)  # a line of 0 bytes is left out
        assert memory.allocated.get("verify_scratch", 0) == planned
        assert (planned > 0) == (recurrent > 0)
        assert memory.allocated["logits"] == memory.planned["logits"] == 32 * shape.vocab * 4


def test_guesses_that_do_not_pay_are_held_back_and_told(model: Path, plain: LLM) -> None:
    prompt = plain.tokenizer.encode(TEXTS[1])
    whole = tokens_of(answers(plain, [plain.request(prompt, PARAMS)])[0])
    drafter = ScriptedDrafter([[*prompt, *whole]], 0.0)
    with drafting(model, drafter, draft_always=False) as llm:
        events = answers(llm, [llm.request(prompt, PARAMS)])[0]
        stats = llm.engine.stats()
    assert tokens_of(events) == whole
    offered = sum(map(len, drafter.drafts))
    assert stats.held_back_tokens >= 2 * 6  # plain steps are measured before the first guess
    assert stats.guessed_tokens + stats.held_back_tokens == offered
    timings = events[-1].timings
    assert timings is not None
    assert timings.held_back == stats.held_back_tokens
