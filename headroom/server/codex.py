"""The list of models in Codex's own schema, for GET /v1/models?client_version=..."""

from typing import Any

EFFORT_DESCRIPTIONS = {
    "none": "Answer without thinking",
    "low": "Think briefly",
    "medium": "Think as long as usual tasks need",
    "high": "Think long",
    "xhigh": "Think as long as the context allows",
}
# Codex takes the instructions of a listed model from this list, and refuses a list without them.
INSTRUCTIONS = """\
You are a coding agent that works in the user's terminal through the Codex CLI.

- Use the tools to look at files and to run commands; never guess what a file contains.
- Follow the AGENTS.md files of the folders you work in.
- Change only what the task needs, in the style of the code around it.
- Try your change, for example by its tests, before you say that it works.
- Go on until the task is done. Ask only if you cannot go on without an answer.
- At the end, say in a few sentences what you did and what the user should know.
"""
TOOL_OUTPUT_TOKENS = 10_000  # Codex shortens longer outputs of tools before it sends them


def codex_model(name: str, context: int, *, thinks: bool) -> dict[str, Any]:
    """Return a model as an entry of Codex's list; `context` is in tokens."""
    levels = [
        {"effort": effort, "description": text} for effort, text in EFFORT_DESCRIPTIONS.items()
    ]
    return {
        "slug": name,
        "display_name": name,
        "description": f"A local model with a context of {context} tokens",
        "default_reasoning_level": "medium" if thinks else None,
        "supported_reasoning_levels": levels if thinks else [],
        "supports_reasoning_summaries": thinks,
        "supports_reasoning_summary_parameter": thinks,
        "default_reasoning_summary": "auto" if thinks else "none",
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "upgrade": None,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": min(TOOL_OUTPUT_TOKENS, context // 8)},
        "supports_parallel_tool_calls": True,
        "supports_image_detail_original": False,
        "input_modalities": ["text"],
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": None,
        "base_instructions": INSTRUCTIONS,
        "experimental_supported_tools": [],
        "supports_search_tool": False,
    }
