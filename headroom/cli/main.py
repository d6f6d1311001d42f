"""The command `headroom`: its subcommands, errors as one line, exit codes."""

import os
import sys
import traceback
from typing import Annotated

import typer
from typer.main import get_command

from headroom import __version__
from headroom.cli.chat import chat
from headroom.cli.doctor import doctor
from headroom.cli.plan import plan
from headroom.cli.pull import pull
from headroom.cli.run import run
from headroom.cli.serve import serve
from headroom.cli.tokenize import tokenize
from headroom.errors import HeadroomError, OptionError, PlanError

FAILED, WRONG_USAGE, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130
EPILOG = (
    "Every setting has three names: --kv-type on the command line, HEADROOM_KV_TYPE in the "
    "environment, kv-type in the file that --config or HEADROOM_CONFIG names."
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (pull, run, chat, serve, plan, tokenize, doctor):
    app.command(epilog=None if command in (pull, doctor) else EPILOG)(command)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        print(f"headroom {__version__}")
        raise typer.Exit


@app.callback()
def headroom(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="print the version"),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="show where an error comes from; anywhere in the line"),
    ] = False,
) -> None:
    """Run language models that do not fit."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors become one line."""
    debug = "--debug" in arguments
    try:
        # --debug is the program's and not the command's, so it goes first wherever it stood.
        rest = [argument for argument in arguments if argument != "--debug"]
        get_command(app)(rest, prog_name="headroom")
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
    """Return what to tell the user about an error."""
    if isinstance(error, HeadroomError | OSError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error} (a bug in headroom; --debug shows where)"


def exit_code(error: Exception) -> int:
    """Return the exit code that stands for an error."""
    if isinstance(error, PlanError):
        return DOES_NOT_FIT
    return WRONG_USAGE if isinstance(error, OptionError) else FAILED


def flushed(code: int) -> int:
    """Return `code` with standard output done; a reader that has gone is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends; what is left goes nowhere, without a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
