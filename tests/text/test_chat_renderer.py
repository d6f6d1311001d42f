"""ChatRenderer: replays answers with the model's own tokens; fits messages to the template."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headroom.errors import RequestError
from headroom.text.answer import AnswerText
from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.chat_renderer import ChatRenderer, RenderedChat
from headroom.text.chat_template import ChatTemplate
from headroom.text.conversation import Tool
from headroom.text.reasoning import find_reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_formats import find_tool_format
from headroom.text.tool_memory import ToolMemory
from tests.text.small_vocabularies import gemma_vocabulary
from tests.text.tool_models import NATIVE_MODELS, TOOL_MODELS, tool_template, tool_tokenizer

WEATHER = Tool(
    name="weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
)
# Answers that no template would spell exactly so. The last three have a thought.
ANSWERS = {
    "json": [
        '<tool_call>\n{"name":"weather","arguments":{"days":2, "city":"Köln"}}\n</tool_call>',
        'I look. \n<tool_call>{"name": "weather", "arguments": {"city": "\\u00e9"}}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>\n',
    ],
    "function": [
        "Ok.\n<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n"
        "<parameter=city>Köln</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=weather></function></tool_call>",
    ],
    "argument": [
        "\nOk.\n\n<tool_call>weather\n<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>\n",
        "\n<tool_call>weather</tool_call>\n\n<tool_call>weather\n</tool_call>",
    ],
    "gemma": [
        '<|tool_call>call:weather{days:2,city:<|"|>Köln<|"|>}<tool_call|>',
        "Ok. <|tool_call>call:weather{}<tool_call|><|tool_call>call:weather{days: 3}<tool_call|>",
    ],
    "llama": [
        '{"name": "weather", "parameters": {"days":2, "city": "Köln"}}',
        '<|python_tag|>{"name": "weather", "parameters": {"city": "x"}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name":"weather","arguments": {"days":2}}, {"name": "weather"}]',
        '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"days":  2}[TOOL_CALLS]weather[ARGS]{ }',
    ],
}
STYLES = {
    "qwen3": "json",
    "qwen35": "function",
    "laguna": "argument",
    "laguna_control": "argument",
    "gemma4": "gemma",
    "llama3": "llama",
    "mistral_list": "mistral",
    "mistral_args": "mistral",
    "plain": "json",
}


class Chat:
    """A client's chat with a model whose answers the test gives."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, **variables: Any) -> None:
        self.tokenizer = tokenizer
        self.reasoning = find_reasoning(tokenizer, template)
        self.form = find_tool_format(tokenizer, template)
        self.memory = ToolMemory()
        self.renderer = ChatRenderer(template, tokenizer, self.form, self.reasoning, self.memory)
        self.variables = variables
        self.messages: list[dict[str, Any]] = []
        self.tools: Sequence[Tool] = [WEATHER]

    def prompt(self) -> tuple[str, list[int]]:
        rendered = self.renderer.render(self.messages, tools=self.tools, variables=self.variables)
        return rendered.text, rendered.encode(self.tokenizer)

    def answer(self, written: str) -> list[int]:
        """Let the model write an answer, and add to the history what a client would."""
        text, _ = self.prompt()
        opened = self.reasoning is not None and self.reasoning.is_open(text)
        parser = AnswerParser(
            self.reasoning,
            in_thought=opened,
            tools=self.tools,
            format=self.form,
            keep=self.memory.keeper(text),
        )
        reader = AnswerText(self.tokenizer, parser=parser)
        tokens = self.tokenizer.encode(written, add_bos=False)
        parts = AnswerParts()
        for token in tokens:
            parts += reader.push(token)
        parts += reader.finish()
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in join_calls(parts.calls)
        ]
        assert calls, written
        self.messages.append({"role": "assistant", "content": parts.text, "tool_calls": calls})
        for number, call in enumerate(calls):
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"grey {number}"}
            self.messages.append(result)
        return tokens


