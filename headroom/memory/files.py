"""Small files that people may read while they are written anew."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a small file in one step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
