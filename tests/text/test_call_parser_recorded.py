"""Calls in recorded answers of real models are read, wherever the answers are cut.

The answers are not part of this project. The variable TOOL_ANSWERS names a folder of JSON lines
with answers in the format of Qwen and Hermes as `result`, such as the results of Hermes 2 Pro in
the repository HuanzhiMao/BFCL-Result; without it these tests are skipped.
"""

import ast
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.conversation import Tool
from headroom.text.tool_formats import find_tool_format
from tests.text.tool_models import tool_template, tool_tokenizer

FOLDER = "TOOL_ANSWERS"
BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
FORM = find_tool_format(tool_tokenizer("qwen3"), tool_template("qwen3"))
CUT_ANSWERS = 200  # that are cut at every byte

Calls = list[tuple[str, Any]]  # names and arguments


@cache
def recorded() -> list[str]:
    """Return the answers that have calls; skip the test if there are none."""
    folder = os.environ.get(FOLDER)
    lines = [
        line
        for file in (sorted(Path(folder).glob("*.json*")) if folder else ())
        for line in file.read_text().splitlines()
    ]
    results = [json.loads(line)["result"] for line in lines]
    answers = [text for text in results if isinstance(text, str) and "<tool_call>" in text]
    if not answers:
        pytest.skip(f"name a folder of recorded answers by {FOLDER}")
    return answers


@cache
def tools() -> tuple[Tool, ...]:
    names = re.findall(r"""["']name["']: *["']([^"']+)["']""", "\n".join(recorded()))
    return tuple(Tool(name=name) for name in sorted(set(names)))


def written_calls(answer: str) -> Calls | None:
    """Return the calls by the readers of JSON and of Python; None if they cannot read one.

    So it is if a call has fields besides name and arguments: those become text.
    """
    calls: Calls = []
    for block in BLOCK.findall(answer):
        try:
            call = json.loads(block)
        except ValueError:
            try:
                call = ast.literal_eval(block)
            except (ValueError, SyntaxError):
                return None
        if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            return None
        calls.append((call["name"], call["arguments"]))
    return calls if calls and "<tool_call>" not in BLOCK.sub("", answer) else None


def read(pieces: list[bytes]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and names and arguments of the calls."""
    parser, parts, before = AnswerParser(tools=tools(), format=FORM), AnswerParts(), b""
    for piece in pieces:  # characters that end later come with the next piece
        text = (before + piece).decode(errors="ignore")
        before = (before + piece)[len(text.encode()) :]
        parts += parser.push(text)
    parts += parser.finish()
    assert not before
    assert parser.held == 0
    return parts.text, [(call.name, call.arguments) for call in join_calls(parts.calls)]


def test_calls_are_those_that_readers_of_json_and_python_find() -> None:
    checked = 0
    for answer in recorded():
        if (written := written_calls(answer)) is None:
            continue
        text, calls = read([answer.encode()])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == written, answer
        assert text.split() == BLOCK.sub("", answer).split()
        checked += 1
    assert checked > len(recorded()) / 2


@pytest.mark.timeout(1200)  # minutes of one core
def test_calls_are_the_same_wherever_an_answer_is_cut() -> None:
    step = max(1, len(recorded()) // CUT_ANSWERS)
    for answer in recorded()[::step]:
        data = answer.encode()
        whole = read([data])
        assert read([bytes([byte]) for byte in data]) == whole, answer
        for place in range(1, len(data)):
            assert read([data[:place], data[place:]]) == whole, (answer, place)
