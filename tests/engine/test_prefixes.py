"""Prefixes: an answer after a known prefix has the tokens of one that computed its whole prompt."""

import functools
import logging
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.engine.engine import Engine
from headroom.engine.prefix_disk import open_prefix_files
from headroom.engine.prefix_folder import common_length
from headroom.engine.prefixes import prompt_cuts
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.llm import LLM
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split.launch import start_pipeline
from tests.families.oracles import variant
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

MODELS = (
    "llama",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "laguna",
    "gemma4-31b",
    "gemma4-26b",
    "gemma4-e4b",
)
WAYS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=1),
    "sampled": SamplingParams(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.1,
        logit_bias={3: 2.0},
        seed=5,
        ignore_eos=True,
        max_tokens=6,
        logprobs=0,
    ),
    "penalised": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        ignore_eos=True,
        max_tokens=6,
        logprobs=2,
    ),
}
SETTINGS: dict[str, Any] = {
    "context": 512,
    "parallel": 2,
    "chunk": 40,
    "cache_tokens": 1024,
    "dtype": "f32",
    "kv_type": "f32",
    "threads": 1,
    "routing_stats": "off",
}


def words(seed: object, count: int) -> list[int]:
    """Random tokens that stand for text."""
    random = Random(f"prefix {seed}")
    return [random.randrange(5, 60) for _ in range(count)]


PROMPT = words("prompt", 150)


class Asker:
    """Asks an engine one request after the other."""

    def __init__(self, checkpoint: Checkpoint, **settings: Any) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        options = Options(**(SETTINGS | settings))
        model = describe(checkpoint)
        plan = make_plan([model.shape], plan_devices(options), options)
        pipeline = start_pipeline(plan, model)
        files = open_prefix_files(model.checkpoint.identity, plan, pipeline, options)
        self.engine = Engine(pipeline, plan.settings, queue=64, prefix_files=files)
        self.count = 0

    def submit(
        self, prompt: list[int], way: str = "greedy", key: str | None = "", **params: Any
    ) -> "queue.SimpleQueue[TokenEvent]":
        """Queue a request; return where its events come."""
        self.count += 1
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        changed = {name: getattr(WAYS[way], name) for name in WAYS[way].__slots__} | params
        request = GenerationRequest(
            id=str(self.count),
            prompt=tuple(prompt),
            params=SamplingParams(**changed),
            stop_ids=frozenset(),
            cache_key=key,
        )
        self.engine.submit(request, events.put)
        return events

    def ask(self, prompt: list[int], way: str = "greedy", **more: Any) -> "Heard":
        """Ask a request and wait for its answer."""
        return Heard(self.submit(prompt, way, **more))


