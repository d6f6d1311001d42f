"""The prediction head in the engine: equal answers, right guesses, and what the head remembers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.engine.request import SamplingParams
from headroom.engine.scheduler import Turn
from headroom.errors import RequestError
from headroom.llm import LLM
from tests.engine.test_engine_drafts import (
    KINDS,
    PROMPTS,
    SETTINGS,
    TEXTS,
    answers,
    numbered,
    request_of,
    tokens_of,
)
from tests.right_heads import write_right_head

ALWAYS = {**SETTINGS, "draft_always": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp") / f"{request.param}.gguf"
    return write_right_head(request.param, path, noise=0.2)


@pytest.fixture(scope="module")
def recorded(model: Path) -> dict[str, list[int]]:
    """What the model answers to every kind of request without guesses, one at a time."""
    with LLM(str(model), draft="none", no_prefix_cache=True, **SETTINGS) as llm:
        return {
            kind: tokens_of(answers(llm, [request_of(llm, kind, prompt)])[0])
            for kind, prompt in PROMPTS.items()
        }


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_answers_are_those_without_guesses_and_many_guesses_are_right(
    model: Path, device: str, recorded: dict[str, list[int]]
) -> None:
    with LLM(str(model), device=device, **ALWAYS) as llm:
        assert llm.plan.problem.options.draft == "mtp"  # by default, since the file has a head
        for warm in (False, True):
            requests = [request_of(llm, kind, prompt) for kind, prompt in PROMPTS.items()]
            found = answers(llm, requests)
            for kind, events in zip(KINDS, found, strict=True):
                assert tokens_of(events) == recorded[kind], (kind, warm)
            reused = [events[-1].cached_tokens for events in found]
            assert all(reused[number] > 0 for number in (0, 2)) == warm
        greedy = found[0][-1].timings
        stats = llm.engine.stats()
    assert greedy is not None
    assert 0.5 * greedy.guessed < greedy.accepted < greedy.guessed
    assert stats.guessed_tokens > stats.accepted_tokens > greedy.accepted


@pytest.mark.parametrize(
    "types",
    [{"dtype": "int8", "kv_type": "f16"}, {"kernels": "reference", "kv_type": "q8_0"}],
    ids=["int8", "reference"],
)
def test_answers_are_those_without_guesses_in_narrow_types_and_with_the_plain_kernels(
    model: Path, types: dict[str, str]
) -> None:
    found = []
    for draft in ("none", "mtp"):
        with LLM(str(model), draft=draft, **ALWAYS | types) as llm:
            found.append(answers(llm, [llm.request(PROMPTS["greedy"], GREEDY)])[0])
    assert tokens_of(found[0]) == tokens_of(found[1])
    timings = found[1][-1].timings
    assert timings is not None
    assert timings.accepted > 5


def test_a_head_without_noise_is_nearly_always_right(tmp_path: Path) -> None:
    path = write_right_head("qwen35", tmp_path / "right.gguf", noise=0.0, trunk=0.02)
    with LLM(str(path), **ALWAYS) as llm:
        answers(llm, [llm.request(PROMPTS["greedy"], GREEDY)])
        stats = llm.engine.stats()
    assert stats.accepted_tokens > 0.8 * stats.guessed_tokens
    assert stats.steps < 12  # for 24 tokens


def test_the_governor_checks_guesses_of_a_head_that_is_right(tmp_path: Path) -> None:
    path = write_right_head("qwen35", tmp_path / "right.gguf", noise=0.0, trunk=0.02)
    with LLM(str(path), **SETTINGS) as llm:
        params = replace(GREEDY, max_tokens=100)
        events = answers(llm, [llm.request(PROMPTS["greedy"], params)])[0]
        stats = llm.engine.stats()
    assert len(tokens_of(events)) == 100
    assert stats.held_back_tokens == 0  # a head does not guess what is not checked


def test_a_request_may_do_without_guesses_and_ask_for_no_other_drafter(
    model: Path, recorded: dict[str, list[int]]
) -> None:
    with LLM(str(model), draft_tokens=2, **ALWAYS) as llm:
        for draft, guessed in (("none", False), ("mtp", True), (None, True)):
            before = llm.engine.stats().guessed_tokens
            request = request_of(llm, "greedy", PROMPTS["greedy"])
            request = replace(request, params=replace(request.params, draft=draft))
            assert tokens_of(answers(llm, [request])[0]) == recorded["greedy"]
            assert (llm.engine.stats().guessed_tokens > before) == guessed
        with pytest.raises(RequestError, match="'ngram', and the engine was started with mtp"):
            llm.engine.check(llm.request([1, 2], replace(GREEDY, draft="ngram")))


# What the head remembers of a sequence: its own state, by which it guesses.

Drafts = dict[tuple[int, ...], tuple[int, ...]]  # the guesses after each text


def noted(llm: LLM) -> Drafts:
    """Note all guesses of an engine, also those that differ from earlier ones: they would clash."""
    drafting, found = llm.engine._drafting, Drafts()
    add_guesses = drafting.add_guesses

    def note(*given: Any) -> list[Turn]:
        turns = add_guesses(*given)
        for turn in turns:
            if turn.draft:
                text, guesses = tuple(turn.sequence.tokens), turn.draft.tokens
                known = found.setdefault(text, guesses)
                assert all(a == b for a, b in zip(known, guesses, strict=False))
                found[text] = max(known, guesses, key=len)
        return turns

    drafting.add_guesses = note  # type: ignore[method-assign]
    return found


def fresh_guesses(model: Path, texts: Sequence[tuple[int, ...]]) -> tuple[Drafts, Drafts, Drafts]:
    """What a head guesses after texts that it has read from their start, each in one prompt.

    And what it guesses without its keys and values, and without its last hidden state.
    """
    right, unkeyed, unstated = Drafts(), Drafts(), Drafts()
    with LLM(str(model), no_prefix_cache=True, **ALWAYS | {"context": 512}) as llm:
        stage: Any = llm.engine._pipeline._stages[-1]
        network, drafts = stage.draft_network, noted(llm)
        guess, last = network.guess, network._states.last
        pages = network._attention._pages.kv

        def also_without(asked: Any) -> Any:
            for found, parts in ((unkeyed, (pages.keys, pages.values)), (unstated, (last,))):
                kept = [part.clone() for part in parts]
                for part in parts:
                    part.zero_()
                found[text] = tuple(guess(asked)[0].tokens[:, 0].tolist())
                for part, before in zip(parts, kept, strict=True):
                    part.copy_(before)
            return guess(asked)

        llm.engine._drafting._drafter._guess = also_without  # type: ignore[union-attr]
        for text in texts:  # the model's own next token ends each prompt
            answers(llm, [llm.request(text[:-1], replace(GREEDY, max_tokens=6))])
            assert text in drafts
            right[text] = drafts[text]
    return right, unkeyed, unstated


def check_guesses(model: Path, found: Drafts, *, least: int) -> None:
    """Compare some guesses with those of a head that read each text from its start."""
    assert len(found) >= least
    texts = list(found)[:: max(1, len(found) // 24)]
    right, unkeyed, unstated = fresh_guesses(model, texts)
    for text in texts:
        length = min(len(found[text]), len(right[text]))
        assert found[text][:length] == right[text][:length], len(text)
    # Otherwise equal guesses would prove nothing.
    assert sum(unkeyed[text] != right[text] for text in texts) > len(texts) // 5
    assert sum(unstated[text] != right[text] for text in texts) > len(texts) // 5


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head's guesses depend much on what it remembers."""
    return write_right_head("qwen35", tmp_path_factory.mktemp("noisy") / "m.gguf", noise=0.35)


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_guesses_after_some_were_right_are_those_of_a_head_that_read_the_text_from_its_start(
    noisy: Path, device: str
) -> None:
    with LLM(str(noisy), device=device, **ALWAYS) as llm:
        found = noted(llm)
        prompts = [PROMPTS["greedy"], PROMPTS["sampled"], list(range(300, 360))]
        params = replace(GREEDY, max_tokens=40)
        answers(llm, [llm.request(prompt, params) for prompt in prompts])
        stats = llm.engine.stats()
    assert 20 < stats.accepted_tokens < 0.9 * stats.guessed_tokens
    check_guesses(noisy, found, least=30)


def warm_prompts(first: list[int]) -> list[list[int]]:
    """Prompts that go on after an earlier one of whole pages, and that prompt again."""
    return [[*first, 7, 8, 9], [*first, 400, 401], [*first, 77], [*first, *range(20)], first]


@pytest.mark.parametrize("store", ["pages", "host pages", "files"])
def test_guesses_after_a_known_prefix_are_those_of_a_head_that_read_the_text_from_its_start(
    noisy: Path, store: str, tmp_path: Path
) -> None:
    first, params = list(range(500, 756)), replace(GREEDY, max_tokens=12)  # four pages
    settings: dict[str, Any] = {**ALWAYS, "context": 512}
    if store == "files":
        settings["cache_dir"] = str(tmp_path)
    elif store == "host pages":
        settings |= {"cache_ram": "16MiB", "cache_tokens": 512, "parallel": 2}
    found, reused = Drafts(), 0
    llm = LLM(str(noisy), **settings)
    with llm:
        answers(llm, [llm.request(first, params)])
        if store == "host pages":
            for start in (1, 200, 300, 400):  # push the pages out
                answers(llm, [llm.request(list(range(start, start + 200)), params)])
            assert llm.engine.stats().prefixes.demoted_pages > 0
        if store != "files":
            found, reused = run_warm(llm, first, params)
    if store == "files":
        with LLM(str(noisy), **settings) as again:
            found, reused = run_warm(again, first, params)
            assert again.engine.stats().prefixes.file_hits > 0
    assert reused >= 4 * 256
    check_guesses(noisy, found, least=10)


