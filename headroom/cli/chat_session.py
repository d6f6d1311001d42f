"""ChatSession: a conversation with its settings, what of it fits the context, and its file."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from headroom.cli.answer_output import Thoughts
from headroom.cli.settings import parse_sampling, sampling_settings
from headroom.engine.request import SamplingParams
from headroom.errors import ContextLengthError, HeadroomError, OptionError, RequestError
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import check_replaceable, read_object
from headroom.units import counted

CHAT_VERSION = 1  # of the files that `save` writes
DEFAULT = "default"  # the value that sets a setting back
ANSWER_ROOM = 4096  # most tokens that are kept free for an answer whose length is not limited
ROOM_SHARE = 4  # at most one in so many tokens of the context is kept free for the answer
FILE_SUFFIX = ".json"
THINK = {"on": True, "off": False, "auto": None}  # auto: what the model's template does
# Settings of the chat itself, beside those of sampling: what each may be, and what it does.
CHAT_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "thoughts": get_args(Thoughts),
    "think": tuple(THINK),
}
CHAT_HELP = {
    "thoughts": "how the model's thoughts are seen: shown, folded to a line, or hidden",
    "think": "whether the model thinks before it answers: on, off, or auto, as its template says",
}
CountTokens = Callable[[list[dict[str, str]]], int]  # of messages, as the model gets them


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A question and its answer."""

    question: str
    answer: str
    thought: str = ""
    stopped: bool = False  # Ctrl-C ended the answer

    def messages(self) -> list[dict[str, str]]:
        """Return the turn as the model gets it."""
        answer = {"role": "assistant", "content": self.answer}
        if self.thought:
            answer["reasoning_content"] = self.thought  # the chat template decides what it keeps
        return [{"role": "user", "content": self.question}, answer]


