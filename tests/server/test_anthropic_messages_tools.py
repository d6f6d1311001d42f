"""A session with a tool and a model whose tokens come from a script; all else is real."""

from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

from headroom.llm import LLM
from headroom.options import Options
from tests.clients.model import write_model
from tests.clients.scripted import ScriptedEngine, scripted_model
from tests.server.fakes import serving

LOOK: ToolParam = {
    "name": "look",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "deep": {"type": "boolean"}},
    },
}
# White space and order as no template writes them.
CALL = '<tool_call>\n{"name":"look",  "arguments": {"place":"Köln" , "deep":true}}\n</tool_call>'
THOUGHT = "<think>\nI must look.\n</think>\n\n"


@pytest.mark.parametrize("after", ["", "\n\nSoon I know."])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_an_answer_with_calls_is_replayed_token_by_token(
    tmp_path: Path, display: str, after: str
) -> None:
    def say(prompt: str) -> str:
        return "Grey." if "<tool_response>" in prompt else f"{THOUGHT}I look.\n{CALL}{after}"

    path = write_model("qwen3", tmp_path / "model.gguf")
    question: MessageParam = {"role": "user", "content": "What is there?"}
    with (
        scripted_model(path, say, context=4096, name="scripted") as llm,
        serving(llm, Options(port=0)) as server,
        Anthropic(base_url=server.address, api_key="none", max_retries=0) as client,
    ):
        thinking: Any = {"type": "adaptive", "display": display}
        first = client.messages.create(
            model="m", max_tokens=999, messages=[question], tools=[LOOK], thinking=thinking
        )
        thought, text, call, *rest = first.content
        assert thought.type == "thinking"
        assert thought.thinking == ("" if display == "omitted" else "I must look.")
        assert text.type == "text"
        assert text.text == "I look."
        assert call.type == "tool_use"
        assert call.input == {"place": "Köln", "deep": True}
        assert [block.type for block in rest] == ["text"] * bool(after)
        result: MessageParam = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "fog"}],
        }
        with client.messages.stream(
            model="m",
            max_tokens=999,
            messages=[question, {"role": "assistant", "content": first.content}, result],
            tools=[LOOK],
            thinking=thinking,
        ) as stream:
            assert stream.get_final_text() == "Grey."
        engine = llm.engine
        assert isinstance(engine, ScriptedEngine)
        one, two = (request.prompt for request in engine.requests)
        written = [*one, *engine.answers[0]]
    assert list(two[: len(written)]) == written
    assert "fog" in engine.prompts[1]


def test_a_budget_ends_a_thought_and_the_message_says_so(tmp_path: Path) -> None:
    path = write_model("qwen35", tmp_path / "model.gguf")  # its prompts end inside a thought
    with (
        LLM(str(path), context=1024) as llm,
        serving(llm, Options(port=0)) as server,
        Anthropic(base_url=server.address, api_key="none", max_retries=0) as client,
    ):
        assert llm.reasoning is not None
        # The model itself never ends its thought.
        endless = {"ignore_eos": True, "logit_bias": {str(llm.reasoning.end_id): -100}}
        message = client.messages.create(
            model="m",
            max_tokens=40,
            messages=[{"role": "user", "content": "Hm?"}],
            thinking={"type": "enabled", "budget_tokens": 6},
            extra_body=endless,
        )
    assert message.content[0].type == "thinking"
    assert message.model_extra is not None
    details = message.model_extra["finish_details"]
    assert details["close_kind"] == "hard"
    assert message.usage.output_tokens_details is not None
    thought_tokens = message.usage.output_tokens_details.thinking_tokens
    assert 6 <= thought_tokens == details["thinking_tokens"] < 12
