"""Fields that say what an answer must match, of OpenAI, vLLM, llama.cpp and SGLang."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headroom.server.output_formats import FormatFields
from headroom.server.refusals import RefusalError
from headroom.text.conversation import OutputFormat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = OutputFormat(kind="json_schema", value=SCHEMA)
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
LARK = 'start: "a" | "b"'


def read(**body: Any) -> OutputFormat | None:
    return FormatFields.model_validate(body).output_format()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat(kind="json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, OF_SCHEMA),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, OF_SCHEMA),
        ({"guided_regex": "a+"}, OutputFormat(kind="regex", value="a+")),
        ({"regex": "a+"}, OutputFormat(kind="regex", value="a+")),
        ({"guided_choice": ["a", "b"]}, OutputFormat(kind="choice", value=["a", "b"])),
        ({"guided_grammar": LARK}, OutputFormat(kind="lark", value=LARK)),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, OutputFormat(kind="json_object")),
        ({"structured_outputs": {"regex": "a+", "json": None}},
         OutputFormat(kind="regex", value="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, OutputFormat(kind="choice", value=["a"])),
        ({"structured_outputs": {"grammar": LARK}}, OutputFormat(kind="lark", value=LARK)),
        ({"structured_outputs": {}}, None),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"grammar": LARK}, OutputFormat(kind="lark", value=LARK)),
        ({"grammar": "", "guided_choice": [], "response_format": None}, None),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, OF_SCHEMA),
    ],
)  # fmt: skip
def test_each_field_says_what_an_answer_must_match(
    body: dict[str, Any], expected: OutputFormat | None
) -> None:
    found = read(**body)
    if found is not None and expected is not None:
        assert found.param.partition(".")[0] in body
        found = replace(found, param=expected.param)
    assert found == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_met_is_refused_by_its_field(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusalError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_grammar_of_llama_cpp_is_refused_by_its_name() -> None:
    with pytest.raises(RefusalError, match="GBNF"):
        read(grammar='root ::= "a"')


def test_a_format_remembers_the_field_that_asks_for_it() -> None:
    named = read(response_format={"type": "json_schema", "json_schema": NAMED})
    assert named is not None
    assert named.param == "response_format.json_schema.schema"
    inner = read(structured_outputs={"regex": "a+"})
    assert inner is not None
    assert inner.param == "structured_outputs.regex"
