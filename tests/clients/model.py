"""A tiny model file with random weights and a chat template in the manner of Qwen3's."""

from dataclasses import replace
from pathlib import Path

from headroom.families.synth.recipe import cut, find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import gguf_table, gguf_values
from headroom.formats.gguf_writer import gguf_jobs
from headroom.formats.writing import write_pieces

# Agents send prompts of up to 80 kB, and the tiny vocabulary spells most of it byte by byte.
CONTEXT = 160_000

# Tools stand in the system turn, calls are JSON between <tool_call> marks, results are user turns,
# thoughts of earlier turns are dropped: as Qwen3's own template has it, in other words.
TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or first %}
{{- '<|im_start|>system\\n' }}
{%- if first %}{{- first.content + '\\n\\n' }}{%- endif %}
{%- if tools %}
{{- '# Tools\\n\\nThese functions can be called:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call one, write a JSON object between these marks:\\n' }}
{{- '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n' }}
{{- '</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '').split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{\\"name\\": \\"' + function.name + '\\", \\"arguments\\": ' }}
{%- if function.arguments is string %}{{- function.arguments }}
{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
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
{%- endif %}
{%- endif %}
"""


def write_qwen3(path: Path) -> Path:
    """Write a Qwen3 of one layer, with Qwen3's special tokens and the template above."""
    recipe = find_recipe("qwen3", "tiny")
    recipe = replace(recipe, dims=replace(cut(recipe.dims, 1), context=CONTEXT))
    values = {**gguf_values(recipe, "q8_0"), "tokenizer.chat_template": TEMPLATE}
    write_pieces(path, gguf_jobs(values, gguf_table(recipe, "q8_0"), Source(recipe, seed=3).jobs))
    return path
