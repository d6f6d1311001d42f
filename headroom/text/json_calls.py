"""Reads calls that are written as JSON objects, and tells them from other JSON."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from headroom.text.call_scanner import (
    BLANKS,
    QUOTES,
    CallScanner,
    Converters,
    NotACallError,
    Reading,
    read_json_value,
    read_string_value,
    whole_json,
)
from headroom.text.conversation import Tool
from headroom.text.tool_values import argument_types, json_value

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
# Fields of a call's JSON in which an answer may break off and leave nothing but markup.
_OWN_FIELDS = ('"arguments":', '"parameters":', '"id":', '"type":"function"')
SCALARS = frozenset(("integer", "number", "boolean", "null"))  # JSON types that are no strings


def read_json_call(
    scan: CallScanner, ends: Collection[str], *, marked: bool = True
) -> Reading[None]:
    """Read {"name": NAME, "arguments": {...}}; the keys may come in another order."""
    yield from _JsonCall(scan, ends, marked=marked).read()
    scan.end_call()


class _JsonCall:
    """Reads one call that is written as a JSON object.

    The call begins when its name is known and its arguments begin. Until then, all can be handed
    back as text: other JSON may have a name, too. A call may have no arguments:

    - After a mark, arguments of the tool may stand beside its name: {"name": "f", "x": 1}.
    - Without a mark, the object must have nothing but the name (and "type": "function"), of a tool
      that requires no arguments.

    Fields after the arguments that are not the call's own become text.
    """

    def __init__(
        self,
        scan: CallScanner,
        ends: Collection[str],  # marks that may follow the call
        *,
        marked: bool,  # a mark came before the call: the JSON is nothing else
    ) -> None:
        self._scan = scan
        self._ends = ends
        self._marked = marked
        self._name: str | None = None
        self._id = ""
        self._early = ""  # arguments that came before the name
        self._members: list[str] = []  # arguments beside the name, as members of an object
        self._has_arguments = False
        self._begun = False
        self._field_start = 0  # where the last field begins in the scanner's uncommitted text

    def read(self) -> Reading[None]:
        """Read the call up to its last bracket."""
        try:
            yield from self._read_object(nested=False)
        except NotACallError:
            if self._is_cut():  # drop the markup that was read
                if self._begun:
                    self._scan.commit()
                else:
                    self._begin()
            raise
        if not self._begun:
            self._begin_without_arguments()

    def _read_object(self, *, nested: bool) -> Reading[None]:
        """Read the call's object, or the object that is its field "function" (`nested`)."""
        scan = self._scan
        yield from scan.expect("{")
        first = True
        while True:
            if self._begun:
                scan.commit()
            self._field_start = len(scan.uncommitted)
            yield from scan.skip_blanks()
            if (yield from scan.take("}")):
                return
            if not first and not (yield from scan.take(",")):
                # After whole arguments only the call's last bracket can be missing: no harm.
                if self._begun and (yield from scan.starts_with_any(self._ends)):
                    return
                raise NotACallError("A comma is missing.")
            yield from scan.skip_blanks()
            if not first and (yield from scan.take("}")):
                return
            first = False
            key = yield from read_string_value(scan)
            yield from scan.skip_blanks()
            yield from scan.expect(":")
            yield from scan.skip_blanks()
            yield from self._read_field(key, nested=nested)

    def _read_field(self, key: str, *, nested: bool) -> Reading[None]:
        scan = self._scan
        character = yield from scan.peek()
        if key in _NAME_KEYS and character in QUOTES and self._name is None:
            self._name = yield from read_string_value(scan)
            if self._name not in scan.tools:
                raise NotACallError(f"There is no tool {self._name!r}.")
            if self._has_arguments:
                self._begin(self._early)
        elif key in _ARGUMENT_KEYS and not self._has_arguments and not self._members:
            yield from self._read_arguments(character)
            self._has_arguments = True
        elif key == "function" and character == "{" and not nested and self._name is None:
            yield from self._read_object(nested=True)
        elif key == "id" and character in QUOTES and not self._id:
            self._id = yield from read_string_value(scan)
        elif key != "type" or not (
            (yield from scan.take('"function"')) or (yield from scan.take("'function'"))
        ):
            yield from self._read_other_field(key)

    def _read_arguments(self, character: str) -> Reading[None]:
        scan = self._scan
        if character == "{" and self._name is not None:
            self._begin()
            converters = scalar_converters(scan.tools[self._name])
            yield from read_json_value(scan, scan.add_json, self._ends, converters)
            return
        pieces: list[str] = []
        yield from read_json_value(scan, pieces.append, self._ends)
        value: str | None = "".join(pieces)
        # Some models write the object as a string, or null if there are no arguments.
        if value == "null":
            value = "{}"
        elif character in QUOTES:
            value = whole_json(json.loads("".join(pieces)) or "{}")
        if value is None or not value.startswith("{"):
            raise NotACallError("The arguments are not an object.")
        if self._name is None:
            self._early = value
        else:
            self._begin(value)

    def _read_other_field(self, key: str) -> Reading[None]:
        """Read a field that is not the call's own: an argument, or text after the arguments."""
        scan = self._scan
        pieces = [f"{json.dumps(key, ensure_ascii=False)}: "]
        if self._begun:
            yield from read_json_value(scan, pieces.append, self._ends)
            text = scan.uncommitted
            if scan.in_call:  # a comma separates this field from the arguments
                text = text.lstrip(BLANKS).removeprefix(",")
            scan.end_call()
            scan.emit_text(text if scan.has_text else text.lstrip(BLANKS))
            return
        if not self._marked or self._has_arguments or key not in self._properties():
            raise NotACallError(f"A call has no field {key!r}.")
        yield from read_json_value(scan, pieces.append, self._ends)
        self._members.append("".join(pieces))

    def _properties(self) -> Mapping[str, Any]:
        """Return the schemas of the tool's arguments; none if the name is not known."""
        return {} if self._name is None else _properties(self._scan.tools[self._name])

    def _begin(self, arguments: str = "") -> None:
        """Begin the call, with whole arguments if they are given."""
        assert self._name is not None
        self._begun = True
        self._scan.begin_call(self._name, self._id)
        if arguments:
            converters = scalar_converters(self._scan.tools[self._name])
            self._scan.add_json(whole_json(arguments, converters) or arguments)

    def _begin_without_arguments(self) -> None:
        if self._name is None:
            raise NotACallError("The call has no name.")
        required = self._scan.tools[self._name].parameters.get("required")
        if not self._marked and (self._id or required):
            raise NotACallError("The call has no arguments.")
        if self._id and "id" in self._properties():
            self._members.append(f'"id": {json.dumps(self._id, ensure_ascii=False)}')
        self._begin("{" + ", ".join(self._members) + "}")

    def _is_cut(self) -> bool:
        """Return whether the answer breaks off with nothing but markup after the last field."""
        scan = self._scan
        if self._name is None or self._members or not scan.ended or scan.rest:
            return False
        if self._begun and not self._has_arguments:
            return False
        field = "".join(scan.uncommitted[self._field_start :].split()).removeprefix(",")
        field = field.replace("'", '"')
        if not self._marked and not self._begun:  # other JSON could begin in the same way
            return field in _OWN_FIELDS[:2]
        return field.startswith('"id":"') or any(own.startswith(field) for own in _OWN_FIELDS)


def _properties(tool: Tool) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def scalar_converters(tool: Tool) -> Converters:
    """Return what turns strings into arguments that must be numbers, booleans or null."""
    types = {name: argument_types(tool, name) for name in _properties(tool)}
    return {
        name: partial(json_value, types=allowed)
        for name, allowed in types.items()
        if allowed <= SCALARS
    }
