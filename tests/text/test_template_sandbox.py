"""The sandbox: templates cannot reach Python, and end within their limits."""

import enum
import functools
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.sandbox import SandboxedEnvironment

from headroom.errors import RequestError
from headroom.text.chat_template import ChatTemplate
from headroom.text.template_limits import MAX_CHARACTERS, MAX_ITEMS, new_budget, printed_size
from headroom.text.template_sandbox import TemplateEnvironment, plain_data
from tests.text.budgets import steps_of, taken

CHAT = [{"role": "user", "content": "hi"}]

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__code__.co_code }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ self._TemplateReference__context.environment }}",
]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one range": "{{ range(10000000000) | list }}",
    "filtered loop": "{% for a in range(9999) %}{% for b in [1] * 9999 if b > 1 %}{% endfor %}"
    "{% endfor %}",
    "recursive macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for a in [1, 2] recursive %}"
    "{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
}
HUGE = {
    "output": "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "joined": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "repeated": "{{ 'a' * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "percent": "{{ '%1000000000d' % 3 }}",
    "percent star": "{{ '%*d' % (10**9, 3) }}",
    "format filter": "{{ '%1000000000d' | format(3) }}",
    "format method": "{{ '{:>1000000000}'.format(3) }}",
    "format width": "{{ '{:>{w}}'.format(3, w=10**9) }}",
    "justified": "{{ 'a'.ljust(1000000000) }}",
    "centred": "{{ 'a' | center(width=10**9) }}",
    "indented": "{{ messages | tojson(indent=10**9) }}",
    "filler": "{{ lipsum(n=100000) }}",
}


DOUBLED = "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = "
BIG = "{% set big = 'x ' * 16000000 %}"
# Small templates that would take gigabytes or hours without limits on what one operation makes.
GREEDY = {
    "lists added": DOUBLED + "ns.l + ns.l %}{% endfor %}{{ ns.l|length }}",
    "lists multiplied": DOUBLED + "ns.l * 2 %}{% endfor %}{{ ns.l|length }}",
    "nested, as JSON": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson|length }}",
    "nested, written": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested, joined": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ ns.l|join(',') }}",
    "nested, in a text": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ ('' ~ ns.l)|length }}",
    "nested, formatted": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ '%s' % ns.l }}",
    "nested, by a filter": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ ns.l|upper|length }}",
    "nested, by a method": DOUBLED + "[ns.l, ns.l] %}{% endfor %}{{ '{}'.format(ns.l) }}",
    "nested, compared": "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "nested, tested": "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a is eq ns.b }}",
    "nested, changed": "{% set ns = namespace(a=[0]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{{ loop.changed(ns.a) }}{% endfor %}",
    "joined by a filter": "{{ (['x' * 30000000] * 70)|join|length }}",
    "joined by a method": "{{ ('x' * 1000000).join(['y'] * 10000)|length }}",
    "joined by a long text": "{{ (['y'] * 10000)|join('x' * 1000000)|length }}",
    "replaced by a method": "{{ ('x' * 70).replace('x', 'y' * 30000000)|length }}",
    "replaced by a filter": "{{ ('x' * 70)|replace('x', 'y' * 30000000)|length }}",
    "translated": "{{ ('x' * 1000000).translate({120: 'y' * 1000000})|length }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000)|length }}",
    "fields": "{{ ('{0}' * 1000000).format('x' * 1000000)|length }}",
    "percents": "{{ (('%s' * 1000) % (('x' * 1000000,) * 1000))|length }}",
    "indented": "{{ ('\n' * 1000000)|indent(1000000)|length }}",
    "indented JSON": "{{ ([[[[1]]]] * 100000)|tojson(indent=10000)|length }}",
    "words": BIG + "{{ big.split()|length }}",
    "lines": "{{ ('\n' * 30000000).splitlines()|length }}",
    "letters": BIG + "{{ big|list|length }}",
    "mapped letters": BIG + "{{ big|map('upper')|list|length }}",
    "counted words": BIG + "{{ big|wordcount }}",
    "batches": "{{ [1]|batch(30000000, 0)|list|length }}",
    "summed": "{{ ([[1]] * 500000)|sum(start=[])|length }}",
    "many texts": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(60) %}"
    "{% set ns.l = ns.l + [big.upper()] %}{% endfor %}{{ ns.l|length }}",
    "many slices": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, big[1:]] %}{% endfor %}",
    "many blocks": BIG + "{% set ns = namespace(l=[]) %}{% for i in range(60) %}"
    "{% set x %}{{ big }}{% endset %}{% set ns.l = [ns.l, x] %}{% endfor %}",
    "many macros": BIG + "{% macro m() %}{{ big }}{% endmacro %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(60) %}{% set ns.l = [ns.l, m()] %}{% endfor %}",
    "one block": "{% set x %}{% for i in range(400000) %}" + "text " * 100 + "{% endfor %}"
    "{% endset %}{{ x|length }}",
    "long literals": "{% set ns = namespace(l=[]) %}{% for i in range(400000) %}"
    "{% set ns.l = [ns.l, [" + "1," * 5000 + "]] %}{% endfor %}",
    "searched": BIG + "{% for i in range(400000) %}{{ 'y' in big }}{% endfor %}",
    "counted": BIG + "{% for i in range(400000) %}{{ big.count('y') }}{% endfor %}",
    "time": "{{ strftime_now('%999999Y' * 100)|length }}",
}
GREEDY_BYTES = 768 << 20  # of address space, besides what the process has


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_is_ended_before_it_takes_memory(name: str) -> None:
    told = r"more than \d+ (steps|characters|items)|repeats|huge width|adds up lists"
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + GREEDY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        with pytest.raises(RequestError, match=told):  # a MemoryError would say something else
            ChatTemplate(GREEDY[name], "", "").render(CHAT)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("'a' ~ 1 ~ none ~ [1, 'b']", "a1None[1, 'b']"),
        ("[1, 2] + [3]", "[1, 2, 3]"),
        ("messages[0:1]|length", "1"),
        ("'a,b'.split(',')|join('-')", "a-b"),
        ("'a b  c'.split()", "['a', 'b', 'c']"),
        ("'x'.join(['a', 'b'])", "axb"),
        ("'%s-%d' % ('a', 3)", "a-3"),
        ("'{} {x}'.format(1, x=2)", "1 2"),
        ("'a\nb'|indent(2)", "a\n  b"),
        ("{'a': [1, {'b': 2}]}|tojson(indent=2)|length", "48"),
        ("'hi' in messages[0].content", "True"),
        ("[3, 1, 2]|sort|first", "1"),
        ("[1, 2]|sum", "3"),
        ("messages|map(attribute='role')|join(',')", "user"),
        ("missing is defined", "False"),
        ("('a' ~ missing)", "a"),
        ("'abcabc'.replace('b', '')", "acac"),
        ("'abcabc'|replace('b', 'x', 1)", "axcabc"),
        ("'a'.ljust(3) ~ '|'", "a  |"),
        ("range(3)|list", "[0, 1, 2]"),
        ("messages|selectattr('role', 'equalto', 'user')|list|length", "1"),
    ],
)
def test_what_templates_usually_do_works_as_in_plain_jinja(source: str, text: str) -> None:
    plain = SandboxedEnvironment()
    plain.filters["tojson"] = lambda value, indent: json.dumps(value, indent=indent)
    whole = "{{ " + source + " }}"
    assert ChatTemplate(whole, "", "").render(CHAT) == text
    assert plain.from_string(whole).render(messages=CHAT) == text


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match=r"unsafe|undefined|no attribute"):
        ChatTemplate(source, "", "").render(CHAT)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_ended(name: str) -> None:
    with pytest.raises(RequestError, match=r"more than 500000 steps|calls itself without end"):
        ChatTemplate(ENDLESS[name], "", "").render(CHAT)


