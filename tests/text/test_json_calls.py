"""Calls that are written as JSON are told from other JSON, and their small mistakes mended."""

import json

import pytest

from headroom.text.answer_parser import AnswerParser
from headroom.text.conversation import Tool
from tests.text.call_reading import (
    ANY,
    GEMMA,
    LLAMA,
    MISTRAL,
    TAGS,
    TOOLS,
    check,
    read_in_all_ways,
)


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ('{"name": "write", "arguments": {"text": "a"}', {"text": "a"}),
        ('{"name": "write", "arguments": {"text": ["a", {"b": 1}', {"text": ["a", {"b": 1}]}),
        ('{"name": "write", "arguments": {"text": "a",},}', {"text": "a"}),
        ('{"name": "write", "arguments": {"text": None, "b": [True, 1,]}}',
         {"text": None, "b": [True, 1]}),
        ('{"name": "write", "arguments": {"text": "a\n\tb \\d \\u00e9 \\ud83d\\udc4d \\ud83d!"}}',
         {"text": "a\n\tb \\d é 👍 \ufffd!"}),
        ('{"arguments": {"text": "a"}, "name": "write"}', {"text": "a"}),
        ('{"type": "function", "function": {"name": "write", "arguments": {"text": "a"}}}',
         {"text": "a"}),
        ('{"name": "write", "arguments": "{\\"text\\": \\"a\\"}"}', {"text": "a"}),
        ('{"name": "write", "arguments": null}', {}),
        ('{"name": "write", "type": "function", "arguments": {"text": "a"}, "id": "x"}',
         {"text": "a"}),
        ('{"name": "write"}', {}),
        ("{'name': 'write', 'arguments': {'text': 'it\\'s \"a\"\\n', 'all': True, 'b': ['c', 1]}}",
         {"text": 'it\'s "a"\n', "all": True, "b": ["c", 1]}),
        ("""{"name": "write", "arguments": {'text': "it's", 'old': '\\d"\\\\'}}""",
         {"text": "it's", "old": '\\d"\\'}),
    ],
)  # fmt: skip
def test_small_mistakes_in_json_are_mended(answer: str, arguments: object) -> None:
    check(TAGS, f"<tool_call>\n{answer}\n</tool_call>", "", ("write", arguments))


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "write", "age": 3, "bio": "a long text"}',
        '{"age": 3, "name": "write"}',
        '{"name": "write", "text": "a"}',
        '{"name": "write", "type": "dog"}',
        '{"name": "write", "id": "x"}',
        '{"name": "write", "arguments": 5}',
        '{"name": "write", "name": "now"}',
        '{"name": "write", "bio": "a", "arguments": {"text": "a"}}',
        '{"function": {"name": "write", "description": "d", "parameters": {}}}',
        '{"name": "wri',
        '{"name": "write"',
        '{"name": "write", "arg',
        '{"name": "search"}',
    ],
)
def test_json_without_a_mark_that_merely_has_a_tool_s_name_stays_text(answer: str) -> None:
    search = Tool(name="search", parameters={"required": ["query"]})
    for form in (LLAMA, ANY):
        check(form, answer, answer, tools=(*TOOLS, search))


def test_json_without_a_mark_that_has_nothing_but_a_name_is_a_call() -> None:
    for form in (LLAMA, ANY):
        check(form, '{"name": "now"}', "", ("now", {}))
        check(form, '{"type": "function", "name": "now"}', "", ("now", {}))
        check(form, '{"type": "function", "function": {"name": "now"}}', "", ("now", {}))


def test_arguments_beside_the_name_are_read_after_a_mark() -> None:
    check(
        TAGS,
        '<tool_call>{"name": "get_weather", "city": "x", "days": "2", "box": {"a": [1]}}'
        "</tool_call>",
        "",
        ("get_weather", {"city": "x", "days": 2, "box": {"a": [1]}}),
    )
    delete = Tool(name="delete", parameters={"properties": {"id": {"type": "string"}}})
    check(
        TAGS,
        '<tool_call>{"id": "a", "name": "delete"}</tool_call>',
        "",
        ("delete", {"id": "a"}),
        tools=[delete],
    )
    for answer in (
        '<tool_call>{"name": "write", "a": 5}</tool_call>',
        '<tool_call>{"name": "write", "text": "a", "b": 5}</tool_call>',
        '<tool_call>{"name": "write", "text": "a", "arguments": {"text": "b"}}</tool_call>',
        '<tool_call>{"name": "write", "type": "note"}</tool_call>',
        '<tool_call>{"name": "write", "tex',
    ):
        check(TAGS, answer, answer)


