"""The registry of model families: one line each."""

from importlib import import_module

from headroom.errors import ModelError
from headroom.families.dims import Dims, Facts
from headroom.families.family import Family
from headroom.formats.header import ModelHeader
from headroom.formats.mixes import MIXES
from headroom.formats.names import Naming

# Every family file, in the order in which users see families listed.
FILES = (
    "llama",
    "qwen3",
    "qwen35",
    "mistral",
    "smollm3",
    "laguna",
    "glm4_moe",
    "gpt_oss",
    "gemma3",
    "gemma4",
    "dflash",
)


def _families_of(file: str) -> tuple[Family, ...]:
    """Return the families of one file: variants that share almost everything share a file."""
    found: tuple[Family, ...] = import_module(f"headroom.families.{file}").FAMILIES
    return found


FAMILIES: dict[str, Family] = {
    family.architecture: family for file in FILES for family in _families_of(file)
}
# Families that run by themselves; drafts do not.
RUNNABLE = tuple(name for name, family in FAMILIES.items() if family.read_config is not None)
NAMINGS: dict[str, Naming] = {name: family.naming for name, family in FAMILIES.items()}
# Published models: dimensions that a plan can be made from before anything is downloaded.
KNOWN: dict[str, Dims] = {
    name: dims for family in FAMILIES.values() for name, dims in family.known.items()
}


def find_family(architecture: str) -> Family:
    """Return the family of an architecture that is known to be registered."""
    return FAMILIES[architecture]


def read_dims(header: ModelHeader) -> Dims:
    """Return a model's dimensions; refuse an architecture that no family has."""
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise ModelError(
            f"{header.name} is a {header.architecture!r} model, which cannot be planned.",
            hint=f"Families: {', '.join(FAMILIES)}.",
        )
    return family.read_dims(Facts(header))


def is_known(text: str) -> bool:
    """Return whether a text names a known model; any text may follow a colon."""
    return text.lower().partition(":")[0] in KNOWN


def split_mix(text: str) -> tuple[str, str]:
    """Return a model's name and the mix that follows it after a colon, "" if none does."""
    base, _, last = text.rpartition(":")
    name = last.lower().replace("-", "_")
    return (base, name) if base and name in MIXES else (text, "")
