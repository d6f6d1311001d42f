"""Fields of other APIs are refused by name if they would change the answer, on every path."""

from typing import Any

import httpx
import pytest

from headroom.server.answer_fields import ANSWER_FIELDS, VECTOR_FIELDS
from headroom.server.refusals import RefusalError
from headroom.server.schemas import CheckedBody

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA_CHAT, GENERATE = "/v1/responses", "/api/chat", "/api/generate"
EMBEDDINGS, EMBED, OLDER_EMBED = "/v1/embeddings", "/api/embed", "/api/embeddings"
SUBJECTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    f"{MESSAGES}/count_tokens": {"messages": HI},
    RESPONSES: {"input": "hi"},
    OLLAMA_CHAT: {"model": "fake", "messages": HI},
    GENERATE: {"model": "fake", "prompt": "hi"},
    EMBEDDINGS: {"input": "hi"},
    EMBED: {"model": "fake", "input": "hi"},
    OLDER_EMBED: {"model": "fake", "prompt": "hi"},
}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
# A path, a field with its value, and the field to use instead.
REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"previous_response_id": "resp_1"}, "messages"),
    (CHAT, {"instructions": "Be brief."}, "messages"),
    (CHAT, {"input": "hi"}, "messages"),
    (CHAT, {"prompt": "hi"}, "messages"),
    (CHAT, {"system": "Be brief."}, "messages"),
    (CHAT, {"text": {"format": {"type": "json_object"}}}, "response_format"),
    (CHAT, {"format": "json"}, "response_format"),
    (CHAT, {"options": {"temperature": 0}}, None),
    (CHAT, {"ebnf": 'root ::= "a"'}, "guided_grammar"),
    (CHAT, {"typical": 0.5}, None),
    (CHAT, {"typ_p": 0.5}, None),
    (CHAT, {"max_tokens": 5, "max_output_tokens": 9}, "max_tokens"),
    (CHAT, {"seed": 5, "random_seed": 9}, "seed"),
    (CHAT, {"mcp_servers": [{"name": "x"}]}, None),
    (COMPLETIONS, {"messages": HI}, "prompt"),
    (COMPLETIONS, {"think": True}, None),
    (COMPLETIONS, {"thinking_budget": 9}, None),
    (MESSAGES, {"reasoning_effort": "high"}, "output_config.effort"),
    (MESSAGES, {"guided_json": SCHEMA}, "output_config.format"),
    (MESSAGES, {"json_schema": SCHEMA}, "output_config.format"),
    (MESSAGES, {"grammar": 'start: "a"'}, None),
    (MESSAGES, {"max_completion_tokens": 5}, "max_tokens"),
    (MESSAGES, {"top_logprobs": 3}, None),
    (MESSAGES, {"enable_thinking": True}, "thinking"),
    (MESSAGES, {"instructions": "Be brief."}, "system"),
    (f"{MESSAGES}/count_tokens", {"instructions": "Be brief."}, "system"),
    (RESPONSES, {"messages": HI}, "input"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "text.format"),
    (RESPONSES, {"max_completion_tokens": 5}, "max_output_tokens"),
    (RESPONSES, {"system": "Be brief."}, "instructions"),
    (RESPONSES, {"logprobs": True}, "include"),
    (OLLAMA_CHAT, {"response_format": {"type": "json_object"}}, "format"),
    (OLLAMA_CHAT, {"n": 2}, None),
    (OLLAMA_CHAT, {"max_tokens": 5}, "options.num_predict"),
    (OLLAMA_CHAT, {"temperature": 0}, "options.temperature"),
    (OLLAMA_CHAT, {"stop": ["x"]}, "options.stop"),
    (OLLAMA_CHAT, {"system": "Be brief."}, "messages"),
    (OLLAMA_CHAT, {"reasoning_effort": "none"}, "think"),
    (OLLAMA_CHAT, {"guided_json": SCHEMA}, "format"),
    (OLLAMA_CHAT, {"logit_bias": {"5": 1}}, None),
    (OLLAMA_CHAT, {"repetition_penalty": 1.5}, "options.repeat_penalty"),
    (GENERATE, {"tools": [FUNCTION]}, None),
    (GENERATE, {"messages": HI}, "prompt"),
    (EMBEDDINGS, {"truncate_prompt_tokens": 5}, None),
    (EMBEDDINGS, {"normalize": False}, None),
    (EMBEDDINGS, {"pooling": "mean"}, None),
    (EMBEDDINGS, {"messages": HI}, "input"),
    (EMBED, {"prompt": "hi"}, "input"),
    (EMBED, {"truncate_prompt_tokens": 5}, "truncate"),
    (OLDER_EMBED, {"input": "hi"}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "instead"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_that_a_path_does_not_have_is_refused_with_the_one_to_use(
    shared: httpx.Client, path: str, fields: dict[str, Any], instead: str | None
) -> None:
    response = shared.post(path, json={**SUBJECTS[path], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    name = list(fields)[-1]
    advice = "; leave it out." if instead is None else f" here; use `{instead}`."
    message = f"`{name}` cannot be honoured{advice}"
    assert message == (error if isinstance(error, str) else error["message"])
    if path.startswith("/v1") and not path.startswith(MESSAGES):
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA_CHAT])
def test_a_stream_is_refused_before_it_begins(shared: httpx.Client, path: str) -> None:
    body = {**SUBJECTS[path], "stream": True, "typical_p": 0.5}
    assert shared.post(path, json=body).status_code == 400


@pytest.mark.parametrize("path", SUBJECTS)
@pytest.mark.parametrize("value", [None, "", [], {}, 0, False, "none"], ids=repr)
def test_values_that_change_nothing_are_taken_everywhere(
    shared: httpx.Client, path: str, value: Any
) -> None:
    known = VECTOR_FIELDS if "embed" in path else ANSWER_FIELDS
    own = {"model", "messages", "prompt", "input", *SUBJECTS[path]}
    declared = DECLARED[path]
    body = {name: value for name, field in known.items() if value in field.harmless}
    body = {name: value for name, value in body.items() if name not in own | declared}
    response = shared.post(path, json={**SUBJECTS[path], **body})
    assert response.status_code == 200, response.text


# Fields whose type, read by the path itself, does not allow every empty value.
READ_BY_ALL = {
    *("max_tokens", "max_output_tokens", "n_predict", "num_predict", "temperature", "top_p"),
    *("top_k", "seed", "random_seed", "stop", "stop_sequences", "logit_bias", "min_p", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty"),
    *("ignore_eos", "penalty_window", "user", "stream"),
}
THOUGHTS = {
    *("reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget", "think"),
    *("thinking_budget_tokens", "reasoning_budget", "chat_template_kwargs"),
}
FORMATS = {
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("structured_outputs", "json_schema", "grammar", "regex"),
}
TOOLS = {"tools", "tool_choice", "functions", "function_call"}
DECLARED: dict[str, set[str]] = {
    CHAT: READ_BY_ALL | THOUGHTS | FORMATS | TOOLS
    | {"max_completion_tokens", "logprobs", "top_logprobs", "continue_final_message",
       "add_generation_prompt"},
    COMPLETIONS: READ_BY_ALL | FORMATS | {"logprobs", "echo", "suffix", "best_of"},
    MESSAGES: READ_BY_ALL | TOOLS
    | {"system", "thinking", "chat_template_kwargs", "context_management"},
    f"{MESSAGES}/count_tokens": READ_BY_ALL | TOOLS
    | {"system", "thinking", "chat_template_kwargs", "context_management"},
    RESPONSES: READ_BY_ALL | THOUGHTS | FORMATS | TOOLS
    | {"instructions", "previous_response_id", "text", "truncation", "top_logprobs"},
    OLLAMA_CHAT: {"format", "think", "logprobs", "top_logprobs", "options", "tools"},
    GENERATE: {"format", "think", "logprobs", "top_logprobs", "options", "system", "suffix",
               "images"},
    EMBEDDINGS: set(),
    EMBED: set(),
    OLDER_EMBED: set(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"enable_thinking": False, "reasoning_effort": "none", "think": False}),
        (COMPLETIONS, {"chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {"enable_thinking": False, "reasoning": {"enabled": False}, "n": 1}),
        (OLLAMA_CHAT, {"n": 1, "top_p": 1, "seed": -1, "response_format": {"type": "text"}}),
        (OLLAMA_CHAT, {"options": {"typical_p": 1.0, "mirostat": 0, "num_gpu": 1, "tfs_z": 1}}),
        (EMBEDDINGS, {"normalize": True, "user": "me", "encoding_format": "float"}),
        (EMBED, {"options": {"num_ctx": 4096}, "keep_alive": "5m"}),
    ],
)
def test_defaults_of_other_servers_are_taken(
    shared: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    response = shared.post(path, json={**SUBJECTS[path], **fields})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "fields",
    [{"max_output_tokens": 5}, {"num_predict": 5}, {"max_tokens": 5, "n_predict": 5}],
)
def test_other_names_of_a_setting_are_read(shared: httpx.Client, fields: dict[str, Any]) -> None:
    answer = shared.post(CHAT, json={"messages": HI, **fields}).json()
    assert answer["usage"]["completion_tokens"] == 5
    stopped = shared.post(CHAT, json={"messages": HI, "stop_sequences": ["wor"]}).json()
    assert stopped["choices"][0]["message"]["content"] == "Hello, "
    assert shared.post(CHAT, json={"messages": HI, "random_seed": 7}).json()["seed"] == 7


def test_a_field_of_an_object_is_named_with_the_object(shared: httpx.Client) -> None:
    body = {**SUBJECTS[OLLAMA_CHAT], "options": {"max_tokens": 5}}
    error = shared.post(OLLAMA_CHAT, json=body).json()["error"]
    assert error == "`options.max_tokens` cannot be honoured here; use `options.num_predict`."


@pytest.mark.parametrize("name", ANSWER_FIELDS)
def test_a_body_without_fields_refuses_all_by_name(name: str) -> None:
    with pytest.raises(RefusalError, match=f"`{name}` cannot be honoured; leave it out") as refused:
        CheckedBody.model_validate({name: ["x"]})
    assert refused.value.param == name