def check_replay(chat: Chat, answers: Sequence[str]) -> None:
    """Let a model call tools several times, and require that each prompt continues the last."""
    chat.messages.append({"role": "user", "content": "How is the weather in Köln?"})
    for written in answers:
        _, before = chat.prompt()
        tokens = chat.answer(written)
        _, after = chat.prompt()
        start = [*before, *tokens]
        assert after[: len(start)] == start, chat.tokenizer.decode(after)
        assert after[len(start)] in chat.tokenizer.stop_ids


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("model", TOOL_MODELS)
def test_a_replayed_history_has_the_tokens_of_the_answers(model: str, thinks: bool) -> None:
    chat = Chat(tool_tokenizer(model), tool_template(model), enable_thinking=thinks)
    answers = list(ANSWERS[STYLES[model]])
    if thinks and chat.reasoning is not None:
        thought = {
            "qwen3": "<think>\nHm,  hm.\n</think>\n\n",
            "gemma4": "<|channel>thought\nHm.\n<channel|>",
        }
        answers[0] = thought.get(model, "\nHm,  hm.\n</think>\n") + answers[0]
        if model != "gemma4":
            answers[1] = thought.get(model, "Or else\n\n</think>") + answers[1]
    check_replay(chat, answers)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_the_thought_that_a_client_sends_back_is_the_model_s_own(field: str) -> None:
    chat = Chat(tool_tokenizer("laguna"), tool_template("laguna"), enable_thinking=True)
    chat.messages.append({"role": "user", "content": "Weather?"})
    _, before = chat.prompt()
    tokens = chat.answer(" Hm,  hm. </think>" + ANSWERS["argument"][0])
    chat.messages[1][field] = "Hm,  hm."
    start = [*before, *tokens]
    assert chat.prompt()[1][: len(start)] == start


def test_older_turns_are_written_as_the_template_has_them() -> None:
    """Qwen3.5 leaves out thoughts of older turns, and the marks around them."""
    chat = Chat(tool_tokenizer("qwen35"), tool_template("qwen35"))
    chat.messages.append({"role": "user", "content": "How is the weather in Köln?"})
    chat.answer("Hm.\n</think>\n\n" + ANSWERS["function"][0])
    assert "<think>\nHm.\n</think>\n\nOk." in chat.prompt()[0]
    chat.messages += [
        {"role": "assistant", "content": "Grey."},
        {"role": "user", "content": "Thanks."},
    ]
    text, _ = chat.prompt()
    assert f"<|im_start|>assistant\n{ANSWERS['function'][0]}<|im_end|>" in text
    assert "Hm." not in text


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_calls_that_are_not_remembered_are_written_by_the_template(model: str) -> None:
    chat = Chat(tool_tokenizer(model), tool_template(model), enable_thinking=False)
    chat.messages.append({"role": "user", "content": "Weather?"})
    chat.answer(ANSWERS[STYLES[model]][0])
    chat.messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Ulm"}'
    text, _ = chat.prompt()
    assert "Ulm" in text
    assert "grey 0" in text
    assert "Köln" not in text


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_a_history_with_calls_of_other_models_is_rendered(model: str) -> None:
    """Foreign ids, arguments that are not JSON, several calls, results without a name."""
    chat = Chat(tool_tokenizer(model), tool_template(model))
    calls = [
        {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": text}}
        for text in ('{"city": "Ulm"}', '{"city": "Bo', "")
    ]
    calls = [{**call, "id": f"toolu_{place}"} for place, call in enumerate(calls)]
    chat.messages += [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": f"toolu_{i}", "content": f"sun {i}"} for i in range(3)),
    ]
    text, _ = chat.prompt()
    places = [text.find(f"sun {number}") for number in range(3)]
    assert -1 not in places
    assert places == sorted(places)
    assert "Ulm" in text
    assert "Bo" in text


def test_a_model_without_tools_gets_them_explained() -> None:
    chat = Chat(tool_tokenizer("plain"), tool_template("plain"))
    chat.messages.append({"role": "system", "content": "Be brief."})
    check_replay(chat, ANSWERS["json"])
    text, _ = chat.prompt()
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:\n{")
    assert json.dumps(WEATHER.for_template()) in text
    end = (
        "user\n<tool_response>\ngrey 0\n</tool_response>\n<tool_response>\ngrey 1\n</tool_response>"
    )
    assert f"{end}<|im_end|>\n<|im_start|>assistant\n" in text


def test_without_a_system_role_tools_are_explained_to_the_user() -> None:
    source = tool_template("plain").source.replace("('system', 'user',", "('user',")
    chat = Chat(tool_tokenizer("plain"), ChatTemplate(source, "", ""))
    chat.messages.append({"role": "user", "content": "Weather?"})
    text, _ = chat.prompt()
    assert text.startswith("<|im_start|>user\nYou can call these functions:")
    assert "\n\nWeather?<|im_end|>" in text


def test_pieces_of_one_answer_that_come_as_messages_are_joined() -> None:
    chat = Chat(tool_tokenizer("qwen3"), tool_template("qwen3"))
    check_replay(chat, ANSWERS["json"])
    _, whole = chat.prompt()
    last = next(i for i, message in enumerate(chat.messages) if message.get("content") == "I look.")
    text, calls = chat.messages[last]["content"], chat.messages[last]["tool_calls"]
    chat.messages[last : last + 1] = [
        {"role": "assistant", "content": text},
        *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls),
    ]
    assert chat.prompt()[1] == whole


def test_an_answer_that_was_begun_is_continued() -> None:
    for model in ("qwen3", "qwen35", "plain"):
        renderer = Chat(tool_tokenizer(model), tool_template(model)).renderer
        begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is "}]
        assert renderer.render(begun, continues=True).text.endswith("It is ")
        assert not renderer.render(begun).text.endswith("It is ")


@pytest.mark.parametrize("name", ["messages", "tools", "self"])
def test_variables_cannot_replace_the_messages(name: str) -> None:
    renderer = Chat(tool_tokenizer("plain"), tool_template("plain")).renderer
    with pytest.raises(RequestError, match=f"the name '{name}'") as caught:
        renderer.render([{"role": "user", "content": "q"}], variables={name: []})
    assert caught.value.param == "chat_template_kwargs"


# As some published templates do, it reads one type for each value, and calls itself for others.
ONE_TYPE = """
{%- macro kind(spec) %}
{%- if spec.type in ['string', 'integer', 'boolean'] %}{{- spec.type }}
{%- elif spec.type == 'object' %}{{- 'map of ' ~ kind(spec.additionalProperties) }}
{%- else %}{% for one in spec.type %}{{- kind({'type': one}) }}{% endfor %}{% endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
{%- for name, spec in tool.function.parameters.properties | items %}
{{- name ~ ': ' ~ kind(spec) ~ '. ' }}{% endfor %}{% endfor %}"""


def test_schemas_that_the_template_cannot_write_get_one_type_for_each_value() -> None:
    tokenizer, plain = tool_tokenizer("qwen3"), tool_template("qwen3")
    chat = Chat(tokenizer, ChatTemplate(ONE_TYPE + plain.source, "", tokenizer.eos_token))
    chat.messages = [{"role": "user", "content": "Hi."}]
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": ["string", "null"]},
            "days": {"type": ["null", "integer"]},
            "more": {"type": "object", "properties": {"x": {"type": "boolean"}}},
        },
    }
    chat.tools = [Tool(name="weather", parameters=schema)]
    assert chat.prompt()[0].startswith("city: string. days: integer. more: map of . ")
    # A template that reads lists of types gets them.
    assert '["string", "null"]' in plain.render(
        chat.messages, tools=[tool.for_template() for tool in chat.tools]
    )