@pytest.mark.parametrize("name", HUGE)
def test_a_template_cannot_make_something_huge(name: str) -> None:
    with pytest.raises(RequestError, match=r"more than 33554432|repeats|bits|huge width|undefined"):
        ChatTemplate(HUGE[name], "", "").render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{:>1000000000}'.format(3) }}",
        "{{ '{x:>1000000000}'.format_map({'x': 3}) }}",
        "{{ '{:>{w}}'.format(3, w=10**9) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (10**9, 3) }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(width=10**9) }}",
    ],
)
def test_a_huge_width_is_refused_before_the_text_is_made(source: str) -> None:
    with pytest.raises(RequestError, match="huge width"):
        ChatTemplate(source, "", "").render(CHAT)


def test_a_text_may_have_exactly_as_many_characters_as_the_limit() -> None:
    for source in ("'a' * {}", "'a'.ljust({})"):
        longest = ChatTemplate("{{ (" + source.format(MAX_CHARACTERS) + ")|length }}", "", "")
        assert longest.render(CHAT) == str(MAX_CHARACTERS)
        with pytest.raises(RequestError, match=r"repeats|huge width"):
            ChatTemplate("{{ " + source.format(MAX_CHARACTERS + 1) + " }}", "", "").render(CHAT)


@pytest.mark.parametrize(
    ("source", "text"),
    [("2.0 ** 3", "8.0"), ("2 ** 0.5 < 2", "True"), ("1000000 + 1000000", "2000000")],
)
def test_plain_arithmetic_is_let_through(source: str, text: str) -> None:
    assert ChatTemplate("{{ " + source + " }}", "", "").render(CHAT) == text


