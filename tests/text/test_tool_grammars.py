"""Grammars of tool calls: whatever llguidance lets through is read as calls that fit the schema."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from headroom.errors import RequestError
from headroom.text.answer_limits import compile_chat
from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.conversation import Conversation, OutputFormat, Tool, ToolChoice
from headroom.text.grammar import GrammarCompiler
from headroom.text.tool_formats import KNOWN_FORMATS, ToolFormat, find_tool_format
from headroom.text.tool_grammars import tool_grammar
from tests.text.tool_models import (
    NATIVE_MODELS,
    TOOL_MODELS,
    rendered_answer,
    tool_template,
    tool_tokenizer,
)

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["celsius", "kelvin"]},
            "exact": {"type": "boolean"},
            "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        },
        "required": ["city", "unit", "near"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {
                    "lat": {"type": "number", "minimum": -9, "maximum": 9},
                    "at": {"type": "string", "maxLength": 3},
                },
                "required": ["lat"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = Tool(name="now")
TOOLS = (WEATHER, NOW)
REQUIRED = ToolChoice(mode="required")


class _Tokens:
    """A small vocabulary as llguidance takes it."""

    is_tokenizer_wrapper = True

    def __init__(self, model: str) -> None:
        tokenizer = tool_tokenizer(model)
        known = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) for i in known]
        self.special_token_ids = [i for i in known if tokenizer.is_control(i)]
        self.bos_token_id = None
        self.eos_token_id = min(tokenizer.stop_ids)

    def __call__(self, text: str) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]


class Walker:
    """Writes random answers that a grammar allows."""

    def __init__(self, model: str) -> None:
        self.tokenizer = tool_tokenizer(model)
        self.form = find_tool_format(self.tokenizer, tool_template(model))
        self._tokens = _Tokens(model)
        vocab = len(self._tokens.tokens)
        self._trie = LLTokenizer(self._tokens, n_vocab=vocab)  # type: ignore[arg-type]

    def start(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._trie, grammar)
        assert not matcher.is_error(), (matcher.get_error(), grammar)
        return matcher

    def walk(
        self,
        grammar: str,
        dice: random.Random,
        most: int = 3000,
        texts: Sequence[str] = (),  # now and then one of these comes at once, where it may
    ) -> str | None:
        """Return an answer; None if it does not end."""
        matcher = self.start(grammar)
        text = b""
        for _ in range(most):
            if texts and dice.random() < 0.2:
                ids = self.tokenizer.encode(dice.choice(texts))
                if matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids):
                    text += b"".join(self._tokens.tokens[token] for token in ids)
                    continue
            allowed = self._allowed(matcher)
            if self._tokens.eos_token_id in allowed and dice.random() < 0.7:
                return text.decode(errors="replace")
            if not (others := [token for token in allowed if token != self._tokens.eos_token_id]):
                return text.decode(errors="replace")
            # Letters make strings long; marks and brackets end them.
            rare = [i for i in others if self._tokens.tokens[i] in b'"<>]}\n']
            token = dice.choice(rare if rare and dice.random() < 0.3 else others)
            matcher.consume_token(token)
            assert not matcher.is_error(), matcher.get_error()
            text += self._tokens.tokens[token]
        return None

    def accepts(self, grammar: str, answer: str) -> bool:
        """Whether a grammar allows an answer, marks as tokens."""
        matcher = self.start(grammar)
        ids = self.tokenizer.encode(answer)
        return bool(
            matcher.validate_tokens(ids) == len(ids)
            and matcher.consume_tokens(ids)
            and matcher.is_accepting()
        )

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        mask = matcher.compute_bitmask()
        bits = int.from_bytes(mask, "little")
        return [i for i in range(len(self._tokens.tokens)) if bits >> i & 1]


def parse(form: ToolFormat, tools: Sequence[Tool], answer: str) -> AnswerParts:
    parser = AnswerParser(tools=tools, format=form)
    return parser.push(answer) + parser.finish()


def check_calls(parts: AnswerParts, tools: Sequence[Tool], answer: str) -> int:
    schemas: dict[str, Any] = {tool.name: tool.parameters or {"maxProperties": 0} for tool in tools}
    calls = join_calls(parts.calls)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return len(calls)


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_answers_of_required_calls_are_calls_that_fit_the_schema(model: str) -> None:
    walker, dice = Walker(model), random.Random(model)
    grammar = tool_grammar(walker.form, TOOLS, REQUIRED)
    assert grammar is not None
    several = ended = 0
    for _ in range(40):
        answer = walker.walk(grammar, dice)
        if answer is None:
            continue
        parts = parse(walker.form, TOOLS, answer)
        assert parts.text == "", answer
        several += check_calls(parts, TOOLS, answer) > 1
        ended += 1
    assert ended > 20
    assert several or model.startswith("llama")


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_a_named_tool_is_called_once_also_where_calls_may_be_parallel(model: str) -> None:
    walker, dice = Walker(model), random.Random(model)
    choice = ToolChoice(mode="required", name="now", parallel=True)
    grammar = tool_grammar(walker.form, TOOLS, choice)
    assert grammar is not None
    for _ in range(5):
        answer = walker.walk(grammar, dice)
        assert answer is not None
        (call,) = join_calls(parse(walker.form, TOOLS, answer).calls)
        assert (call.name, json.loads(call.arguments)) == ("now", {})


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_strict_tools_limit_calls_and_leave_text_free(model: str) -> None:
    walker = Walker(model)
    strict = replace(WEATHER, strict=True)
    grammar = tool_grammar(walker.form, (strict, NOW), ToolChoice())
    assert grammar is not None
    assert walker.accepts(grammar, "Just text, 1 < 2 and a } too.")
    good = {"city": "x", "unit": "kelvin", "near": []}
    bad = {"city": "x", "unit": "newton", "near": []}
    assert walker.accepts(grammar, answer_of(model, good))
    assert not walker.accepts(grammar, answer_of(model, bad))


def answer_of(model: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model's template writes it, without the end of the turn."""

    call = {
        "type": "function",
        "id": "abcdefghi",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    return rendered_answer(model, {"role": "assistant", "content": "", "tool_calls": [call]})


def test_an_answer_that_may_be_anything_has_no_grammar() -> None:
    form = KNOWN_FORMATS[0]
    assert tool_grammar(form, (), REQUIRED) is None
    assert tool_grammar(form, TOOLS, ToolChoice()) is None
    assert tool_grammar(form, TOOLS, ToolChoice(mode="none")) is None


def test_a_choice_that_names_no_tool_is_refused() -> None:
    with pytest.raises(RequestError, match="no tool has that name") as caught:
        tool_grammar(KNOWN_FORMATS[0], TOOLS, ToolChoice(mode="required", name="rm"))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_an_output_format_and_tools_can_be_asked_for_together(model: str) -> None:
    tokenizer, template = tool_tokenizer(model), tool_template(model)
    schema = OutputFormat(kind="json_schema", value={"type": "object", "required": ["a"]})
    chat = Conversation(messages=(), tools=TOOLS, output_format=schema)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    form = find_tool_format(tokenizer, template)
    grammar = compile_chat(compiler, chat, form, after_thought=False)
    assert grammar is not None
    good = {"city": "x", "unit": "kelvin", "near": []}
    for answer, fits in (
        ('{"a": 1}', True),
        ('{"b": 1}', False),
        ("Text.", False),
        (answer_of(model, good), True),
    ):
        state = grammar.begin()
        for token in tokenizer.encode(answer):
            if not state.mask()[token // 32] >> token % 32 & 1:
                assert not fits, answer
                break
            state.advance(token)
        else:
            assert state.may_end == fits, answer


def calls_of_model(model: str, count: int, text: str = "") -> str:
    """Return calls of one tool as the model's template writes them, after a text."""
    function = {"name": "get_weather", "arguments": {"city": "x", "unit": "kelvin", "near": []}}
    calls = [
        {"type": "function", "id": f"abcdefgh{at}", "function": function} for at in range(count)
    ]
    return rendered_answer(model, {"role": "assistant", "content": text, "tool_calls": calls})


@pytest.mark.parametrize("model", sorted({*NATIVE_MODELS} - {"llama3"}))
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_several_calls_are_taken_only_if_calls_may_be_parallel(model: str, mode: Any) -> None:
    walker, strict = Walker(model), (replace(WEATHER, strict=True),)
    many = tool_grammar(walker.form, strict, ToolChoice(mode=mode))
    single = tool_grammar(walker.form, strict, ToolChoice(mode=mode, parallel=False))
    assert many is not None
    assert single is not None
    one, two, three = (calls_of_model(model, count).strip("\n") for count in (1, 2, 3))
    assert [walker.accepts(many, answer) for answer in (one, two, three)] == [True] * 3
    assert [walker.accepts(single, answer) for answer in (one, two, three)] == [True, False, False]


@pytest.mark.parametrize("model", sorted({*NATIVE_MODELS} - {"llama3"}))
def test_text_may_stand_around_calls_that_need_not_come(model: str) -> None:
    walker, strict = Walker(model), (replace(WEATHER, strict=True),)
    many = tool_grammar(walker.form, strict, ToolChoice())
    single = tool_grammar(walker.form, strict, ToolChoice(parallel=False))
    required = tool_grammar(walker.form, strict, REQUIRED)
    assert many is not None
    assert single is not None
    assert required is not None
    call = calls_of_model(model, 1).strip("\n")
    later = () if model == "mistral_list" else (many,)  # its only list ends the answer
    for answer, grammars in (
        (f"Well. {call}", (many, single)),
        (f"{call} And {call} Done.", later),
        (f"{call} Done.", later),
        ("Done.", (many, single)),
        ("", (many, single)),
        (call, (many, single, required)),
        (call[:-3], ()),
    ):
        taken = [g for g in (many, single, required) if walker.accepts(g, answer)]
        assert taken == list(grammars), answer


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_required_calls_between_tags_may_have_line_breaks_around_them(model: str) -> None:
    walker = Walker(model)
    grammar = tool_grammar(walker.form, (NOW,), REQUIRED)
    assert grammar is not None
    answer = next(
        found
        for seed in range(9)
        if (found := walker.walk(grammar, random.Random(seed))) is not None
        and len(join_calls(parse(walker.form, (NOW,), found).calls)) == 1
    ).strip("\n")
    tagged = walker.form.end == "</tool_call>"
    for before in range(4):
        for after in range(3):
            padded = "\n" * before + answer + "\n" * after
            fits = before <= 2 and after <= 1 if tagged else before == after == 0
            assert walker.accepts(grammar, padded) == fits, padded


def test_ids_of_calls_have_nine_letters_or_digits_where_the_model_writes_them() -> None:
    walker = Walker("mistral_list")
    grammar = tool_grammar(walker.form, (NOW,), REQUIRED)
    assert grammar is not None
    start = '[TOOL_CALLS][{"name": "now", "arguments": {}'
    for rest, fits in (
        ("}]", True),
        (', "id": "abcDEF123"}]', True),
        (', "id": "abcDEF12"}]', False),
        (', "id": "abcDEF1234"}]', False),
        (', "id": "abc-EF123"}]', False),
    ):
        assert walker.accepts(grammar, start + rest) == fits, rest
    walker = Walker("mistral_args")
    grammar = tool_grammar(walker.form, (NOW,), REQUIRED)
    assert grammar is not None
    for written, fits in (("[CALL_ID]abcDEF123", True), ("", False), ("[CALL_ID]abc", False)):
        assert walker.accepts(grammar, f"[TOOL_CALLS]now{written}[ARGS]{{}}") == fits, written
    without = replace(walker.form, writes_ids=False)
    grammar = tool_grammar(without, (NOW,), REQUIRED)
    assert grammar is not None
    assert walker.accepts(grammar, "[TOOL_CALLS]now[ARGS]{}")
    assert not walker.accepts(grammar, "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}")


def test_with_bare_json_an_answer_is_a_call_or_text_that_does_not_begin_like_one() -> None:
    walker = Walker("llama3")
    grammar = tool_grammar(walker.form, (replace(WEATHER, strict=True), NOW), ToolChoice())
    assert grammar is not None
    call = '{"name": "now", "parameters": {}}'
    for answer, fits in (
        (call, True),
        ("", True),
        ("Text with a { in it", True),
        ('{"a": 1}', False),
        (f"{call}; {call}", False),
        (f"{call} text", False),
    ):
        assert walker.accepts(grammar, answer) == fits, answer


@pytest.mark.parametrize(
    ("model", "opening", "value", "end", "longest"),
    [
        ("qwen35", "<parameter=", ">\nx\n</parameter>\n", "</function>\n</tool_call>", 200),
        ("laguna", "<arg_key>", "</arg_key>\n<arg_value>x</arg_value>\n", "</tool_call>", 200),
        ("gemma4", "", ':<|"|>x<|"|>', "}<tool_call|>", 100),
    ],
)
def test_names_of_arguments_that_no_schema_names_are_short(
    model: str, opening: str, value: str, end: str, longest: int
) -> None:
    starts = {
        "qwen35": "<tool_call>\n<function=any>\n",
        "laguna": "<tool_call>any\n",
        "gemma4": "<|tool_call>call:any{",
    }
    walker = Walker(model)
    free = Tool(name="any", parameters={"type": "object"})
    grammar = tool_grammar(walker.form, (free,), REQUIRED)
    assert grammar is not None
    for length, fits in ((0, False), (1, True), (longest, True), (longest + 1, False)):
        answer = f"{starts[model]}{opening}{'k' * length}{value}{end}"
        assert walker.accepts(grammar, answer) == fits, length