def test_schemas_that_the_template_cannot_write_at_all_are_refused_with_its_failure() -> None:
    tokenizer, plain = tool_tokenizer("qwen3"), tool_template("qwen3")
    chat = Chat(tokenizer, ChatTemplate(ONE_TYPE + plain.source, "", tokenizer.eos_token))
    chat.messages = [{"role": "user", "content": "Hi."}]
    schema = {"type": "object", "properties": {"city": {"type": "place"}}}
    chat.tools = [Tool(name="weather", parameters=schema)]
    with pytest.raises(RequestError, match="it calls itself without end"):
        chat.prompt()


@pytest.mark.parametrize(("left_out", "exact"), [(0, True), (1, True), (63, True), (64, False)])
def test_a_template_may_leave_out_a_little_of_what_came_before_an_answer(
    left_out: int, exact: bool
) -> None:
    """With the line break before it, 64 characters may be missing in later prompts."""
    source, header = tool_template("qwen3").source, "{{- '<|im_start|>assistant\n' }}"
    assert source.count(header) == 2  # of older answers, and of the next one
    at = source.rindex(header) + len(header)
    source = source[:at] + "{{- '" + "y" * left_out + "' }}" + source[at:]
    tokenizer = tool_tokenizer("qwen3")
    chat = Chat(tokenizer, ChatTemplate(source, "", tokenizer.eos_token))
    chat.messages.append({"role": "user", "content": "Weather?"})
    _, before = chat.prompt()
    tokens = chat.answer(ANSWERS["json"][0])
    start = [*before, *tokens]
    assert (chat.prompt()[1][: len(start)] == start) == exact
    # After another question, the template has the answer as it writes older ones.
    chat.messages.append({"role": "user", "content": "Thanks."})
    assert (chat.prompt()[1][: len(start)] == start) == (left_out == 0)


@pytest.mark.parametrize(("changed", "exact"), [(17, False), (18, True)])
def test_the_place_of_an_answer_is_known_by_the_24_characters_before_it(
    changed: int, exact: bool
) -> None:
    chat = Chat(tool_tokenizer("mistral_list"), tool_template("mistral_list"))
    question = "What is the weather like in Ulm?"
    chat.messages.append({"role": "user", "content": question})
    chat.answer(ANSWERS["mistral"][0] + "\n\n")
    other = f"{question[:-changed]}_{question[len(question) - changed + 1 :]}"
    assert len(other) == len(question)
    chat.messages[0]["content"] = other
    text, _ = chat.prompt()
    assert f"{other}[/INST]{ANSWERS['mistral'][0]}" in text
    assert (ANSWERS["mistral"][0] + "\n\n" in text) == exact  # the model's own line breaks


