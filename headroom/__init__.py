"""headroom runs language models that do not fit: it plans every byte before it loads any."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headroom.errors import HeadroomError
from headroom.options import Options

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta, Completion
    from headroom.engine.request import SamplingParams
    from headroom.llm import LLM
    from headroom.plan.plan import Plan
    from headroom.text.conversation import (
        Conversation,
        OutputFormat,
        Thinking,
        Tool,
        ToolChoice,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AnswerDelta",
    "Completion",
    "Conversation",
    "HeadroomError",
    "Options",
    "OutputFormat",
    "Plan",
    "SamplingParams",
    "Thinking",
    "Tool",
    "ToolChoice",
    "__version__",
]

# Imported when first used: they need torch, and the planner and the file readers must not.
_LAZY = {
    "AnswerDelta": "headroom.answers",
    "Completion": "headroom.answers",
    "Conversation": "headroom.text.conversation",
    "LLM": "headroom.llm",
    "OutputFormat": "headroom.text.conversation",
    "Plan": "headroom.plan.plan",
    "SamplingParams": "headroom.engine.request",
    "Thinking": "headroom.text.conversation",
    "Tool": "headroom.text.conversation",
    "ToolChoice": "headroom.text.conversation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
