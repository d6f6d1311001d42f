"""`headroom run`: which words are which, and what it prints."""

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from headroom.cli.main import run_command
from headroom.cli.run import AskedWords, read_words
from headroom.engine.request import SamplingParams
from headroom.errors import ContextLengthError, FormatError
from headroom.options import Options
from tests.server.fakes import EOS

WITH_A_NAME = "laguna-xs.2: what is it?"


def test_one_word_is_the_prompt_and_two_are_model_and_prompt() -> None:
    assert read_words(["hello"], "") == AskedWords("", "hello")
    assert read_words(["model.gguf", "hello"], "") == AskedWords("model.gguf", "hello")


def test_a_dash_reads_the_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert read_words(["-"], "") == AskedWords("", "two\nlines\n")


def test_a_model_without_a_prompt_is_not_taken_for_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for model in ("model.gguf", str(tmp_path)):
        with pytest.raises(typer.BadParameter, match="is a model, and the text"):
            read_words([model], "")


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
        read_words(["laguna-xs.2:q8_0"], "")
    assert read_words([WITH_A_NAME], "") == AskedWords("", WITH_A_NAME)


def test_a_prompt_may_be_longer_than_a_file_name() -> None:
    for prompt in ("why " * 100, "/" + "x" * 5000):
        assert read_words([prompt], "") == AskedWords("", prompt)


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


def test_settings_that_are_not_given_are_the_models_own(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "hello", "--seed", "3", "--top-k", "7"]) == 0
    assert fake_llm.params == [SamplingParams(temperature=0.6, top_k=7, seed=3)]


def test_raw_leaves_the_chat_template_out(
    opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "Once upon", "--raw"]) == 0
    assert (fake_llm.asked, fake_llm.prompts) == ([], ["Once upon"])
    assert run_command(["run", "Once upon", "--raw", "--system", "Be kind"]) == 2


@pytest.mark.parametrize("more", [[], ["--raw"]])
def test_json_is_exactly_one_object(
    more: list[str], opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "hello", "--json", "--seed", "3", *more]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    read = len(fake_llm.engine.requests[0].prompt)
    assert json.loads(captured.out) == {
        "text": "Hello there.",
        "token_ids": [*fake_llm.tokenizer.encode("Hello there.", add_bos=False), EOS],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": read, "completion_tokens": 4, "total_tokens": read + 4},
        "timings": {
            "queue_s": 0.0,
            "prefill_s": 0.5,
            "decode_s": 0.375,
            "decode_tokens_per_s": 8.0,
            "guessed": 0,
            "accepted": 0,
            "held_back": 0,
        },
        "seed": 3,
    }