def test_if_a_template_takes_no_form_of_the_messages_the_first_refusal_is_told() -> None:
    tokenizer, plain = tool_tokenizer("qwen3"), tool_template("qwen3")
    refusing = (
        "{%- for m in messages if m.tool_calls %}"
        "{% set given = m.tool_calls[0].function.arguments %}"
        "{{ raise_exception(m.tool_calls | length ~ ' calls: ' ~ given) }}{% endfor %}"
    )
    chat = Chat(tokenizer, ChatTemplate(refusing + plain.source, "", tokenizer.eos_token))
    calls = [
        {"id": id, "type": "function", "function": {"name": "weather", "arguments": "[1]"}}
        for id in ("a", "b")
    ]
    chat.messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    with pytest.raises(RequestError, match=r"refused the messages: 2 calls: \[1\]$"):
        chat.prompt()


def test_results_of_tools_that_are_offered_no_more_are_written_too() -> None:
    chat = Chat(tool_tokenizer("plain"), tool_template("plain"))
    chat.tools = []
    chat.messages = [
        {"role": "user", "content": "q"},
        {"role": "tool", "tool_call_id": "a", "content": "grey"},
    ]
    text, _ = chat.prompt()
    assert "user\n<tool_response>\ngrey\n</tool_response>" in text
    assert "You can call" not in text


def test_a_call_without_a_known_answer_does_not_hide_the_known_ones() -> None:
    chat = Chat(tool_tokenizer("qwen3"), tool_template("qwen3"))
    chat.messages.append({"role": "user", "content": "Weather?"})
    chat.answer(ANSWERS["json"][0])
    foreign = {"id": "x", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    chat.messages += [
        {"role": "assistant", "content": "", "tool_calls": [foreign]},
        {"role": "tool", "tool_call_id": "x", "content": "sun"},
    ]
    text, _ = chat.prompt()
    assert ANSWERS["json"][0] in text
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in text


# Refuses any conversation that no client could have had.
STRICT = """
{%- set seen = namespace(role='') %}
{%- for m in messages %}
{%- if m.content is not string %}{{ raise_exception('no text in ' ~ m.role) }}{% endif %}
{%- if m.role == 'user' %}
{%- if seen.role not in ('', 'assistant') or not m.content %}
{{ raise_exception('no question') }}{% endif %}
{%- elif m.role == 'assistant' %}
{%- if seen.role not in ('user', 'tool') %}{{ raise_exception('no turn') }}{% endif %}
{%- if not m.content and not m.tool_calls %}{{ raise_exception('no answer') }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if call.id is not string or call.id | length != 9 %}{{ raise_exception('no id') }}{% endif %}
{%- if call.function.name not in tools | map(attribute='function.name') %}
{{ raise_exception('no such tool') }}{% endif %}
{%- if call.function.arguments is not mapping %}{{ raise_exception('no arguments') }}{% endif %}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if seen.role not in ('assistant', 'tool') or not m.content %}
{{ raise_exception('no result') }}{% endif %}
{%- if m.tool_call_id is not string or m.tool_call_id | length != 9 %}
{{ raise_exception('no id of a call') }}{% endif %}
{%- else %}{{ raise_exception('no role') }}{% endif %}
{%- set seen.role = m.role %}
{%- endfor %}"""


def test_answers_are_replayed_by_a_template_that_takes_only_true_conversations() -> None:
    """So the chats by which the renderer tries a template are conversations, too."""
    tokenizer, plain = tool_tokenizer("mistral_args"), tool_template("mistral_args")
    template = ChatTemplate(STRICT + plain.source, "", tokenizer.eos_token)
    chat = Chat(tokenizer, template)
    check_replay(
        chat, [ANSWERS["mistral"][1].replace("abc123XYZ", id) for id in ("a" * 9, "b" * 9)]
    )


def test_a_prompt_in_pieces_begins_with_bos_once() -> None:
    tokenizer = Tokenizer.from_vocabulary(gemma_vocabulary())
    hello = tokenizer.encode("hello", add_bos=False)
    prompt = RenderedChat(("hello", [7, 8], "hello"), "")
    assert prompt.encode(tokenizer) == [tokenizer.bos_id, *hello, 7, 8, *hello]
    assert RenderedChat(([7, 8], "hello"), "").encode(tokenizer) == [7, 8, *hello]
