"""Writes JSON, which has neither NaN nor infinite numbers."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from starlette import responses


def write_json(value: object) -> str:
    """Return a value as JSON; an infinite number becomes the largest float, and NaN becomes null.

    Tool calls of a model and schemas of a client may have numbers such as 1e999, which no float
    can hold.
    """
    try:
        return _dump(value)
    except ValueError:
        return _dump(_finite(value))


def write_with_list(fields: Mapping[str, object], name: str, values: Iterable[object]) -> bytes:
    """Return a JSON object with `fields`, and with a list of `values` called `name`.

    The values are written one by one, so that other threads get their turn.
    """
    items = b",".join(write_json(value).encode() for value in values)
    return b'%b,"%b":[%b]}' % (write_json(fields).encode()[:-1], name.encode(), items)


class JSONResponse(responses.JSONResponse):
    """A response with a JSON body."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return write_json(content).encode()


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(sys.float_info.max, value)
    return value
