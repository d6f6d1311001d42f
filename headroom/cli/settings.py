"""Command-line flags, made from the declarations of Options and SamplingParams."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headroom.cli.completion import NAME_COMPLETERS, model_names, one_of
from headroom.engine.request import SamplingParams, new_seed, user_settings
from headroom.errors import OptionError, RequestError
from headroom.formats.aliases import with_aliases
from headroom.formats.sampling import GGUF_KEYS
from headroom.log import start_logging
from headroom.options import (
    BOOLEANS,
    Options,
    flag,
    load_options,
    value_type,
    warn_unknown_variables,
)

Command = Callable[..., None]

TYPED_SEED_BITS = 31  # of a random seed: short enough to type it again
CONFIG_HELP = "TOML file with settings, named as the flags are"


def with_settings(
    *groups: str, sampling: bool = False, **defaults: object
) -> Callable[[Command], Command]:
    """Give a command the flags of some `groups` of Options and, if asked, of SamplingParams.

    The command receives the options as `options`, and the sampling settings that the user gave as
    `sampling`. `defaults` are this command's own defaults, which a flag, a variable or the config
    file overrides.
    """

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name not in ("options", "sampling")
        ]
        flags = option_flags(groups, defaults) + (sampling_flags() if sampling else [])

        @functools.wraps(command)
        def call(**values: Any) -> None:
            received = {parameter.name: values[parameter.name] for parameter in own}
            given = {name: _joined(values[name]) for name in _names(Options) if name in values}
            received["options"] = load_options(given, values["config"], defaults)
            if sampling:
                received["sampling"] = given_sampling(values)
            start_logging(received["options"].log_level)
            warn_unknown_variables()
            received["options"] = with_aliases(received["options"])
            command(**received)

        parameters = sorted([*own, *flags], key=lambda parameter: parameter.kind)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def add_flags(command: Any, kind: type[Any]) -> None:
    """Replace a command's `**flags` by a parameter for each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]
    command.__signature__ = inspect.Signature([*own, *flags])
    command.__annotations__ = {flag.name: flag.annotation for flag in (*own, *flags)}


def option_flags(
    groups: tuple[str, ...], defaults: Mapping[str, object]
) -> list[inspect.Parameter]:
    """Return one flag for each setting of the groups, and `--config`."""
    flags = [
        _option_flag(setting, defaults.get(setting.name, setting.default))
        for setting in fields(Options)
        if _group(setting) in groups
    ]
    config = typer.Option("--config", help=CONFIG_HELP, rich_help_panel="Program options")
    return [*flags, _keyword("config", Annotated[Path | None, config])]


def sampling_flags() -> list[inspect.Parameter]:
    """Return one flag for each sampling setting that a flag can hold."""
    return [_sampling_flag(setting) for setting in sampling_settings().values()]


def sampling_settings() -> "dict[str, Field[Any]]":
    """Return the sampling settings that have a flag, by name: all but mappings."""
    kinds = get_type_hints(SamplingParams)
    return {
        setting.name: setting
        for setting in user_settings()
        if get_origin(kinds[setting.name]) is not Mapping
    }


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings that the user gave, and a random seed if the user gave none.

    `LLM.sampling` adds the model's own defaults once the model is loaded.
    """
    given = {name: values[name] for name in sampling_settings() if values.get(name) is not None}
    given["stop"] = tuple(given.get("stop", ()))
    given.setdefault("seed", new_seed(TYPED_SEED_BITS))
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise OptionError(error.message, hint=error.hint, param=error.param) from error
    return given


def parse_sampling(name: str, text: str, defaults: Mapping[str, Any]) -> object:
    """Return the value of a sampling setting that `text` stands for; "" stands for the default.

    `defaults` are the model's own.
    """
    known = sampling_settings()
    if name not in known:
        raise OptionError(f"Unknown setting {name!r}.", hint=f"Known: {', '.join(known)}.")
    if not text:
        return defaults.get(name, known[name].default)
    kind = _plain(get_type_hints(SamplingParams)[name])
    if get_origin(kind) is tuple:
        return (text,)
    if kind is bool:
        if (word := text.lower()) not in BOOLEANS:
            raise OptionError(f"{name} is {text!r}.", hint="Choose from on, off.", param=name)
        return BOOLEANS[word]
    try:
        return kind(text)
    except ValueError as error:
        needed = "a whole number" if kind is int else "a number"
        raise OptionError(f"{name} is {text!r}, not {needed}.", param=name) from error


def _option_flag(setting: "Field[Any]", default: object) -> inspect.Parameter:
    rules, kind = setting.metadata, value_type(setting)
    if setting.name == "model":  # the one setting that is written without a flag
        model = typer.Argument(
            metavar="[MODEL]",
            help=rules["help"],
            show_default=False,
            autocompletion=model_names,
        )
        return _keyword(setting.name, Annotated[str | None, model])
    if rules["repeatable"]:
        kind = list[kind]  # type: ignore[valid-type]
    # Options checks choices and bounds: its errors are one line with the allowed values.
    choices = "|".join(rules["choices"])
    info = typer.Option(
        flag(setting),
        help=_with_default(rules["help"], default),
        metavar=f"[{choices}]" if choices else None,
        show_default=False,
        autocompletion=one_of(rules["choices"]) if choices else NAME_COMPLETERS.get(setting.name),
        rich_help_panel=f"{_group(setting).capitalize()} options",
    )
    return _keyword(setting.name, Annotated[kind | None, info])


def _sampling_flag(setting: "Field[Any]") -> inspect.Parameter:
    name, kind = setting.name, _plain(get_type_hints(SamplingParams)[setting.name])
    words = flag_words = "--" + name.replace("_", "-")
    if get_origin(kind) is tuple:
        kind = list[str]
    elif kind is bool:
        words = f"{flag_words}/--no-{flag_words[2:]}"
    shown = None
    if kind in (int, float) and name != "seed":
        shown = "the model's own" if name in GGUF_KEYS else setting.default
    info = typer.Option(
        words,
        help=_with_default(setting.metadata["help"], shown),
        show_default=False,
        rich_help_panel="Sampling options",
    )
    return _keyword(name, Annotated[kind | None, info])


def _with_default(help: str, default: object) -> str:
    return help if default in (None, "") else f"{help} (default: {default})"


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _plain(kind: Any) -> Any:
    """Return T for `T | None`."""
    if type(None) in get_args(kind):
        return next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


def _joined(value: object) -> object:
    """Return the values of a repeated flag, joined with commas; other values unchanged."""
    return ",".join(value) or None if isinstance(value, list) else value


def _names(kind: type[Options]) -> list[str]:
    return [setting.name for setting in fields(kind)]


def _group(setting: "Field[Any]") -> str:
    group = setting.metadata["group"]
    assert isinstance(group, str)
    return group
