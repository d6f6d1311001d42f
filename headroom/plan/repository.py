"""Plans for every quantisation that a repository offers: which one is worth a download?"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headroom.errors import FormatError, HeadroomError
from headroom.families.registry import NAMINGS
from headroom.formats.hub import gguf_parts, is_on_disk, list_files
from headroom.formats.hub_names import first_files, parse_hub_name, quant_of_file
from headroom.formats.remote import read_hub
from headroom.plan.plan import DoesNotFitError, Plan
from headroom.plan.shape import ModelShape
from headroom.plan.sources import header_shape

MOST_QUANTS = 40  # whose headers are read
AT_ONCE = 6  # headers that are read at a time


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A GGUF model of a repository."""

    name: str  # what a command takes: org/repo:Q4_K_M, or with the file's name
    quant: str  # what its name ends with, or the whole name
    file: str  # of several parts the first
    size_bytes: int  # of all parts


@dataclass(frozen=True, slots=True)
class OfferedPlan:
    """A plan for one of the models, or why there is none."""

    offered: OfferedFile
    plan: Plan | None
    error: str = ""


def offered_files(text: str, home: Path) -> list[OfferedFile]:
    """Return the GGUF models of a repository, the smallest first.

    There are none if the text names a single model: one of this disk, a file or a quantisation, or
    a repository with safetensors or with one GGUF model.
    """
    name = parse_hub_name(text)
    if name is None or name.file is not None or name.quant is not None or is_on_disk(text, home):
        return []
    sizes = list_files(name)
    if any(file.endswith(".safetensors") and "/" not in file for file in sizes):
        return []
    firsts = first_files(sizes)
    quants = [quant_of_file(file) for file in firsts]
    found = []
    for file, quant in zip(firsts, quants, strict=True):
        unique = quant is not None and quants.count(quant) == 1
        shown = quant if unique and quant is not None else file
        size = sum(sizes.get(part, 0) for part in gguf_parts(file))
        found.append(OfferedFile(f"{name.repo}:{shown}", shown, file, size))
    return sorted(found, key=lambda x: x.size_bytes) if len(found) > 1 else []


def plan_offered(
    repo: str, files: list[OfferedFile], make: Callable[[ModelShape], Plan]
) -> list[OfferedPlan]:
    """Read the header of each file, and plan it; `make` raises an error where nothing fits."""
    if len(files) > MOST_QUANTS:
        raise FormatError(
            f"{repo} offers {len(files)} models; at most {MOST_QUANTS} are compared.",
            hint=f"Name one of them, as in {files[0].name}",
        )

    def read(offered: OfferedFile) -> ModelShape | HeadroomError:
        try:
            return header_shape(read_hub(repo, offered.file, NAMINGS))
        except HeadroomError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as readers:
        shapes = list(readers.map(read, files))
    found = []
    for offered, shape in zip(files, shapes, strict=True):
        if isinstance(shape, HeadroomError):
            found.append(OfferedPlan(offered, None, shape.message))
            continue
        try:
            found.append(OfferedPlan(offered, make(shape)))
        except DoesNotFitError as error:
            found.append(OfferedPlan(offered, error.plan, error.message))
        except HeadroomError as error:
            found.append(OfferedPlan(offered, None, error.message))
    return found
