"""Options: declared once; flags, variables and config files give the same values."""

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from headroom.cli.main import make_app
from headroom.errors import OptionError
from headroom.options import (
    SWAP_WINDOW,
    Options,
    flag,
    load_options,
    value_type,
    variable,
    warn_unknown_variables,
)

SETTINGS = {setting.name: setting for setting in fields(Options)}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(variable(setting), raising=False)
    monkeypatch.delenv("HEADROOM_CONFIG", raising=False)


def test_without_anything_said_every_setting_has_its_default() -> None:
    assert load_options({}) == Options()


def test_a_setting_has_one_word_in_three_spellings() -> None:
    assert flag(SETTINGS["kv_type"]) == "--kv-type"
    assert variable(SETTINGS["kv_type"]) == "HEADROOM_KV_TYPE"
    assert value_type(SETTINGS["context"]) is int
    assert value_type(SETTINGS["kv_type"]) is str


def test_what_is_given_beats_the_variable_the_file_and_the_commands_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "headroom.toml"
    config.write_text("context = 100\nparallel = 100\nchunk = 100\n")
    monkeypatch.setenv("HEADROOM_CONTEXT", "200")
    monkeypatch.setenv("HEADROOM_PARALLEL", "200")
    given = {"context": 300, "parallel": None}
    preferred = {"context": 50, "parallel": 50, "chunk": 50, "threads": 5}
    options = load_options(given, config, preferred)
    assert (options.context, options.parallel) == (300, 200)
    assert (options.chunk, options.threads) == (100, 5)


def test_the_config_file_may_be_named_by_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "headroom.toml"
    config.write_text('kv-type = "q8_0"\nserved_name = "mine"\n')
    monkeypatch.setenv("HEADROOM_CONFIG", str(config))
    options = load_options({})
    assert (options.kv_type, options.served_name) == ("q8_0", "mine")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context", 15, "--context is 15; it must be at least 16."),
        ("parallel", 1025, "--parallel is 1025; it must be at most 1024."),
        ("context", "8k", "--context is '8k', not int."),
        ("context", True, "--context is True, not int."),
        ("port", 65536, "--port is 65536; it must be at most 65535."),
        ("weights", None, "--weights is None, not str."),
    ],
)
def test_a_value_out_of_its_type_or_range_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Options(**{name: value})
    assert (str(refused.value), refused.value.param) == (message, name)


def test_a_wrong_choice_is_refused_with_the_list_of_choices() -> None:
    with pytest.raises(OptionError, match=r"^--kv-type is 'q9'\. Choose from f32, f16, bf16, q8_0"):
        Options(kv_type="q9")


def test_a_whole_number_is_good_enough_where_a_fraction_is_meant() -> None:
    assert Options(keep_alive=3).keep_alive == 3


def test_an_unknown_setting_is_refused_wherever_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^Unknown setting 'contxt'\. Known: model, context, "):
        load_options({"contxt": 4096})
    config = tmp_path / "headroom.toml"
    config.write_text("contxt = 4096\n")
    with pytest.raises(OptionError, match=r"headroom\.toml: unknown setting 'contxt'\. Known: "):
        load_options({}, config)


def test_a_variable_that_is_no_number_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADROOM_CONTEXT", "many")
    with pytest.raises(OptionError, match=r"^HEADROOM_CONTEXT is 'many', not int\.$"):
        load_options({})


def test_a_config_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Cannot read the config file .*No such file"):
        load_options({}, tmp_path / "none.toml")
    config = tmp_path / "bad.toml"
    config.write_text("context 4096")
    with pytest.raises(OptionError, match=r"bad\.toml is not a TOML file"):
        load_options({}, config)


def test_pulled_models_live_in_the_cache_folder_unless_told_otherwise() -> None:
    assert Options().home_path == Path.home() / ".cache" / "headroom"
    assert Options(home="~/models").home_path == Path.home() / "models"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HEADROOM_KVTYPE", "; did you mean HEADROOM_KV_TYPE?"),
        ("HEADROOM_CONFG", "; did you mean HEADROOM_CONFIG?"),
        ("HEADROOM_FLUX_DENSITY", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_warned_of_with_the_nearest_one(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variables in (name, "HEADROOM_CONTEXT", "HEADROOM_CONFIG", "MY_HEADROOM_THING"):
        monkeypatch.setenv(variables, "1")
    warn_unknown_variables()
    assert caplog.messages == [f"options: {name} is ignored, since there is no such setting{hint}"]


def test_help_and_page_name_the_window_that_exchanges_are_planned_by() -> None:
    assert f"last {SWAP_WINDOW} tokens" in SETTINGS["swap_min_gain"].metadata["help"]
    page = Path(__file__).parents[1] / "docs" / "routing-stats.md"
    assert f"last {SWAP_WINDOW} tokens" in " ".join(page.read_text().split())


def test_a_user_without_a_home_folder_is_told_what_to_set() -> None:
    with pytest.raises(OptionError, match=r"no home folder for pulled models\. Set --home or"):
        _ = Options(home="~no-such-user/models").home_path


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_says_what_it_is_and_where_it_belongs(setting: Any) -> None:
    assert setting.metadata["help"]
    assert setting.metadata["group"] in (
        "model", "engine", "workers", "plan", "server", "program",
    )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)
def test_every_setting_is_a_flag_a_variable_and_a_config_key(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = example(setting)
    wanted = replace(Options(), **{setting.name: value})
    assert load_options({setting.name: value}) == wanted
    config = tmp_path / "headroom.toml"
    for key in (setting.name, setting.name.replace("_", "-")):
        config.write_text(f"{key} = {json.dumps(value)}\n")
        assert load_options({}, config) == wanted
    monkeypatch.setenv(variable(setting), str(value))
    assert load_options({}) == wanted
    wanted_flag = setting.name if setting.name == "model" else flag(setting)  # a plain argument
    assert wanted_flag in declared_flags()


def example(setting: Any) -> object:
    """A value that a setting takes and that is not its default."""
    rules, kind = setting.metadata, value_type(setting)
    if rules["choices"]:
        return next(choice for choice in rules["choices"] if choice != setting.default)
    if kind is bool:
        return not setting.default
    if kind is str:
        return "1GiB"  # a size, a name or a path
    least = rules["min"] if rules["min"] is not None else 1
    return kind(least + 1 if least + 1 != setting.default else least + 2)


@cache
def declared_flags() -> set[str]:
    """The flags and plain arguments of all commands."""
    group = typer.main.get_command(make_app())
    assert isinstance(group, click.Group)
    commands = [group, *group.commands.values()]
    return {name for command in commands for option in command.params for name in option.opts}
