"""What the scripted model says to the tests' questions."""

import json
import re

from tests.clients.model import Manner
from tests.clients.programs import cases
from tests.clients.scripted import Script

RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def last_turn(prompt: str) -> str:
    """Return the last turn of a rendered prompt that is not the model's."""
    return re.split(r"<\|im_start\|>(?!assistant)", prompt)[-1]


def answers(manner: Manner) -> Script:
    """Return the script that answers what client programs ask."""

    def answer(prompt: str) -> str:
        turn = last_turn(prompt)
        if results := RESULT.findall(turn):
            thought, said = "The tool has answered.", f"The tool says: {results[-1]}"
        elif cases.ASK_WEATHER in turn:
            thought, said = "I must ask.", manner.call("get_weather", cases.ARGUMENTS)
        elif "Two cities." in turn:
            cities = [{**cases.ARGUMENTS, "city": city} for city in ("Oslo", "Rome")]
            calls = [manner.call("get_weather", arguments) for arguments in cities]
            thought, said = "I must ask twice.", "\n".join(["I look at both.", *calls])
        elif cases.ASK_JSON in turn:
            thought, said = "I know it.", json.dumps(cases.CITY)
        elif cases.ASK_CALL in turn:
            # Some clients change the name of a class.
            name = re.findall(r'"name": "(\w*City)"', prompt)[0]
            thought, said = "I know it.", manner.call(name, cases.CITY)
        elif cases.ASK_OWNER_JSON in turn:
            thought, said = "I know it.", json.dumps({"pet": cases.OWNER["pet"]})
        elif cases.ASK_OWNER in turn:
            name = re.findall(r'"name": "(\w*Owner)"', prompt)[0]
            thought, said = "I know it.", manner.call(name, cases.OWNER)
        else:
            thought, said = cases.THOUGHT, cases.HELLO
        return manner.thought(prompt, thought) + said

    return answer
