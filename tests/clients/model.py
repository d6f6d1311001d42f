"""Tiny model files with random weights, and chat templates in the manner of Qwen3 and Qwen3.5."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from headroom.families.synth.recipe import cut, find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import gguf_table, gguf_values
from headroom.formats.gguf_writer import gguf_jobs
from headroom.formats.writing import write_pieces

# Agents send prompts of up to 80 kB, and the tiny vocabulary spells most of it byte by byte.
CONTEXT = 160_000

# Like the models' own templates: tools are in the system message, results are user messages, and
# thoughts are shown only after the user's last message. `explain` says how to write a call, `calls`
# writes the calls of an earlier answer, `opens` begins a thought.
TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or first %}
{{- '<|im_start|>system\\n' }}
{%- if first %}{{- first.content + '\\n\\n' }}{%- endif %}
{%- if tools %}
{{- '# Tools\\n\\nThese functions can be called:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call one, write:\\n' }}
[explain]
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
[calls]
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
[opens]
{%- endif %}
{%- endif %}
"""
EXPLAIN_JSON = """\
{{- '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n' }}
{{- '</tool_call>' }}"""
CALLS_JSON = """\
{{- '<tool_call>\\n{\\"name\\": \\"' + function.name + '\\", \\"arguments\\": ' }}
{%- if function.arguments is string %}{{- function.arguments }}
{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}"""
EXPLAIN_TAGS = """\
{{- '<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nvalue\\n</parameter>\\n</function>\\n' }}
{{- '</tool_call>' }}"""
CALLS_TAGS = """\
{{- '<tool_call>\\n<function=' + function.name + '>\\n' }}
{%- for key, value in function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}"""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a family writes calls and thoughts."""

    tags: bool  # arguments stand between tags; otherwise a call is JSON
    opens: bool  # the prompt opens the thought

    @property
    def template(self) -> str:
        """The chat template."""
        return (
            TEMPLATE.replace("[explain]", EXPLAIN_TAGS if self.tags else EXPLAIN_JSON)
            .replace("[calls]", CALLS_TAGS if self.tags else CALLS_JSON)
            .replace("[opens]", "{%- else %}{{- '<think>\\n' }}" if self.opens else "")
        )

    def call(self, name: str, arguments: Mapping[str, object], *, odd: bool = False) -> str:
        """Return a tool call as the family writes it, or with odd white space between its parts."""
        if not self.tags:
            marks = (" ,", ": ") if odd else (", ", ": ")
            body = json.dumps({"name": name, "arguments": arguments}, separators=marks)
            return f"<tool_call>\n{body}\n</tool_call>"
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        lines = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()]
        end = "\n" if odd else ""
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}{end}</function>\n</tool_call>"

    def thought(self, prompt: str, text: str) -> str:
        """Return a thought as the answer's beginning; "" if thoughts are off."""
        if prompt.endswith("</think>\n\n"):
            return ""
        start = "" if prompt.endswith("<think>\n") else "<think>\n"
        return f"{start}{text}\n</think>\n\n"


MANNERS: Mapping[str, Manner] = MappingProxyType(
    {"qwen3": Manner(tags=False, opens=False), "qwen35": Manner(tags=True, opens=True)}
)


def write_model(family: str, path: Path) -> Path:
    """Write a model of one layer, with its family's special tokens and call format."""
    recipe = find_recipe(family, "tiny")
    recipe = replace(recipe, dims=replace(cut(recipe.dims, 1), context=CONTEXT))
    values = gguf_values(recipe, "q8_0") | {"tokenizer.chat_template": MANNERS[family].template}
    write_pieces(path, gguf_jobs(values, gguf_table(recipe, "q8_0"), Source(recipe, seed=3).jobs))
    return path
