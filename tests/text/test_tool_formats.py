"""Tool-call formats are recognised by chat template and vocabulary."""

import pytest

from headroom.text.chat_template import ChatTemplate
from headroom.text.tool_formats import find_tool_format, is_cut_markup
from tests.text.tool_models import tool_template, tool_tokenizer


@pytest.mark.parametrize(
    ("model", "name", "native", "writes_ids"),
    [
        ("qwen3", "json_tags", True, False),
        ("qwen35", "function_tags", True, False),
        ("laguna", "argument_tags", True, False),
        ("gemma4", "plain_keys", True, False),
        ("llama3", "bare_json", True, False),
        ("mistral_list", "json_list", True, False),
        ("mistral_args", "named_json", True, True),
        ("plain", "json_tags", False, False),
    ],
)
def test_each_family_s_format_is_known(
    model: str, name: str, native: bool, writes_ids: bool
) -> None:
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    assert (form.name, form.native, form.writes_ids) == (name, native, writes_ids)


def test_a_model_without_a_template_has_the_general_format() -> None:
    form = find_tool_format(tool_tokenizer("qwen3"), None)
    assert (form.name, form.native, form.begins_bare) == ("json_tags", False, True)


def test_markup_that_is_single_tokens_is_listed_with_its_ids() -> None:
    tokenizer = tool_tokenizer("gemma4")
    form = find_tool_format(tokenizer, tool_template("gemma4"))
    names = {tokenizer.token_text(token) for token in form.marks}
    assert names == {"<|tool_call>", "<tool_call|>", '<|"|>'} == set(form.control)
    visible = find_tool_format(tool_tokenizer("qwen3"), tool_template("qwen3"))
    assert len(visible.marks) == 2
    assert visible.control == {}


def test_marks_in_the_vocabulary_do_not_make_a_format_without_the_template() -> None:
    form = find_tool_format(tool_tokenizer("qwen3"), ChatTemplate("{{ messages }}", "", ""))
    assert not form.native


def test_ids_are_new_each_time() -> None:
    form = find_tool_format(tool_tokenizer("mistral_list"), tool_template("mistral_list"))
    ids = {form.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_quotes_may_be_escaped_in_the_template() -> None:
    source = "{{- '<tool_call>{\\\"name\\\": ...}</tool_call>' }}"
    form = find_tool_format(tool_tokenizer("qwen3"), ChatTemplate(source, "", ""))
    assert (form.name, form.native) == ("json_tags", True)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("", True),
        ("<", True),
        ("<param", True),
        ("<parameter=ci", True),
        ("<parameter=city>", True),
        ("<parameter=city> x", False),
        ("\n<arg_key>city</arg_key>\n<arg_val", True),
        ("<arg_key>city</arg_key><arg_value>", True),
        ("<arg_key>city</arg_key><arg_value>x", False),
        ("</function>\n</tool_c", True),
        ("</function>\n</tool_call>", True),
        ("</tool_call>", True),
        ("<tool_call|>", True),
        ("</tool_call>.", False),
        ("</parameter>", False),
        ("text", False),
    ],
)
def test_the_beginning_of_markup_inside_a_block_is_known(text: str, cut: bool) -> None:
    assert is_cut_markup(text) == cut


def test_a_template_with_the_marks_of_several_formats_has_the_first_of_them() -> None:
    both = "<tool_call> <function= <arg_key> [TOOL_CALLS] [ARGS]"
    for source, name in (
        (both, "function_tags"),
        (both.replace("<function=", ""), "argument_tags"),
        ("[TOOL_CALLS] [ARGS]", "named_json"),
        ("[TOOL_CALLS]", "json_list"),
        ("[ARGS]", "json_tags"),
        ("<|tool_call> call:", "plain_keys"),
        ("<|tool_call>", "json_tags"),
    ):
        form = find_tool_format(tool_tokenizer("qwen3"), ChatTemplate(source, "", ""))
        assert form.name == name, source
        assert form.native == (source not in ("[ARGS]", "<|tool_call>"))
