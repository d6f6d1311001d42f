"""Flags made from the declarations of Options and SamplingParams, so that each is written once."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headroom.engine.request import SamplingParams
from headroom.errors import OptionError, RequestError
from headroom.log import start_logging
from headroom.options import BOOLEANS, Options, flag, load_options, value_type

Command = Callable[..., None]

SAMPLING_HELP = {
    "max_tokens": "tokens to generate; if left out, as many as the context holds",
    "temperature": "how freely tokens are drawn; 0 always takes the likeliest",
    "top_k": "draw from the K likeliest tokens; 0 for all",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "min_p": "drop tokens below this share of the likeliest token's probability",
    "repetition_penalty": "make tokens that were seen less likely; 1 for none",
    "frequency_penalty": "subtract this from a token's logit for each time it was seen",
    "presence_penalty": "subtract this once from the logit of a token that was seen",
    "penalty_window": "last tokens that the penalties look at; 0 for all",
    "seed": "start of the random numbers; a new one for every answer if left out",
    "ignore_eos": "go on where the model would end its answer",
    "stop": "text that ends the answer; may be repeated",
}
CONFIG_HELP = "TOML file with settings, named as the flags are"


def with_settings(
    *groups: str, sampling: bool = False, **defaults: object
) -> Callable[[Command], Command]:
    """Give a command the flags of `groups` of Options, and of SamplingParams where asked.

    The command receives `options`, and `params` where it samples. `defaults` are Options that this
    command prefers where neither a flag nor a variable nor the config file says otherwise.
    """

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name not in ("options", "params")
        ]
        flags = option_flags(groups, defaults) + (sampling_flags() if sampling else [])

        @functools.wraps(command)
        def call(**values: Any) -> None:
            received = {parameter.name: values[parameter.name] for parameter in own}
            given = {name: _joined(values[name]) for name in _names(Options) if name in values}
            received["options"] = load_options(given, values["config"], defaults)
            if sampling:
                received["params"] = make_params(values)
            start_logging(received["options"].log_level)
            command(**received)

        parameters = sorted([*own, *flags], key=lambda parameter: parameter.kind)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def add_flags(command: Any, kind: type[Any]) -> None:
    """Replace a command's catch-all by one parameter for each field of a dataclass."""
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
    """Return one flag for each sampling setting that a command line can hold."""
    kinds = get_type_hints(SamplingParams)
    return [_sampling_flag(name, kinds[name], help) for name, help in SAMPLING_HELP.items()]


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling settings that were given, with a new seed where none was."""
    given = {name: values[name] for name in SAMPLING_HELP if values.get(name) is not None}
    given["stop"] = tuple(given.get("stop", ()))
    given.setdefault("seed", new_seed())
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise OptionError(error.message, hint=error.hint, param=error.param) from error


def new_seed() -> int:
    """Return a seed that nobody chose, short enough to be typed again."""
    return int.from_bytes(os.urandom(4)) >> 1  # the module secrets takes longer to import


def parse_sampling(name: str, text: str) -> object:
    """Return the value of a sampling setting that is written as `text`; none is its default."""
    if name not in SAMPLING_HELP:
        raise OptionError(f"Unknown setting {name!r}.", hint=f"Known: {', '.join(SAMPLING_HELP)}.")
    if not text:
        return _default(name)
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
        raise OptionError(f"{name} is {text!r}, not {kind.__name__}.", param=name) from error


def _option_flag(setting: "Field[Any]", default: object) -> inspect.Parameter:
    rules, kind = setting.metadata, value_type(setting)
    if setting.name == "model":  # the one setting that is written without a flag
        model = typer.Argument(metavar="[MODEL]", help=rules["help"], show_default=False)
        return _keyword(setting.name, Annotated[str | None, model])
    if rules["repeatable"]:
        kind = list[kind]  # type: ignore[valid-type]
    # Choices and bounds are checked by Options, whose errors are one line with the right values.
    choices = "|".join(rules["choices"])
    info = typer.Option(
        flag(setting),
        help=_with_default(rules["help"], default),
        metavar=f"[{choices}]" if choices else None,
        show_default=False,
        rich_help_panel=f"{_group(setting).capitalize()} options",
    )
    return _keyword(setting.name, Annotated[kind | None, info])


def _sampling_flag(name: str, kind: Any, help: str) -> inspect.Parameter:
    kind = _plain(kind)
    words = flag_words = "--" + name.replace("_", "-")
    if get_origin(kind) is tuple:
        kind = list[str]
    elif kind is bool:
        words = f"{flag_words}/--no-{flag_words[2:]}"
    default = _default(name)
    shown = default if name != "seed" and kind in (int, float) else None
    info = typer.Option(
        words,
        help=_with_default(help, shown),
        show_default=False,
        rich_help_panel="Sampling options",
    )
    return _keyword(name, Annotated[kind | None, info])


def _default(name: str) -> object:
    return next(field.default for field in fields(SamplingParams) if field.name == name)


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
    """Return what a repeated flag collected as one text, and anything else as it is."""
    return ",".join(value) or None if isinstance(value, list) else value


def _names(kind: type[Options]) -> list[str]:
    return [setting.name for setting in fields(kind)]


def _group(setting: "Field[Any]") -> str:
    group = setting.metadata["group"]
    assert isinstance(group, str)
    return group
