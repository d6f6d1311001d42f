"""CallParser: calls and text are told apart in every format, however the answer is cut."""

import json

import pytest

from headroom.text.answer_parser import AnswerParser, join_calls
from headroom.text.tool_formats import ToolFormat
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


def test_the_name_comes_first_and_arguments_come_as_they_are_written() -> None:
    parser = AnswerParser(tools=TOOLS, format=TAGS)
    assert parser.push("<tool_call>\n<function=wri").calls == ()
    (named,) = parser.push("te>").calls
    assert (named.index, named.name, named.arguments) == (0, "write", "")
    pieces = [parser.push(piece) for piece in ("\n<parameter=text>\n", 'a "quote"', "\nb", "\n")]
    written = [delta.arguments for parts in pieces for delta in parts.calls]
    assert written == ['{"text": "', 'a \\"quote\\"', "\\nb"]


def test_a_key_without_a_value_ends_a_call_of_gemma_s() -> None:
    result = read_in_all_ways(GEMMA, "<|tool_call>call:write{text:}<tool_call|>")
    assert result.calls == [("write", '{"text": ')]
    assert result.text == "}<tool_call|>"


def test_text_after_a_broken_call_comes_with_the_next_piece() -> None:
    parser = AnswerParser(tools=TOOLS, format=TAGS)
    parts = parser.push('<tool_call>{"name": "write", "arguments": {"text": 1 oh <')
    assert (parts.text, len(parts.calls)) == ("", 2)
    assert parser.held > 0
    assert parser.push(" no").text == "oh < no"


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


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        (LLAMA, '{"name": "now", "parameters": {}}; bye', "; bye", 1),
        (LLAMA, '{"name": "now", "parameters": {}};', ";", 1),
        (LLAMA, '{"name": "now", "parameters": {}}\n;\n{"name": "now", "parameters": {}}', "", 2),
        (MISTRAL, '[TOOL_CALLS]{"name": "now", "arguments": {}} bye', "bye", 1),
        (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}} bye', "bye", 1),
        (MISTRAL, '[TOOL_CALLS] [ {"name": "now", "arguments": {}} , {"name": "now"} ] bye',
         "bye", 2),
        (MISTRAL, "[TOOL_CALLS] now {} bye", "bye", 1),
        (MISTRAL, "[TOOL_CALLS]now[ARGS] {}", "", 1),
        (TAGS, "<tool_call>now</tool_call> <tool_call> now </tool_call>", "", 2),
        (TAGS, "<tool_call>\n<function=now></tool_call> bye", "bye", 1),
        (TAGS, "<function=now>{}</tool_call> bye", "bye", 1),
        (TAGS, '<tool_call>[{"name": "now"} {"name": "now"}]</tool_call>',
         '{"name": "now"}]</tool_call>', 1),
        (GEMMA, "<|tool_call> call:now{} <tool_call|> bye", "bye", 1),
    ],
)  # fmt: skip
def test_what_models_leave_out_of_markup_or_add_to_it_changes_no_call(
    form: ToolFormat, answer: str, text: str, calls: int
) -> None:
    check(form, answer, text, *[("now", {})] * calls)


@pytest.mark.parametrize("written", ["abc", "abc123XYZ0", "abc-23XYZ", ""])
def test_an_id_that_the_template_would_refuse_is_replaced(written: str) -> None:
    parser = AnswerParser(tools=TOOLS, format=MISTRAL)
    parts = parser.push(f"[TOOL_CALLS]now[CALL_ID]{written}[ARGS]{{}}")
    (call,) = join_calls((parts + parser.finish()).calls)
    assert call.id != written
    assert len(call.id) == 9
    assert call.id.isalnum()
    assert call.arguments == "{}"


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ('{text:<|"|>a<|"|>,}', {"text": "a"}),
        ("{}", {}),
        ('{ text : <|"|>a<|"|> }', {"text": "a"}),
        ('{"text":"a\\n"}', {"text": "a\n"}),
        ('{<|"|>text<|"|>:<|"|>a<|"|>}', {"text": "a"}),
        ("{b:[1,[2,{c:[]}],]}", {"b": [1, [2, {"c": []}]]}),
        ("{b:{c:1},text:2}", {"b": {"c": 1}, "text": "2"}),
        ("{b:{text:2},c:[text,true,null,x]}", {"b": {"text": 2}, "c": ["text", True, None, "x"]}),
        ("{text:a b}", {"text": "a b"}),
        ("{b:-1.5e3,c:1.0}", {"b": -1500.0, "c": 1.0}),
    ],
)
def test_objects_with_plain_keys_are_read(answer: str, arguments: object) -> None:
    check(GEMMA, f"<|tool_call>call:write{answer}<tool_call|>", "", ("write", arguments))


@pytest.mark.parametrize(
    ("answer", "arguments", "text"),
    [
        ('{text:"a" b:2}<tool_call|>', '{"text": "a"', "b:2}<tool_call|>"),
        ("{b:[1}<tool_call|>", '{"b": [1', "}<tool_call|>"),
        ("{b:[1]]<tool_call|>", '{"b": [1]', "]<tool_call|>"),
        ("{:1}<tool_call|>", "{", ":1}<tool_call|>"),
        ("{b}<tool_call|>", "{", "b}<tool_call|>"),
        ("{b:<tool_call|>", '{"b": ', "<tool_call|>"),
    ],
)
def test_objects_with_plain_keys_that_are_wrong_keep_what_was_read(
    answer: str, arguments: str, text: str
) -> None:
    result = read_in_all_ways(GEMMA, f"<|tool_call>call:write{answer}")
    assert result.calls == [("write", arguments)]
    assert result.text == text