@dataclass
class ChatSession:
    """The turns so far, and the settings of the next answer."""

    params: SamplingParams
    defaults: Mapping[str, Any]  # the model's own sampling settings
    system: str = ""
    turns: list[ChatTurn] = field(default_factory=list)
    left_out: int = 0  # oldest turns that the last answer was given without
    thoughts: Thoughts = "shown"
    think: str = "auto"  # a key of THINK

    def messages(self, question: str | None, left_out: int = 0) -> list[dict[str, str]]:
        """Return the system text, the turns but the oldest `left_out`, and the question if any."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns[left_out:]:
            found += turn.messages()
        return found if question is None else [*found, {"role": "user", "content": question}]

    def fit(self, question: str, count: CountTokens, context: int) -> int:
        """Return how many of the oldest turns must be left out so that an answer has room.

        If the question alone leaves no room for a single token, it is refused.
        """
        room = min(self.params.max_tokens or ANSWER_ROOM, context // ROOM_SHARE)

        def fits(left_out: int) -> bool:
            return count(self.messages(question, left_out)) + room <= context

        left_out = bisect_left(range(len(self.turns)), True, key=fits)
        if left_out == len(self.turns):
            alone = count(self.messages(question, left_out))
            if alone >= context:
                raise too_long(alone, context, bool(self.system))
        return left_out

    def set(self, name: str, text: str) -> str:
        """Change a setting to what `text` stands for; return its name and its value."""
        name = name.replace("-", "_")
        if name in CHAT_SETTINGS:
            chosen = self._chat_value(name, text.lower())
            setattr(self, name, chosen)
            return f"{name} is {chosen}."
        check_known(name)
        value = parse_sampling(name, "" if text == DEFAULT else text, self.defaults)
        self.params = replace(self.params, **{name: value})  # type: ignore[arg-type]
        return f"{name} is {shown_value(value)}."

    def _chat_value(self, name: str, text: str) -> str:
        if text == DEFAULT:
            declared = next(entry for entry in fields(ChatSession) if entry.name == name)
            return str(declared.default)
        if text not in CHAT_SETTINGS[name]:
            hint = f"Choose from {', '.join(CHAT_SETTINGS[name])}."
            raise OptionError(f"{name} is {text!r}.", hint=hint, param=name)
        return text

    def settings(self) -> "list[SettingRow]":
        """Return every setting that `set` changes."""
        chat = [SettingRow(name, str(getattr(self, name)), CHAT_HELP[name]) for name in CHAT_HELP]
        return chat + [
            SettingRow(name, shown_value(getattr(self.params, name)), declared.metadata["help"])
            for name, declared in sampling_settings().items()
        ]

    def save(self, path: Path, model: str) -> None:
        """Write the conversation and its settings; a file that is no conversation stays."""
        try:
            check_replaceable(path, "conversation", "save")
            sampling = {name: getattr(self.params, name) for name in sampling_settings()}
            table = {
                "version": CHAT_VERSION,
                "model": model,
                "system": self.system,
                "thoughts": self.thoughts,
                "think": self.think,
                "sampling": sampling,
                "turns": [asdict(turn) for turn in self.turns],
            }
            replace_text(path, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise OptionError(f"Cannot write {path}: {error.strerror}.") from error
        except OptionError as error:
            error.hint = "Name another file."
            raise

    def load(self, path: Path) -> None:
        """Replace the conversation and its settings by those of a file; a wrong one is refused."""
        try:
            table = read_object(path)
            loaded = self._from_table(table)
        except OSError as error:
            raise OptionError(f"Cannot read {path}: {error.strerror}.") from error
        except KeyError as error:
            raise not_saved(path, f"it has no {error}") from error
        except (ValueError, TypeError, HeadroomError) as error:
            raise not_saved(path, str(error)) from error
        for entry in fields(self):
            setattr(self, entry.name, getattr(loaded, entry.name))

    def _from_table(self, table: Mapping[str, Any]) -> "ChatSession":
        if table.get("version") != CHAT_VERSION:
            raise ValueError(f"its version is {table.get('version')!r}, not {CHAT_VERSION}")
        turns = [ChatTurn(**turn) for turn in table["turns"]]
        for turn in turns:
            check_texts(turn.question, turn.answer, turn.thought)
        check_texts(table["system"])
        given = dict(table["sampling"])
        sampling = {name: self._read(name, value) for name, value in given.items()}
        loaded = replace(
            self,
            params=replace(self.params, **sampling),
            system=table["system"],
            turns=turns,
            left_out=0,
        )
        for name in CHAT_SETTINGS:
            loaded.set(name, str(table[name]))
        return loaded

    def _read(self, name: str, value: object) -> Any:
        """Return a sampling setting of a file, or refuse it."""
        if value is None and name == "max_tokens":
            return None
        if isinstance(value, list):
            check_texts(*value)
            return tuple(value)
        return parse_sampling(name, str(value), self.defaults)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting, as `/set` lists it."""

    name: str
    value: str
    help: str


def shown_value(value: object) -> str:
    """Return a setting's value as people read it."""
    if value is None:
        return "not limited"  # max_tokens
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return str(value)


def check_known(name: str) -> None:
    """Refuse the name of a setting that does not exist; the error names the nearest one."""
    known = [*CHAT_SETTINGS, *sampling_settings()]
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        hint = f"Did you mean {nearest[0]}?" if nearest else f"Known: {', '.join(known)}."
        raise OptionError(f"There is no setting {name}.", hint=hint)


def check_texts(*texts: object) -> None:
    """Refuse anything that is not a text."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"it has {text!r} in the place of a text")


def not_saved(path: Path, why: str) -> OptionError:
    """Return the error for a file that holds no conversation."""
    return OptionError(f"{path} is not a conversation that /save wrote: {why.rstrip('.')}.")


def too_long(tokens: int, context: int, system: bool) -> RequestError:
    """Return the error for a message that does not fit the context even alone."""
    what = "The message and the system text have" if system else "The message has"
    return ContextLengthError(
        f"{what} {counted(tokens, 'token')}, and the context holds {context}, the answer included.",
        hint="Shorten it, or start with a larger --context.",
        tokens=tokens,
        context=context,
    )


def chat_path(text: str) -> Path:
    """Return the path that a name after /save or /load stands for; .json is added if missing."""
    try:
        path = Path(text).expanduser()
        return path if path.suffix else path.with_name(path.name + FILE_SUFFIX)
    except (RuntimeError, ValueError) as error:  # ~ of a user who is not there, or no name at all
        raise OptionError(f"{text!r} names no file: {error}.") from error
