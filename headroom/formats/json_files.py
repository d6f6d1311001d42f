"""Small JSON files: checked reading, and which files of any kind may be replaced."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from headroom.errors import OptionError
from headroom.units import MIB, gib

FileKind = Literal["routing statistics", "placement", "conversation", "picture", "routing trace"]

_MOST_BYTES = 64 * MIB  # of a file; that of a large model has 0.2 MiB
# A key that each kind of file has.
_KEYS = {"routing statistics": "counts", "placement": "hot", "conversation": "turns"}
TRACE_MAGIC = b"headroom routing trace\n"  # what a file with a routing trace begins with
_BEGINNINGS = {"picture": b"<svg", "routing trace": TRACE_MAGIC}  # of kinds that are no JSON


def read_object(path: Path) -> Mapping[str, object]:
    """Return the JSON object of a small file, or raise a ValueError that says what is wrong."""
    # Probably a model, which would take long to read.
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"it has {gib(size)}")
    table = json.loads(path.read_text())
    if not isinstance(table, dict):
        raise ValueError("it is not a JSON object")
    return table


def check_folder(path: Path, param: str) -> None:
    """Refuse a file whose folder does not exist: most likely a typing error."""
    if not path.absolute().parent.exists():
        raise OptionError(
            f"--{param.replace('_', '-')} {path} is in a folder that does not exist.",
            hint="Make the folder, or name another file.",
            param=param,
        )


def check_replaceable(path: Path, kind: FileKind, param: str, model: Iterable[Path] = ()) -> None:
    """Refuse to write over a file of another kind, and over any file of the model.

    An empty file may be replaced. Call this before the work whose result is to be written.
    """
    if not path.exists():
        return
    if any(file.exists() and file.samefile(path) for file in model):
        raise _refusal(path, "is a file of the model", param)
    if not _is_of(path, kind):
        raise _refusal(path, f"is there and is not a {kind} file", param)


def _refusal(path: Path, why: str, param: str) -> OptionError:
    hint = f"Name another file with --{param.replace('_', '-')}."
    return OptionError(f"{path} {why}; it is not written over.", hint=hint, param=param)


def _is_of(path: Path, kind: FileKind) -> bool:
    """Return whether an existing file is of a kind, or is empty."""
    try:
        if (beginning := _BEGINNINGS.get(kind)) is not None:
            if not path.is_file():
                return not path.is_dir()  # a pipe or a terminal has no content to lose
            with path.open("rb") as file:
                return file.read(len(beginning)) in (b"", beginning)
        if not path.is_file() or not path.stat().st_size:
            return path.is_file()
        table = read_object(path)
    except (OSError, ValueError, RecursionError):
        return False
    return type(table.get("version")) is int and _KEYS[kind] in table
