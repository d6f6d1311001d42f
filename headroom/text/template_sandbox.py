"""The Jinja sandbox of chat templates, with limits on work and size."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Limits of one rendering: far more than a long chat needs, and reached within seconds.
MAX_STEPS = 500_000  # rounds of loops, calls of macros, and numbers of range
MAX_CHARACTERS = 32 << 20  # of the prompt and of every text that is made on the way
MAX_INTEGER_BITS = 256

HUGE_WIDTH = re.compile(r"\d{7}")  # a width in a format string
HANDED_WIDTH = re.compile(r"\*|:[^}]*\{")  # a width that is one of the arguments
WIDTH_FILTERS = ("batch", "center", "indent", "slice", "tojson", "wordwrap")

Value = TypeVar("Value")


class CountedContext(Context):
    """The variables of one rendering, and how many steps it has left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps_left = [MAX_STEPS]  # a list, so that derived contexts share it

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Return a context for an inner block, with the same budget."""
        context = super().derived(locals)
        assert isinstance(context, CountedContext)
        context.steps_left = self.steps_left
        return context

    def spend(self, steps: int) -> None:
        """Take steps from the budget; raise where it is used up."""
        self.steps_left[0] -= steps
        if self.steps_left[0] < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")


class StepCounter(Extension):
    """Counts the rounds of loops and the calls of macros and blocks."""

    @pass_context
    def step(self, context: CountedContext) -> bool:
        """Count one step and return True, so that it can be part of a condition."""
        context.spend(1)
        return True

    def insert_into(self, template: nodes.Template) -> None:
        """Insert a counting call at the start of every loop, macro and block."""
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
            line = node.lineno
            node.body.insert(0, nodes.ExprStmt(self.call_method("step"), lineno=line))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(self.call_method("step"), node.test, lineno=line)
        for concat in list(template.find_all(nodes.Concat)):
            parts = nodes.Concat(concat.nodes, lineno=concat.lineno)
            concat.nodes = [self.call_method("bounded", [parts], lineno=concat.lineno)]

    def bounded(self, text: str) -> str:
        """Return a joined text; raise if it is too long."""
        return _bounded(text)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the model's words for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block up to its end tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("show"), [], [], body, lineno=line)

    def show(self, caller: Macro) -> str:
        """Return the body's text."""
        text: str = caller()
        return text


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on what operators, calls and filters may make."""

    context_class = CountedContext
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[StepCounter, GenerationTag, loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, run) for name, run in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "range": _counted_range,
        }
        del self.globals["lipsum"]  # filler text without bounds; no prompt needs it

    def build(self, source: str) -> Template:
        """Compile a template in which steps are counted."""
        template = self.parse(source)
        elsewhere = (nodes.Include, nodes.Extends, nodes.Import, nodes.FromImport)
        for node in template.find_all(elsewhere):
            raise TemplateError(f"line {node.lineno} wants another file")
        for extension in self.extensions.values():
            if isinstance(extension, StepCounter):
                extension.insert_into(template)
        return Template.from_code(self, self.compile(template), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator; refuse operands whose result would be huge."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bound_bits(left.bit_length() * abs(right))
        elif operator == "*":
            _bound_product(left, right)
        elif operator == "%" and isinstance(left, str):
            _bound_format(left, right if isinstance(right, tuple) else (right,))
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; refuse calls that would make a huge text."""
        # The sandbox wraps the methods that format.
        text = getattr(getattr(target, "__wrapped__", target), "__self__", None)
        if isinstance(text, str):
            values = (*args, *kwargs.values())
            if target.__name__ in ("format", "format_map"):
                _bound_format(text, values)
            else:
                _bound_widths(values)
        return _bounded(super().call(context, target, *args, **kwargs))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@pass_context
def _counted_range(context: CountedContext, *bounds: int) -> range:
    numbers = range(*bounds)
    context.spend(len(numbers))
    return numbers


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model has seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _bounded_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name == "format":
            _bound_format(str(args[0]), (*args[1:], *kwargs.values()))
        elif name in WIDTH_FILTERS:
            _bound_widths((*args[1:], *kwargs.values()))
        return _bounded(run(*args, **kwargs))

    return bounded


def _bounded(value: Value) -> Value:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise SecurityError(f"it makes a text of more than {MAX_CHARACTERS} characters")
    return value


def _bound_format(format: str, arguments: Sequence[Any]) -> None:
    """Refuse a format with a huge width, written in it or handed to it."""
    if HUGE_WIDTH.search(format):
        raise SecurityError("it formats a text to a huge width")
    if HANDED_WIDTH.search(format):
        _bound_widths(arguments)


def _bound_widths(arguments: Sequence[Any]) -> None:
    """Refuse numbers that are too large for a width."""
    if any(isinstance(value, int) and abs(value) > MAX_CHARACTERS for value in arguments):
        raise SecurityError("it formats a text to a huge width")


def _bound_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SecurityError(f"it computes a number of {bits} bits")


def _bound_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _bound_bits(left.bit_length() + right.bit_length())
    for items, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(items, Sequence):
            characters = len(items) * times
            if characters > MAX_CHARACTERS:
                raise SecurityError(f"it repeats something into {characters} items")


def plain_data(value: Any) -> Any:
    """Return a copy made of plain JSON types: rich objects have methods that a sandbox cannot know.

    Anything that is not data becomes a text that names its type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):  # enumerations become plain values
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_data(item) for item in value]
    return f"<{type(value).__name__}>"
