"""headroom runs language models that do not fit: it plans every byte before it loads any."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headroom.errors import HeadroomError
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.engine.request import SamplingParams
    from headroom.llm import LLM
    from headroom.plan.plan import Plan

__version__ = "0.1.0"
__all__ = ["LLM", "HeadroomError", "Options", "Plan", "SamplingParams", "__version__"]

# Imported when first used: they need torch, and the planner and the file readers must not.
_LAZY = {
    "LLM": "headroom.llm",
    "Plan": "headroom.plan.plan",
    "SamplingParams": "headroom.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
