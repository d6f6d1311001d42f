"""DFlash drafts in the engine: equal answers, and guesses that depend on accepted tokens alone."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError, OptionError, RequestError
from headroom.llm import LLM
from tests.dflash_drafts import random_draft
from tests.engine.test_engine_drafts import (
    KINDS,
    PROMPTS,
    SETTINGS,
    answers,
    numbered,
    request_of,
    tokens_of,
)
from tests.imposed_drafts import ImposedNetwork, Notes, write_draft
from tests.synth_models import write_model

ALWAYS = {**SETTINGS, "draft_always": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TARGETS = {"qwen35": (0, 1, 3), "llama": (1, 0), "gemma4": (0, 4, 5)}
SHAPES = {"chain": 3, "tree of 8": 8, "tree of 22": 22}  # guesses; a block has 3 places for them


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model and a draft for it."""
    return write_pair(request.param, tmp_path_factory.mktemp("dflash"))


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    model = write_model(name, "q8_0", folder, few_layers=True)
    return model, write_draft(folder / f"{name}-draft.gguf", TARGETS[name])


def cases() -> Iterator[Any]:
    """Yield every shape with each number of stages; by default a few of them run."""
    for shape, device in product(SHAPES, ("cpu", "cpu,cpu")):
        usual = (shape, device) == ("tree of 8", "cpu,cpu")
        yield pytest.param(shape, device, marks=[] if usual else [pytest.mark.slow])


@pytest.mark.parametrize(("shape", "device"), list(cases()))
def test_answers_are_those_without_guesses(pair: Any, shape: str, device: str) -> None:
    model, draft = pair
    with LLM(str(model), no_prefix_cache=True, **SETTINGS) as llm:
        wanted = {
            kind: tokens_of(answers(llm, [request_of(llm, kind, prompt)])[0])
            for kind, prompt in PROMPTS.items()
        }
    texts = [prompt + wanted[kind] for kind, prompt in PROMPTS.items()]
    options = {"draft": str(draft), "draft_tokens": SHAPES[shape], "device": device}
    with LLM(str(model), **options, **ALWAYS) as llm:
        imposed = ImposedNetwork(llm, texts, 0.7)
        for warm in (False, True):  # the second time, prompts begin with known prefixes
            requests = [request_of(llm, kind, prompt) for kind, prompt in PROMPTS.items()]
            found = answers(llm, requests)
            for kind, events in zip(KINDS, found, strict=True):
                assert tokens_of(events) == wanted[kind], (kind, warm)
            reused = [events[-1].cached_tokens for events in found]
            assert all(reused[number] > 0 for number in (0, 2)) == warm
        stats = llm.engine.stats()
        for memory in llm.engine._pipeline._memory.values():  # each device's lines are its memory
            planned = {line: size for line, size in memory.planned.items() if size}
            assert planned == {line: size for line, size in memory.allocated.items() if size}
    assert stats.guessed_tokens > stats.accepted_tokens > 50
    assert len(imposed.notes) > 40


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with recurrent layers and a draft with a window, which both need snapshots."""
    return write_pair("qwen35", tmp_path_factory.mktemp("noted"))


def greedy_texts(model: Path, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return prompts with the answers that the model gives without guesses."""
    with LLM(str(model), no_prefix_cache=True, **{**SETTINGS, "context": 512}) as llm:
        found = [answers(llm, [llm.request(prompt, params)])[0] for prompt in prompts]
    return [prompt + tokens_of(events) for prompt, events in zip(prompts, found, strict=True)]