def test_blocks_share_the_budget_of_their_template() -> None:
    source = "{% block a %}{% for i in range(300000) %}{% endfor %}{% endblock %}{{ self.a() }}"
    with pytest.raises(RequestError, match="more than 500000 steps"):
        ChatTemplate(source, "", "").render(CHAT)


def test_a_long_chat_is_far_from_the_limits() -> None:
    source = (
        "{% for m in messages %}{% for p in m.content.split() %}{{ p }}{% endfor %}{% endfor %}"
    )
    prompt = ChatTemplate(source, "", "").render([{"role": "user", "content": "a b c"}] * 20000)
    assert prompt == "abc" * 20000


def test_renderings_do_not_share_a_budget() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done", "", "")
    assert [template.render(CHAT) for _ in range(6)] == ["done"] * 6


def test_templates_see_only_plain_data() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    class Rich:
        def open(self) -> None:
            raise AssertionError("a template called it")

    data: dict[str, Any] = {"role": Role.USER, "content": [{"x": Rich()}, (1, 2.5, None, True)]}
    plain = plain_data(data)
    assert plain == {"role": "user", "content": [{"x": "<Rich>"}, [1, 2.5, None, True]]}
    assert type(plain["role"]) is str


def sandbox_filter(name: str) -> Callable[..., Any]:
    """Return a filter of the sandbox, to be called with the value and its arguments."""
    sandbox = TemplateEnvironment()
    run = sandbox.filters[name]
    needed = {"eval_context": EvalContext(sandbox), "environment": sandbox}
    wanted = getattr(run, "jinja_pass_arg", None)
    return functools.partial(run, needed[wanted.name]) if wanted else run


# What a filter takes from the budget before it runs; its result is counted besides.
FILTERS: list[tuple[str, tuple[Any, ...], dict[str, Any], int]] = [
    ("upper", ("abc",), {}, printed_size("abc")),
    ("center", ("abc", 9), {}, printed_size("abc") + printed_size(9)),
    ("trim", ("xax", "x"), {}, printed_size("xax") + printed_size("x")),
    ("indent", ("a\nb\rXn",), {}, printed_size("a\nb\rXn") + 3 * 4),
    ("indent", ("a\nX", 7), {}, printed_size("a\nX") + printed_size(7) + 2 * 7),
    ("indent", ("a\nb", "--"), {}, printed_size("a\nb") + printed_size("--") + 2 * 2),
    ("indent", ("a", 7, True), {}, printed_size("a") + printed_size(7) + printed_size(True) + 7),
    ("indent", ("a",), {"first": True}, printed_size("a") + printed_size(True) + 4),
    ("join", (["a", "b"], "--"), {}, printed_size(["a", "b"]) + printed_size("--") + 2 * 2),
    ("join", (["a", "b"],), {}, printed_size(["a", "b"])),
    ("join", (["a"],), {"d": "--"}, printed_size(["a"]) + printed_size("--") + 2),
    ("replace", ("banana", "a", "xyz"), {}, len("banana") + 3 * 2),
    ("format", ("%s-%s", "ab", "c"), {}, len("%s-%s") + 2 * printed_size("ab")),
    ("tojson", ([1, ["a"]],), {}, printed_size([1, ["a"]])),
    ("tojson", ([1, ["a"]],), {"indent": 3}, printed_size([1, ["a"]], indent=3)),
    ("tojson", ([1, ["a"]],), {"indent": "--"}, printed_size([1, ["a"]], indent=2)),
    ("pprint", ([1, ["a"]],), {}, printed_size([1, ["a"]], indent=1)),
    ("wordcount", ("a b",), {}, printed_size("a b")),
    ("length", ("abc",), {}, 0),
    ("list", ((1, 2, 3),), {}, 0),
]


