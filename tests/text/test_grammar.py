"""Grammars: answers match their schema, regular expression, Lark grammar or choice."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from headroom.errors import HeadroomError, RequestError
from headroom.formats.vocabulary import Vocabulary
from headroom.text.conversation import OutputFormat
from headroom.text.grammar import (
    MOST_DIVISORS,
    Grammar,
    GrammarCompiler,
    GrammarState,
    Mask,
    check_divisors,
    token_bits,
)
from headroom.text.schema_faults import MOST_GRAMMAR_CHARACTERS
from headroom.text.spelling import BYTE_OF
from headroom.text.tokenizer import Tokenizer
from tests.text.small_vocabularies import gemma_vocabulary, sentencepiece_vocabulary

WORDS = ['{"', '":', '": "', '",', "true", "null", "ye", "yes", "no", "Ġ", "ĠĠ", "Ċ", "ĊĊ", "12"]
SPECIAL = ["<|end|>", "<|im_end|>", "<|user|>"]
UNUSED = "[PAD]"


def byte_level() -> Tokenizer:
    """Bytes, some words, one plain token in angle brackets, control tokens, and unused rows."""
    words = [word for word in WORDS if word not in BYTE_OF]
    tokens = [*BYTE_OF, *words, "<tool>", *SPECIAL, UNUSED]
    types = [*[1] * (len(BYTE_OF) + len(words)), 4, *[3] * len(SPECIAL), 5]
    return Tokenizer.from_vocabulary(
        Vocabulary(
            model="gpt2", pre="smollm", tokens=tokens, types=types, scores=[], merges=[],
            special_ids={"eos": tokens.index("<|end|>")}, add_bos=False,
        ),
        rows=len(tokens) + 3,
    )  # fmt: skip


def compiler(tokenizer: Tokenizer | None = None) -> GrammarCompiler:
    tokenizer = tokenizer or byte_level()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 5)


def allowed(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def texts(tokenizer: Tokenizer, state: GrammarState) -> set[str]:
    return {tokenizer.token_text(token) for token in allowed(state.mask())}


def write(tokenizer: Tokenizer, state: GrammarState, text: str) -> None:
    for byte in text.encode():
        token = tokenizer.find(next(c for c, b in BYTE_OF.items() if b == byte))
        assert token is not None
        assert token in allowed(state.mask()), f"{text!r}: {chr(byte)!r}"
        state.advance(token)


def finish(tokenizer: Tokenizer, state: GrammarState, seed: int, most: int = 3000) -> str | None:
    """Draw tokens evenly until the answer ends; None if it does not."""
    draw, ids = random.Random(seed), []
    for _ in range(most):
        token = draw.choice(sorted(allowed(state.mask())))
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids)
        state.advance(token)
        ids.append(token)
    return None


def schema_format(schema: Any) -> OutputFormat:
    return OutputFormat(kind="json_schema", value=schema)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_an_answer_of_a_schema_can_be_written_and_then_ends() -> None:
    made = compiler()
    state = made.compile([schema_format(PERSON)]).begin()
    write(made.tokenizer, state, '{"name": "Ada",\n  "age": 36}')
    assert allowed(state.mask()) == set(made.tokenizer.stop_ids)
    assert state.may_end


def test_every_stop_token_may_come_exactly_where_the_answer_may_end() -> None:
    made = compiler()
    stops = set(made.tokenizer.stop_ids)
    assert len(stops) == 2
    state = made.compile([OutputFormat(kind="regex", value="ab*")]).begin()
    for text, ends in (("a", False), ("b", True), ("b", True)):
        assert (stops <= allowed(state.mask())) is ends
        assert bool(stops & allowed(state.mask())) is ends
        write(made.tokenizer, state, text)


@pytest.mark.parametrize("name", SPECIAL[:2])
def test_any_stop_token_may_follow_a_complete_answer_for_ever(name: str) -> None:
    made = compiler()
    state = made.compile([OutputFormat(kind="choice", value=["a"])]).begin()
    write(made.tokenizer, state, "a")
    end = made.tokenizer.find(name)
    assert end is not None
    for _ in range(3):  # a request may ignore the end of its answer
        assert allowed(state.mask()) == set(made.tokenizer.stop_ids)
        state.advance(end)


def test_a_text_that_spells_a_control_token_is_written_in_plain_tokens() -> None:
    tokenizer = byte_level()
    spelled = OutputFormat(kind="choice", value=["a<|end|>b"])
    state = compiler(tokenizer).compile([spelled]).begin()
    write(tokenizer, state, "a<|end|>b")
    assert allowed(state.mask()) == tokenizer.stop_ids


def test_control_tokens_and_unused_rows_are_never_text() -> None:
    made = compiler()
    tokenizer = made.tokenizer
    free = allowed(made.compile([OutputFormat(kind="regex", value="(.|\\n)*")]).begin().mask())
    user, tool, padding = (tokenizer.find(name) for name in ("<|user|>", "<tool>", UNUSED))
    assert tool in free
    assert user not in free
    assert padding not in free
    assert max(free) < tokenizer.vocab_size - 3
    assert len(made.compile([OutputFormat(kind="regex", value="a")]).begin().mask()) == -(
        -made.vocab // 32
    )


def test_a_lark_grammar_may_name_control_tokens() -> None:
    made = compiler()
    grammar = OutputFormat(kind="lark", value='start: <|user|> "<tool>" /[0-9]+/')
    state = made.compile([grammar]).begin()
    user, tool = (made.tokenizer.find(name) for name in ("<|user|>", "<tool>"))
    assert user is not None
    assert tool is not None
    assert allowed(state.mask()) == {user}
    state.advance(user)
    assert tool in allowed(state.mask())
    state.advance(tool)
    write(made.tokenizer, state, "17")


CHOICES = ["yes", "no", 'a "quoted" one', "back\\slash", "line\nbreak", "é ☃", "a/b", "ye"]


def test_a_choice_is_one_of_its_texts_whatever_they_hold() -> None:
    made = compiler()
    grammar = made.compile([OutputFormat(kind="choice", value=CHOICES)])
    found = {finish(made.tokenizer, grammar.begin(), seed) for seed in range(120)}
    assert found == set(CHOICES)


@pytest.mark.parametrize("pattern", [r"[a-c]{2,4}-\d", r"(yes|no)/\w", r'"x"|\\', r"^abc$"])
def test_a_regular_expression_holds(pattern: str) -> None:
    made = compiler()
    grammar = made.compile([OutputFormat(kind="regex", value=pattern)])
    for seed in range(20):
        text = finish(made.tokenizer, grammar.begin(), seed)
        assert text is not None
        assert re.fullmatch(pattern, text)


def test_a_json_object_is_any_object() -> None:
    made = compiler()
    grammar = made.compile([OutputFormat(kind="json_object")])
    found = [finish(made.tokenizer, grammar.begin(), seed, most=400) for seed in range(40)]
    ended = [text for text in found if text is not None]
    assert len(ended) > 5
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_white_space_between_the_parts_of_a_json_text_is_limited() -> None:
    made = compiler()
    state = made.compile([schema_format(PERSON)]).begin()
    write(made.tokenizer, state, "{\n" + 32 * " ")
    blank = made.tokenizer.find("Ġ")
    assert blank not in allowed(state.mask())


@pytest.mark.parametrize(
    "vocabulary", [sentencepiece_vocabulary, gemma_vocabulary], ids=["sentencepiece", "gemma"]
)
@pytest.mark.parametrize("after_thought", [False, True])
def test_vocabularies_with_blank_marks_write_valid_answers(
    vocabulary: Any, after_thought: bool
) -> None:
    tokenizer = Tokenizer.from_vocabulary(vocabulary())
    made = compiler(tokenizer)
    grammar = made.compile([schema_format(PERSON)], after_thought=after_thought)
    found = [finish(tokenizer, grammar.begin(), seed) for seed in range(10)]
    assert None not in found
    for text in found:
        jsonschema.validate(json.loads(text or ""), PERSON)
    choice = made.compile([OutputFormat(kind="choice", value=["hello world", "he"])])
    chosen = {finish(tokenizer, choice.begin(), seed) for seed in range(30)}
    assert chosen == {"hello world", "he"}


def test_an_answer_that_continues_text_does_not_begin_with_a_blank() -> None:
    tokenizer = Tokenizer.from_vocabulary(sentencepiece_vocabulary())
    wanted, made = [OutputFormat(kind="choice", value=["hello"])], compiler(tokenizer)
    blank = {" ", " h", " he", " hello"}
    assert texts(tokenizer, made.compile(wanted).begin()) & blank
    assert not texts(tokenizer, made.compile(wanted, continues=True).begin()) & blank


def test_forced_text_is_written_with_the_tokens_that_the_model_would_write() -> None:
    tokenizer = Tokenizer.from_vocabulary(sentencepiece_vocabulary())
    state = (
        compiler(tokenizer).compile([OutputFormat(kind="lark", value='start: "xhello"')]).begin()
    )
    first = tokenizer.find("<0x78>")
    assert first is not None
    state.advance(first)
    assert texts(tokenizer, state) == {"hello"}  # not "▁hello", which would add a blank


def test_white_space_after_a_thought_may_come_before_the_answer() -> None:
    made = compiler()
    grammar = made.compile([schema_format(PERSON)], after_thought=True)
    for leading in ("", "\n", "\n\n"):
        write(made.tokenizer, grammar.begin(), leading + '{"name": "A", "age": 3}')
    double = made.tokenizer.find("ĊĊ")
    assert double in allowed(grammar.begin().mask())
    assert double not in allowed(made.compile([schema_format(PERSON)]).begin().mask())


def test_a_grammar_goes_on_from_the_first_words_of_an_answer_wherever_they_end() -> None:
    made = compiler()
    text = '{"name": "Adé", "age": 12}'
    for cut in range(len(text) + 1):
        grammar = made.compile([schema_format(PERSON)], continues=True, begun=text[:cut])
        written = made.compile([schema_format(PERSON)]).begin()
        write(made.tokenizer, written, text[:cut])
        assert allowed(grammar.begin().mask()) == allowed(written.mask())
        rest = grammar.begin()
        write(made.tokenizer, rest, text[cut:])
        assert rest.may_end


@pytest.mark.parametrize(
    ("begun", "matches"), [('{"name": 3', 9), ("Sure: {", 0), ('{"name": "A", "age": 1} ', 23)]
)
def test_first_words_that_do_not_match_are_refused_with_how_far_they_do(
    begun: str, matches: int
) -> None:
    told = f"only its first {matches} of {len(begun)} characters do"
    with pytest.raises(RequestError, match=told) as caught:
        compiler().compile([schema_format(PERSON)], continues=True, begun=begun)
    assert caught.value.param == "response_format"


def test_answers_of_one_grammar_do_not_share_a_state() -> None:
    made = compiler()
    grammar = made.compile([OutputFormat(kind="choice", value=["yes", "no"])])
    first, second = grammar.begin(), grammar.begin()
    write(made.tokenizer, first, "yes")
    write(made.tokenizer, second, "no")
    assert first.may_end
    assert second.may_end


def test_a_grammar_is_compiled_once() -> None:
    made = compiler()
    one = made.compile([schema_format(dict(PERSON))])
    assert made.compile([schema_format(dict(PERSON))]) is one
    assert made.compile([schema_format(PERSON)], after_thought=True) is not one


def test_a_token_that_may_not_come_is_an_error() -> None:
    made = compiler()
    state = made.compile([OutputFormat(kind="choice", value=["yes"])]).begin()
    token = made.tokenizer.find("n")
    assert token is not None
    with pytest.raises(HeadroomError, match="grammar failed"):
        state.advance(token)


def nested(part: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a/b": {"type": "array", "items": part}}}


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        (nested({"not": {"type": "string"}}), "/properties/a~1b/items", "`not` cannot be enforced"),
        (nested({"type": "text"}), "/properties/a~1b/items", "Invalid type: text"),
        ({"$ref": "#/$defs/x"}, "its root", "does not exist"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "/anyOf/1", "`not` cannot be enforced"),
        ({"enum": []}, "its root", "anyOf is empty"),
        ({"$defs": {"x": {"uniqueItems": True}}, **nested({"$ref": "#/$defs/x"})},
         "/$defs/x", "`uniqueItems` cannot be enforced"),
        (nested({"oneOf": [{"type": "object"}, {"type": "object"}]}),
         "/properties/a~1b/items", "the choices of `oneOf` do not exclude each other"),
        ({**nested({}), "required": ["b"], "additionalProperties": False}, "its root",
         "required member 'b'"),
        (nested({"$ref": "https://example.org/s"}), "/properties/a~1b/items",
         "'https://example.org/s' is not a part of the schema"),
        (nested({"type": "string", "pattern": "(?=a)b"}), "/properties/a~1b/items", "look-around"),
        ({"type": "integer", "minimum": 9, "maximum": 3}, "its root", "greater than maximum"),
        (False, "its root", "false"),
        ({"$ref": "#"}, "its root", "no answer can match"),
        ({"properties": {"a": 5}}, "/properties/a", "a schema is not an object"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_path(
    schema: Any, path: str, reason: str
) -> None:
    with pytest.raises(RequestError) as refused:
        compiler().compile([schema_format(schema)])
    assert f"at {path}: " in refused.value.message
    assert reason in refused.value.message
    assert "coerce_one_of" not in refused.value.message
    assert len(refused.value.message.splitlines()) == 1
    assert refused.value.param == "response_format"


KINDS = {
    name: {
        "type": "object",
        "properties": {"kind": {"const": name, "default": name}, **more},
        "required": list(more),
        "additionalProperties": False,
    }
    for name, more in {
        "cat": {"lives": {"type": "integer"}},
        "dogs": {"names": {"type": "array", "items": {"$ref": "#/$defs/pet"}}},
    }.items()
}
PET = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dogs"}],
    "discriminator": {"propertyName": "kind"},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": KINDS | {"pet": PET}, **PET},
        {"$defs": KINDS | {"pet": PET}, "$ref": "#/$defs/pet"},
        {"$defs": KINDS | {"pet": PET}, **PET, "oneOf": list(KINDS.values())},
    ],
)
def test_the_field_of_a_discriminator_tells_the_choices_apart_and_is_always_written(
    schema: Any,
) -> None:
    made = compiler()
    grammar = made.compile([schema_format(schema)])
    for text in ('{"kind": "cat", "lives": 9}', '{"kind": "dogs", "names": [{"kind": "cat", "l'):
        write(made.tokenizer, grammar.begin(), text)
    for text in ('{"lives', '{"kind": "cat", "n', '{"kind": "dogs", "names": [{"l'):
        with pytest.raises(AssertionError):
            write(made.tokenizer, grammar.begin(), text)
    assert "required" in KINDS["cat"]
    assert KINDS["cat"]["required"] == ["lives"]  # the client's schema stays as it is


def test_of_several_formats_the_schema_that_fails_is_named() -> None:
    calls = OutputFormat(kind="lark", value='start: "a"', param="tools")
    with pytest.raises(RequestError, match="JSON schema cannot be used, at its root") as refused:
        compiler().compile([calls, schema_format({"not": {"type": "null"}})])
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "", "empty str"),
        ("regex", None, "NoneType"),
        ("lark", "start: b", "unknown name"),
        ("choice", [], "empty list"),
        ("choice", ["a", ""], "not empty"),
        ("choice", "yes", "list of texts"),
        ("json_schema", [1], "an object"),
        (
            "json_schema",
            {
                "anyOf": [
                    {"multipleOf": 99_991},
                    {"multipleOf": 0.37},
                    {"items": {"multipleOf": 99_991}},
                ]
            },
            "add up to 200,019",
        ),
        ("choice", ["\ud800"], "list of choices cannot be used"),
        ("lark", "start: start", "no answer can match"),
        ("json_schema", {"enum": ["x" * 300_000]}, "300,1"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: Any, value: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        compiler().compile([OutputFormat(kind=kind, value=value, param="text.format")])
    assert refused.value.param == "text.format"


def test_a_panic_of_the_compiler_is_a_refusal_without_its_backtrace() -> None:
    schema = {"type": "object", "required": "🙂" * 40}  # cut within a character for a message
    with pytest.raises(RequestError, match="at its root: panic: ") as refused:
        compiler().compile([schema_format(schema)])
    assert "backtrace" not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    for depth in (200, 5000):
        schema: dict[str, Any] = {"type": "null"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        with pytest.raises(RequestError, match=r"nested too deeply|recursion limit"):
            compiler().compile([schema_format(schema)])


def test_formats_that_no_grammar_knows_restrict_nothing() -> None:
    made = compiler()
    state = made.compile([schema_format({"type": "string", "format": "zip-code"})]).begin()
    write(made.tokenizer, state, '"any"')
    # A property may have the name of a keyword.
    schema = {"type": "object", "properties": {"format": {"const": "zip"}}, "required": ["format"]}
    state = made.compile([schema_format({**schema, "additionalProperties": False})]).begin()
    write(made.tokenizer, state, '{"format": "zip"}')


def test_a_model_without_a_stop_token_has_no_grammars() -> None:
    vocabulary = Vocabulary(
        model="gpt2", pre="smollm", tokens=list(BYTE_OF), types=[1] * 256, scores=[], merges=[],
        special_ids={}, add_bos=False,
    )  # fmt: skip
    with pytest.raises(RequestError, match="no token that ends an answer"):
        compiler(Tokenizer.from_vocabulary(vocabulary)).compile([OutputFormat(kind="json_object")])


def test_masks_of_tokens_have_a_bit_for_each() -> None:
    assert token_bits([0, 31, 32, 70], 71).tolist() == [1 + (1 << 31), 1, 1 << 6]


def test_the_latest_64_grammars_are_kept() -> None:
    made = compiler()

    def grammar(text: str) -> Grammar:
        return made.compile([OutputFormat(kind="choice", value=[text])])

    first, second = grammar("first"), grammar("second")
    for number in range(62):
        grammar(str(number))
    assert grammar("first") is first  # it is now the latest one
    grammar("one too many")
    assert grammar("first") is first
    assert grammar("second") is not second


def test_divisors_and_characters_may_have_their_limits_and_no_more() -> None:
    made = compiler()
    check_divisors({"multipleOf": MOST_DIVISORS - 1}, "tools")
    check_divisors({"anyOf": [{"multipleOf": MOST_DIVISORS - 1}, {"multipleOf": 10}]}, "tools")
    with pytest.raises(RequestError, match="add up to 100,001; at most 100,000") as caught:
        check_divisors({"anyOf": [{"multipleOf": MOST_DIVISORS - 1}, {"multipleOf": 2}]}, "tools")
    assert caught.value.param == "tools"
    frame = len('{"grammars": [{"lark_grammar": "start: \\"\\""}]}')
    longest = "x" * (MOST_GRAMMAR_CHARACTERS - frame)
    assert made.compile([OutputFormat(kind="choice", value=[longest])]).count_matching([87]) == 1
    with pytest.raises(RequestError, match="has 262,145 characters; at most 262,144"):
        made.compile([OutputFormat(kind="choice", value=[longest + "x"])])


def test_a_grammar_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for kind, value in (("lark", "start: b"), ("regex", "("), ("json_schema", {"type": "text"})):
        with pytest.raises(RequestError):
            compiler().compile([OutputFormat(kind=kind, value=value)])  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("drops_blank", [False, True])
@pytest.mark.parametrize("after_thought", [False, True])
@pytest.mark.parametrize("continues", [False, True])
def test_only_what_models_write_before_an_answer_may_come_before_it(
    drops_blank: bool, after_thought: bool, continues: bool
) -> None:
    vocabulary = replace(sentencepiece_vocabulary(), add_bos=False)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, blank_prefix=drops_blank)
    grammar = compiler(tokenizer).compile(
        [OutputFormat(kind="choice", value=["hello"])],
        after_thought=after_thought,
        continues=continues,
    )
    blank, line = tokenizer.find("▁"), tokenizer.find("<0x0A>")
    assert blank is not None
    assert line is not None
    blanks = drops_blank and (after_thought or not continues)
    assert (grammar.count_matching([blank]) == 1) == blanks
    for count in range(1, 4):
        lines = grammar.count_matching([line] * count) == count
        assert lines == (after_thought and count <= 2)
