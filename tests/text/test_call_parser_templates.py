"""Calls as published chat templates write them are read back.

The templates are not part of this project. The variable TOOL_TEMPLATES names a folder with their
files, such as models/templates of llama.cpp; without it these tests are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headroom.text.answer_parser import AnswerParser, join_calls
from headroom.text.chat_template import ChatTemplate
from headroom.text.tool_formats import find_tool_format
from tests.text.tool_corpus import TOOLS, Call, corpus
from tests.text.tool_models import STYLES, rendered_answer, tool_tokenizer

FOLDER = "TOOL_TEMPLATES"
# Beginnings of the files' names, with the stand-in that is used where there are no such files.
PUBLISHED = {
    "Qwen-Qwen3-": "qwen3",
    "Qwen-Qwen2.5-": "qwen3",
    "NousResearch-Hermes-": "qwen3",
    "Qwen3-Coder": "qwen35",
    "Qwen3.5-": "qwen35",
    "poolside-Laguna-": "laguna",
    "GLM-4.6": "laguna",
    "google-gemma-4-": "gemma4",
    "meta-llama-Llama-3": "llama3",
    "mistralai-Mistral-Nemo-": "mistral_list",
    "Mistral-Small-3.2-": "mistral_args",
    "mistralai-Ministral-3-": "mistral_args",
}


def templates(beginning: str) -> list[ChatTemplate]:
    """Return the templates of a family; skip the test if they are not there."""
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob(f"{beginning}*.jinja")) if folder else []
    if not files:
        pytest.skip(f"there is no {beginning}*.jinja: name a folder of templates by {FOLDER}")
    return [ChatTemplate(file.read_text(), "<s>", "</s>") for file in files]


def message_of(calls: tuple[Call, ...]) -> dict[str, Any]:
    written = [
        {"id": "aB3dE6gH9", "type": "function", "function": {"name": name, "arguments": values}}
        for name, values in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}


def answer_of(template: ChatTemplate, message: dict[str, Any]) -> str:
    """Return what a template writes into the history for a message, with the end of its turn."""
    question = {"role": "user", "content": "q"}
    tools = [TOOLS[1].for_template()]  # some templates cannot be without
    whole = template.render([question, message], tools=tools, add_generation_prompt=False)
    for opens_turn in (True, False):  # what opens a turn may also open a thought
        before = template.render([question], tools=tools, add_generation_prompt=opens_turn)
        if whole.startswith(before):
            return whole[len(before) :]
    raise AssertionError("The template changes what came before an answer.")


def samples(style: str) -> list[tuple[Call, ...]]:
    found = [sample.calls for sample in corpus(style, 120) if sample.calls]
    return [calls for calls in found if style != "bare_json" or len(calls) == 1]


@pytest.mark.parametrize("beginning", PUBLISHED)
def test_what_a_published_template_writes_is_read_back(beginning: str) -> None:
    model = PUBLISHED[beginning]
    for template in templates(beginning):
        form = find_tool_format(tool_tokenizer(model), template)
        assert form.native
        assert form.name == STYLES[model]
        for calls in samples(form.name):
            answer = answer_of(template, message_of(calls))
            parser = AnswerParser(tools=TOOLS, format=form)
            parts = parser.push(answer) + parser.finish()
            read = [(call.name, json.loads(call.arguments)) for call in join_calls(parts.calls)]
            assert read == list(calls), answer


@pytest.mark.parametrize("beginning", PUBLISHED)
def test_stand_ins_write_calls_as_published_templates_do(beginning: str) -> None:
    model = PUBLISHED[beginning]
    if beginning in ("GLM-4.6", "NousResearch-Hermes-", "mistralai-Ministral-3-"):
        pytest.skip("the format is the same, its line breaks or ids are not")
    without_breaks = beginning.startswith("poolside")  # some of these have no line breaks
    for template in templates(beginning):
        for calls in samples(STYLES[model]):
            message = message_of(calls)
            ours, theirs = rendered_answer(model, message).strip(), answer_of(template, message)
            if without_breaks:
                ours, theirs = ours.replace("\n", ""), theirs.replace("\n", "")
            assert ours in theirs
