"""Runs the cases of a client's program and reports each: JSON of its name and what went wrong."""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else ""  # of the server: http://127.0.0.1:PORT
MODEL = sys.argv[2] if len(sys.argv) > 2 else ""
KEY = sys.argv[3] if len(sys.argv) > 3 else ""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = {"city": "Oslo", "days": 3}  # of the call that the script makes
RESULT = "sunny, 21 degrees"  # of the tool; the script quotes it
SAID = f"The tool says: {RESULT}"
THOUGHT = "The user greets me."
HELLO = "Hello from the script."
ASK_WEATHER = "What is the weather in Oslo for three days?"
ASK_JSON = "Give the city as JSON."
ASK_CALL = "Give the city as a call."
CITY = {"name": "Oslo", "people": 717710}
ASK_OWNER_JSON = "Give the owner as JSON."
ASK_OWNER = "Give the owner as a call."
OWNER = {"names": ["Ada", "Kim"], "pet": {"kind": "cat", "lives": 9}}


def refused(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Call something that the server must refuse, and return the client's exception."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("The server did not refuse it.")


def run(cases: dict[str, object]) -> None:
    """Call every function named case_..., and print what failed."""
    report = {}
    for name, case in cases.items():
        if not name.startswith("case_") or not isinstance(case, Callable):
            continue
        try:
            case()
            report[name.removeprefix("case_")] = ""
        except Exception:
            report[name.removeprefix("case_")] = traceback.format_exc()
    print(json.dumps(report))
