"""Random JSON schemas of the kinds that the JSON Schema test suite has."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    "^[a-c]{1,4}$",
    "^[A-Z][a-z]?-[0-9]{2}$",
    "^(on|off|auto)$",
    "^x{2,5}y?$",
    "^\\d+\\.\\d$",
)
FORMATS = ("date", "ipv4", "uuid", "date-time", "email", "ipv6", "time")
NAMES = ("a", "name", "in_stock", "größe", 'with "quotes"', "x/y", "$id_", "0", "list of things")
CONSTANTS = (
    0,
    -7,
    2.5,
    True,
    None,
    "",
    "red",
    'say "hi"',
    "tab\tand\nline",
    "☃",
    [1, "a"],
    {"k": 1},
)


def random_schema(seed: int) -> Schema:
    """Return a schema; equal seeds give equal schemas."""
    dice = random.Random(seed)
    made = _Maker(dice)
    schema = made.schema(depth=3)
    if made.defined:
        schema = {"$defs": made.defined, "allOf": [schema]} if "$ref" in schema else {
            **schema, "$defs": made.defined,
        }  # fmt: skip
    return schema


class _Maker:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.defined: dict[str, Schema] = {}

    def schema(self, depth: int) -> Schema:
        """A schema that nests others at most `depth` deep."""
        dice = self._dice
        plain: list[Callable[[], Schema]] = [
            self._string, self._integer, self._number, self._enum, self._const, self._word,
            self._types,
        ]  # fmt: skip
        if depth == 0:
            return dice.choice(plain)()
        nested: list[Callable[[int], Schema]] = [
            self._object, self._object, self._array, self._tuple, self._any_of, self._one_of,
            self._all_of, self._reference, self._map, self._linked,
        ]  # fmt: skip
        return dice.choice(nested)(depth - 1) if dice.random() < 0.65 else dice.choice(plain)()

    def _string(self) -> Schema:
        dice = self._dice
        kind = dice.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": dice.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": dice.choice(FORMATS)}
        least = dice.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + dice.randrange(6)}

    def _integer(self) -> Schema:
        dice, made = self._dice, {"type": "integer"}
        low = dice.randrange(-200, 200)
        bounds: list[Schema] = [
            {"minimum": low, "maximum": low + dice.randrange(500)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + dice.randrange(90)},
            {"minimum": low, "maximum": low + 50, "multipleOf": dice.choice((2, 5, 7))},
            {"maximum": 9, "minimum": 0},
        ]
        return {**made, **dice.choice(bounds)}

    def _number(self) -> Schema:
        dice = self._dice
        low = dice.randrange(-50, 50) / 4
        return {"type": "number", "minimum": low, "maximum": low + dice.choice((0.5, 3, 1000))}

    def _enum(self) -> Schema:
        return {"enum": self._dice.sample(CONSTANTS, self._dice.randrange(1, 6))}

    def _const(self) -> Schema:
        return {"const": self._dice.choice(CONSTANTS)}

    def _word(self) -> Schema:
        return {"type": self._dice.choice(("boolean", "null"))}

    def _types(self) -> Schema:
        dice = self._dice
        types = dice.sample(("boolean", "null", "string"), 2)
        return {"type": types, "maxLength": 4}

    def _object(self, depth: int) -> Schema:
        dice = self._dice
        names = dice.sample(NAMES, dice.randrange(1, 5))
        required = [name for name in names if dice.random() < 0.6]
        made: Schema = {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }
        if dice.random() < 0.2:
            made["title"], made["description"] = "Some thing", "What it is."
        return made

    def _map(self, depth: int) -> Schema:
        made: Schema = {"type": "object", "maxProperties": 2}
        if self._dice.random() < 0.5:
            made["patternProperties"] = {"^k[0-9]$": self.schema(depth)}
            made["additionalProperties"] = False
        else:
            made["additionalProperties"] = self.schema(depth)
        return made

    def _array(self, depth: int) -> Schema:
        least = self._dice.randrange(3)
        most = least + self._dice.randrange(3)
        return {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> Schema:
        parts = [self.schema(depth) for _ in range(self._dice.randrange(1, 4))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth) for _ in range(self._dice.randrange(2, 4))]}

    def _one_of(self, depth: int) -> Schema:
        parts = []
        for kind in self._dice.sample(("circle", "square", "line"), 2):
            part = {"kind": {"const": kind}, "size": self.schema(max(0, depth - 1))}
            parts.append(
                {"type": "object", "properties": part, "required": ["kind"],
                 "additionalProperties": False}
            )  # fmt: skip
        return {"oneOf": parts}

    def _all_of(self, depth: int) -> Schema:
        first = self._object(depth)
        return {"allOf": [first, {"required": list(first["properties"])}]}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self.defined)}"
        self.defined[name] = {}  # the name is taken while the part is made
        self.defined[name] = self.schema(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _linked(self, depth: int) -> Schema:
        """A list whose entries hold the next one."""
        name = f"part{len(self.defined)}"
        self.defined[name] = {}
        value = self.schema(max(0, depth - 1))
        following = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        self.defined[name] = {
            "type": "object",
            "properties": {"value": value, "next": following},
            "required": ["next"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}
