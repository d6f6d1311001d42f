"""The list of models in Anthropic's format, for clients that send the header anthropic-version."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def show_model_info(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's format, made from its entry in OpenAI's list."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["context_length"],
        "max_tokens": model["context_length"],
    }


def models_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return Anthropic's list of models, as one page, made from the entries of OpenAI's list."""
    return {
        "data": [show_model_info(model) for model in models],
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }
