"""The prefix cache over HTTP: what every API reports, and who shares what with whom."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from headroom import LLM, Options
from headroom.families.synth.vocabulary import ENGLISH_WORDS
from tests.server.fakes import serving
from tests.synth_models import write_model

PAGE = 64  # tokens
# Families whose layers keep all in pages, or recurrent states, or windows, too.
FAMILIES = ("qwen3", "qwen35", "gemma4")
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.7, "seed": 11}

Json = dict[str, Any]


def words(seed: str, count: int = 150) -> str:
    """Random words that stand for text; a word has a token or two."""
    return " ".join(Random(f"cache {seed}").choices(ENGLISH_WORDS, k=count))


def chat_body(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


@dataclass(frozen=True, slots=True)
class Api:
    """How one API is asked, and where its answer has its text and its counts."""

    path: str
    body: Callable[[str], Json]
    said: Callable[[Json], Any]
    usage: Callable[[Json], tuple[int, int]]  # tokens of the prompt, and how many were cached
    last: Callable[[list[Json]], Json]  # the event of a stream that has the counts
    most: str = "max_tokens"  # the field that limits the answer


def openai_usage(answer: Json) -> tuple[int, int]:
    usage = answer["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert answer["timings"]["cached_tokens"] == cached
    return usage["prompt_tokens"], cached


def responses_usage(answer: Json) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def anthropic_usage(answer: Json) -> tuple[int, int]:
    usage = answer["usage"]
    cached: int = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        chat_body,
        lambda answer: answer["choices"][0]["message"],
        openai_usage,
        last=lambda events: next(one for one in events if one.get("usage")),
    ),
    "completions": Api(
        "/v1/completions",
        lambda text: {"prompt": text},
        lambda answer: answer["choices"][0]["text"],
        openai_usage,
        last=lambda events: next(one for one in events if one.get("usage")),
    ),
    "responses": Api(
        "/v1/responses",
        lambda text: {"input": text, "store": False},
        lambda answer: [part.get("content") for part in answer["output"]],
        responses_usage,
        most="max_output_tokens",
        last=lambda events: dict(events[-1]["response"]),
    ),
    "messages": Api(
        "/v1/messages",
        chat_body,
        lambda answer: answer["content"],
        anthropic_usage,
        last=lambda events: next(one for one in events if one["type"] == "message_delta"),
    ),
}
OLLAMA: dict[str, Callable[[str], Json]] = {
    "chat": chat_body,
    "generate": lambda text: {"prompt": text},
}
BODIES = {api.path: api.body("hi") | {api.most: 2} for api in APIS.values()}
BODIES |= {f"/api/{name}": OLLAMA[name]("hi") | {"options": {"num_predict": 2}} for name in OLLAMA}


@dataclass(frozen=True, slots=True)
class Told:
    """What one answer says."""

    said: Any
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks a served model."""

    client: httpx.Client
    model: str

    def post(self, path: str, body: Json, **more: Any) -> Json:
        """Post a body, which must be accepted."""
        answer = self.client.post(path, json={"model": self.model, **body}, **more)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    def ask(self, name: str, text: str, *, key: str = "", **fields: Any) -> Told:
        """Ask one API and read its answer; `key` is the API key."""
        api = APIS[name]
        body = {api.most: 8, **GREEDY, **api.body(text), **fields}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = self.post(api.path, body, headers=headers)
        return Told(api.said(answer), *api.usage(answer))

    def metric(self, name: str) -> float:
        """Return one number of the metrics."""
        lines = self.client.get("/metrics").text.splitlines()
        (found,) = (line.split()[-1] for line in lines if line.startswith(f"headroom_{name} "))
        return float(found)


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("prefix")
    path = write_model(request.param, "f32", folder, few_layers=True)
    # Snapshots are taken at the ends of chunks: as often as there are pages.
    sizes: Json = {"context": 1024, "parallel": 2, "chunk": PAGE, "threads": 1}
    with LLM(str(path), dtype="f32", kv_type="f32", **sizes) as made:
        yield made


