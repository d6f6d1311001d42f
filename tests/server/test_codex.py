"""GET /v1/models?client_version=...: the list of models that Codex reads."""

import httpx

from tests.server.fakes import CONTEXT, FakeLLM

# The fields that Codex 0.166 needs for each model, and their JSON types. If one is missing, it
# refuses the whole list.
NEEDED = {
    "slug": str,
    "display_name": str,
    "supported_reasoning_levels": list,
    "shell_type": str,
    "visibility": str,
    "supported_in_api": bool,
    "priority": int,
    "base_instructions": str,
    "support_verbosity": bool,
    "truncation_policy": dict,
    "supports_parallel_tool_calls": bool,
    "experimental_supported_tools": list,
    "context_window": int,
    "input_modalities": list,
}


def test_codex_gets_the_model_in_its_own_schema(client: httpx.Client, llm: FakeLLM) -> None:
    (model,) = client.get("/v1/models?client_version=0.166.0").json()["models"]
    assert {name: type(model[name]) for name in NEEDED} == NEEDED
    assert (model["slug"], model["context_window"]) == ("fake", CONTEXT)
    assert model["supported_reasoning_levels"] == []
    assert model["default_reasoning_level"] is None
    llm.thinks = True
    (model,) = client.get("/v1/models?client_version=0.166.0").json()["models"]
    efforts = [level["effort"] for level in model["supported_reasoning_levels"]]
    assert model["default_reasoning_level"] in efforts
    assert model["supports_reasoning_summaries"]


def test_other_clients_get_openais_list(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["object"] == "model"
