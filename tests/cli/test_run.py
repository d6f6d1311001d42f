"""`headroom run`: which words are which, and what it prints."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from headroom.answers import AnswerDelta
from headroom.cli.main import run_command
from headroom.cli.run import AnswerOutput, show, split_words
from headroom.engine.request import SamplingParams
from headroom.errors import FormatError
from headroom.options import Options


def test_one_word_is_the_prompt_and_two_are_model_and_prompt() -> None:
    assert split_words(["hello"]) == ("", "hello")
    assert split_words(["model.gguf", "hello"]) == ("model.gguf", "hello")


def test_a_dash_reads_the_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert split_words(["-"]) == ("", "two\nlines\n")


def test_a_model_without_a_prompt_is_not_taken_for_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for model in ("model.gguf", str(tmp_path)):
        with pytest.raises(typer.BadParameter, match="is a model, and the text"):
            split_words([model])


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "Gemma-4-31b:q6_k"])
@pytest.mark.parametrize("command", [["run"], ["serve"], ["pull"], ["tokenize"], ["bench"]])
def test_a_name_that_only_plans_know_is_refused_with_what_to_name_instead(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["hello"] if command[0] in ("run", "tokenize") else []
    assert run_command([*command, name, *text, "--home", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {name} is a name for plans: headroom knows the sizes of this model, but has no "
        "weights of it. Name a GGUF file, a folder with safetensors, or a repository of Hugging "
        "Face (org/repo, org/repo:file.gguf).\n"
    )


def test_a_name_for_plans_without_a_prompt_is_not_taken_for_a_prompt() -> None:
    with pytest.raises(FormatError, match="is a name for plans"):
        split_words(["laguna-xs.2:q8_0"])
    assert split_words(["laguna-xs.2: what is it?"]) == ("", "laguna-xs.2: what is it?")


def test_a_prompt_may_be_longer_than_a_file_name() -> None:
    for prompt in ("why " * 100, "/" + "x" * 5000):
        assert split_words([prompt]) == ("", prompt)


def test_three_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "model", "why", "not"]) == 2
    assert "3 words" in capsys.readouterr().err


def test_text_streams_and_ends_in_a_line_feed(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "other", "Say hello", "--system", "Be kind"]) == 0
    assert capsys.readouterr() == ("Hello there.\n", "")
    assert opened[0].model == "other"
    assert fake_llm.asked == [
        [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Say hello"}]
    ]


def test_an_answer_that_ends_a_line_gets_no_second_line_feed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([AnswerDelta(text="done\n"), AnswerDelta(finish_reason="stop")])
    assert capsys.readouterr().out == "done\n"


def test_thoughts_are_dimmed_on_a_terminal_and_left_out_of_a_pipe() -> None:
    deltas = [
        AnswerDelta(thought="Let me"),
        AnswerDelta(thought=" see."),
        AnswerDelta(text="Four."),
        AnswerDelta(finish_reason="stop"),
    ]
    for thoughts, expected in ((True, "\x1b[2mLet me see.\x1b[0m\n\nFour."), (False, "Four.")):
        written = io.StringIO()
        output = AnswerOutput(written, thoughts=thoughts)
        for delta in deltas:
            output.write(delta)
        assert written.getvalue() == expected


def test_a_thought_that_never_ends_does_not_leave_the_terminal_dim() -> None:
    written = io.StringIO()
    output = AnswerOutput(written, thoughts=True)
    output.write(AnswerDelta(thought="Hmm"))
    output.write(AnswerDelta(finish_reason="length"))
    assert written.getvalue() == "\x1b[2mHmm\x1b[0m\n\n"


def test_settings_that_are_not_given_are_the_models_own(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "hello", "--seed", "3", "--top-k", "7"]) == 0
    assert fake_llm.params == [SamplingParams(temperature=0.6, top_k=7, seed=3)]


def test_raw_leaves_the_chat_template_out(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "Once upon", "--raw"]) == 0
    assert fake_llm.asked == [[{"role": "raw", "content": "Once upon"}]]
    assert run_command(["run", "Once upon", "--raw", "--system", "Be kind"]) == 2


@pytest.mark.parametrize("more", [[], ["--raw"]])
def test_json_is_exactly_one_object(
    more: list[str], opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "hello", "--json", "--seed", "3", *more]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert json.loads(captured.out) == {
        "text": "Hello there.",
        "token_ids": [5, 6, 7],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
        "timings": {
            "queue_s": 0.0,
            "prefill_s": 0.5,
            "decode_s": 0.25,
            "decode_tokens_per_s": 8.0,
        },
        "seed": 3,
    }


def test_a_refused_prompt_is_one_line(
    opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "refuse me", "--json"]) == 1
    told = "error: The prompt has 99 tokens. The context holds 64.\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_answer_cut_by_the_context_is_a_warning(
    more: list[str], opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.finish_reason = "length"
    assert run_command(["run", "hello", "--max-tokens", "3", *more]) == 0  # all that was asked for
    assert capsys.readouterr().err == ""
    assert run_command(["run", "hello", "--max-tokens", "4", *more]) == 0
    told = "answer: cut after 3 tokens, not 4 (--max-tokens), where the context of 64 tokens ends"
    assert told in capsys.readouterr().err
    assert run_command(["run", "hello", *more]) == 0
    told = "answer: cut after 3 tokens, where the context of 64 tokens ends; raise --context"
    assert told in capsys.readouterr().err
    fake_llm.finish_reason = "stop"
    assert run_command(["run", "hello", "--max-tokens", "4", *more]) == 0
    assert capsys.readouterr().err == ""
