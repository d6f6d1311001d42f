"""Limits of one rendering of a chat template: the number of its steps and the size of its results.

A template may come from a hostile file. The size of a result (of an operator, a filter or a call)
is computed before the result itself. If it is too large, the operation is refused; otherwise it is
charged to the budget of the rendering.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError

# Limits of one rendering: far more than a long chat needs, and reached within seconds.
MAX_STEPS = 500_000  # rounds of loops, calls of macros, and numbers of range
MAX_CHARACTERS = 32 << 20  # of the prompt and of every text that is made on the way
MAX_ITEMS = 1 << 18  # of a list, and of all lists within one
MAX_MADE = 256 << 20  # characters of all texts together; an item of a list counts as 16
MAX_INTEGER_BITS = 256
ITEM = 16  # characters that one item of a list counts as
NUMBER = 80  # characters of the longest number
SCANNED = 16  # characters that a comparison or search may read for each one that it is charged

HUGE_WIDTH = re.compile(r"\d{7}")  # a width in a format string
HANDED_WIDTH = re.compile(r"\*|:[^}]*\{")  # a width that is one of the arguments
TIME_WIDTH = re.compile(r"%[^A-Za-z%]*\d{3}")  # a width in a time's format
MAX_TIME_FORMAT = 1000  # characters
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Value = TypeVar("Value")


class RenderBudget:
    """The steps and characters that one rendering may still use."""

    def __init__(self) -> None:
        self._steps, self._characters = MAX_STEPS, MAX_MADE

    def step(self, steps: int) -> None:
        """Charge the budget for some steps; raise if it has too few left."""
        self._steps -= steps
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def make(self, characters: int) -> None:
        """Charge the budget for the characters of a new text; raise if they are too many."""
        if characters > MAX_CHARACTERS:
            raise SecurityError(f"it makes a text of more than {MAX_CHARACTERS} characters")
        self._characters -= characters
        if self._characters < 0:
            raise SecurityError(f"it makes texts of more than {MAX_MADE} characters together")

    def make_items(self, items: int) -> None:
        """Charge the budget for the items of a new list; raise if they are too many."""
        if items > MAX_ITEMS:
            raise SecurityError(f"it makes a list of more than {MAX_ITEMS} items")
        self.make(ITEM * items)


_BUDGET: ContextVar[RenderBudget] = ContextVar("budget of the rendering")


def budget() -> RenderBudget:
    """Return the budget of this rendering; a new one while a template is compiled."""
    return _BUDGET.get(None) or RenderBudget()


@contextmanager
def new_budget() -> Iterator[None]:
    """Give the rendering in this `with` block a budget of its own."""
    before = _BUDGET.set(RenderBudget())
    try:
        yield
    finally:
        _BUDGET.reset(before)


def made(value: Value) -> Value:
    """Charge the budget for the size of a value that the template made; return the value."""
    if isinstance(value, str | bytes):
        budget().make(len(value))
    elif isinstance(value, list | tuple | dict | set):
        budget().make_items(len(value))
    return value


def printed_size(value: object, indent: int = 0) -> int:
    """Return about how many characters a value has as text; raise if there are too many.

    Lists that contain the same list many times are small in memory and huge as text.
    """
    total, seen, stack = 0, 0, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        seen += 1
        total += indent * depth + 2
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            stack += [(part, depth + 1) for part in itertools.chain.from_iterable(item.items())]
        elif isinstance(item, list | tuple | set):
            stack += [(part, depth + 1) for part in item]
        else:
            total += NUMBER
        if seen + len(stack) > MAX_ITEMS:
            raise SecurityError(f"it writes a list of more than {MAX_ITEMS} items")
        if total > MAX_CHARACTERS:
            raise SecurityError(f"it makes a text of more than {MAX_CHARACTERS} characters")
    return total


def compared(value: Value) -> Value:
    """Charge the budget for comparing or searching a value; return the value."""
    if isinstance(value, str):
        budget().make(len(value) // SCANNED)
    elif isinstance(value, list | tuple | dict | set):
        budget().make(printed_size(value) // SCANNED)
    return value


def joined(parts: Iterable[object]) -> str:
    """Return values as one text."""
    texts, total = [], 0
    for part in parts:
        text = part if isinstance(part, str) else str(printable(part))
        texts.append(text)
        total += len(text)
        if total > MAX_CHARACTERS:
            break
    budget().make(total)
    return "".join(texts)


def printable(value: Value) -> Value:
    """Return a value that is about to become text; raise if the text would be huge."""
    if not isinstance(value, str):
        budget().make(printed_size(value))
    return value


def bound_format(format: str, arguments: Sequence[Any], mark: str) -> None:
    """Refuse a format whose text would be huge; `mark` begins each place of an argument."""
    if HUGE_WIDTH.search(format):
        raise SecurityError("it formats a text to a huge width")
    if HANDED_WIDTH.search(format):
        bound_widths(arguments)
    longest = max((printed_size(value) for value in arguments), default=0)
    budget().make(len(format) + format.count(mark) * longest)


def bound_widths(arguments: Sequence[Any], most: int = MAX_CHARACTERS) -> None:
    """Refuse numbers that are too large for a width."""
    if any(isinstance(value, int) and abs(value) > most for value in arguments):
        raise SecurityError("it formats a text to a huge width")


def bound_bits(bits: int) -> None:
    """Refuse a number of too many bits."""
    if bits > MAX_INTEGER_BITS:
        raise SecurityError(f"it computes a number of {bits} bits")


def bound_sum(left: Any, right: Any) -> None:
    """Refuse two texts or two lists that are too large together."""
    if isinstance(left, str) and isinstance(right, str):
        budget().make(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget().make_items(len(left) + len(right))


def bound_product(left: Any, right: Any) -> None:
    """Refuse a product that is too large: of numbers, or of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bound_bits(left.bit_length() + right.bit_length())
    for items, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(items, Sequence):
            count = len(items) * times
            if count > (MAX_CHARACTERS if isinstance(items, str) else MAX_ITEMS):
                raise SecurityError(f"it repeats something into {count} items")
            if count > 0:
                budget().make(count if isinstance(items, str) else ITEM * count)