def check_notes(pair: tuple[Path, Path], notes: Notes, **options: Any) -> None:
    """Compare some guesses with those of a draft that read each text from its start in a prompt."""
    model, draft = pair
    texts = list(notes)[:: max(1, len(notes) // 6)]
    differing = 0
    settings = {**ALWAYS, "context": 512, **options}
    with LLM(str(model), draft=str(draft), no_prefix_cache=True, **settings) as llm:
        fresh = ImposedNetwork(llm, [], 0.0)
        stage: Any = llm.engine._pipeline._stages[-1]
        network, guess = stage.draft_network, fresh._guess

        def also_without(asked: Any) -> Any:
            nonlocal differing
            parts = [kv for own in network.pages for kv in (own.kv.keys, own.kv.values)]
            kept = [part.clone() for part in parts]
            for part in parts:
                part.zero_()
            blind = guess(asked)[0].tokens[:, 0].tolist()
            for part, before in zip(parts, kept, strict=True):
                part.copy_(before)
            found = guess(asked)
            differing += blind != found[0].tokens[:, 0].tolist()
            return found

        fresh._guess = also_without
        for text in texts:  # the model's own next token ends each prompt
            answers(llm, [llm.request(text[:-1], replace(GREEDY, max_tokens=6))])
            known, own = notes[text], fresh.notes[text]
            length = min(len(known), len(own))
            assert known[:length] == own[:length], len(text)
    assert differing > len(texts) // 2  # otherwise equal guesses would prove nothing


@pytest.mark.parametrize(
    ("device", "features"),
    [
        ("cpu,cpu", "q8_0"),
        pytest.param("cpu", "f32", marks=pytest.mark.slow),
        pytest.param("cpu", "f16", marks=pytest.mark.slow),
        pytest.param("cpu", "bf16", marks=pytest.mark.slow),
    ],
)
def test_guesses_after_some_were_right_are_those_of_a_draft_that_read_the_text_from_its_start(
    noted: tuple[Path, Path], device: str, features: str
) -> None:
    prompts = [PROMPTS["greedy"], PROMPTS["sampled"], list(range(300, 360))]
    params = replace(GREEDY, max_tokens=40)
    texts = greedy_texts(noted[0], prompts, params)
    options = {"device": device, "feature_dtype": features}
    with LLM(str(noted[0]), draft=str(noted[1]), draft_tokens=8, **options, **ALWAYS) as llm:
        imposed = ImposedNetwork(llm, texts, 0.7)
        answers(llm, [llm.request(prompt, params) for prompt in prompts])
        assert llm.engine.stats().accepted_tokens > 40
    check_notes(noted, imposed.notes, **options)


@pytest.mark.parametrize(
    "store", ["pages", *(pytest.param(x, marks=pytest.mark.slow) for x in ("host pages", "files"))]
)
def test_guesses_after_a_known_prefix_are_those_of_a_draft_that_read_the_text_from_its_start(
    noted: tuple[Path, Path], store: str, tmp_path: Path
) -> None:
    first, params = list(range(500, 756)), replace(GREEDY, max_tokens=12)  # four pages
    prompts = [[*first, 7, 8, 9], [*first, 400, 401], [*first, 77], [*first, *range(20)]]
    texts = greedy_texts(noted[0], prompts, params)
    settings: dict[str, Any] = {**ALWAYS, "context": 512, "draft": str(noted[1])}
    if store == "files":
        settings["cache_dir"] = str(tmp_path)
    elif store == "host pages":
        settings |= {"cache_ram": "16MiB", "cache_tokens": 512, "parallel": 2}
    with LLM(str(noted[0]), **settings) as llm:
        answers(llm, [llm.request(first, params)])
        if store == "host pages":
            for start in (1, 200, 300, 400):  # push the pages out
                answers(llm, [llm.request(list(range(start, start + 200)), params)])
            assert llm.engine.stats().prefixes.demoted_pages > 0
        if store != "files":
            notes = run_warm(llm, texts, prompts, params)
    if store == "files":
        with LLM(str(noted[0]), **settings) as again:
            notes = run_warm(again, texts, prompts, params)
            assert again.engine.stats().prefixes.file_hits > 0
    check_notes(noted, notes)


def run_warm(
    llm: LLM, texts: list[list[int]], prompts: list[list[int]], params: SamplingParams
) -> Notes:
    """Run prompts that begin with a known one; return the guesses."""
    imposed = ImposedNetwork(llm, texts, 0.5)
    for prompt in prompts:
        events = answers(llm, [llm.request(prompt, params)])[0]
        assert events[-1].cached_tokens >= 256
    return imposed.notes


def test_files_of_prefixes_belong_to_a_model_with_its_draft(
    noted: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_draft(tmp_path / "other.gguf", seed=6)
    prompt, params = list(range(500, 756)), replace(GREEDY, max_tokens=2)
    hits = []
    for draft in (noted[1], other, noted[1]):
        settings = {"draft": str(draft), "cache_dir": str(tmp_path / "kept"), "context": 512}
        with LLM(str(noted[0]), **{**ALWAYS, **settings}) as llm:
            answers(llm, [llm.request([*prompt, 5], params)])
            hits.append(llm.engine.stats().prefixes.file_hits)
    assert hits == [0, 0, 1]


def test_guesses_and_answers_after_preemption_are_those_of_a_draft_that_read_from_the_start(
    noted: tuple[Path, Path],
) -> None:
    params = replace(GREEDY, max_tokens=80)
    with LLM(str(noted[0]), **SETTINGS) as llm:
        requests = numbered(llm, params)
        wanted = [tokens_of(answers(llm, [one])[0]) for one in requests]
    texts = [[*one.prompt, *tokens] for one, tokens in zip(requests, wanted, strict=True)]
    options = {"draft": str(noted[1]), "cache_tokens": 320}
    with LLM(str(noted[0]), **options, **ALWAYS) as llm:
        imposed = ImposedNetwork(llm, texts, 0.5)
        found = [tokens_of(events) for events in answers(llm, numbered(llm, params))]
        stats, scheduler = llm.engine.stats(), llm.engine._scheduler
        assert found == wanted
        assert stats.preemptions > 0
        assert stats.cache_pages_used == 0
        assert scheduler._state_slots.free == scheduler._state_slots.total
    check_notes(noted, imposed.notes)


def test_a_request_may_do_without_the_draft(noted: tuple[Path, Path]) -> None:
    with LLM(str(noted[0]), draft=str(noted[1]), **ALWAYS) as llm:
        for draft, guessed in (("none", False), ("model", True), (None, True)):
            before = llm.engine.stats().guessed_tokens
            answers(llm, [llm.request([1, 2, 3], replace(GREEDY, draft=draft))])
            assert (llm.engine.stats().guessed_tokens > before) == guessed
        with pytest.raises(RequestError, match="'ngram', and the engine was started with model"):
            llm.engine.check(llm.request([1, 2], replace(GREEDY, draft="ngram")))


def test_drafts_of_another_model_or_kind_are_refused_before_anything_is_loaded(
    noted: tuple[Path, Path], tmp_path: Path
) -> None:
    for draft, message in (
        (random_draft().save(tmp_path / "other"), "made for a model with 64 values a token"),
        (
            random_draft(architectures=["DSparkDraftModel"]).save(tmp_path / "kind"),
            "is a DSpark draft",
        ),
        (noted[0], "is not a draft"),
    ):
        with pytest.raises(HeadroomError, match=message) as caught:
            LLM(str(noted[0]), draft=str(draft), **SETTINGS)
        assert caught.value.param == "draft"
    with pytest.raises(OptionError, match="Worker processes do not verify guessed tokens"):
        LLM(str(noted[0]), draft=str(noted[1]), workers="2", **SETTINGS)
