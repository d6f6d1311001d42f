"""`headroom chat`: talk with a model in the terminal."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.cli.answer_output import AnswerOutput, AnswerStats, Thoughts, cut_note
from headroom.cli.chat_session import (
    CHAT_SETTINGS,
    DEFAULT,
    THINK,
    ChatSession,
    ChatTurn,
    chat_path,
    check_known,
)
from headroom.cli.loading import open_llm
from headroom.cli.progress import waiting
from headroom.cli.quiet_keys import marked_pastes, quiet_keys
from headroom.cli.settings import sampling_settings, with_settings
from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError, ModelError, OptionError
from headroom.options import Options
from headroom.text.conversation import Conversation, Thinking
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta
    from headroom.cli.chat_input import MessageReader
    from headroom.llm import LLM, AnswerStream

KEYS_HELP = (
    "Enter sends, Alt-Enter begins a new line; a pasted text is one message. A line that ends in a "
    'backslash goes on in the next one, and a message may stand between two """. Tab completes '
    "commands; the arrows bring earlier messages back. Ctrl-C stops an answer; twice, it leaves, "
    "as Ctrl-D does."
)


@with_settings(
    "model", "engine", "workers", "program", sampling=True, parallel=1, log_level="warning"
)
def chat(
    options: Options,
    sampling: dict[str, Any],
    system: Annotated[str, typer.Option(help="instructions that the model gets first")] = "",
    load: Annotated[
        Path | None, typer.Option(help="a conversation that /save wrote, to go on with")
    ] = None,
    thoughts: Annotated[
        Thoughts, typer.Option(help="how the model's thoughts are seen on a terminal")
    ] = "shown",
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="whether the model thinks before it answers"),
    ] = None,
) -> None:
    """Talk with a model; /help lists what can be typed."""
    if load is not None:  # a wrong file is refused before the model is loaded
        ChatSession(SamplingParams(), {}).load(chat_path(str(load)))
    with ExitStack() as stack:
        with pastes_between_prompts(Console()):
            llm = stack.enter_context(open_llm(options))
        if llm.template is None:
            raise ModelError(
                f"{llm.name} has no chat template.",
                hint="Give it plain prompts: headroom run --raw.",
            )
        session = ChatSession(
            llm.sampling(**sampling),
            llm.default_sampling,
            system,
            thoughts=thoughts,
            think=next(word for word, value in THINK.items() if value is think),
        )
        talk = Chat(llm, session, Console(highlight=False, markup=False, emoji=False))
        if load is not None:
            talk.load(str(load))
        if not talk.converse(message_reader(options.home_path, talk)):
            raise typer.Exit(1)


def message_reader(home: Path, talk: "Chat") -> "MessageReader":
    """Return where messages come from: a person at a terminal, or lines of a file or a pipe."""
    # The line editor takes a tenth of a second to import; --help must not wait for it.
    from headroom.cli.chat_input import LineReader, terminal_reader

    if sys.stdin.isatty() and talk.console.is_terminal:
        return terminal_reader(home, talk.proposals, tuple(PATH_COMMANDS))
    return LineReader(sys.stdin)


def pastes_between_prompts(console: Console) -> AbstractContextManager[None]:
    """Keep a paste one message that comes while a person's terminal shows no prompt."""
    if sys.stdin.isatty() and console.is_terminal:
        return marked_pastes(console.file)
    return nullcontext()


