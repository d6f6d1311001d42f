"""Chat templates that write prompts of each family's shape: turns, thinking on and off, tools."""

_TURNS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
"""
_QWEN_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
"""
_NO_THOUGHT = "{{- '<think>\\n\\n</think>\\n\\n' }}\n"

SMOLLM = _TURNS + "{%- endif %}\n"
QWEN3 = (
    _QWEN_TOOLS
    + _TURNS
    + "{%- if enable_thinking is defined and not enable_thinking %}\n"
    + _NO_THOUGHT
    + "{%- endif %}\n{%- endif %}\n"
)
QWEN35 = (
    _QWEN_TOOLS
    + _TURNS
    + "{%- if enable_thinking is defined and not enable_thinking %}\n"
    + _NO_THOUGHT
    + "{%- else %}\n{{- '<think>\\n' }}\n{%- endif %}\n{%- endif %}\n"
)
LAGUNA = """\
{{- '\u3008|EOS|\u3009' }}
{%- for message in messages %}
{{- '<' + message.role + '>\\n' + message.content + '\\n</' + message.role + '>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>\\n' }}
{{- '<think>' if enable_thinking is defined and enable_thinking else '</think>' }}
{%- endif %}
"""
GEMMA = """\
{{- bos_token }}
{%- set thinks = enable_thinking is defined and enable_thinking %}
{%- if thinks and messages[0].role != 'system' %}
{{- '<|turn>system\\n<|think|><turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<|turn>' + role + '\\n' }}
{%- if thinks and loop.first and role == 'system' %}
{{- '<|think|>' }}
{%- endif %}
{{- message.content + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- if not thinks %}
{{- '<|channel>thought\\n<channel|>' }}
{%- endif %}
{%- endif %}
"""
