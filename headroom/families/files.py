"""Open a model's files with the names of all registered families."""

from pathlib import Path

from headroom.families.registry import NAMINGS
from headroom.formats import checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.header import ModelHeader


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, a .safetensors file or index, or a folder with one of them."""
    return checkpoint.open_checkpoint(path, NAMINGS)


def open_header(path: Path) -> ModelHeader:
    """Open what a plan needs of a checkpoint; a config.json without weights will do."""
    return checkpoint.open_header(path, NAMINGS)