class LlmAsker(Asker):
    """Asks the engine of an open model."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.count = llm, llm.engine, 0


class Heard:
    """A whole answer."""

    def __init__(self, events: "queue.SimpleQueue[TokenEvent]") -> None:
        heard = [events.get(timeout=60)]
        while heard[-1].finish_reason is None:
            heard.append(events.get(timeout=60))
        assert heard[-1].finish_reason == "length", heard[-1].error
        self.tokens = [event.token for event in heard if event.token is not None]
        found = [event.logprobs for event in heard]
        self.logprobs = [one.logprob for one in found if one is not None]
        self.cached = heard[-1].cached_tokens


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("prefixes") / "m.gguf"
    return open_checkpoint(variant(request.param).save_gguf(path))


@pytest.fixture
def asker(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Asker]:
    settings = getattr(request, "param", {})
    one = Asker(checkpoint, **settings)
    yield one
    one.engine.close()


def check_conversation(asker: Asker, way: str, disturb: Callable[[], object] | None = None) -> None:
    """Ask prompts that share beginnings; compare each answer with one without the cache.

    `disturb` is called before each warm answer; without it, another prompt changes what a sequence
    has of states and windows.
    """
    if disturb is None:
        disturb = functools.partial(asker.ask, words("other", 120), way, key=None)
    first = asker.ask(PROMPT, way)
    branch = PROMPT[:100] + words("branch", 60)
    longer = PROMPT + words("longer", 30)
    turn = PROMPT + [x for x in first.tokens if x is not None] + words("turn", 50)
    least = {"same": 64, "longer": 128, "branch": 64, "turn": 128}
    for name, prompt in (
        ("same", PROMPT),
        ("longer", longer),
        ("branch", branch),
        ("turn", turn),
        ("same", turn),
    ):
        cold = asker.ask(prompt, way, key=None)
        disturb()
        warm = asker.ask(prompt, way)
        assert warm.tokens == cold.tokens, name
        assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-3), name
        assert cold.cached == 0
        assert least[name] <= warm.cached <= len(prompt), name


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asker", [{}, {"device": "cpu,cpu"}], indirect=True, ids=["one", "two"])
def test_a_warm_answer_is_the_cold_one(asker: Asker, way: str) -> None:
    check_conversation(asker, way)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "asker", [{"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"}], indirect=True
)
def test_what_leaves_the_devices_is_logged_with_numbers(
    asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asker.ask(PROMPT)
    push_out(asker)
    told = re.search(
        r"pressure: (\d+) more pages needed: prefixes gave up 0 and moved (\d+) to host memory "
        r"\(\d+ of \d+ used there\); \d of 8 pages are free now",
        caplog.text,
    )
    assert told is not None
    assert int(told[1]) == int(told[2]) > 0


def push_out(asker: Asker) -> None:
    """Take all pages of the devices once, so that whatever was kept has to leave them."""
    asker.ask(words(f"room {asker.count}", 500), key=None, max_tokens=6)
    counts = asker.engine.stats().prefixes
    assert counts.idle_pages == 0
    assert counts.host_pages > 0


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "asker",
    [
        {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"},
        pytest.param(
            {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB", "device": "cpu,cpu"},
            marks=pytest.mark.slow,
        ),
    ],
    indirect=True,
    ids=["one", "two"],
)
def test_a_warm_answer_from_host_memory_is_the_cold_one(asker: Asker, way: str) -> None:
    check_conversation(asker, way, lambda: push_out(asker))
    counts = asker.engine.stats().prefixes
    assert counts.promoted_pages >= 8
    assert asker.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
@pytest.mark.parametrize(
    "asker",
    [{"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB", "kv_type": "q8_0"}],
    indirect=True,
)
def test_types_are_kept_as_they_are_in_host_memory(asker: Asker) -> None:
    check_conversation(asker, "greedy", lambda: push_out(asker))


@pytest.mark.parametrize("checkpoint", ["qwen35", "gemma4-26b"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_prompt_again_computes_nothing(asker: Asker, way: str) -> None:
    prompt = PROMPT + words("again", 80)  # 70 tokens behind the last cut
    cold = asker.ask(prompt, way, key=None)
    first = asker.ask(prompt, way)
    asker.ask(words("other", 120), way, key=None)
    before = asker.engine.stats().prompt_tokens
    heard = [Heard(x) for x in [asker.submit(prompt, way) for _ in range(3)]]
    assert asker.engine.stats().prompt_tokens == before
    for warm in heard:
        assert warm.tokens == first.tokens == cold.tokens
        assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-3)
        assert warm.cached == len(prompt)
    one = asker.ask(prompt, way, max_tokens=1)
    assert one.tokens == cold.tokens[:1]


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
def test_answers_that_run_together_share_a_prefix(asker: Asker) -> None:
    cold = [asker.ask(PROMPT + words(i, 20), key=None) for i in range(6)]
    asker.ask(PROMPT)
    warm = [Heard(x) for x in [asker.submit(PROMPT + words(i, 20)) for i in range(6)]]
    assert [one.tokens for one in warm] == [one.tokens for one in cold]
    assert all(one.cached >= 128 for one in warm)


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_equal_beginnings_that_arrive_together_are_computed_once(asker: Asker) -> None:
    prompts = [PROMPT + words(i, 20) for i in range(5)]
    cold = [asker.ask(prompt, key=None) for prompt in prompts]
    before = asker.engine.stats().prompt_tokens
    warm = [Heard(x) for x in [asker.submit(prompt) for prompt in prompts]]
    assert [one.tokens for one in warm] == [one.tokens for one in cold]
    assert warm[0].cached == 0
    assert all(one.cached >= 80 for one in warm[1:])
    assert asker.engine.stats().prompt_tokens - before <= 170 + 4 * 90


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_cancelled_prompt_leaves_nobody_waiting(asker: Asker) -> None:
    first = asker.submit(PROMPT * 3)
    second = asker.submit(PROMPT * 3)
    asker.engine.cancel("1")
    heard = [first.get(timeout=60)]
    while heard[-1].finish_reason is None:
        heard.append(first.get(timeout=60))
    assert Heard(second).tokens == asker.ask(PROMPT * 3, key=None).tokens


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_prefixes_are_given_up_when_pages_run_short(asker: Asker) -> None:
    for i in range(12):  # 16 pages, of which each prompt takes three and keeps two
        asker.ask(words(i, 180))
    counts = asker.engine.stats().prefixes
    assert counts.evicted_pages >= 8
    assert asker.engine.stats().preemptions == 0
    assert asker.ask(words(11, 180)).cached >= 64
    assert asker.ask(words(0, 180)).cached == 0
    assert asker.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
@pytest.mark.parametrize(
    "asker", [{"parallel": 1, "chunk": 512, "cache_tokens": 512, "context": 512}], indirect=True
)
@pytest.mark.parametrize("scores", [False, True])
def test_a_known_page_before_pages_in_use_is_given_up(asker: Asker, scores: bool) -> None:
    first = words("a", 100)
    asker.ask(first)  # keeps a page, and of a model with states a snapshot after it
    prompt = first[:80] + words("b", 300)
    found = asker.ask(prompt, max_tokens=120, prompt_logprobs=scores)  # needs all pages
    assert found.tokens == asker.ask(prompt, key=None, max_tokens=120).tokens
    assert asker.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_request_passes_one_that_waits_for_its_prefix(asker: Asker) -> None:
    first = asker.submit(PROMPT * 3, max_tokens=1)  # 450 tokens, in chunks of 40
    second = asker.submit(PROMPT * 3 + [9], max_tokens=1)
    third = asker.submit(words("other", 10), max_tokens=1)
    order = []
    for name, events in (("third", third), ("first", first), ("second", second)):
        order.append((name, events.get(timeout=60).timings))
    times = {name: told.queue_s for name, told in order if told is not None}
    assert times["third"] < times["second"]


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_keys_keep_prefixes_apart_and_none_keeps_nothing(asker: Asker) -> None:
    asker.ask(PROMPT, key=None)
    assert asker.ask(PROMPT, key="one").cached == 0
    assert asker.ask(PROMPT, key="two").cached == 0
    assert asker.ask(PROMPT, key="one").cached > 0
    counts = asker.engine.stats().prefixes
    assert (counts.hits, counts.misses) == (1, 2)


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_prompt_logprobs_need_every_row_of_the_prompt(asker: Asker) -> None:
    asker.ask(PROMPT)
    assert asker.ask(PROMPT, prompt_logprobs=True).cached == 0


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
@pytest.mark.parametrize("asker", [{"cache_tokens": 256, "context": 256}], indirect=True)
def test_a_preempted_answer_goes_on_where_it_was(
    asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ways = [words(i, 100) for i in range(2)]
    alone = [asker.ask(one, key=None, max_tokens=60) for one in ways]
    heard = [asker.submit(one, max_tokens=60) for one in ways]
    together = [Heard(one) for one in heard]
    assert asker.engine.stats().preemptions > 0
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert re.search(
        r"pressure: request \S+ is preempted after \d+ tokens, .* \d pages; \d of 4 pages are free",
        caplog.text,
    )


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
@pytest.mark.parametrize("asker", [{"no_prefix_cache": True}], indirect=True)
def test_the_cache_can_be_turned_off(asker: Asker) -> None:
    asker.ask(PROMPT)
    assert asker.ask(PROMPT).cached == 0
    assert asker.engine.stats().prefixes.idle_pages == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("checkpoint", ["qwen35", "gemma4-31b"], indirect=True)
def test_a_gpu_saves_and_restores_its_part(checkpoint: Checkpoint, gpu: StandInGpu) -> None:
    asker = Asker(checkpoint, device="cuda:0,cpu", kernels="reference", chunk=80)
    cold = asker.ask(PROMPT, key=None, max_tokens=2)
    asker.ask(PROMPT[:100], max_tokens=1)
    asker.ask(words("other", 90), key=None, max_tokens=1)  # changes states and windows
    warm = asker.ask(PROMPT, max_tokens=2)
    assert (warm.tokens, warm.cached) == (cold.tokens, 80)
    asker.engine.close()


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.integers(0, 20))
def test_the_common_beginning_is_as_long_as_a_loop_finds(
    one: list[int], other: list[int], most: int
) -> None:
    most = min(most, len(one), len(other))
    length = 0
    while length < most and one[length] == other[length]:
        length += 1
    assert common_length(one, other, most) == length


def test_cuts_depend_on_the_tokens_before_them_alone() -> None:
    end = 1
    tokens = [0] * 5 + [end] + [0] * 20 + [end] + [0] * 3 + [end] + [0] * 7
    cuts = prompt_cuts(tokens, 10, frozenset({end}))
    assert cuts == [6, 16, 26, 31]  # the message that ends at 27 is too short to be cut off
    for length in range(len(tokens)):
        assert prompt_cuts(tokens[:length], 10, frozenset({end})) == [
            cut for cut in cuts if cut <= length
        ]


def check_load(asker: Asker, requests: int, seed: str) -> None:
    """Ask many requests that share beginnings, some of which are cancelled; compare each answer."""
    random = Random(seed)
    roots = [words(f"{seed} {i}", 200) for i in range(3)]
    prompts: list[list[int]] = []
    for number in range(requests):
        root = random.choice([*roots, *prompts[-5:]])
        kept = root[: random.randrange(len(root) // 3, len(root) + 1)]
        new = words(f"{seed} new {number}", random.randrange(0, 60))
        prompts.append((kept + new)[:400])
    ways = [random.choice(("greedy", "sampled")) for _ in prompts]
    alone = Asker(asker.checkpoint, **asker.settings | {"no_prefix_cache": True, "cache_dir": None})
    cold = [alone.ask(x, way).tokens for x, way in zip(prompts, ways, strict=True)]
    alone.engine.close()
    under_way: dict[int, queue.SimpleQueue[TokenEvent]] = {}
    cancelled = set()

    def end(number: int) -> None:
        events = under_way.pop(number)
        if number in cancelled:
            while events.get(timeout=60).finish_reason is None:
                pass
            return
        assert Heard(events).tokens == cold[number], (seed, number)

    for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
        under_way[number] = asker.submit(prompt, way, key=random.choice(["", "", "other", None]))
        if random.random() < 0.15:
            cancelled.add(number)
            asker.engine.cancel(str(asker.count))
        while len(under_way) > random.randrange(1, 9):
            end(random.choice(list(under_way)))
    for number in list(under_way):
        end(number)
    asker.engine.forget_prefixes().result(60)
    stats = asker.engine.stats()
    assert stats.prefixes.hits > requests // 10
    asker.engine.close()
    assert asker.engine.stats().cache_pages_used == 0


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
@pytest.mark.parametrize(
    "asker",
    [
        {"parallel": 4, "cache_tokens": 768},
        {"parallel": 4, "cache_tokens": 768, "cache_ram": "16MiB"},
    ],
    indirect=True,
    ids=["devices", "host"],
)
def test_answers_of_a_mixed_load_are_those_without_the_cache(asker: Asker) -> None:
    check_load(asker, 60, "load")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_answers_of_a_long_mixed_load_with_files(
    checkpoint: Checkpoint, device: str, tmp_path: Path
) -> None:
    for number in range(3):
        asker = Asker(
            checkpoint, device=device, parallel=4, cache_tokens=768, cache_dir=str(tmp_path)
        )
        check_load(asker, 300, f"long {number}")
