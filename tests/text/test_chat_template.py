"""ChatTemplate against transformers, and its refusals."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Coder
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from headroom.errors import ModelError, RequestError
from headroom.families.files import open_checkpoint
from headroom.text.chat_template import ChatTemplate
from headroom.text.template_limits import MAX_CHARACTERS

CHAT = [
    {"role": "system", "content": "Be brief. <b>&</b>"},
    {"role": "user", "content": "Wie geht's? 👍\n{% raw %} {{ x }}"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGut."},
    {"role": "user", "content": ""},
]
TOOL_CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2, "exact": True}},
}
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Köln?"},
    {"role": "assistant", "content": None, "reasoning": "Ask.", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": '{"sky": "grey"}', "name": "weather"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells <the> weather & more.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

TEMPLATES = {
    "bos_and_loop": """{{ bos_token }}{% for message in messages %}
    {% if loop.first %}
        {{- '[FIRST]' }}
    {% endif %}
{{ loop.index0 }}{{ message['role'] }}:{{ message.content or '' | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
""",
    "namespace_and_loop_controls": """
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = index %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- loop.index ~ '/' ~ ns.last ~ message.role }}
{%- endfor %}""",
    "tools_as_json": """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}<{{ message.role }}>
    {%- if message.reasoning_content %}{{ message.reasoning_content ~ message.thinking }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments | items %}
{{ name }}={{ value | tojson if value is not string else value }}
        {%- endfor %}
    {%- endfor %}
    {{- message.content if message.content is not none }}
{%- endfor %}""",
    "generation_tag": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}A: {{ m.content }}{{ eos_token }}
{% endgeneration %}
{% else %}U: {{ m.content }}
{% endif %}{% endfor %}""",
    "macros_and_filters": """{% macro show(message, prefix='>') -%}
    {{ prefix }} {{ message.role | upper }} {{ (message.content or '') | replace('e', 'E') }}
{%- endmacro %}
{% for message in messages | rejectattr('role', 'equalto', 'system') %}
{{ show(message) }}{{ loop.last }}{{ loop.previtem.role if loop.previtem is defined }}
{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ range(1, 7, 2) | list }}
{{ '%s-%03d' | format('a', 7) }} {{ 'a b c'.split(' ')[-1] }} {{ '%d' % 1700000000 }}
{{ dict(a=1) | tojson }} {{ 'x' * 3 }} {{ 2 ** 10 }} {{ 7 // 2 }} {{ documents is none }}""",
    "time_and_variables": """{{ strftime_now('%Y-%m') }}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{{- extra.key[0] if extra is defined }}{{ missing }}""",
    "parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content or [] %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}
{%- endfor %}{% endif %}{% endfor %}""",
}  # fmt: skip
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "three"},
]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    """An empty tokenizer of transformers, for its templates."""
    coder = Coder(BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=coder, bos_token="<s>", eos_token="</s>")


def compare(
    oracle: PreTrainedTokenizerFast, source: str, chat: list[dict[str, Any]], **variables: Any
) -> str:
    """Render with both, require the same prompt and return it."""
    # As transformers does from 5.23 on; earlier versions write null contents as "None".
    sent = [{key: value for key, value in x.items() if value is not None} for x in chat]
    expected = oracle.apply_chat_template(sent, chat_template=source, tokenize=False, **variables)
    prompt = ChatTemplate(source, "<s>", "</s>").render(chat, **variables)
    assert prompt == expected
    return prompt


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[1:2]])
def test_smollm2_s_prompts_equal_transformers(
    smollm2_path: Path,
    oracle: PreTrainedTokenizerFast,
    chat: list[dict[str, Any]],
    generate: bool,
) -> None:
    source = open_checkpoint(smollm2_path).chat_template
    assert source is not None
    prompt = compare(oracle, source, chat, add_generation_prompt=generate)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n") == generate


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", [CHAT, TOOL_CHAT], ids=["chat", "tools"])
def test_prompts_equal_transformers(
    oracle: PreTrainedTokenizerFast, name: str, chat: list[dict[str, Any]]
) -> None:
    for tools in (None, TOOLS):
        for generate in (True, False):
            compare(oracle, TEMPLATES[name], chat, tools=tools, add_generation_prompt=generate)


def test_fields_that_are_null_are_as_missing_ones() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ m.name is defined }};{% endfor %}"
    call = {"role": "assistant", "content": None, "name": None}
    assert ChatTemplate(source, "", "").render([call]) == "False;"
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}]}
    assert ChatTemplate(source, "", "").render([parts, call]) == "oneFalse;False;"


def test_free_variables_reach_the_template(oracle: PreTrainedTokenizerFast) -> None:
    prompt = compare(
        oracle,
        TEMPLATES["time_and_variables"],
        CHAT,
        add_generation_prompt=True,
        enable_thinking=False,
        extra={"key": ["value"]},
    )
    assert prompt.endswith("<think></think>value")


def test_parts_reach_a_template_that_reads_them(oracle: PreTrainedTokenizerFast) -> None:
    prompt = compare(oracle, TEMPLATES["parts"], PARTS, add_generation_prompt=False)
    assert prompt == "[one][two]three"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
    ],
    ids=["fails on lists", "prints lists"],
)
def test_text_parts_are_joined_for_a_template_that_wants_text(source: str) -> None:
    template = ChatTemplate(source, "", "")
    assert template.render(PARTS) == "user:one\ntwo;assistant:three;"
    plain = [{"role": "user", "content": ["one", {"type": "text", "text": "two"}]}]
    assert template.render(plain) == "user:one\ntwo;"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(RequestError, match="only text parts") as caught:
        template.render([image])
    assert caught.value.param == "messages"


def test_the_caller_s_messages_stay_as_they_are() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "x"}], "thinking": "y"}
    copy = {**message, "content": [{"type": "text", "text": "x"}]}
    ChatTemplate(TEMPLATES["parts"], "", "").render([message])
    assert message == copy


def test_the_template_s_own_refusal_is_the_request_s_error() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('User first!') }}{% endif %}"
    with pytest.raises(RequestError, match="refused the messages: User first!") as caught:
        ChatTemplate(source, "", "").render(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ missing.key }}", "{{ messages[99].role }}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}"]
)
def test_every_failure_in_a_template_is_the_request_s_error(source: str) -> None:
    with pytest.raises(RequestError, match=r"The chat template failed .*: \w+Error: .+"):
        ChatTemplate(source, "", "").render(CHAT)


def test_a_template_that_calls_itself_without_end_is_the_request_s_error() -> None:
    source = "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}"
    with pytest.raises(RequestError, match="it calls itself without end"):
        ChatTemplate(source, "", "").render(CHAT)


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(RequestError, match="There are no messages") as caught:
        ChatTemplate("{{ messages }}", "", "").render([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [["text"], [None], [3]])
def test_messages_that_are_no_objects_are_refused(messages: list[Any]) -> None:
    with pytest.raises(RequestError, match="A message is not an object"):
        ChatTemplate("{{ messages }}", "", "").render(messages)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(ModelError, match=r"wrong in line 3: .*endfor"):
        ChatTemplate("a\nb\n{% endfor %}", "", "")


def test_a_template_that_wants_another_file_is_refused() -> None:
    with pytest.raises(ModelError, match="line 2 wants another file"):
        ChatTemplate("\n{% include 'chat_template.jinja' %}", "", "")


def test_parts_reach_a_template_that_reads_them_from_users_alone() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}"
        "{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(source, "", "").render([{"role": "user", "content": parts}]) == "[a][b]"


# As Mistral's and Qwen3.5's: one system message, then user and assistant in turn.
ALTERNATING = """{%- if messages[0].role == 'system' %}
    {{- '[S]' + messages[0].content }}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- '[' + message.role[0] + ']' + message.content }}
{%- endfor %}"""


def test_a_template_that_wants_alternating_roles_gets_them(
    oracle: PreTrainedTokenizerFast,
) -> None:
    sent = [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "place"},
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "more"},
    ]
    reminder = "<system-reminder>\nlate\n</system-reminder>"
    alternating = [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "place\n\nquestion"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": f"{reminder}\n\nmore"},
    ]
    prompt = ChatTemplate(ALTERNATING, "<s>", "</s>").render(sent)
    assert prompt == compare(oracle, ALTERNATING, alternating)
    # A template that takes the messages as they are gets them as they are.
    assert "<system-reminder>" not in compare(oracle, TEMPLATES["generation_tag"], sent)


def test_messages_that_no_rearrangement_helps_are_refused_with_the_template_s_error() -> None:
    first = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    for chat in (first, first[:1]):
        with pytest.raises(RequestError, match="Roles must alternate"):
            ChatTemplate(ALTERNATING, "<s>", "</s>").render(chat)


QWEN3_LIKE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""


@pytest.mark.parametrize("source", [QWEN3_LIKE, TEMPLATES["bos_and_loop"]])
@pytest.mark.parametrize("start", ["The answer is", "{", "a user", "x\n\ny"])
def test_the_start_of_an_answer_is_continued_as_transformers_does(
    oracle: PreTrainedTokenizerFast, source: str, start: str
) -> None:
    chat = [
        {"role": "user", "content": f"Begin with {start}"},
        {"role": "assistant", "content": start, "reasoning_content": "Hm."},
    ]
    expected = oracle.apply_chat_template(
        chat, chat_template=source, tokenize=False, continue_final_message=True
    )
    assert ChatTemplate(source, "<s>", "</s>").render_start(chat) == expected
    assert expected.endswith(start)


def test_white_space_at_the_end_of_a_start_is_kept() -> None:
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "One, "}]
    assert ChatTemplate(QWEN3_LIKE, "", "").render_start(chat).endswith("One, ")


@pytest.mark.parametrize("content", ["Go.", None, [{"type": "text", "text": "x"}]])
def test_only_a_text_of_the_assistant_can_be_continued(content: Any) -> None:
    role = "user" if content == "Go." else "assistant"
    template = ChatTemplate(QWEN3_LIKE, "", "")
    chat = [{"role": "user", "content": "Hi."}, {"role": role, "content": content}]
    if content is None:  # an answer with no words yet
        assert template.render_start(chat).endswith("</think>\n\n")
        return
    with pytest.raises(RequestError, match="Only a last message with the role assistant"):
        template.render_start(chat)


def test_a_start_that_the_template_leaves_out_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "", "")
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hm"}]
    with pytest.raises(RequestError, match="leaves out the last message"):
        template.render_start(chat)


def test_a_prompt_of_many_pieces_may_have_the_limit_and_no_character_more() -> None:
    source = "{% for i in range(32) %}{{ 'a' * 1048576 }}{% endfor %}{{ end }}"
    template = ChatTemplate(source, "", "")
    chat = [{"role": "user", "content": "q"}]
    assert len(template.render(chat, end="")) == MAX_CHARACTERS == 32 << 20
    with pytest.raises(RequestError, match=f"the prompt has more than {MAX_CHARACTERS} characters"):
        template.render(chat, end="a")
