"""Family: how one architecture's settings become a ModelConfig."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headroom.formats.checkpoint import Checkpoint
from headroom.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """A list of parts for every layer, and the settings that the family relies on.

    A family file has no torch in it: the planner reads it too. The parts say what to build,
    `load.py` builds them.
    """

    architecture: str  # GGUF's name
    read_config: Callable[[Checkpoint], ModelConfig]
    # Settings with the only values that the family's arithmetic covers; others are refused.
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