@pytest.mark.parametrize(("name", "arguments", "named", "before"), FILTERS)
def test_a_filter_is_counted_before_it_runs_and_so_is_its_result(
    name: str, arguments: tuple[Any, ...], named: dict[str, Any], before: int
) -> None:
    run = sandbox_filter(name)
    with new_budget():
        found = run(*arguments, **named)
    sizes = {str: 1, list: 16}  # characters that a part of the result counts as
    result = sizes[type(found)] * len(found) if type(found) in sizes else 0
    assert taken(run, *arguments, **named) == before + result


FILTER_LIMITS: list[tuple[str, Callable[[int], tuple[Any, ...]], int, str]] = [
    ("wordcount", lambda size: ("x" * (size - 2),), 16 * MAX_ITEMS, "changes a text"),
    ("first", lambda size: ("x" * size,), MAX_ITEMS, "takes a text"),
    ("batch", lambda size: ([1], size), MAX_ITEMS, "huge width"),
    ("center", lambda size: ("x", size), MAX_CHARACTERS, "huge width"),
    ("tojson", lambda size: ([], False, size), MAX_CHARACTERS, "huge width"),
]


@pytest.mark.parametrize(("name", "arguments", "limit", "reason"), FILTER_LIMITS)
def test_a_filter_takes_exactly_the_limit_and_no_more(
    name: str, arguments: Callable[[int], tuple[Any, ...]], limit: int, reason: str
) -> None:
    run = sandbox_filter(name)
    with new_budget():
        run(*arguments(limit))
    with new_budget(), pytest.raises(SecurityError, match=reason):
        run(*arguments(limit + 1))


def test_only_counting_the_characters_of_a_long_text_is_free() -> None:
    with new_budget():
        assert sandbox_filter("length")("x" * (MAX_ITEMS + 1)) == MAX_ITEMS + 1
        assert sandbox_filter("count")("x" * (MAX_ITEMS + 1)) == MAX_ITEMS + 1


ROUNDS = "{% for a in x %}{BODY}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        ("{{ x }}", 0),
        (ROUNDS.replace("{BODY}", "{{ a }}"), 3),
        (ROUNDS.replace("{BODY}", "{{ a }}" * 60), 3),  # with the loop's own parts, 63
        (ROUNDS.replace("{BODY}", "{{ a }}" * 61), 6),
        (ROUNDS.replace("{BODY}", "{{ a }}" * 125), 9),
        (ROUNDS.replace("{BODY}", ROUNDS.replace("{BODY}", "{{ a }}" * 61)), 3 + 9 * 2),
        ("{% for a in x if a > 1 %}{{ a }}{% endfor %}", 3 + 2),
        ("{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{{ m() }}", 2),
        ("{% block b %}{{ x }}{% endblock %}{{ self.b() }}", 2),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}a{% endcall %}", 2),
        ("{{ range(4) | list }}", 4),
        ("{% generation %}a{% endgeneration %}", 1),
    ],
)
def test_a_run_of_a_body_costs_a_step_and_one_more_for_each_64_parts(
    source: str, steps: int
) -> None:
    template = TemplateEnvironment().build(source)
    assert steps_of(lambda: template.render(x=[1, 2, 3])) == steps


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"indent": 2},
        {"sort_keys": True},
        {"ensure_ascii": True},
        {"separators": (",", ":")},
        {"indent": 1, "sort_keys": True, "separators": (",", ": ")},
    ],
)
def test_json_in_a_template_is_python_s_without_escaped_html(settings: dict[str, Any]) -> None:
    value = {"b": ["<é>", None, True], "a": {"c'd": 1.5}}
    arguments = ", ".join(f"{name}={setting!r}" for name, setting in settings.items())
    template = ChatTemplate("{{ x | tojson(" + arguments + ") }}", "", "")
    wanted = json.dumps(value, **{"ensure_ascii": False, **settings})
    assert template.render(CHAT, x=value) == wanted