def run_warm(llm: LLM, first: list[int], params: SamplingParams) -> tuple[Drafts, int]:
    """Run prompts that begin with a known one; return the guesses and the tokens found."""
    found, reused = noted(llm), 0
    for prompt in warm_prompts(first):
        events = answers(llm, [llm.request(prompt, params)])[0]
        reused += events[-1].cached_tokens
    return found, reused


def test_guesses_after_preemption_are_those_of_a_head_that_read_the_text_from_its_start(
    noisy: Path,
) -> None:
    params = replace(GREEDY, max_tokens=80)
    with LLM(str(noisy), cache_tokens=320, **ALWAYS) as llm:
        found = noted(llm)
        answers(llm, numbered(llm, params))
        assert llm.engine.stats().preemptions > 0
    check_guesses(noisy, found, least=100)


def test_answers_are_the_same_in_batches_that_change_and_after_preemption(model: Path) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=3)
    with LLM(str(model), draft="none", **SETTINGS) as llm:
        wanted = [tokens_of(answers(llm, [one])[0]) for one in numbered(llm, params)]
    with LLM(str(model), cache_tokens=320, **ALWAYS) as llm:
        found = [tokens_of(events) for events in answers(llm, numbered(llm, params))]
        stats, scheduler = llm.engine.stats(), llm.engine._scheduler
        assert found == wanted
        assert stats.preemptions > 0
        assert stats.cache_pages_used == 0
        assert scheduler._state_slots.free == scheduler._state_slots.total
        assert stats.accepted_tokens > 20
    assert len(TEXTS) == len(wanted)


def test_what_a_head_learns_is_in_all_pages_of_a_sequence(noisy: Path) -> None:
    with LLM(str(noisy), **ALWAYS) as llm:
        stage: Any = llm.engine._pipeline._stages[-1]
        kv = stage.draft_network._attention._pages.kv
        kv.keys.zero_()
        answers(llm, [llm.request(list(range(70)), replace(GREEDY, max_tokens=2))])
        written = kv.keys.float().abs().sum((1, 2)) > 0
        assert int(written.sum()) == 71  # the answer's last token was not computed
