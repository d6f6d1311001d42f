"""read_prompts(): a file of prompts, one per line, or JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.errors import OptionError

HINT = 'Write one prompt a line, or one JSON object a line with "prompt" or "messages".'


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt of a file."""

    line: int  # counted from 1
    messages: list[dict[str, Any]]
    text: str | None  # None if the line holds a conversation


def read_prompts(path: Path) -> list[FilePrompt]:
    """Return the prompts of a file, or refuse it; empty lines are skipped."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise _refused(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise _refused(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise _refused(f"{path} holds no prompts.")
    if lines[0][1].lstrip().startswith("{"):
        return [_from_json(path, number, line) for number, line in lines]
    return [_plain(number, line.rstrip("\r")) for number, line in lines]


def _from_json(path: Path, number: int, line: str) -> FilePrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise _refused(f"{path}, line {number}: not JSON: {error}.") from error
    if isinstance(entry, dict):
        prompt, messages = entry.get("prompt"), entry.get("messages")
        if isinstance(prompt, str) and prompt:
            return _plain(number, prompt)
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return FilePrompt(number, messages, None)
    raise _refused(f'{path}, line {number}: neither a "prompt" nor "messages" that can be used.')


def _is_message(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    return isinstance(entry.get("role"), str) and isinstance(entry.get("content"), str)


def _plain(number: int, text: str) -> FilePrompt:
    return FilePrompt(number, [{"role": "user", "content": text}], text)


def _refused(what: str) -> OptionError:
    return OptionError(what, hint=HINT, param="prompts")
