"""Files that `headroom run -f` attaches: reading them, and how they stand in the message."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headroom.errors import OptionError
from headroom.units import MIB, gib

MOST_ATTACHED_BYTES = 16 * MIB  # of a file; more than any context holds
_FENCES = re.compile(r"`{3,}")


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that goes into the message."""

    path: Path  # as the user wrote it
    text: str

    def framed(self) -> str:
        """Return the file as the model gets it: its path, and its text as a block of code.

        The fence is longer than any in the file, so that the model sees where the file ends.
        """
        longest = max((len(found) for found in _FENCES.findall(self.text)), default=2)
        fence = "`" * (longest + 1)
        kind = self.path.suffix.removeprefix(".")
        return f"{self.path}:\n{fence}{kind}\n{self.text.rstrip()}\n{fence}"


def read_attachments(paths: Sequence[Path]) -> list[Attachment]:
    """Return the files, or refuse the first that is missing, too large or no text."""
    return [Attachment(path, read_text(path)) for path in paths]


def read_text(path: Path) -> str:
    """Return the text of a file, which may also be a pipe, or refuse it."""
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(MOST_ATTACHED_BYTES + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _refused(f"Cannot read {path}: {reason}.") from error
    if len(content) > MOST_ATTACHED_BYTES:
        raise _refused(
            f"{path} has {gib(size)}; at most {gib(MOST_ATTACHED_BYTES)} can be attached.",
            "Attach a part of it.",
        )
    if b"\0" in content:
        raise _refused(
            f"{path} is not text: it has a zero byte at {content.index(0)}.",
            "Only text files can be attached.",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.",
            "Convert it to UTF-8 first, if it is text.",
        ) from error


def _refused(what: str, hint: str = "") -> OptionError:
    return OptionError(what, hint=hint, param="file")
