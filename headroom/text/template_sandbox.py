"""The Jinja sandbox of chat templates, with limits on work and size."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headroom.text.template_limits import (
    MAX_ITEMS,
    bound_bits,
    bound_format,
    bound_method,
    bound_product,
    bound_replacement,
    bound_sum,
    bound_time,
    bound_widths,
    budget,
    compared,
    joined,
    made,
    printable,
    printed_size,
)

NODES_PER_STEP = 64  # of a loop's or macro's body; bodies in real templates have fewer
# Filters that look at a few items, or pass items on one by one; others look at all of them.
PASSING_FILTERS = frozenset((
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map",
    "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
))  # fmt: skip
# Filters that take a text apart, or write several characters for one.
WORD_FILTERS = frozenset((
    "e", "escape", "forceescape", "striptags", "title", "urlencode", "urlize", "wordcount",
    "wordwrap", "xmlattr",
))  # fmt: skip
COMPARING_TESTS = (
    "in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le",
    "<=", "ge", ">=",
)  # fmt: skip
COMPARING_METHODS = ("changed", "count", "index")  # of loops and lists


class TemplateSteps(Extension):
    """Counts the rounds of loops and the calls of macros and blocks, and what they make."""

    def step(self, steps: int) -> bool:
        """Count steps and return True, so that it can be part of a condition."""
        budget().step(steps)
        return True

    def insert_into(self, template: nodes.Template) -> None:
        """Insert counting calls at the start of loops, macros and blocks, and around operators.

        One run of a body costs a step, and one more for each NODES_PER_STEP nodes in it. Nodes of
        an inner loop or macro count for the inner one only.
        """
        bodies = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
        counted = list(template.find_all(bodies))
        steps = {id(node): 1 + _own_parts(node, bodies) // NODES_PER_STEP for node in counted}
        for concat in list(template.find_all(nodes.Concat)):
            parts = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [self.call_method("join", [parts], lineno=concat.lineno)]
        for compare in list(template.find_all(nodes.Compare)):
            compare.expr = self._compared(compare.expr)
            for operand in compare.ops:
                operand.expr = self._compared(operand.expr)
        self._count_slices(template)
        for node in counted:
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
            line, price = node.lineno, nodes.Const(steps[id(node)])
            call = self.call_method("step", [price])
            node.body.insert(0, nodes.ExprStmt(call, lineno=line))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(self.call_method("step", [price]), node.test, lineno=line)

    def join(self, parts: Sequence[object]) -> str:
        """Return the parts of a `~` as one text."""
        return joined(parts)

    def compare(self, value: object) -> object:
        """Count the cost of comparing an operand, and return the operand."""
        return compared(value)

    def make(self, value: object) -> object:
        """Count the size of a slice of a text or list, and return the slice."""
        return made(value)

    def _count_slices(self, node: nodes.Node) -> None:
        """Count every slice below a node; compiled templates cut without asking the sandbox."""
        for name, value in list(node.iter_fields()):
            several = isinstance(value, list)
            changed = [self._counted_slice(child) for child in (value if several else [value])]
            setattr(node, name, changed if several else changed[0])

    def _counted_slice(self, child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        self._count_slices(child)
        if isinstance(child, nodes.Getitem) and isinstance(child.arg, nodes.Slice):
            return self.call_method("make", [child], lineno=child.lineno)
        return child

    def _compared(self, operand: nodes.Expr) -> nodes.Expr:
        if isinstance(operand, nodes.Const):
            return operand
        return self.call_method("compare", [operand], lineno=operand.lineno)


def _own_parts(node: nodes.Node, bodies: tuple[type[nodes.Node], ...]) -> int:
    """Return how many nodes are in a loop, macro or block, without those of inner ones."""
    return sum(
        1 if isinstance(child, bodies) else 1 + _own_parts(child, bodies)
        for child in node.iter_child_nodes()
    )


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

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    concat = staticmethod(joined)  # of macros, blocks and `set` blocks

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[TemplateSteps, GenerationTag, loopcontrols],
            finalize=printable,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, run) for name, run in self.filters.items()}
        for name in COMPARING_TESTS:
            run: Any = self.tests[name]
            self.tests[name] = _counted_test(run)
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
            if isinstance(extension, TemplateSteps):
                extension.insert_into(template)
        return Template.from_code(self, self.compile(template), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator; refuse operands whose result would be huge."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            bound_bits(left.bit_length() * abs(right))
        elif operator == "*":
            bound_product(left, right)
        elif operator == "+":
            bound_sum(left, right)
        elif operator == "%" and isinstance(left, str):
            bound_format(left, right if isinstance(right, tuple) else (right,), "%")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; refuse calls whose result would be huge."""
        # The sandbox wraps the methods that format.
        text = getattr(getattr(target, "__wrapped__", target), "__self__", None)
        name = getattr(target, "__name__", "")
        if isinstance(text, str):
            bound_method(text, name, args, kwargs)
        elif name in COMPARING_METHODS:
            compared([text if isinstance(text, list | tuple) else None, *args])
        found = super().call(context, target, *args, **kwargs)
        return found if isinstance(text, TemplateSteps) else made(found)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    bound_time(format)
    return datetime.now().strftime(format)


def _counted_range(*bounds: int) -> range:
    numbers = range(*bounds)
    budget().step(len(numbers))
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
    # Jinja hands some filters its environment or context, before the value.
    first = 1 if hasattr(run, "jinja_pass_arg") else 0

    @functools.wraps(run)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[first:]
        if given:
            _bound_filter(name, given[0], given[1:], kwargs)
        return made(run(*args, **kwargs))

    return bounded


def _bound_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be huge, or that would take long."""
    values = (*args, *kwargs.values())
    if name in PASSING_FILTERS:
        if name in ("batch", "slice"):
            bound_widths(values, MAX_ITEMS)
        if isinstance(value, str) and len(value) > MAX_ITEMS and name not in ("count", "length"):
            raise SecurityError(f"it takes a text of more than {MAX_ITEMS} characters apart")
        return
    if name == "sum" and any(isinstance(item, list | tuple) for item in values):
        raise SecurityError("it adds up lists")  # each sum copies the one before
    if name == "tojson":
        indent = next((x for x in (*args[1:2], kwargs.get("indent")) if x is not None), 0)
        bound_widths((indent,))
        width = len(indent) if isinstance(indent, str) else indent
        budget().make(printed_size(value, indent=width if isinstance(width, int) else 0))
        return
    if name == "format":
        bound_format(str(printable(value)), values, "%")
        return
    bound_widths(values)
    size = printed_size(value, indent=1 if name == "pprint" else 0)
    size += sum(printed_size(item) for item in values)
    if name in WORD_FILTERS and size > 16 * MAX_ITEMS:
        raise SecurityError(f"it changes a text of more than {16 * MAX_ITEMS} characters")
    if name == "replace" and len(args) > 1:
        bound_replacement(str(value), *args[:2])
    elif name == "join":
        separator = str(args[0]) if args else str(kwargs.get("d", ""))
        count = len(value) if hasattr(value, "__len__") else MAX_ITEMS if separator else 0
        budget().make(size + len(separator) * count)
    elif name == "indent":
        width = next((x for x in values if not isinstance(x, bool)), 4)
        characters = len(width) if isinstance(width, str) else width
        lines = 1 + sum(map(str(value).count, "\n\r"))
        budget().make(size + lines * (characters if isinstance(characters, int) else 0))
    else:
        budget().make(size)


def _counted_test(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def counted(*args: Any) -> Any:
        for value in args:
            compared(value)
        return run(*args)

    return counted


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
