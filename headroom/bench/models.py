"""Models with random weights that `headroom bench` takes by name: `synth:qwen3.5-27b:q4_k_m`."""

from dataclasses import dataclass
from pathlib import Path

from headroom.errors import OptionError
from headroom.families.family import Recipe
from headroom.families.registry import KNOWN, RUNNABLE
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.write import mix_name

PREFIX = "synth:"
DEFAULT_MIX = "q4_k_m"


@dataclass(frozen=True, slots=True)
class SynthModel:
    """A model with random weights that is written before it is measured."""

    recipe: Recipe
    mix: str

    def path(self, home: Path) -> Path:
        """Return where the file is kept."""
        return home / "synth" / f"{self.recipe.family}-{self.recipe.name}-{self.mix}.gguf"


def parse_synth(text: str) -> SynthModel | None:
    """Return the model that `synth:SIZE[:QUANT]` names; None for any other text.

    SIZE is a known model, a family (for its small test model), or FAMILY/SIZE.
    """
    if not text.lower().startswith(PREFIX):
        return None
    size, _, quant = text[len(PREFIX) :].lower().partition(":")
    mix = mix_name(quant or DEFAULT_MIX)
    family, _, name = size.partition("/")
    # `headroom synth` also writes draft models, which do not run alone; they are not in the list.
    known = [model for model, dims in KNOWN.items() if dims.architecture in RUNNABLE]
    if size in known:
        return SynthModel(find_recipe(KNOWN[size].architecture, size), mix)
    if family in RUNNABLE:
        return SynthModel(find_recipe(family, name or "tiny"), mix)
    raise OptionError(
        f"{size!r} is no model to synthesise and run.",
        hint=f"Write synth:SIZE or synth:SIZE:QUANT with a family ({', '.join(RUNNABLE)}) "
        f"or one of {', '.join(known)}.",
        param="model",
    )
