"""`headroom chat`: talk with a model in the terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headroom.cli.loading import open_llm
from headroom.cli.run import AnswerOutput, warn_if_cut
from headroom.cli.settings import parse_sampling, sampling_settings, with_settings
from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError, OptionError
from headroom.options import Options
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta
    from headroom.llm import LLM

with contextlib.suppress(ImportError):  # line editing; not every Python is built with it
    import readline  # noqa: F401

HELP = """\
/help              this text
/reset             forget the conversation, keep the system text and the settings
/system TEXT       set the system text and forget the conversation; without TEXT, remove it
/set NAME VALUE    change a sampling setting, as in /set temperature 0.3; without VALUE, back to
                   its default; /set alone shows all settings
/quit              leave (so does Ctrl-D)
A line that ends in a backslash goes on in the next one. Ctrl-C stops an answer."""


@with_settings("model", "engine", "program", sampling=True, parallel=1, log_level="warning")
def chat(
    options: Options,
    sampling: dict[str, Any],
    system: Annotated[str, typer.Option(help="instructions that the model gets first")] = "",
) -> None:
    """Talk with a model; /help lists what can be typed."""
    with open_llm(options) as llm:
        console = Console(highlight=False, markup=False, emoji=False)
        if console.is_terminal:
            console.print(
                f"{llm.name}, {llm.context} tokens of context. /help for help.", style="dim"
            )
        prompt = coloured_prompt if sys.stdin.isatty() and console.is_terminal else no_prompt
        talk = ChatSession(llm.sampling(**sampling), llm.default_sampling, system)
        Chat(llm, talk, console).talk(lambda more: input(prompt(more)))


def coloured_prompt(more: bool) -> str:
    """Return the prompt; its marks show line editing which characters have no width."""
    return f"\001\x1b[1;36m\002{'.' if more else '>'}\001\x1b[0m\002 "


def no_prompt(more: bool) -> str:
    """Return an empty prompt, for input that is not typed."""
    return ""


@dataclass
class ChatSession:
    """The messages so far, and the sampling settings of the next answer."""

    params: SamplingParams
    defaults: Mapping[str, Any]  # the model's own sampling settings
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return all messages, the system text first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def command(self, line: str) -> str:
        """Carry out a line that starts with a slash, and return the text to show."""
        word, _, rest = line.partition(" ")
        actions: dict[str, Callable[[str], str]] = {
            "/help": lambda _: HELP,
            "/reset": self._reset,
            "/system": self._set_system,
            "/set": self._set_param,
        }
        if word not in actions:
            raise OptionError(f"There is no {word}.", hint="/help lists what can be typed.")
        return actions[word](rest.strip())

    def _reset(self, _: str) -> str:
        self.turns.clear()
        return "The conversation is forgotten."

    def _set_system(self, text: str) -> str:
        self.turns.clear()
        self.system = text
        return "The system text is set." if text else "There is no system text now."

    def _set_param(self, text: str) -> str:
        if not text:
            return "\n".join(f"{name} {getattr(self.params, name)}" for name in sampling_settings())
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = name.replace("-", "_")
        changed = {name: parse_sampling(name, value.strip(), self.defaults)}
        self.params = replace(self.params, **changed)  # type: ignore[arg-type]
        return f"{name} is {changed[name]}."


class Chat:
    """The loop that reads a line and answers it."""

    def __init__(self, llm: "LLM", conversation: ChatSession, console: Console) -> None:
        self.llm = llm
        self.conversation = conversation
        self.console = console

    def talk(self, read: Callable[[bool], str]) -> None:
        """Answer line after line until the input ends or says /quit; `read` returns one line."""
        while True:
            try:
                text = read_message(read)
            except EOFError:
                break
            except KeyboardInterrupt:
                self.console.print("\nCtrl-D or /quit leaves.", style="dim")
                continue
            if text == "/quit":
                return
            if text:
                self._take(text)
        if self.console.is_terminal:
            self.console.print()

    def _take(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self.console.print(self.conversation.command(text), style="dim")
            else:
                self._answer(text)
        except HeadroomError as error:
            self.console.print(f"error: {error}", style="red")
        except KeyboardInterrupt:  # before the first token, while the prompt was encoded
            self.console.print("stopped", style="dim")

    def _answer(self, text: str) -> None:
        turns = self.conversation.turns
        turns.append({"role": "user", "content": text})
        params = self.conversation.params
        try:
            deltas = self.llm.stream_chat(self.conversation.messages(), params)
            received = write_answer(deltas, self.console)
        except (HeadroomError, KeyboardInterrupt):
            turns.pop()  # a question that got no answer is not part of the conversation
            raise
        answer = {"role": "assistant", "content": "".join(delta.text for delta in received)}
        if thought := "".join(delta.thought for delta in received):
            answer["reasoning_content"] = thought  # the chat template decides what it keeps
        turns.append(answer)
        if received:
            warn_if_cut(received[-1], params, self.llm.context)
        # With a new seed the next answer does not repeat the random numbers of this one.
        self.conversation.params = replace(params, seed=(params.seed + 1) % (1 << 62))


def read_message(read: Callable[[bool], str]) -> str:
    """Read one message: a line, and the next ones while they end in a backslash."""
    lines = [read(False)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(True))
    return "\n".join(lines).strip()


def write_answer(deltas: "Iterable[AnswerDelta]", console: Console) -> "list[AnswerDelta]":
    """Show an answer as it comes, then its token rate, and return its deltas; Ctrl-C ends it."""
    received: list[AnswerDelta] = []
    times, note = list[float](), ""
    out = AnswerOutput(console.file, thoughts=console.is_terminal)
    try:
        for delta in deltas:
            received.append(delta)
            out.write(delta)
            if delta.token is not None:
                times.append(time.perf_counter())
    except KeyboardInterrupt:
        note = ", stopped"
        if isinstance(deltas, Generator):
            deltas.close()  # which cancels the request
    ends_line = "".join(delta.text for delta in received).endswith("\n")
    console.file.write("" if ends_line else "\n")
    if console.is_terminal:
        console.print(f"{counted(len(times), 'token')}{rate(times)}{note}\n", style="dim")
    return received


def rate(times: list[float]) -> str:
    """Return the speed of tokens that came at `times`, as text; nothing for fewer than two."""
    if len(times) < 2 or times[-1] <= times[0]:
        return ""
    return f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
