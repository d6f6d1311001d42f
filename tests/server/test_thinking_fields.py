"""The fields about thoughts, those of OpenAI and of other servers."""

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from headroom.server.refusals import RefusalError
from headroom.server.thinking_fields import ThinkingFields
from headroom.text.conversation import Thinking


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "none"}, Thinking(enabled=False)),
        ({"reasoning_effort": "minimal"}, Thinking(enabled=True, effort="minimal")),
        ({"reasoning_effort": "xhigh"}, Thinking(enabled=True, effort="xhigh")),
        ({"reasoning": {"effort": "low"}}, Thinking(enabled=True, effort="low")),
        ({"reasoning": {"max_tokens": 100}}, Thinking(enabled=True, budget=100)),
        ({"reasoning": {"enabled": False}}, Thinking(enabled=False)),
        ({"reasoning": {"enabled": True, "effort": "none"}}, Thinking(enabled=True)),
        ({"reasoning": {}}, Thinking()),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Thinking(enabled=True, budget=9)),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, Thinking(enabled=False)),
        ({"thinking": {"type": "adaptive"}}, Thinking()),
        ({"thinking": True}, Thinking(enabled=True)),
        ({"thinking": False}, Thinking(enabled=False)),
        ({"enable_thinking": False}, Thinking(enabled=False)),
        ({"enable_thinking": True, "thinking_budget": 7}, Thinking(enabled=True, budget=7)),
        ({"thinking_budget": 0}, Thinking(enabled=False)),
        ({"enable_thinking": True, "thinking_budget": 0}, Thinking(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, Thinking(enabled=False)),
        ({"reasoning": {"enabled": True, "max_tokens": 0}}, Thinking(enabled=False)),
        ({"reasoning_effort": "high", "thinking_budget": 0}, Thinking(enabled=False)),
        ({"thinking_budget_tokens": 7}, Thinking(enabled=True, budget=7)),
        ({"reasoning_budget": 0}, Thinking(enabled=False)),
        ({"reasoning_budget": -1}, Thinking()),
        ({"enable_thinking": True, "reasoning_budget": -1}, Thinking(enabled=True)),
        ({"think": False}, Thinking(enabled=False)),
        ({"think": True}, Thinking(enabled=True)),
        ({"think": "low"}, Thinking(enabled=True, effort="low")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(enabled=False)),
        ({"enable_thinking": True, "reasoning_effort": "low"},
         Thinking(enabled=True, effort="low")),
    ],
)  # fmt: skip
def test_each_field_switches_or_limits_thoughts(body: dict[str, Any], expected: Thinking) -> None:
    assert ThinkingFields.model_validate(body).asked_thinking() == expected


def test_variables_of_the_template_are_passed_on() -> None:
    given = {"enable_thinking": True, "style": "brief", "numbers": [1, 2]}
    fields = ThinkingFields.model_validate({"chat_template_kwargs": given})
    assert fields.template_variables() == given


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"]
)
def test_variables_that_the_server_sets_are_refused(name: str) -> None:
    fields = ThinkingFields.model_validate({"chat_template_kwargs": {name: "x"}})
    with pytest.raises(RefusalError) as caught:
        fields.template_variables()
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_enable_thinking_in_the_variables_must_be_true_or_false() -> None:
    fields = ThinkingFields.model_validate({"chat_template_kwargs": {"enable_thinking": "no"}})
    with pytest.raises(RefusalError, match="true or false"):
        fields.template_variables()


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({}, True),
        ({"reasoning": {"exclude": False}}, True),
        ({"reasoning": {"exclude": True}}, False),
        ({"include_reasoning": False}, False),
    ],
)
def test_thoughts_can_be_left_out_of_the_answer(body: dict[str, Any], shown: bool) -> None:
    assert ThinkingFields.model_validate(body).shows_thoughts is shown


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "huge"},
        {"reasoning_effort": 5},
        {"reasoning": "high"},
        {"reasoning": {"effort": "huge"}},
        {"reasoning": {"max_tokens": -1}},
        {"thinking": "yes"},
        {"thinking": {}},
        {"thinking": {"type": "maybe"}},
        {"thinking": {"type": "enabled", "budget_tokens": -5}},
        {"enable_thinking": 1},
        {"thinking_budget": 1.5},
        {"reasoning_budget": -2},
        {"think": "often"},
        {"include_reasoning": "no"},
        {"chat_template_kwargs": [1]},
    ],
)
def test_a_wrong_value_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ThinkingFields.model_validate(body)
    assert caught.value.errors()[0]["loc"][0] == next(iter(body))


HI = [{"role": "user", "content": "Hi"}]
ENABLED = {"type": "enabled", "budget_tokens": 5}
ASKS = [
    ("/v1/chat/completions", {"messages": HI, "reasoning_effort": "high"}),
    ("/v1/chat/completions", {"messages": HI, "thinking": ENABLED}),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "high", "summary": "auto"}}),
    ("/v1/messages", {"messages": HI, "max_tokens": 99, "thinking": ENABLED}),
    ("/v1/messages", {"messages": HI, "max_tokens": 99, "thinking": {"type": "adaptive"}}),
    ("/api/chat", {"model": "fake", "messages": HI, "think": True, "stream": False}),
    ("/api/generate", {"model": "fake", "prompt": "Hi", "think": "high", "stream": False}),
]


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_a_model_without_thoughts_answers_a_request_to_think_on_every_api(
    shared: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = shared.post(path, json=body)
    assert answer.status_code == 200
    assert "Hello, world." in answer.text
    for thought in ('"reasoning_content":"', '"thinking":"', '"type":"reasoning"'):
        assert thought not in answer.text
