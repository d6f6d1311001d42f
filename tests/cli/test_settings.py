"""Flags follow the declarations of Options and SamplingParams."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.cli.settings import given_sampling, parse_sampling, sampling_settings
from headroom.engine.request import SamplingParams
from headroom.errors import OptionError
from headroom.options import Options, flag

ENGINE = [flag(setting) for setting in fields(Options) if setting.metadata["group"] == "engine"]
# A command prints one answer as text, so these have no flag.
WITHOUT_FLAG = {"logit_bias", "draw", "draft", "logprobs", "prompt_logprobs"}


@pytest.mark.parametrize("command", ["run", "chat", "serve", "plan"])
def test_engine_options_are_the_same_words_for_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [word for word in [*ENGINE, "--config", "--home"] if word not in shown] == []
    assert ("--port" in shown) == (command == "serve")
    assert ("--temperature" in shown) == (command in ("run", "chat"))


def test_every_sampling_setting_has_a_flag_or_is_known_to_have_none() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == {*sampling_settings(), *WITHOUT_FLAG}


def test_flags_reach_the_engine_with_their_types(opened: list[Options], fake_llm: Any) -> None:
    line = "run hello --context 2048 --kv-type q8_0 --v-type f16 --threads 2 --max-tokens 9"
    more = "--temperature 0.5 --seed 7 --stop END --stop FIN --top-k 3 --ignore-eos"
    assert run_command([*line.split(), *more.split()]) == 0
    assert opened == [
        Options(
            context=2048, kv_type="q8_0", v_type="f16", threads=2, parallel=1, log_level="warning"
        )
    ]
    assert fake_llm.params == [
        SamplingParams(
            max_tokens=9, temperature=0.5, seed=7, stop=("END", "FIN"), top_k=3, ignore_eos=True
        )
    ]


def test_variables_and_a_config_file_reach_the_engine(
    opened: list[Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "headroom.toml"
    config.write_text('context = 1024\nparallel = 4\nmodel = "other"\n')
    monkeypatch.setenv("HEADROOM_CHUNK", "32")
    assert run_command(["run", "hello", "--config", str(config)]) == 0
    assert run_command(["run", "hello", "--config", str(config), "--parallel", "2"]) == 0
    first, second = opened
    assert (first.context, first.parallel, first.chunk, first.model) == (1024, 4, 32, "other")
    assert second.parallel == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--context", "3"], "16"),
        (["--kv-type", "q9"], "q8_0"),
        (["--threads", "two"], "--threads"),
        (["--contxt", "3"], "--contxt"),
        (["--temperature", "-1"], "error: temperature is -1.0; it must be from 0 to 100."),
        (["--max-tokens", "0"], "error: max_tokens is 0; it must be from 1 to 2147483647."),
    ],
)
def test_wrong_values_are_usage_errors(
    flags: list[str], told: str, opened: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "hello", *flags]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert (captured.out, opened) == ("", [])


def test_without_a_seed_every_answer_gets_another_one() -> None:
    assert given_sampling({"seed": 5})["seed"] == 5
    assert len({given_sampling({})["seed"] for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.3", 0.3),
        ("max_tokens", "12", 12),
        ("stop", "two words", ("two words",)),
        ("ignore_eos", "on", True),
        ("ignore_eos", "off", False),
    ],
)
def test_a_sampling_setting_is_read_from_text(name: str, text: str, value: object) -> None:
    assert parse_sampling(name, text, {}) == value


@pytest.mark.parametrize(("name", "text"), [("temperature", "warm"), ("top_k", "0.5"), ("x", "1")])
def test_text_that_is_no_sampling_setting_is_refused(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=name):
        parse_sampling(name, text, {})


def test_a_command_warns_of_a_variable_that_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_THREAD", "1")
    line = ["plan", "smollm2-135m", "--device", "24GiB", "--explain", "kv"]
    assert run_command(line) == 0
    told = "options: HEADROOM_THREAD is ignored, since there is no such setting; did you mean "
    assert f"{told}HEADROOM_THREADS?" in capsys.readouterr().err
    assert run_command([*line, "--log-level", "error"]) == 0
    assert capsys.readouterr().err == ""
