"""The fields of all APIs that change an answer; a body refuses those that it does not declare.

Clients send fields of other servers, which are ignored if they change nothing. A field that would
change the answer is refused by name, so that no client takes the answer for what it asked for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headroom.server.refusals import RefusalError

Values = tuple[object, ...]

EMPTY: Values = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True, slots=True)
class AnswerField:
    """A field that changes an answer."""

    instead: tuple[str, ...] = ()  # fields of other bodies that say the same, the best one first
    harmless: Values = EMPTY  # values that change nothing


def _field(*instead: str, harmless: Values = ()) -> AnswerField:
    """Return a field that may be empty, or have one of the `harmless` values."""
    return AnswerField(instead, (*EMPTY, *harmless))


def _only(*harmless: object, instead: tuple[str, ...] = ()) -> AnswerField:
    """Return a field whose empty values change the answer, too, but for null and `harmless`."""
    return AnswerField(instead, (None, *harmless))


PROMPTS = ("messages", "input", "prompt")
SYSTEM = ("system", "instructions", "messages")
LENGTHS = ("max_output_tokens", "max_tokens", "options.num_predict", "num_predict")
STOPS = ("stop", "options.stop")
FORMATS = ("text.format", "response_format", "output_config.format", "format")
GRAMMARS = ("guided_grammar",)
EFFORTS = ("output_config.effort", "reasoning_effort", "think")
SWITCHES = ("thinking", "think")
BUDGETS = ("thinking.budget_tokens",)
PENALTIES = ("repetition_penalty", "options.repeat_penalty", "repeat_penalty")

ANSWER_FIELDS: Mapping[str, AnswerField] = {
    # What is answered.
    **{name: _field(*PROMPTS) for name in PROMPTS},
    **{name: _field(*SYSTEM) for name in ("system", "instructions")},
    **dict.fromkeys(("previous_response_id", "conversation"), _field("messages")),
    **dict.fromkeys(("images", "documents", "suffix", "echo", "prompt_embeds"), _field()),
    **dict.fromkeys(("container", "mcp_servers", "compaction", "context_management"), _field()),
    "truncation": _field("truncate", harmless=("disabled",)),
    "truncate_prompt_tokens": _field("truncation", "truncate"),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "mm_processor_kwargs"), _field()),
    "continue_final_message": _field(),
    "add_generation_prompt": _only(True),
    # Tools.
    "tools": _field(),
    "tool_choice": _field(harmless=("auto",)),
    "functions": _field("tools"),
    "function_call": _field("tool_choice", harmless=("auto",)),
    "web_search_options": _only(),
    # What the answer must match.
    "response_format": _field(*FORMATS, harmless=({"type": "text"},)),
    "text": _field(*FORMATS, harmless=({"format": {"type": "text"}},)),
    **dict.fromkeys(("format", "json_schema", "guided_json"), _field(*FORMATS)),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), _field(*GRAMMARS)),
    **dict.fromkeys(("guided_regex", "guided_choice", "structured_outputs", "regex"), _field()),
    # Thoughts. Where they are off anyway, see THOUGHTS_OFF.
    "reasoning_effort": _only("", instead=EFFORTS),
    "reasoning": _only("", {}, instead=EFFORTS),
    "enable_thinking": _only(instead=SWITCHES),
    "think": _only("", instead=SWITCHES),
    "thinking": _only({}, instead=SWITCHES),
    **dict.fromkeys(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget"),
        _only(-1, instead=BUDGETS),
    ),
    "reasoning_format": _field(harmless=("auto", "deepseek", "parsed")),
    # Length and end.
    **{
        name: _field(*LENGTHS, harmless=(-1,))
        for name in (
            *("max_tokens", "max_completion_tokens", "max_output_tokens"),
            *("n_predict", "num_predict"),
        )
    },
    "min_tokens": _field(),
    **dict.fromkeys(("stop", "stop_sequences"), _field(*STOPS, harmless=([""],))),
    **dict.fromkeys(("stop_token_ids", "include_stop_str_in_output", "ignore_eos"), _field()),
    # Sampling.
    "options": _field(),
    "temperature": _only(instead=("options.temperature",)),
    "seed": _only(-1, instead=("options.seed",)),
    "random_seed": _only(-1, instead=("seed", "options.seed")),
    "top_k": _field("options.top_k", harmless=(-1,)),
    "top_p": _field("options.top_p", harmless=(1,)),
    "min_p": _field("options.min_p"),
    "presence_penalty": _field("options.presence_penalty"),
    "frequency_penalty": _field("options.frequency_penalty"),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), _field(*PENALTIES, harmless=(1,))),
    "penalty_window": _only(instead=("options.repeat_last_n", "repeat_last_n")),
    "repeat_last_n": _field("penalty_window", "options.repeat_last_n", harmless=(64,)),
    **dict.fromkeys(("typical_p", "typical", "typ_p"), _field(harmless=(1,))),
    **dict.fromkeys(("tfs_z", "length_penalty"), _field(harmless=(1,))),
    "top_n_sigma": _field(harmless=(-1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier"), _field()),
    **dict.fromkeys(("samplers", "use_beam_search", "logits_processors", "lora"), _field()),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words"), _field()),
    # What is answered besides the text, and how often.
    **dict.fromkeys(("n", "best_of"), _field(harmless=(1,))),
    "logprobs": _field("include"),
    "top_logprobs": _field(),
    "prompt_logprobs": _only(),
    "skip_special_tokens": _only(True),
    "audio": _field(),
    "modalities": _field(harmless=(["text"],)),
    **dict.fromkeys(("background", "moderation"), _field()),
}
# Values by which clients ask for no thoughts; they change nothing where thoughts are off anyway.
THOUGHTS_OFF: Mapping[str, Values] = {
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "think", "thinking_budget"), EMPTY),
    **dict.fromkeys(("thinking_budget_tokens", "reasoning_budget"), EMPTY),
    "reasoning": (*EMPTY, {"effort": "none"}, {"enabled": False}),
    "thinking": (*EMPTY, {"type": "disabled"}),
    "chat_template_kwargs": ({"enable_thinking": False},),
}
# The fields that change the vector of a text.
VECTOR_FIELDS: Mapping[str, AnswerField] = {
    **{name: _field("input", "prompt") for name in PROMPTS},
    "truncate_prompt_tokens": _field("truncate"),
    "pooling": _field(),
    "normalize": _only(True),
    "output_dimension": _field("dimensions"),
    **dict.fromkeys(("prompt_name", "late_chunking"), _field()),
}


def refuse_undeclared(
    body: Mapping[str, Any],
    known: Mapping[str, AnswerField],  # the fields that matter to this body
    declared: Collection[str],  # the names of those that it reads
    harmless: Mapping[str, Values],  # further values that change nothing in this body
    prefix: str = "",  # of field names in errors, such as "options." for the fields of an object
) -> None:
    """Raise RefusalError if a body has a field that would change its answer and is not read."""
    for name, value in body.items():
        if name in declared or (field := known.get(name)) is None:
            continue
        if value in field.harmless or value in harmless.get(name, ()):
            continue
        others = (x for x in field.instead if x.partition(".")[0] in declared and x != name)
        other = next(others, None)
        message = (
            f"`{prefix}{name}` cannot be honoured; leave it out."
            if other is None
            else f"`{prefix}{name}` cannot be honoured here; use `{prefix}{other}`."
        )
        raise RefusalError(400, "unsupported_parameter", message, param=f"{prefix}{name}")
