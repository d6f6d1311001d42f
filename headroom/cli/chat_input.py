"""How `headroom chat` reads messages: typed with line editing, or from a pipe line by line."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

log = logging.getLogger(__name__)

BLOCK_MARK = '"""'  # begins and ends a message of several lines
PROMPT = FormattedText([("bold ansicyan", "> ")])
HISTORY_FILE = "chat_history"

# The words that may follow what was typed so far: after `/set `, the names of settings.
Proposals = Callable[[str], Iterable[str]]


class MessageReader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """Return the next message; EOFError ends the chat, KeyboardInterrupt is Ctrl-C."""


class LineReader:
    """Reads messages from a file or a pipe: one line each, or a block of lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def read(self) -> str:
        """Return the next message."""
        text = self._line()
        while goes_on(text):
            try:
                text = with_next_line(text) + self._line()
            except EOFError:  # a block that is not closed ends with the file
                break
        return message_of(text)

    def _line(self) -> str:
        line = self._file.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TypedReader:
    """Reads messages that a person types: editing, history, completion, and pastes as one."""

    def __init__(
        self,
        history: History,
        completer: Completer,
        input: Input | None = None,  # None: the terminal
        output: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=continuation,
            history=history,
            completer=completer,
            complete_while_typing=False,
            enable_suspend=True,  # by Ctrl-Z
            key_bindings=key_bindings(),
            input=input,
            output=output,
        )

    def read(self) -> str:
        """Return the next message."""
        return message_of(self._session.prompt())


def continuation(width: int, line: int, wraps: int) -> FormattedText:
    """Return the mark before a further line; `wraps` is above 0 where a long line is wrapped."""
    return FormattedText([("ansicyan", "  " if wraps else ". ")])


def goes_on(text: str) -> bool:
    """Return whether a message needs another line: an open block, or a backslash at the end."""
    in_block = text.lstrip().startswith(BLOCK_MARK) and text.count(BLOCK_MARK) == 1
    return in_block or text.endswith("\\")


def with_next_line(text: str) -> str:
    """Return the text and a line break; a backslash at its end, which asked for it, is dropped."""
    return text.removesuffix("\\") + "\n"


def message_of(text: str) -> str:
    """Return the message that was typed: without the marks of a block, and without empty lines."""
    whole = text.strip()
    if whole.startswith(BLOCK_MARK) and whole.count(BLOCK_MARK) == 1:  # never closed
        text = whole.removeprefix(BLOCK_MARK)
    elif (
        whole.startswith(BLOCK_MARK) and whole.endswith(BLOCK_MARK) and whole.count(BLOCK_MARK) == 2
    ):
        text = whole.removeprefix(BLOCK_MARK).removesuffix(BLOCK_MARK)
    lines = text.rstrip().split("\n")
    if len(lines) == 1:
        return lines[0].strip()
    while not lines[0].strip():
        del lines[0]
    return "\n".join(lines)  # the first line may be indented code


def key_bindings() -> KeyBindings:
    """Return the keys that differ from those of a plain editor of several lines."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not goes_on(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.text.endswith("\\"):
            buffer.cursor_position = len(buffer.text)
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


class CommandCompleter(Completer):
    """Completes commands, names and values of settings, and paths of files."""

    def __init__(self, propose: Proposals, path_commands: tuple[str, ...]) -> None:
        self._propose = propose
        self._path_commands = path_commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Yield what the last word may become."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text.partition(" ")
        if space and command in self._path_commands:
            yield from self._paths.get_completions(Document(rest), event)
            return
        before, _, word = text.rpartition(" ")
        for proposal in self._propose(before):
            if proposal.startswith(word):
                yield Completion(proposal, start_position=-len(word))


def open_history(home: Path) -> History:
    """Return the history of messages, kept in the home folder, readable by its owner alone."""
    path = home / HISTORY_FILE
    try:
        home.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        log.warning("chat: messages are not kept for the next chat: %s", error)
        return InMemoryHistory()
    return FileHistory(path)


def terminal_reader(home: Path, propose: Proposals, path_commands: tuple[str, ...]) -> TypedReader:
    """Return the reader of messages that are typed into this terminal."""
    return TypedReader(open_history(home), CommandCompleter(propose, path_commands))
