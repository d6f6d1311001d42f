"""What the scripted model says to the tests' questions."""

import json
import re
from typing import Any

from tests.clients.programs import cases

RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def last_turn(prompt: str) -> str:
    """Return the last turn of a rendered prompt that is not the model's."""
    return re.split(r"<\|im_start\|>(?!assistant)", prompt)[-1]


def answer(prompt: str) -> str:
    """Return the answer to what a client program asked."""
    turn = last_turn(prompt)
    if results := RESULT.findall(turn):
        return f"The tool says: {results[-1]}"
    if cases.ASK_WEATHER in turn:
        return tool_call("get_weather", cases.ARGUMENTS)
    if "Two cities." in turn:
        rome = {**cases.ARGUMENTS, "city": "Rome"}
        calls = [tool_call("get_weather", cases.ARGUMENTS), tool_call("get_weather", rome)]
        return "\n".join(["I look at both.", *calls])
    if cases.ASK_JSON in turn:
        return json.dumps(cases.CITY)
    if cases.ASK_CALL in turn:
        name = re.findall(r'"name": "(\w*City)"', prompt)[0]  # some clients change a class's name
        return tool_call(name, cases.CITY)
    thinks = not prompt.endswith("</think>\n\n")
    return (f"<think>\n{cases.THOUGHT}\n</think>\n\n" if thinks else "") + cases.HELLO