class Chat:
    """The loop that reads a message and answers it, and the commands."""

    def __init__(
        self, llm: "LLM", session: ChatSession, console: Console, notes: Console | None = None
    ) -> None:
        self.llm = llm
        self.session = session
        self.console = console  # answers, and what commands say
        # Errors and notes: a pipe gets answers alone.
        self.notes = notes or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.stats: list[AnswerStats] = []  # of the answers so far
        self._file: Path | None = None  # that the conversation was last saved to or loaded from
        self._leaving = False

    def converse(self, reader: "MessageReader") -> bool:
        """Answer message after message until the input ends; return whether all were answered.

        At a terminal the result is always True: the person there has seen every error.
        """
        failed = interrupted = False
        if self.console.is_terminal:
            told = f"{self.llm.name}, {self.llm.context} tokens of context. /help for help."
            self._say(told)
        while not self._leaving:
            try:
                text = reader.read()
                interrupted = False
                if text and not self._take(text):
                    failed = True
            except EOFError:
                break
            except KeyboardInterrupt:
                if interrupted:
                    break
                interrupted = True
                self._say("Ctrl-C again, Ctrl-D or /exit leaves.")
            except Stopped:
                interrupted = True
        return self.console.is_terminal or not failed

    def _take(self, text: str) -> bool:
        """Carry out a command or answer a message; return whether that went well."""
        try:
            if (command := find_command(text)) is not None:
                command.run(self, "".join(text.split(maxsplit=1)[1:]))
            else:
                self.ask(text)
        except HeadroomError as error:
            self._note(f"error: {error}", "red")
            return False
        return True

    def ask(self, question: str) -> None:
        """Answer a question, and add both to the conversation."""
        session, params = self.session, self.session.params
        left_out = session.fit(question, self.count_tokens, self.llm.context)
        if left_out > session.left_out:
            oldest = "turn is" if left_out == 1 else f"{left_out} turns are"
            self._note(
                f"The oldest {oldest} left out: the context holds {self.llm.context} tokens."
            )
        session.left_out = left_out
        thinking = Thinking(enabled=THINK[session.think])
        chat = Conversation(messages=session.messages(question, left_out), thinking=thinking)
        received = ReceivedAnswer()
        with quiet_keys(), pastes_between_prompts(self.console):
            deltas = self.llm.stream_chat(chat, params)
            self._show(deltas, received)
        if not received.deltas:
            self._note("stopped before the answer began")
            raise Stopped
        session.turns.append(received.turn(question))
        # With a new seed the next answer does not repeat the random numbers of this one.
        session.params = replace(params, seed=(params.seed + 1) % (1 << 62))
        self._conclude(received)

    def _show(self, deltas: "AnswerStream", received: "ReceivedAnswer") -> None:
        """Show an answer as it comes; Ctrl-C ends it."""
        out = AnswerOutput(
            self.console.file,
            terminal=self.console.is_terminal,
            thoughts=self.session.thoughts,
            width=lambda: self.console.width,
        )
        try:
            with waiting(self.console, self.notes):
                received.deltas.append(next(deltas))
            out.write(received.deltas[-1])
            for delta in deltas:
                received.deltas.append(delta)
                out.write(delta)
        except KeyboardInterrupt:
            received.stopped = True
            deltas.close()  # which cancels the request
        finally:
            if received.deltas:
                out.finish()

    def _conclude(self, received: "ReceivedAnswer") -> None:
        """Say below an answer what it took."""
        last = received.deltas[-1]
        stats = AnswerStats.of(last)
        self.stats.append(stats)
        note = cut_note(last, self.session.params, self.llm.context)
        if self.console.is_terminal:
            parts = [counted(stats.generated_tokens, "token")]
            if stats.tokens_per_s is not None:
                parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
            if received.stopped:
                parts.append("stopped")
            elif last.finish_reason == "length" and note is None:
                parts.append("cut by max_tokens")
            self._say(f"{', '.join(parts)}\n")
        if note is not None:
            self._note(f"The answer was {note}.")
        if received.stopped:
            raise Stopped

    def count_tokens(self, messages: list[dict[str, str]]) -> int:
        """Return the tokens of messages, as the model gets them."""
        thinking = Thinking(enabled=THINK[self.session.think])
        prompt = self.llm.prepare_chat(Conversation(messages=messages, thinking=thinking))
        return len(prompt.tokens)

    def proposals(self, before: str) -> list[str]:
        """Return the words that may follow the words of a command, for completion."""
        words = before.split()
        if not words:
            return [f"/{command.name}" for command in CHAT_COMMANDS]
        if words == ["/set"]:
            return [*CHAT_SETTINGS, *sampling_settings()]
        if words[0] == "/set" and len(words) == 2:
            declared = sampling_settings().get(words[1])
            if declared is not None and isinstance(declared.default, bool):
                return ["on", "off", DEFAULT]
            return [*CHAT_SETTINGS.get(words[1], ()), DEFAULT]
        return []

    def help(self, _: str) -> None:
        """Show the commands."""
        table = Table.grid(padding=(0, 2))
        for command in CHAT_COMMANDS:
            table.add_row(f"/{command.name} {command.argument}".strip(), command.help)
        self.console.print(table, style="dim")
        self._say(KEYS_HELP)

    def reset(self, _: str) -> None:
        """Forget the conversation."""
        self.session.turns.clear()
        self.session.left_out = 0
        self._say("The conversation is forgotten.")

    def system(self, text: str) -> None:
        """Show or set the system text."""
        if text in ('""', "''"):
            self.session.system = ""
        elif text:
            self.session.system = text
            self._say("The system text is set.")
            return
        self._say(self.session.system or "There is no system text.")

    def set(self, text: str) -> None:
        """Show the settings, or change one."""
        name, _, value = text.replace("=", " ", 1).partition(" ")
        if value.strip():
            self._say(self.session.set(name, value.strip()))
            return
        rows = self.session.settings()
        if name:
            name = name.replace("-", "_")
            check_known(name)
            rows = [row for row in rows if row.name == name]
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(row.name, row.value, row.help)
        self.console.print(table, style="dim")

    def regenerate(self, _: str) -> None:
        """Answer the last question again, by other random numbers."""
        if not self.session.turns:
            raise OptionError("There is no answer to give again.")
        last = self.session.turns.pop()
        turns = len(self.session.turns)
        try:
            self.ask(last.question)
        finally:
            if len(self.session.turns) == turns:  # no new answer came
                self.session.turns.append(last)

    def show_stats(self, _: str) -> None:
        """Show what the last answer and all answers took."""
        if not self.stats:
            raise OptionError("There is no answer yet.")
        self._say(f"last answer: {self.stats[-1].line()}")
        prompts = sum(stats.prompt_tokens - stats.cached_tokens for stats in self.stats)
        generated = sum(stats.generated_tokens for stats in self.stats)
        self._say(
            f"this chat: {counted(len(self.stats), 'answer')}, {prompts} prompt tokens computed, "
            f"{counted(generated, 'token')} generated"
        )

    def tokens(self, text: str) -> None:
        """Show how much of the context is used, or the tokens of a text."""
        if text:
            self._say(counted(len(self.llm.tokenizer.encode(text)), "token"))
            return
        session, context = self.session, self.llm.context
        used = 0
        if messages := session.messages(None, session.left_out):
            used = self.count_tokens(messages)
        share = 100 * used / context
        turns = counted(len(session.turns) - session.left_out, "turn")
        self._say(f"{turns}, {used} of {context} tokens ({share:.0f} % of the context)")
        if session.left_out:
            self._say(f"{counted(session.left_out, 'older turn')} left out")

    def save(self, text: str) -> None:
        """Write the conversation to a file."""
        path = chat_path(text) if text else self._file
        if path is None:
            raise OptionError("/save needs the name of a file.", hint="As in /save rivers.json.")
        self.session.save(path, self.llm.name)
        self._file = path
        self._say(f"{counted(len(self.session.turns), 'turn')} saved in {path}.")

    def load(self, text: str) -> None:
        """Replace the conversation by that of a file."""
        if not text:
            raise OptionError("/load needs the name of a file.", hint="As in /load rivers.json.")
        path = chat_path(text)
        self.session.load(path)
        self._file = path
        self._say(f"{counted(len(self.session.turns), 'turn')} loaded from {path}.")
        if self.session.turns and self.console.is_terminal:
            last = self.session.turns[-1]
            self._say(f"> {last.question}\n{last.answer}")

    def leave(self, _: str) -> None:
        """End the chat."""
        self._leaving = True

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=not self.console.is_terminal)

    def _note(self, text: str, style: str = "dim") -> None:
        self.notes.print(text, style=style, soft_wrap=not self.notes.is_terminal)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """Something that can be typed instead of a message."""

    name: str  # without the slash
    argument: str  # as the help shows it
    help: str
    run: Callable[[Chat, str], None]