def test_a_refused_prompt_is_one_line(
    opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "word " * 70, "--json"]) == 1
    out, told = capsys.readouterr()
    assert (out, told.count("\n")) == ("", 1)
    assert told.startswith("error: The prompt has 72 tokens")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_answer_cut_by_the_context_is_a_warning(
    more: list[str], opened: list[Options], fake_llm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.engine.words = "word " * 100
    assert run_command(["run", "hello", "--max-tokens", "3", *more]) == 0  # all that was asked for
    assert capsys.readouterr().err == ""
    # Of 64 tokens, the prompt has three: a start, "hello" and a line feed.
    assert run_command(["run", "hello", "--max-tokens", "62", *more]) == 0
    told = "answer: cut after 61 tokens, not 62 (--max-tokens), where the context of 64 tokens ends"
    assert told in capsys.readouterr().err
    assert run_command(["run", "hello", *more]) == 0
    told = "answer: cut after 61 tokens, where the context of 64 tokens ends; raise --context"
    assert told in capsys.readouterr().err
    fake_llm.engine.words = "Hello there."
    assert run_command(["run", "hello", "--max-tokens", "62", *more]) == 0
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("seen", [("stdout", "stderr"), ("stdout",), ("stderr",), ()])
def test_a_person_sees_a_line_of_statistics_and_a_pipe_does_not(
    seen: tuple[str, ...],
    opened: list[Options],
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_llm.engine.cost = {"hit_rate": 0.875}
    streams = {name: Terminal() if name in seen else io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert run_command(["run", "hello"]) == 0
    assert streams["stdout"].getvalue() == "Hello there.\n"
    told = "first token 500 ms, prompt 3, answer 4 tokens, 8.0 tokens/s, expert hits 88 %"
    shown = re.sub(r"\x1b\[\d*m", "", streams["stderr"].getvalue())
    # The spinner has cleared its line.
    assert shown.rpartition("\x1b[2K")[2] == (f"{told}\n" if len(seen) == 2 else "")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that lets standard input be a file with a text."""

    def give(text: str) -> None:
        (tmp_path / "given").write_text(text)
        monkeypatch.setattr("sys.stdin", (tmp_path / "given").open())

    return give


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        (["Summarise."], "", "some notes\n\nSummarise."),
        (["m.gguf", "Summarise."], "m.gguf", "some notes\n\nSummarise."),
        ([], "", "some notes\n"),
        (["-"], "", "some notes\n"),
        (["m.gguf", "-"], "m.gguf", "some notes\n"),
        (["m.gguf"], "m.gguf", "some notes\n"),
        (["smollm2"], "smollm2", "some notes\n"),
        (["org/repo:m.gguf"], "org/repo:m.gguf", "some notes\n"),
    ],
)
def test_what_is_piped_in_comes_before_the_prompt(
    words: list[str],
    model: str,
    prompt: str,
    pipe: Callable[[str], None],
    opened: list[Options],
    fake_llm: Any,
) -> None:
    pipe("some notes\n")
    assert run_command(["run", *words]) == 0
    assert opened[0].model == model
    assert fake_llm.asked == [[{"role": "user", "content": prompt}]]


def test_an_empty_pipe_and_no_pipe_add_nothing(
    pipe: Callable[[str], None],
    opened: list[Options],
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe("")
    assert run_command(["run", "smollm2"]) == 0
    with Path("/dev/null").open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert run_command(["run", "hello"]) == 0
    assert [asked[0]["content"] for asked in fake_llm.asked] == ["smollm2", "hello"]
    capsys.readouterr()
    pipe("")
    assert run_command(["run"]) == 2
    assert "There is no prompt. Write one, pipe one in, or attach" in capsys.readouterr().err


def test_attached_files_come_first_then_what_is_piped_in_then_the_prompt(
    pipe: Callable[[str], None],
    opened: list[Options],
    fake_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("x = 1\n")
    Path("b.txt").write_text("two")
    pipe("piped")
    assert run_command(["run", "Explain.", "-f", "a.py", "--file", "b.txt"]) == 0
    content = "a.py:\n```py\nx = 1\n```\n\nb.txt:\n```txt\ntwo\n```\n\npiped\n\nExplain."
    assert fake_llm.asked == [[{"role": "user", "content": content}]]


def test_files_may_come_without_a_prompt_and_raw_leaves_out_their_frames(
    opened: list[Options], fake_llm: Any, tmp_path: Path
) -> None:
    file = tmp_path / "story.txt"
    file.write_text("Once upon a ")
    assert run_command(["run", "-f", str(file)]) == 0
    assert run_command(["run", "smollm2", "-f", str(file)]) == 0
    assert run_command(["run", "time", "--raw", "-f", str(file)]) == 0
    contents = [asked[0]["content"] for asked in fake_llm.asked]
    assert contents[0] == contents[1] == f"{file}:\n```txt\nOnce upon a\n```"
    assert fake_llm.prompts[2] == "Once upon a time"
    assert opened[1].model == "smollm2"


def test_a_file_that_cannot_be_attached_is_wrong_usage(
    opened: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.txt"
    assert run_command(["run", "hello", "-f", str(missing)]) == 2
    assert capsys.readouterr().err == f"error: Cannot read {missing}: {os.strerror(2)}.\n"
    assert opened == []


def test_files_that_do_not_fit_the_context_are_told_with_their_tokens(
    opened: list[Options],
    fake_llm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise ContextLengthError("The prompt has 99 tokens.", hint="Shorten.", tokens=99)

    monkeypatch.setattr(fake_llm, "stream_chat", refuse)
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.txt", "one two three"), ("b.txt", "four")):
        Path(name).write_text(text)
    assert run_command(["run", "hello", "-f", "a.txt", "-f", "b.txt"]) == 1
    assert capsys.readouterr().err == (  # the frame of a file has six tokens
        "error: The prompt has 99 tokens: a.txt has 9, b.txt has 7. "
        "Attach fewer files or parts of them, or raise --context.\n"
    )
    assert run_command(["run", "hello"]) == 1
    assert capsys.readouterr().err == "error: The prompt has 99 tokens. Shorten.\n"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"enum": [1, 2]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def test_an_answer_is_asked_to_match_the_schema(
    opened: list[Options],
    fake_llm: Any,
    tiny_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "city.json"
    file.write_text(json.dumps(SCHEMA))
    line = ["run", str(tiny_path), "hello", "--schema", str(file)]
    fake_llm.engine.words = '{"city": "Rome", "size": 1}'
    assert run_command(line) == 0
    assert json.loads(capsys.readouterr().out) == {"city": "Rome", "size": 1}
    assert fake_llm.chats[0].output_format.value == SCHEMA
    assert run_command([*line, "--max-tokens", "2"]) == 1
    assert capsys.readouterr().err == (
        f"error: The answer ends after 2 tokens, before the JSON that {file} asks for is "
        "complete. Raise --max-tokens or --context, and give no --stop.\n"
    )
    assert run_command([*line, "--raw"]) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "--schema {} is not a JSON file: Expecting value: line 1 column 1 (char 0).\n"),
        ("[" * 100_000, "--schema {} is not a JSON file: "),
        ("[1]", "--schema {} holds a value of type list, not an object.\n"),
        (
            '{"properties": {"a": {"type": "inteer"}}}',
            "--schema {}: The JSON schema cannot be used, at /properties/a: Invalid type: inteer.",
        ),
        (None, "Cannot read --schema {}: "),
    ],
)
def test_a_wrong_schema_is_refused_before_the_model_is_loaded(
    content: str | None,
    told: str,
    opened: list[Options],
    tiny_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "wrong.json"
    if content is not None:
        file.write_text(content)
    assert run_command(["run", str(tiny_path), "hello", "--schema", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told.format(file)}")
    assert opened == []
