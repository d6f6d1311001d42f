"""Find a model's files, and open them with the names of all registered families."""

from pathlib import Path

from headroom.errors import FormatError
from headroom.families.registry import NAMINGS, is_known
from headroom.formats import checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.header import ModelHeader
from headroom.formats.hub import find_model


def find_weights(name: str, home: Path) -> Path:
    """Return the path of a model on this disk: a file, a folder, or the name of a pulled one."""
    try:
        return find_model(name, home)
    except FormatError:
        refuse_plan_name(name)
        raise


def refuse_plan_name(name: str) -> None:
    """Refuse the name of a built-in model, of which plans know the sizes and nobody has a file."""
    if is_known(name):
        raise FormatError(
            f"{name} is a name for plans: headroom knows the sizes of this model, but has no "
            "weights of it.",
            hint="Name a GGUF file, a folder with safetensors, or a repository of Hugging Face "
            "(org/repo, org/repo:file.gguf).",
        )


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file, a .safetensors file or index, or a folder with one of them."""
    return checkpoint.open_checkpoint(path, NAMINGS)


def open_header(path: Path) -> ModelHeader:
    """Open what a plan needs of a checkpoint; a config.json without weights will do."""
    return checkpoint.open_header(path, NAMINGS)
