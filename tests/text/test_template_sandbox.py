"""The sandbox: no way out, and an end to everything."""

import enum
from typing import Any

import pytest

from headroom.errors import RequestError
from headroom.text.chat_template import ChatTemplate
from headroom.text.template_sandbox import MAX_CHARACTERS, plain_data

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


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match=r"unsafe|undefined|no attribute"):
        ChatTemplate(source, "", "").render(CHAT)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_ended(name: str) -> None:
    with pytest.raises(RequestError, match=r"more than 500000 steps|recursion"):
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