def test_fields_after_the_arguments_become_text() -> None:
    fields = '"note": "a long text", "id": "x", "why": {"a": [1]}'
    whole = f'{{"name": "write", "arguments": {{"text": "a"}}, {fields}}}'
    shown = '"note": "a long text", "why": {"a": [1]}'
    check(TAGS, f"<tool_call>{whole}</tool_call>", shown, ("write", {"text": "a"}))
    check(TAGS, f"Hm. <tool_call>{whole}</tool_call>", f"Hm. {shown}", ("write", {"text": "a"}))
    check(LLAMA, whole, shown, ("write", {"text": "a"}))
    check(
        MISTRAL,
        f'[TOOL_CALLS][{whole}, {{"name": "now", "arguments": {{}}}}]',
        shown,
        ("write", {"text": "a"}),
        ("now", {}),
    )


def test_the_place_of_a_field_after_the_arguments_is_known() -> None:
    field = '"note": "b"'
    answer = f'<tool_call>{{"name": "write", "arguments": {{"text": "a"}}, {field}}}</tool_call>'
    for pieces in ([answer], list(answer)):
        parser = AnswerParser(tools=TOOLS, format=TAGS)
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        shown = [
            character for place, character in enumerate(answer) if parser.is_text(place, place + 1)
        ]
        assert "".join(shown) == field


def test_arguments_of_a_json_call_come_as_they_are_written() -> None:
    for form, mark in ((TAGS, "<tool_call>"), (LLAMA, "")):
        parser = AnswerParser(tools=TOOLS, format=form)
        assert parser.push(f'{mark}{{"name": "write", "arg').calls == ()
        (named,) = parser.push('uments": ').calls + parser.push("{").calls[:1]
        assert (named.name, named.arguments) == ("write", "")
        pieces = [parser.push(piece) for piece in ('"text": "', "ab", "c", '"}', "}")]
        written = ["".join(delta.arguments for delta in parts.calls) for parts in pieces]
        assert written == ['"text": "', "ab", "c", '"}', ""]


def test_strings_become_the_scalars_that_the_schema_of_a_json_call_demands() -> None:
    written = (
        '{"city": "1", "days": "2", "wind": "2.5", "exact": "True", "note": "3", '
        '"near": "[]", "box": {"days": "1"}, "other": "4"}'
    )
    typed = json.loads(written) | {"days": 2, "wind": 2.5, "exact": True}
    quoted = json.dumps(written)
    call = ("get_weather", typed)
    for form, answer in (
        (TAGS, f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>'),
        (TAGS, f'<tool_call>{{"arguments": {written}, "name": "get_weather"}}</tool_call>'),
        (TAGS, f'<tool_call>{{"name": "get_weather", "arguments": {quoted}}}</tool_call>'),
        (TAGS, f"<function=get_weather>{written}</function>"),
        (LLAMA, f'{{"name": "get_weather", "parameters": {written}}}'),
        (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{written}"),
    ):
        check(form, answer, "", call)
    check(
        TAGS,
        '<tool_call>{"name": "get_weather", "arguments": {"days": "two", "exact": "1"}}'
        "</tool_call>",
        "",
        ("get_weather", {"days": "two", "exact": "1"}),
    )
    check(
        GEMMA,
        '<|tool_call>call:get_weather{days:<|"|>2<|"|>,city:<|"|>2<|"|>,wind:<|"|>low<|"|>}',
        "",
        ("get_weather", {"days": 2, "city": "2", "wind": "low"}),
    )


@pytest.mark.parametrize(
    "arguments", ['{"text": ', '{"text": {"a": 1, "b":\n', '{"text": "a", ', '{"text": [1, ', "{"]
)
def test_arguments_that_break_off_are_those_that_were_written(arguments: str) -> None:
    result = read_in_all_ways(TAGS, f'<tool_call>{{"name": "write", "arguments": {arguments}')
    assert result.calls == [("write", arguments)]
    assert result.text == ""


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_call_that_breaks_off_in_its_markup_has_no_text(quote: str) -> None:
    for written in (
        '<tool_call>{"name": "now", "arguments": {',
        '<tool_call>{"name": "now", "arguments": {}, "type": "function", "id": "x"}',
        '<tool_call>{"name": "now", "id": "abc", "argum',
    ):
        answer = written.replace('"', quote)
        for end in range(answer.index("now") + 4, len(answer) + 1):
            result = read_in_all_ways(TAGS, answer[:end])
            assert [name for name, _ in result.calls] == ["now"]
            assert result.text == "", answer[:end]
