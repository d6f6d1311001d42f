"""CallParser: calls and text are told apart in every format, however the answer is cut."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.conversation import Tool
from headroom.text.tool_formats import (
    ToolFormat,
    read_any,
    read_bare_json,
    read_marked_list,
    read_plain_keys,
    read_tagged,
)

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "wind": {"type": "number"},
                "exact": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
                "near": {"type": "array", "items": {"type": "string"}},
                "box": {"$ref": "#/$defs/box"},
            },
            "$defs": {"box": {"type": "object"}},
        },
    ),
    Tool(name="write", parameters={"properties": {"text": {"type": "string"}}}),
    Tool(name="now"),
)
TAGS = ToolFormat(name="json_tags", starts=("<tool_call>", "<function="), read=read_tagged)
GEMMA = ToolFormat(name="plain_keys", starts=("<|tool_call>",), read=read_plain_keys)
LLAMA = ToolFormat(
    name="bare_json", starts=("<|python_tag|>",), read=read_bare_json, begins_bare=True
)
MISTRAL = ToolFormat(
    name="named_json", starts=("[TOOL_CALLS]",), read=read_marked_list, short_ids=True
)
ANY = ToolFormat(
    name="json_tags",
    starts=("<tool_call>", "<function="),
    read=read_any,
    begins_bare=True,
    native=False,
)


@dataclass(frozen=True)
class Read:
    """The parts of an answer."""

    text: str
    calls: list[tuple[str, str]]  # name and arguments, as text


def read(form: ToolFormat, pieces: list[str], tools: Sequence[Tool] = TOOLS) -> Read:
    parser, parts = AnswerParser(tools=tools, format=form), AnswerParts()
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    assert parser.held == 0
    calls = join_calls(parts.calls)
    assert all(call.id for call in calls)
    return Read(parts.text, [(call.name, call.arguments) for call in calls])


def read_in_all_ways(form: ToolFormat, answer: str, tools: Sequence[Tool] = TOOLS) -> Read:
    """Read an answer whole, character by character and cut once at each place."""
    whole = read(form, [answer], tools)
    assert read(form, list(answer), tools) == whole
    for place in range(len(answer)):
        assert read(form, [answer[:place], answer[place:]], tools) == whole
    return whole


def check(
    form: ToolFormat,
    answer: str,
    text: str,
    *calls: tuple[str, object],
    tools: Sequence[Tool] = TOOLS,
) -> None:
    result = read_in_all_ways(form, answer, tools)
    assert result.text == text
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == list(calls)


def test_json_in_tags_becomes_a_call() -> None:
    check(
        TAGS,
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n'
        '</tool_call>\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
        "I look.",
        ("get_weather", {"city": "Köln", "days": 2}),
        ("now", {}),
    )


def test_a_list_between_one_pair_of_tags_is_several_calls() -> None:
    check(
        TAGS,
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "write", "arguments": '
        '{"text": "a"}}]</tool_call>!',
        "!",
        ("now", {}),
        ("write", {"text": "a"}),
    )


def test_an_end_tag_in_a_string_of_json_is_a_part_of_it() -> None:
    inside = "</parameter>\n</function>\n</tool_call>"
    check(
        TAGS,
        f"<function=get_weather><parameter=near>[{json.dumps(inside)}]</parameter>"
        "<parameter=box>{}</parameter></function>",
        "",
        ("get_weather", {"near": [inside], "box": {}}),
    )
    inside = "</arg_value><arg_key>"
    check(
        TAGS,
        f"<tool_call>get_weather<arg_key>box</arg_key><arg_value>{json.dumps({inside: inside})}"
        "</arg_value></tool_call>",
        "",
        ("get_weather", {"box": {inside: inside}}),
    )


def test_names_of_arguments_are_written_as_they_are() -> None:
    result = read_in_all_ways(
        TAGS, "<function=now><parameter=Größe>3</parameter><parameter=b>4</parameter></function>"
    )
    ((_, arguments),) = result.calls
    assert arguments.startswith('{"Größe": ')


def test_brackets_that_json_leaves_open_are_closed_at_the_end_of_the_function() -> None:
    for end in ("</function>", "</function></tool_call>"):
        check(
            TAGS,
            f'<function=write>{{"text": "a"{end} and on',
            "and on",
            ("write", {"text": "a"}),
        )


def test_json_with_a_string_that_does_not_end_ends_at_the_first_tag() -> None:
    result = read_in_all_ways(
        TAGS,
        '<function=get_weather><parameter=near>["a]</parameter><parameter=box>{}</parameter>'
        "</function>",
    )
    ((name, arguments),) = result.calls
    assert (name, result.text) == ("get_weather", "")
    assert json.loads(arguments) == {"near": '["a]', "box": {}}


def test_function_tags_become_a_call_with_typed_arguments() -> None:
    check(
        TAGS,
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n"B"\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=wind>\n2.5\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        '<parameter=near>\n["x", "ü"]\n</parameter>\n<parameter=box>\n{"a": [1]}\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        (
            "get_weather",
            {
                "city": 'A\n"B"\n',
                "days": 3,
                "wind": 2.5,
                "exact": True,
                "note": None,
                "near": ["x", "ü"],
                "box": {"a": [1]},
            },
        ),
    )


def test_a_value_that_does_not_fit_its_type_stays_a_string() -> None:
    check(
        TAGS,
        "<function=get_weather><parameter=days>two</parameter><parameter=near>[1,</parameter>"
        "<parameter=other>5</parameter><parameter=note>5</parameter></function>",
        "",
        ("get_weather", {"days": "two", "near": "[1,", "other": 5, "note": "5"}),
    )


def test_an_end_mark_inside_a_value_is_a_part_of_it() -> None:
    value = "<config>\n<parameter name='x'>1</parameter>\n</config>\n</parameter> </function"
    check(
        TAGS,
        f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
        "</tool_call> bye",
        "bye",
        ("write", {"text": value}),
    )


def test_argument_tags_become_a_call() -> None:
    check(
        TAGS,
        "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>\nKöln </arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>\n",
        "Well.",
        ("get_weather", {"city": "\nKöln ", "days": 2}),
        ("now", {}),
    )


def test_gemma_s_calls_are_read() -> None:
    check(
        GEMMA,
        '<|tool_call>call:get_weather{city:<|"|>A, "b" {c}<|"|>,days:2,exact:true,wind:-1.5e3,'
        'note:None,near:[<|"|>x<|"|>,<|"|>y]<|"|>],box:{a:[1,{b:<|"|>c<|"|>}],d:{}}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "",
        (
            "get_weather",
            {
                "city": 'A, "b" {c}',
                "days": 2,
                "exact": True,
                "wind": -1500.0,
                "note": None,
                "near": ["x", "y]"],
                "box": {"a": [1, {"b": "c"}], "d": {}},
            },
        ),
        ("now", {}),
    )


def test_llama_s_calls_are_read_at_the_answer_s_start() -> None:
    check(
        LLAMA,
        '\n{"name": "get_weather", "parameters": {"city": "x"}}; {"name": "now", "parameters": {}}',
        "",
        ("get_weather", {"city": "x"}),
        ("now", {}),
    )
    check(
        LLAMA,
        'Yes: <|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        "Yes:",
        ("now", {}),
    )
    inside = 'Say {"name": "now", "parameters": {}}'
    check(LLAMA, inside, inside)
    other = '{"name": "Bob", "age": 3}'
    check(LLAMA, other, other)
    check(LLAMA, '{"answer": 42}', '{"answer": 42}')


def test_mistral_s_calls_are_read_in_both_forms() -> None:
    check(
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "x"}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        "",
        ("get_weather", {"city": "x"}),
        ("now", {}),
    )
    check(
        MISTRAL,
        'Ok.[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}',
        "Ok.",
        ("get_weather", {"city": "x"}),
        ("now", {}),
    )


def test_mistral_s_ids_are_kept_and_made() -> None:
    parser = AnswerParser(tools=TOOLS, format=MISTRAL)
    parts = parser.push("[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    first, second = join_calls((parts + parser.finish()).calls)
    assert first.id == "abc123XYZ"
    assert len(second.id) == 9
    assert second.id.isalnum()


def test_other_formats_ids_are_call_and_24_hex_digits() -> None:
    parser = AnswerParser(tools=TOOLS, format=TAGS)
    (call,) = join_calls(parser.push('<tool_call>{"name": "now"}</tool_call>').calls)
    assert call.id.startswith("call_")
    assert len(call.id) == 29
    int(call.id[5:], 16)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (TAGS, 'Hm.\n<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>\n'),
        (TAGS, "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
        (TAGS, "<tool_call>rm\n<arg_key>a</arg_key>"),
        (TAGS, "a <tool_call> b <function=now"),
        (TAGS, "<tool_call>"),
        (TAGS, '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
        (TAGS, '<tool_call>{"name": "now"'.replace("now", "no")),
        (GEMMA, "<|tool_call>call:rm{}<tool_call|>"),
        (GEMMA, "<|tool_call>now{}"),
        (LLAMA, '{"name": "rm", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}"),
        (MISTRAL, '[TOOL_CALLS][{"name": "rm", "arguments": {}}]'),
        (MISTRAL, "[TOOL_CALLS]now"),
        (ANY, "{no json"),
    ],
)
def test_text_that_only_looks_like_a_call_stays_text(form: ToolFormat, answer: str) -> None:
    check(form, answer, answer)


def test_a_call_after_text_that_only_looks_like_one_is_read() -> None:
    check(
        TAGS,
        'The mark <tool_call> begins <tool_call>{"name": "now", "arguments": {}}</tool_call> it.',
        "The mark <tool_call> begins it.",
        ("now", {}),
    )


@pytest.mark.parametrize(
    ("form", "answer", "text", "arguments"),
    [
        (TAGS, '<tool_call>{"name": "write", "arguments": {"text": "rm /', "", '{"text": "rm /'),
        (
            TAGS,
            '<tool_call>{"name": "write", "arguments": {"text": 1,, "b": 2}}</tool_call>',
            ',, "b": 2}}</tool_call>',
            '{"text": 1',
        ),
        (
            TAGS,
            "<function=write><parameter=text>\nab\n</param",
            "",
            '{"text": "ab\\n</param',
        ),
        (
            TAGS,
            "<function=get_weather><parameter=city>a</parameter><parameter=days>\n1",
            "<parameter=days>\n1",
            '{"city": "a"',
        ),
        (TAGS, "<function=write>now what</function>", "now what</function>", ""),
        (GEMMA, '<|tool_call>call:write{text:<|"|>ab<|', "", '{"text": "ab<|'),
        (GEMMA, "<|tool_call>call:write{text:12", "12", '{"text": '),
        (MISTRAL, '[TOOL_CALLS]write[ARGS]{"text": 12', "12", '{"text":'),
    ],
)  # fmt: skip
def test_a_call_that_breaks_after_its_name_keeps_incomplete_arguments(
    form: ToolFormat, answer: str, text: str, arguments: str
) -> None:
    result = read_in_all_ways(form, answer)
    assert [entry[1].rstrip() for entry in result.calls] == [arguments.rstrip()]
    assert result.text.strip() == text
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.calls[0][1])


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


def test_the_name_comes_first_and_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(tools=TOOLS, format=TAGS)
    assert parser.push("<tool_call>\n<function=wri").calls == ()
    (named,) = parser.push("te>").calls
    assert (named.index, named.name, named.arguments) == (0, "write", "")
    pieces = [parser.push(piece) for piece in ("\n<parameter=text>\n", 'a "quote"', "\nb", "\n")]
    written = [delta.arguments for parts in pieces for delta in parts.calls]
    assert written == ['{"text": "', 'a \\"quote\\"', "\\nb"]


def test_text_after_a_broken_call_comes_with_the_next_piece() -> None:
    parser = AnswerParser(tools=TOOLS, format=TAGS)
    parts = parser.push('<tool_call>{"name": "write", "arguments": {"text": 1 oh <')
    assert (parts.text, len(parts.calls)) == ("", 2)
    assert parser.held > 0
    assert parser.push(" no").text == "oh < no"


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


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (TAGS, '<tool_call>\n{"name": "now"}\n{"name": "write"}\n</tool_call>'),
        (TAGS, '<tool_call>{"name": "now"}{"name": "write"}</tool_call>\n</tool_call>'),
        (TAGS, '<tool_call>{"name": "now"}</tool_call></tool_call>\n\n</tool_call>'
               '<tool_call>{"name": "write"}</tool_call>'),
        (ANY, '{"name": "now"}\n</tool_call>\n{"name": "write"}</tool_call></tool_call>'),
        (TAGS, "<function=now></function></tool_call></tool_call><tool_call>write</tool_call>"),
        (GEMMA, "<|tool_call>call:now{}<tool_call|><tool_call|><|tool_call>call:write{}"),
    ],
)  # fmt: skip
def test_several_calls_in_a_block_and_repeated_end_marks_leave_no_text(
    form: ToolFormat, answer: str
) -> None:
    check(form, answer, "", ("now", {}), ("write", {}))
    check(form, f"{answer} bye", "bye", ("now", {}), ("write", {}))


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
    ("form", "whole", "first"),
    [
        (TAGS, '<tool_call>\n{"name": "get_weather", "arguments": {', '"get_weather"'),
        (TAGS, "<tool_call>\n<function=get_weather>\n<parameter=days>\n", "weather>"),
        (TAGS, "<function=get_weather><parameter=city>a</parameter>\n</function>\n</tool_call>",
         "</parameter>\n<"),
        (TAGS, "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>", "weather\n"),
        (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": ', '"get_weather"'),
        (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {}, "id": "abc123XYZ"}]',
         '"get_weather"'),
        (MISTRAL, "[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{", "get_weather["),
        (GEMMA, '<|tool_call>call:get_weather{box:{},days:', "weather{"),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_off_in_a_call_s_markup_has_no_text(
    form: ToolFormat, whole: str, first: str
) -> None:
    for end in range(whole.index(first) + len(first), len(whole) + 1):
        result = read_in_all_ways(form, whole[:end])
        assert [name for name, _ in result.calls] == ["get_weather"]
        assert result.text == "", whole[:end]