CHAT_COMMANDS = (
    ChatCommand("help", "", "this text", Chat.help),
    ChatCommand("reset", "", "forget the conversation, keep system text and settings", Chat.reset),
    ChatCommand(
        "system", "[TEXT]", 'show or set the system text; /system "" removes it', Chat.system
    ),
    ChatCommand(
        "set",
        "[NAME [VALUE]]",
        "show or change a setting, as in /set temperature 0.3; default as VALUE sets it back",
        Chat.set,
    ),
    ChatCommand("regenerate", "", "answer the last question again", Chat.regenerate),
    ChatCommand("save", "[FILE]", "write conversation and settings to a file", Chat.save),
    ChatCommand("load", "FILE", "go on with a conversation that was saved", Chat.load),
    ChatCommand("stats", "", "time to first token, tokens/s, expert hits", Chat.show_stats),
    ChatCommand("tokens", "[TEXT]", "how full the context is, or the tokens of TEXT", Chat.tokens),
    ChatCommand("exit", "", "leave", Chat.leave),
)
PATH_COMMANDS = ("/save", "/load")  # a path follows them
OTHER_NAMES = {"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}


def find_command(text: str) -> ChatCommand | None:
    """Return the command that a text is, or None for a message; refuse an unknown command.

    A path is a message: `/etc/hosts is what?`.
    """
    first = text.split(maxsplit=1)[0]
    if not first.startswith("/"):
        return None
    name = first.removeprefix("/").lower()
    known = {command.name: command for command in CHAT_COMMANDS}
    if (found := known.get(OTHER_NAMES.get(name, name))) is not None:
        return found
    if "\n" in text or not name.replace("_", "").replace("-", "").isalpha():
        return None
    nearest = get_close_matches(name, known, n=1)
    hint = f"Did you mean /{nearest[0]}?" if nearest else "/help lists what can be typed."
    raise OptionError(f"There is no /{name}.", hint=hint)


class Stopped(Exception):  # noqa: N818  # not an error
    """Ctrl-C stopped an answer; the chat goes on."""


@dataclass
class ReceivedAnswer:
    """What has come of an answer."""

    deltas: "list[AnswerDelta]" = field(default_factory=list)
    stopped: bool = False  # by Ctrl-C

    def turn(self, question: str) -> ChatTurn:
        """Return the question with what has come of its answer."""
        text = "".join(delta.text for delta in self.deltas)
        thought = "".join(delta.thought for delta in self.deltas)
        return ChatTurn(question, text, thought, self.stopped)