def bound_replacement(text: str, old: object, new: object) -> None:
    """Refuse to replace parts of a text if the new one would be huge."""
    old, new = str(printable(old)), str(printable(new))
    budget().make(len(text) + text.count(old) * max(0, len(new) - len(old)))


def bound_method(text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a text's method whose result would be huge."""
    values = (*args, *kwargs.values())
    if name in ("format", "format_map"):
        bound_format(text, values, "{")
    elif name == "replace":
        bound_replacement(text, *args[:2])
    elif name == "join":
        parts = values[0] if values and isinstance(values[0], Sequence) else ()
        budget().make(printed_size(parts) + len(text) * len(parts))
    elif name == "expandtabs":
        bound_widths(values)
        width = next(iter(values), 8)
        budget().make(len(text) + text.count("\t") * (width if isinstance(width, int) else 8))
    elif name == "translate":
        longest = max((printed_size(value) for value in values), default=0)
        budget().make(len(text) * max(1, longest))
    elif name in ("split", "rsplit"):
        separator = next(iter(values), None)
        by_words = not isinstance(separator, str) or not separator
        parts_most = len(text) // 2 if by_words else text.count(str(separator))
        if parts_most > MAX_ITEMS and by_words:
            parts_most = len(text.split(None, MAX_ITEMS))
        budget().make_items(parts_most + 1)
    elif name == "splitlines":
        budget().make_items(1 + sum(map(text.count, LINE_BREAKS)))
    else:
        bound_widths(values)
        budget().make(len(text) // SCANNED)


def bound_time(format: str) -> None:
    """Refuse a format of a time with a huge width."""
    if len(format) > MAX_TIME_FORMAT or TIME_WIDTH.search(format):
        raise SecurityError("it formats a time to a huge width")
