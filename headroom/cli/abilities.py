"""How a model is talked to, as `doctor` and `show` tell it: sampling, chat, thoughts, tools."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headroom.formats.checkpoint import Checkpoint
    from headroom.text.abilities import Abilities


def ability_facts(checkpoint: "Checkpoint", abilities: "Abilities") -> dict[str, Any]:
    """Return what a model's files say about sampling, chat, thoughts and tool calls."""
    return {
        "sampling": dict(checkpoint.sampling.settings),
        "sampling_source": checkpoint.sampling.source,
        "chat_template": abilities.template is not None,
        "reasoning": abilities.reasoning_facts(),
        "tool_format": abilities.tool_format.name,
        "stop_tokens": abilities.stop_tokens(),
    }


def ability_texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a model's abilities, from `ability_facts`, as texts for people."""
    settings = ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())
    return {
        "sampling": f"{settings} ({facts['sampling_source']})",
        "chat template": "yes" if facts["chat_template"] else "no: the model continues text only",
        "thoughts": _thought_text(facts["reasoning"]),
        "tool calls": f"in the format {facts['tool_format']}",
        "stop tokens": " ".join(facts["stop_tokens"]),
    }


def _thought_text(facts: Mapping[str, Any]) -> str:
    if not facts["supported"]:
        return "none"
    default = "on by default" if facts["default"] == "on" else "the model decides by default"
    return f"between {facts['start'].strip()} and {facts['end']}; {default}"