@pytest.fixture(scope="module")
def asker(llm: LLM) -> Iterator[Asker]:
    with (
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        yield Asker(client, llm.name)


def nearly_all(told: Told) -> bool:
    """Whether all was cached but what lies after the last page or the last cut."""
    return told.prompt - 2 * PAGE < told.cached <= told.prompt


@pytest.mark.parametrize("name", APIS)
def test_the_second_time_every_api_reports_the_cached_tokens(asker: Asker, name: str) -> None:
    text = words(f"{name} again")
    before = asker.metric("prompt_tokens_cached_total")
    hits, misses = asker.metric("prefix_hits_total"), asker.metric("prefix_misses_total")
    cold, warm = asker.ask(name, text), asker.ask(name, text)
    longer = asker.ask(name, f"{text} {words('more', 40)}")
    assert cold.cached == 0
    assert nearly_all(warm)
    assert warm.prompt == cold.prompt
    assert warm.said == cold.said
    assert longer.prompt > warm.prompt
    assert longer.cached > warm.prompt - 2 * PAGE
    assert asker.metric("prompt_tokens_cached_total") - before == warm.cached + longer.cached
    assert asker.metric("prefix_hits_total") - hits == 2
    assert asker.metric("prefix_misses_total") - misses == 1
    assert asker.metric("prefix_pages") > 0


@pytest.mark.parametrize("name", APIS)
def test_a_stream_reports_the_cached_tokens(asker: Asker, name: str) -> None:
    api, text = APIS[name], words(f"{name} streamed")
    cold = asker.ask(name, text)
    body = {"model": asker.model, api.most: 8, **GREEDY, **api.body(text), "stream": True}
    if name in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    lines = asker.client.post(api.path, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    prompt, cached = api.usage(api.last(events))
    assert prompt == cold.prompt
    assert nearly_all(Told(None, prompt, cached))


@pytest.mark.parametrize("name", OLLAMA)
def test_ollama_counts_the_whole_prompt_and_answers_alike(asker: Asker, name: str) -> None:
    body = OLLAMA[name](words(f"ollama {name}"))
    body |= {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    cold = asker.post(f"/api/{name}", body)
    before = asker.metric("prompt_tokens_cached_total")
    warm = asker.post(f"/api/{name}", body)
    cached = asker.metric("prompt_tokens_cached_total") - before
    # Ollama's counts have no field for cached tokens: they are part of prompt_eval_count.
    assert warm["prompt_eval_count"] == cold["prompt_eval_count"] >= cached > 0
    said = "message" if name == "chat" else "response"
    assert warm[said] == cold[said]
    asker.post(f"/api/{name}", body | {"cache_prompt": False})
    assert asker.metric("prompt_tokens_cached_total") - before == cached


@pytest.mark.parametrize("way", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_warm_answer_is_the_one_without_a_cache(asker: Asker, way: Json) -> None:
    text = words(f"equal {way}")
    fields = {**way, "max_tokens": 24, "logprobs": True}
    uncached = asker.ask("chat", text, cache_prompt=False, **fields)
    cold = asker.ask("chat", text, **fields)
    other = asker.ask("chat", words("something else"), **way)  # changes states and windows
    warm = asker.ask("chat", text, **fields)
    assert (uncached.cached, cold.cached) == (0, 0)
    assert nearly_all(warm)
    assert warm.said == cold.said == uncached.said != other.said


def test_without_the_cache_a_request_neither_reads_nor_leaves_anything(asker: Asker) -> None:
    text = words("left")
    assert asker.ask("chat", text, cache_prompt=False).cached == 0
    assert asker.ask("chat", text).cached == 0  # nothing was left
    assert asker.ask("chat", text, cache_prompt=False).cached == 0  # nothing was read
    assert nearly_all(asker.ask("chat", text, cache_prompt=True))


def test_texts_with_different_keys_share_nothing(asker: Asker) -> None:
    text = words("keys")
    for key in ("one", "two"):
        assert asker.ask("chat", text, prompt_cache_key=key).cached == 0
    for key in ("one", "two"):
        assert nearly_all(asker.ask("chat", text, prompt_cache_key=key))
    assert asker.ask("chat", text).cached == 0


def test_apis_share_what_has_the_same_tokens(asker: Asker) -> None:
    text = words("apis")
    asker.ask("chat", text)
    assert nearly_all(asker.ask("responses", text))
    assert nearly_all(asker.ask("messages", text))


def test_a_second_turn_finds_the_first_one(asker: Asker) -> None:
    messages: list[Json] = [
        {"role": "system", "content": words("system")},
        {"role": "user", "content": words("question", 60)},
    ]
    body = {**GREEDY, "max_tokens": 8}
    first = asker.post("/v1/chat/completions", {**body, "messages": messages})
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": words("next")}]
    second = asker.post("/v1/chat/completions", {**body, "messages": messages})
    (before, _), (after, cached) = openai_usage(first), openai_usage(second)
    assert before - PAGE <= cached < after
    uncached = {**body, "messages": messages, "cache_prompt": False}
    alone = asker.post("/v1/chat/completions", uncached)
    assert alone["choices"] == second["choices"]


def test_an_echoed_prompt_with_logprobs_is_computed_whole(asker: Asker) -> None:
    text = words("echo")
    body = {"prompt": text, "max_tokens": 4, **GREEDY}
    scores = {"echo": True, "logprobs": 1}
    cold = asker.post("/v1/completions", body | scores | {"cache_prompt": False})
    assert asker.ask("completions", text).cached == 0
    whole = asker.post("/v1/completions", body | scores)
    assert openai_usage(whole)[1] == 0
    assert whole["choices"] == cold["choices"]
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == openai_usage(whole)[0] + 4
    echoed = asker.post("/v1/completions", body | {"echo": True})  # no row's scores are needed
    assert nearly_all(Told(None, *openai_usage(echoed)))


def test_prefixes_are_shared_within_an_api_key_alone(llm: LLM, tmp_path: Path) -> None:
    file, text = tmp_path / "keys.toml", words("tenants")
    file.write_text("[alice]\nkey = 'a'\n[bob]\nkey = 'b'\n")
    with (
        serving(llm, Options(port=0, api_keys=str(file))) as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        asker = Asker(client, llm.name)
        assert asker.ask("chat", text, key="a").cached == 0
        assert asker.ask("chat", text, key="b").cached == 0
        assert asker.ask("chat", text, key="b", prompt_cache_key="x").cached == 0
        assert asker.ask("chat", text, key="a", prompt_cache_key="x").cached == 0
        for key in ("a", "b"):
            assert nearly_all(asker.ask("chat", text, key=key))
            assert nearly_all(asker.ask("chat", text, key=key, prompt_cache_key="x"))


WRONG: dict[str, tuple[Any, ...]] = {
    "cache_prompt": ("yes", 1, [True]),
    "prompt_cache_key": (7, True, ["a"], "k" * 1025),
}


@pytest.mark.parametrize("llm", ["qwen3"], indirect=True)
@pytest.mark.parametrize("path", BODIES)
def test_wrong_values_are_refused_by_name(asker: Asker, path: str) -> None:
    body = {"model": asker.model, "stream": False, **BODIES[path]}
    for name, values in WRONG.items():
        for value in values:
            answer = asker.client.post(path, json=body | {name: value})
            assert answer.status_code == 400, (name, value)
            assert name in answer.text, (name, value)
        asker.post(path, body | {name: None})  # null counts as a field that is left out
