"""Small stand-ins for models with tools: vocabularies and chat templates in each family's style.

The templates are short, and write calls, results and thoughts exactly as the published ones do.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from headroom.formats.vocabulary import Vocabulary
from headroom.text.chat_template import ChatTemplate
from headroom.text.spelling import BYTE_OF
from headroom.text.tokenizer import Tokenizer

_CHATML_END = """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- elif OPENS %}{{- '<think>\n' }}{%- endif %}{%- endif %}"""
_CHATML_THOUGHT = """
{%- set thought = message.reasoning_content | default('', true) %}
{%- if loop.index0 > last.query and (thought or ALWAYS) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
{%- endif %}"""
_CHATML_RESULT = """
{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}"""
_LAST_QUERY = """
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}
{%- endfor %}"""

QWEN3 = (
    """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\n\n' }}{% endif %}
{{- '# Tools\n<tools>' }}{% for tool in tools %}{{- '\n' ~ (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nWrite <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}{% endif %}"""
    + _LAST_QUERY
    + """
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\n' ~ message.content ~ '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"""
    + _CHATML_THOUGHT.replace("ALWAYS", "loop.last")
    + """{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""
    + _CHATML_RESULT
    + "{%- endfor %}"
    + _CHATML_END.replace("OPENS", "false")
)
QWEN35 = (
    """{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n' }}
{{- '</function>\n</tool_call>' }}
{%- if messages[0].role == 'system' %}{{- '\n\n' ~ messages[0].content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}{% endif %}"""
    + _LAST_QUERY
    + """
{%- for message in messages %}
{%- set content = (message.content or '') | trim %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"""
    + _CHATML_THOUGHT.replace("ALWAYS", "true")
    + """{{- content }}
{%- for call in message.tool_calls or [] %}
{{- ('\n\n' if content else '') if loop.first else '\n' }}
{{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' ~ key ~ '>\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string)
    else value | string }}{{- '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""
    + _CHATML_RESULT
    + "{%- endfor %}"
    + _CHATML_END.replace("OPENS", "true")
)
LAGUNA = """{{- '〈|EOS|〉' }}
{%- set enable_thinking = enable_thinking | default(false) %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}{{- '<system>\n\n' ~ system.rstrip() }}
{%- if tools %}{{- '\n\n### Tools\n<available_tools>\n' }}
{%- for tool in tools %}{{- (tool | tojson) ~ '\n' }}{% endfor %}
{{- '</available_tools>\n<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>' }}
{{- '\n</tool_call>' }}{% endif %}{{- '\n</system>\n' }}{% endif %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'user' %}{{- '<user>\n' ~ content ~ '\n</user>\n' }}
{%- elif message.role == 'assistant' %}{% generation %}{{- '<assistant>\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' ~ message.reasoning_content.strip() ~ '\n</think>\n' }}
{%- else %}{{- '</think>\n' }}{% endif %}
{%- if content.strip() %}{{- content.strip() ~ '\n' }}{% endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' ~ call.function.name ~ '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>\n' }}
{%- endfor %}{{- '</tool_call>\n' }}{% endfor %}{{- '</assistant>\n' }}{% endgeneration %}
{%- elif message.role == 'tool' %}{{- '<tool_response>\n' ~ content ~ '\n</tool_response>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>\n' ~ ('<think>' if enable_thinking else '</think>') }}{% endif %}"""
GEMMA4 = """{%- macro written(value) %}
{%- if value is string %}{{- '<|"|>' ~ value ~ '<|"|>' }}
{%- elif value is boolean %}{{- 'true' if value else 'false' }}
{%- elif value is mapping %}{{- '{' }}{% for key, inner in value | dictsort %}
{{- key ~ ':' ~ written(inner) }}{{- ',' if not loop.last }}{% endfor %}{{- '}' }}
{%- elif value is sequence %}{{- '[' }}{% for inner in value %}
{{- written(inner) }}{{- ',' if not loop.last }}{% endfor %}{{- ']' }}
{%- else %}{{- value }}{% endif %}{% endmacro %}
{{- bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{%- if thinks or tools or messages[0].role == 'system' %}{{- '<|turn>system\n' }}
{%- if thinks %}{{- '<|think|>\n' }}{% endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}
{{- '<|tool>declaration:' ~ tool.function.name ~ written(tool.function.parameters) ~ '<tool|>' }}
{%- endfor %}{{- '<turn|>\n' }}{% endif %}
{%- set ns = namespace(last='', user=-1, before='') %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{% if message.role not in ('system', 'tool') %}
{%- set ns.last = '' %}{% set index = loop.index0 %}
{%- if not (message.role == 'assistant' and ns.before == 'assistant') %}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' }}{% endif %}
{%- set ns.before = message.role %}
{%- if message.reasoning_content and index > ns.user and message.tool_calls %}
{{- '<|channel>thought\n' ~ message.reasoning_content ~ '\n<channel|>' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' ~ call.function.name }}
{{- written(call.function.arguments) }}{{- '<tool_call|>' }}{% set ns.last = 'call' %}{% endfor %}
{%- set result = namespace(open=true, any=false) %}
{%- if message.tool_calls %}{% for follow in messages[index + 1:] %}
{%- if follow.role != 'tool' %}{% set result.open = false %}{% endif %}
{%- if result.open %}{% set name = namespace(text=follow.name or 'unknown') %}
{%- for call in message.tool_calls %}{% if call.id == follow.tool_call_id %}
{%- set name.text = call.function.name %}{% endif %}{% endfor %}
{{- '<|tool_response>response:' ~ name.text ~ '{value:' ~ written(follow.content) ~ '}' }}
{{- '<tool_response|>' }}{% set result.any = true %}{% set ns.last = 'result' %}{% endif %}
{%- endfor %}{% endif %}
{{- (message.content or '') | trim }}
{%- if ns.last == 'call' and not result.any %}{{- '<|tool_response>' }}
{%- elif not (result.any and not message.content) %}{{- '<turn|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt and ns.last == '' %}{{- '<|turn>model\n' }}
{%- if not thinks %}{{- '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' ~ system }}
{%- if tools %}{{- '\nRespond in the format {"name": NAME, "parameters": DICTIONARY}.' }}
{%- for tool in tools %}{{- '\n' ~ (tool | tojson(indent=4)) }}{% endfor %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('One call at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' ~ call.name }}
{{- '", "parameters": ' ~ (call.arguments | tojson) ~ '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ (message.content | tojson) }}
{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}
{{- message.content | trim ~ '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
_MISTRAL_ORDER = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role != 'system' %}
{%- if not (message.role == 'tool' or message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('Roles must alternate!') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"""
MISTRAL_LIST = (
    _MISTRAL_ORDER
    + """
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Ids must have length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
{{- ', ' if not loop.last else ']' ~ eos_token }}{% endfor %}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Ids must have length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' ~ message.content ~ ', "call_id": "' }}
{{- message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
{%- else %}{{- message.content ~ eos_token }}{% endif %}{% endfor %}"""
)
MISTRAL_ARGS = (
    _MISTRAL_ORDER
    + """
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Ids must have length 9!') }}{% endif %}
{{- '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ call.id }}
{{- '[ARGS]' ~ (call.function.arguments | tojson) }}{% endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('Bad id!') }}{% endif %}
{{- '[TOOL_RESULTS]' ~ message.tool_call_id ~ '[TOOL_CONTENT]' ~ message.content }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{- message.content ~ eos_token }}{% endif %}{% endfor %}"""
)
PLAIN = """{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}
{{- raise_exception('Unknown role ' ~ message.role) }}{% endif %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

_TAGS = ("<tool_call>", "</tool_call>")
_ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_THINK = ("<think>", "</think>")
_GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>")
_MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
# Template, visible marks, control tokens, and what ends a turn; the last control token is eos.
_MODELS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "qwen3": (QWEN3, (*_TAGS, *_THINK), ("<|im_start|>", "<|im_end|>"), "<|im_end|>\n"),
    "qwen35": (QWEN35, (*_TAGS, *_THINK), ("<|im_start|>", "<|im_end|>"), "<|im_end|>\n"),
    "laguna": (LAGUNA, (*_TAGS, *_ARGUMENT_TAGS, *_THINK), ("</assistant>",), "</assistant>\n"),
    "laguna_control": (LAGUNA, _THINK, (*_TAGS, *_ARGUMENT_TAGS, "</assistant>"), "</assistant>\n"),
    "gemma4": (GEMMA4, (), (*_GEMMA_MARKS, "<|tool_response>", "<turn|>"), "<|tool_response>"),
    "llama3": (LLAMA3, (), ("<|python_tag|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral_list": (MISTRAL_LIST, (), (*_MISTRAL_MARKS, "</s>"), "</s>"),
    "mistral_args": (MISTRAL_ARGS, (), (*_MISTRAL_MARKS, "</s>"), "</s>"),
    "plain": (PLAIN, (), ("<|im_start|>", "<|im_end|>"), "<|im_end|>\n"),
}  # fmt: skip
TOOL_MODELS = tuple(_MODELS)
# The format of each template that has one of its own.
STYLES: Mapping[str, str] = {
    "qwen3": "json_tags",
    "qwen35": "function_tags",
    "laguna": "argument_tags",
    "laguna_control": "argument_tags",
    "gemma4": "plain_keys",
    "llama3": "bare_json",
    "mistral_list": "json_list",
    "mistral_args": "named_json",
}
NATIVE_MODELS = tuple(model for model in _MODELS if model != "plain")  # templates with tools


@cache
def tool_tokenizer(model: str) -> Tokenizer:
    """Return a byte-level tokenizer with the marks of a family."""
    _, visible, control, _ = _MODELS[model]
    return Tokenizer.from_vocabulary(
        Vocabulary(
            model="gpt2",
            pre="qwen2",
            tokens=[*BYTE_OF, *visible, *control],
            types=[*[1] * len(BYTE_OF), *[4] * len(visible), *[3] * len(control)],
            scores=[],
            merges=[],
            special_ids={"eos": len(BYTE_OF) + len(visible) + len(control) - 1},
            add_bos=False,
        )
    )


@cache
def tool_template(model: str) -> ChatTemplate:
    """Return a chat template in the style of a family."""
    return ChatTemplate(_MODELS[model][0], "", tool_tokenizer(model).eos_token)


def turn_end(model: str) -> str:
    """Return what a template writes after an answer."""
    return _MODELS[model][3]


def rendered_answer(model: str, message: Mapping[str, Any], **variables: Any) -> str:
    """Return an answer as the template writes it into the history, without the end of its turn."""
    template = tool_template(model)
    # Gemma 4's template leaves out of the history what it puts before an answer without a thought.
    variables = {"enable_thinking": model == "gemma4", **variables}
    question = {"role": "user", "content": "q"}
    prompt = template.render([question], **variables)
    whole = template.render([question, message], add_generation_prompt=False, **variables)
    return _after_common_start(prompt, whole).removesuffix(turn_end(model))


def _after_common_start(prompt: str, whole: str) -> str:
    place = 0
    while place < min(len(prompt), len(whole)) and prompt[place] == whole[place]:
        place += 1
    return whole[place:]
