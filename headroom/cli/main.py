"""The command `headroom`: subcommands, one-line errors, exit codes."""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated

import click
import typer
from click.shell_completion import add_completion_class
from typer.core import TyperCommand
from typer.main import get_command
from typer.utils import get_params_from_function

from headroom import __version__
from headroom.cli.completion import BashWords
from headroom.errors import HeadroomError, OptionError, PlanError, is_out_of_memory
from headroom.options import completed_words

FAILED, WRONG_USAGE, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130
EPILOG = (
    "Every setting has three names: --kv-type on the command line, HEADROOM_KV_TYPE in the "
    "environment, kv-type in the file that --config or HEADROOM_CONFIG names."
)

COMMANDS = (
    "pull", "list", "show", "rm", "alias", "run", "chat", "serve", "ps", "plan", "tokenize",
    "doctor", "bench", "calibrate", "profile", "experts", "synth", "synth-trace", "worker",
)  # fmt: skip

LIKENESS = 0.75  # least likeness, of 1, of an option that is proposed instead of an unknown one

# These commands take few settings: their help does not explain how settings are named.
FEW_SETTINGS = (
    "pull", "list", "show", "rm", "alias", "ps", "doctor", "calibrate", "synth", "synth-trace",
)  # fmt: skip


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"headroom {__version__}")
        raise typer.Exit


def headroom(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="print the version"),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="show the traceback of an error; may stand anywhere in the line"
        ),
    ] = False,
) -> None:
    """Run language models that do not fit."""


def make_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the command line with some commands only, so that the others are not imported."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(headroom)
    for name in names:
        function = name.replace("-", "_")
        command = getattr(import_module(f"headroom.cli.{function}"), function)
        epilog = None if name in FEW_SETTINGS else EPILOG
        app.command(cls=Command, help=help_text(command.__doc__), epilog=epilog)(command)
    return app


def help_text(docstring: str) -> str:
    """Return a docstring with a line for each paragraph, so that it is wrapped for the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in docstring.split("\n\n"))


class Command(TyperCommand):
    """A command that says what to write instead of an option that it does not have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; the error of an unknown option names the nearest known ones."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            told = unknown_option(str(self.name), error.option_name)
            raise click.UsageError(told, ctx) from error


def unknown_option(command: str, wrong: str) -> str:
    """Return the error for an unknown option: which commands have it, and what is like it here."""
    flags = command_flags()
    every = {flag for own in flags.values() for flag in own}
    told = f"headroom {command} has no option {wrong}."
    nearest = get_close_matches(wrong, sorted(every), n=1, cutoff=LIKENESS)
    if nearest and nearest[0] not in flags[command]:
        *others, last = [name for name, own in flags.items() if nearest[0] in own]
        listed = f"{', '.join(others)} and {last}" if others else last
        told += f" {nearest[0]} is an option of headroom {listed}."
    if alike := get_close_matches(wrong, sorted(flags[command]), cutoff=LIKENESS):
        told += f" Did you mean {' or '.join(alike)}?"
    return told


def command_flags() -> dict[str, set[str]]:
    """Return the options of every command."""
    whole = get_command(make_app())
    assert isinstance(whole, click.Group)
    return {
        name: {
            flag
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in whole.commands.items()
    }


def whole_command(app: typer.Typer) -> click.Command:
    """Return the app's command with the help texts of its arguments, which click 8.5 removes."""
    whole = get_command(app)
    add_completion_class(BashWords, "bash")  # in place of typer's
    assert isinstance(whole, click.Group)
    for registered in app.registered_commands:
        assert registered.callback is not None
        declared = get_params_from_function(registered.callback)
        name = registered.callback.__name__.replace("_", "-")
        for parameter in whole.commands[name].params:
            if isinstance(parameter, click.Argument) and str(parameter.name) in declared:
                parameter.help = declared[str(parameter.name)].default.help
    return whole


def main() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot encode a character shows a replacement.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors become one line."""
    debug = "--debug" in arguments
    try:
        # --debug belongs to the program, not to a command, but may stand anywhere in the line.
        rest = [argument for argument in arguments if argument != "--debug"]
        named = (rest or completed_words())[:1]
        app = make_app(named if named and named[0] in COMMANDS else COMMANDS)
        whole_command(app)(rest, prog_name="headroom")
        sys.stdout.flush()
    except SystemExit as end:
        return flushed(end.code if isinstance(end.code, int) else FAILED)
    except BrokenPipeError:
        return flushed(FAILED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_code(error)
    return 0


def one_line(error: Exception) -> str:
    """Return the line that reports an error to the user."""
    if isinstance(error, HeadroomError | OSError):
        return " ".join(str(error).split())
    if isinstance(error, UnicodeDecodeError):  # only standard input is decoded unchecked
        return f"The input is not {error.encoding} text: {error.reason} at byte {error.start}."
    if is_out_of_memory(error):
        told = str(error).partition("\n")[0]
        return f"{told} (too little memory of a GPU is free; headroom doctor shows how much)"
    return f"{type(error).__name__}: {error} (a bug in headroom; --debug shows where)"


def exit_code(error: Exception) -> int:
    """Return the exit code that stands for an error."""
    if isinstance(error, PlanError):
        return DOES_NOT_FIT
    return WRONG_USAGE if isinstance(error, OptionError) else FAILED


def flushed(code: int) -> int:
    """Flush standard output and return `code`; a reader that has gone is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again when it exits: /dev/null keeps that from printing a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
