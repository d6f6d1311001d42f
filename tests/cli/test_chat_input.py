"""How messages are typed, pasted and read from a pipe."""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from headroom.cli.chat_input import CommandCompleter, LineReader, TypedReader, open_history

ENTER, CTRL_C, CTRL_D = "\r", "\x03", "\x04"
ALT_ENTER = "\x1b\r"


def propose(before: str) -> list[str]:
    return {"": ["/set", "/save"], "/set": ["top_k", "top_p"]}.get(before, [])


COMPLETER = CommandCompleter(propose, ("/save",))


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


def reader(keys: PipeInput, history: History | None = None) -> TypedReader:
    return TypedReader(history or InMemoryHistory(), COMPLETER, keys, DummyOutput())


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f"hello{ENTER}", "hello"),
        (f"  hello  {ENTER}", "hello"),
        (ENTER, ""),
        (f"{pasted('one' + chr(10) + 'two')}{ENTER}", "one\ntwo"),
        (f"{pasted('one' + chr(13) + chr(10) + 'two')}{ENTER}", "one\ntwo"),
        (f"see: {pasted('a' + chr(10) + '  b')} ok{ENTER}", "see: a\n  b ok"),
        (f"{pasted('  if x:' + chr(10) + '    y()')}{ENTER}", "  if x:\n    y()"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}two\\{ENTER}three{ENTER}", "one\ntwo\nthree"),
        (f'"""{ENTER}one{ENTER}{ENTER}two{ENTER}"""{ENTER}', "one\n\ntwo"),
        (f'"""one{ENTER}two"""{ENTER}', "one\ntwo"),
        (f'say """x""" now{ENTER}', 'say """x""" now'),
        (f"ab{CTRL_C}cd{ENTER}", "cd"),  # as in a shell, Ctrl-C drops the line
    ],
)
def test_a_message_is_what_a_person_means_to_send(
    typed: str, message: str, keys: PipeInput
) -> None:
    keys.send_text(typed)
    assert reader(keys).read() == message


def test_a_pasted_module_with_texts_in_quotes_is_sent_as_it_is(keys: PipeInput) -> None:
    code = '"""What it does."""\n\nimport sys\n\ndef f():\n    """Do it."""'
    keys.send_text(pasted(code) + ENTER)
    assert reader(keys).read() == code


def test_ctrl_c_and_ctrl_d_on_an_empty_line_are_the_chats_to_handle(keys: PipeInput) -> None:
    typed = reader(keys)
    keys.send_text(CTRL_C)
    with pytest.raises(KeyboardInterrupt):
        typed.read()
    keys.send_text(CTRL_D)
    with pytest.raises(EOFError):
        typed.read()


def test_messages_come_back_in_the_next_chat(keys: PipeInput, tmp_path: Path) -> None:
    home = tmp_path / "new"
    keys.send_text(f"{pasted('one' + chr(10) + 'two')}{ENTER}")
    reader(keys, open_history(home)).read()
    again = open_history(home)
    assert isinstance(again, FileHistory)
    assert list(again.load_history_strings()) == ["one\ntwo"]
    file = home / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_home_that_cannot_be_written_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert isinstance(open_history(tmp_path / "file"), InMemoryHistory)


def lines(text: str) -> list[str]:
    found, source = [], LineReader(io.StringIO(text))
    while True:
        try:
            found.append(source.read())
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\ntwo", ["one", "two"]),
        ("one\\\ntwo\nthree", ["one\ntwo", "three"]),
        ('"""one\ntwo"""\nthree\n', ["one\ntwo", "three"]),
        ('"""\n  one\n\n  two\n"""\n', ["  one\n\n  two"]),
        ('"""one\ntwo\n', ["one\ntwo"]),  # never closed
        ('"""one"""\n"""\n', ["one", ""]),
        ("one\\", ["one\\"]),
        ("\n\n", ["", ""]),
        ("", []),
    ],
)
def test_a_pipe_gives_a_message_a_line_or_a_block(text: str, messages: list[str]) -> None:
    assert lines(text) == messages


def completions(text: str) -> list[str]:
    found = COMPLETER.get_completions(Document(text), CompleteEvent(completion_requested=True))
    return [text[: len(text) + each.start_position] + each.text for each in found]


def test_commands_settings_and_paths_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rivers.json").touch()
    assert completions("/s") == ["/set", "/save"]
    assert completions("/set to") == ["/set top_k", "/set top_p"]
    assert completions("/save riv") == ["/save rivers.json"]
    assert completions(f"/save {tmp_path}{os.sep}riv") == [f"/save {tmp_path}{os.sep}rivers.json"]
    assert completions("hello /s") == []
    assert completions("/set x\n/s") == []
