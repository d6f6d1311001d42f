"""Models of true size whose weights are all zero: a header, and a hole of the right length.

They are there at once and take no disk. What they compute is of no use; what they take of memory,
how they are loaded and which kernels they need is that of the model.
"""

from pathlib import Path

from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.write import gguf_header, gguf_table
from headroom.formats.gguf_writer import aligned_size


def write_hollow(family: str, size: str, path: Path, mix: str = "q4_k_m", layers: int = 0) -> Path:
    """Write a GGUF file with a family's known model, unless it is there; `layers` 0: all."""
    if not path.exists():
        recipe = find_recipe(family, size, layers)
        header = gguf_header(recipe, mix)
        tensors = sum(aligned_size(entry.nbytes) for entry in gguf_table(recipe, mix))
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + tensors)
    return path


def fill_page_cache(path: Path, piece: int = 64 << 20) -> int:
    """Read a whole file, so that it is in the page cache, and return its bytes."""
    with path.open("rb", buffering=0) as file:
        room = bytearray(piece)
        while file.readinto(room):
            pass
    return path.stat().st_size
