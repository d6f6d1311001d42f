"""The page's Markdown renderer against markdown-it-py, and against hostile text."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from headroom.options import Options
from tests.server.browser import chromium, pages
from tests.server.fakes import FakeLLM, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

UNTIMED = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# Returns the elements of a text as nested lists: [tag, attributes, children], or a text.
RENDER = """async ([text, cuts]) => {
  const { renderMarkdown, MarkdownView } = await import('/page/markdown.js');
  const plain = (node) => {
    if (node.nodeType === 3) return node.data;
    const inner = () => [...node.childNodes].map(plain);
    if (node.className === 'code-block') {
      const name = node.querySelector('.code-language').textContent;
      return ['pre', { name }, [node.querySelector('code').textContent]];
    }
    if (node.className === 'table-box') return plain(node.firstChild);
    const attributes = {};
    for (const { name, value } of node.attributes) attributes[name] = value;
    const level = node.dataset.level;
    return [level ? `h${level}` : node.tagName.toLowerCase(), attributes, inner()];
  };
  if (cuts === null) return renderMarkdown(text).map(plain);
  const target = document.createElement('div');
  const view = new MarkdownView(target);
  for (const cut of [...cuts, text.length]) view.update(text.slice(0, cut));
  return [...target.childNodes].map(plain);
}"""


@pytest.fixture(scope="module")
def page() -> Iterator["Page"]:
    with (
        chromium() as browser,
        serving(FakeLLM(), Options(port=0)) as server,
        pages(browser, server.address) as (open_page, complaints),
    ):
        complaints.expected.append("500")  # the model is not there
        yield open_page()
        assert complaints.unexpected == []


def render(page: "Page", text: str, cuts: list[int] | None = None) -> list[Any]:
    found: list[Any] = page.evaluate(RENDER, [text, cuts])
    return found


class Tree(HTMLParser):
    """Reads HTML into the nested lists that `RENDER` returns."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root: list[Any] = []
        self._open = [self.root]
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node: list[Any] = [tag, dict(attrs), []]
        self._open[-1].append(node)
        self._open.append(node[2])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].append([tag, dict(attrs), []])

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].append(data)


BLOCKS = {"p", "ul", "ol", "li", "blockquote", "pre", "table", "thead", "tbody", "tr", "th", "td"}
BLOCKS |= {"hr", *(f"h{level}" for level in range(1, 7))}


def simple(nodes: list[Any]) -> list[Any]:
    """Return a tree with joined texts, and without blanks between blocks or other attributes."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, str):
            if found and isinstance(found[-1], str):
                found[-1] += node
            else:
                found.append(node)
            continue
        tag, attributes, children = node
        if tag == "pre":
            name, code = attributes.get("name"), children[0]
            if name is None:  # the oracle's
                inner = code[2][0] if code[2] else ""
                name = code[1].get("class", "language-text").removeprefix("language-")
                code = inner.removesuffix("\n")
            found.append(["pre", name[:40], code.rstrip(" \n")])
            continue
        if tag == "code":  # the oracle keeps the indentation of lines, which CommonMark drops
            found.append(["code", {}, [" ".join("".join(children).split())]])
            continue
        kept = {key: attributes[key] for key in ("start",) if attributes.get(key)}
        if tag == "a":
            kept["href"] = attributes["href"].rstrip("/")
        if tag in ("th", "td"):
            side = attributes.get("style", "").removeprefix("text-align:") or attributes.get(
                "class"
            )
            kept |= {"side": side} if side else {}
        name = {"s": "del"}.get(tag, tag)
        found.append([name, kept, simple(children)])
    for at, node in enumerate(found[1:], 1):  # the oracle writes a line break after <br>
        if isinstance(node, str) and found[at - 1][0] == "br":
            found[at] = node.removeprefix("\n")
    beside = any(not isinstance(node, str) and node[0] in BLOCKS for node in found)
    if beside:  # blanks between blocks
        found = [node.strip("\n") if isinstance(node, str) else node for node in found]
    return [node for node in found if node != ""]


ORACLE = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["table", "strikethrough"])
    .disable(["code", "html_block", "html_inline", "reference"])
)


def expected(text: str) -> list[Any]:
    return simple(Tree(ORACLE.render(text)).root)


DOCUMENTS = [
    "# One\n\ntext *em* **strong** ***both*** ~~gone~~ `code` ``a ` b``\n\n## Two ##\n### Three",
    "- a\n- b\n  - c\n    - d\n- e\n\n  more of e\n- f",
    "1. one\n2. two\n   ```py\n   x = 1\n   ```\n3. three",
    "3) three\n4) four\n\n* star\n+ plus",
    "> quote\nlazy\n> - list\n>   more\n\n> second",
    "| a | b | c |\n|:--|:-:|--:|\n| 1 | `x \\| y` | **3** |\n| 4 |\n\nafter",
    "text\n| a | b |\n|---|---|\n| 1 | 2 |",
    "Title\n=====\n\nUnder\n-----\n\n***\n\n- - -\n___",
    "a  \nb\\\nc\nd",
    '[link](https://a.example/x_y_z "title") <https://b.example/> [*em* link](https://c.example)',
    "**bold*nested*bold** *a**b**c* __u__ _u_ snake_case_name 2*3*4 * not *",
    "~~~js\nlet a = `x`;\n~~~\n\n````\n```\n````",
    "```\nnever closed\n\n- text",
    "\\*not em\\* &amp; &lt; &copy; &#65; &unknown; <div>html</div> <!-- c -->",
    "- [a](https://a.example)\n\n  > quote in item\n\n  ```\n  code\n  ```\n- two",
    "1. a\n\n   b\n2. c\n10. d",
    "text\n- list after text\n1) and a number\ntext\n2) no list",
    "-\n- a\n-\n\n-   b",
    "#no heading\n#\n####### seven\n# x \\#",
    "*a **b* c** [x](mailto:a@e.example *y*) `*z*`",
    "\ttabbed\n\n-\ttab item\n\n  \tdeep",
    "  - indented\n  - list\n\n  para",
    "* a\n\n\n\n* b\n\n  c\n* d",
    "> > nested\n> back\n\n>no blank",
    "!not [a](b) [a] [a][b] [](https://e.example) [](<https://e.example>)",
    "*\u00a0a\u00a0* **\u201cq\u201d** a**\u201cq\u201d**b",
]


@pytest.mark.parametrize("text", DOCUMENTS)
def test_a_document_has_the_elements_of_commonmark(page: "Page", text: str) -> None:
    assert without_checks(simple(render(page, text))) == without_links(expected(text))


def without_checks(nodes: list[Any]) -> list[Any]:
    """Return a tree whose links that are not followed are plain text."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, str) or node[0] == "pre":
            found.append(node)
        elif node[0] == "span":
            found += without_checks(node[2])
        else:
            found.append([node[0], node[1], without_checks(node[2])])
    return simple_texts(found)


def without_links(nodes: list[Any]) -> list[Any]:
    """Return the oracle's tree in which links that the page does not follow are plain text."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, str) or node[0] == "pre":
            found.append(node)
        elif node[0] == "a" and not node[1]["href"].startswith(("http://", "https://", "mailto:")):
            found += without_links(node[2])
        else:
            found.append([node[0], node[1], without_links(node[2])])
    return simple_texts(found)


def simple_texts(nodes: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for node in nodes:
        if isinstance(node, str) and joined and isinstance(joined[-1], str):
            joined[-1] += node
        else:
            joined.append(node)
    return joined


INLINE = st.lists(
    st.sampled_from(
        [
            *("word", "a", " ", " ", "*", "**", "_", "__", "~~", "`", "``", "[", "]"),
            # A letter before the bracket: the oracle takes it for a blank after emphasis.
            *("z](mailto:a@e.example)", "<https://e.example>", "\\*", "&amp;", "<b>", "é", "7"),
            *(".", ",", "(", ")"),
        ]
    ),
    min_size=1,
    max_size=10,
).map(lambda parts: re.sub("~{3,}", "~~", "".join(parts)))  # GitHub: three are text
TEXT_LINE = st.one_of(INLINE, INLINE.map(lambda text: f"text {text}"))
LINE = st.one_of(TEXT_LINE, st.sampled_from(["", "", "---", "# head", "```", "~~~", "===", "***"]))
PREFIX = st.sampled_from(
    ["", "", "", "- ", "  ", "    ", "> ", "1. ", "   ", "* ", "2) ", "> - ", "+ "]
)
ROW = st.sampled_from(["| a | b |", "|---|:-:|", "c | d", "-|-", "| `x \\| y` |", "", "# head"])
DOCUMENT = st.one_of(
    st.lists(st.tuples(PREFIX, LINE).map("".join), min_size=1, max_size=9).map("\n".join),
    # Whether a table may follow the lines of an item or a quote at once is left open by GitHub.
    st.lists(st.one_of(ROW, TEXT_LINE), min_size=1, max_size=9).map("\n".join),
)


@UNTIMED
@given(DOCUMENT)
def test_generated_documents_have_the_elements_of_commonmark(page: "Page", text: str) -> None:
    assert without_checks(simple(render(page, text))) == without_links(expected(text))


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<img src=x onerror=alert(1)>", "javascript:alert(1)", "](javascript:a)", "["),
                *("](data:text/html,x)", "](//e.example)", "](/v1/models)", "<script>", "</p>"),
                *("| a |\n|---|\n", "```\n", "> ", "- ", "1. ", "\n", "\t", "$", "$$", "\\("),
                *("&#0;", "&#xD800;", "&#x110000;", "\\", "*", "_", "~~", "\u202e", "\U0001f600"),
                *("java\nscript:", "](JaVaScRiPt:a)", "<JAVASCRIPT:x>", '](https://a"onclick=x)'),
                *("!", "`", "\0", "\\)", "\\[", "\\]", "^", "{", "}", "\\frac", "\\sqrt"),
            ]
        ),
        st.text(max_size=8),
    ),
    max_size=30,
).map("".join)
ALLOWED = {
    "a": {"href", "title", "target", "rel"},
    "ol": {"start"},
    "th": {"class"},
    "td": {"class"},
    "li": {"class"},
    "input": {"type", "disabled", "aria-label", "checked"},
    "span": {"class", "title"},
    "div": {"class", "tabindex", "role", "aria-label"},
    **{f"h{level}": {"data-level"} for level in range(1, 7)},
    **{tag: set() for tag in ("p", "ul", "blockquote", "table", "thead", "tbody", "tr")},
    **{tag: set() for tag in ("hr", "br", "code", "em", "strong", "del")},
}


FORMULA = {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msup"}
FORMULA |= {"msub", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd"}
FORMULA_ATTRIBUTES = {"display", "alttext", "stretchy", "width", "accent", "mathvariant", "class"}
FORMULA_ATTRIBUTES |= {"linethickness"}


def check_allowed(nodes: list[Any]) -> None:
    for node in nodes:
        if isinstance(node, str) or node[0] == "pre":
            continue
        tag, attributes, children = node
        if tag in FORMULA:
            assert set(attributes) <= FORMULA_ATTRIBUTES
            check_allowed(children)
            continue
        assert tag in ALLOWED
        assert set(attributes) <= ALLOWED[tag], tag
        if tag == "a":
            assert attributes["href"].startswith(("http://", "https://", "mailto:"))
            assert attributes["rel"] == "noopener noreferrer nofollow"
        check_allowed(children)


@UNTIMED
@given(HOSTILE)
@example("[a](javascript:alert(1)) ![b](data:text/html,x) <javascript:x> [c](  \tjavascript:y)")
@example('[a](https://e.example/"><script>) [x](http:javascript:1) [y](https:alert(1))')
def test_hostile_text_becomes_only_known_elements(page: "Page", text: str) -> None:
    check_allowed(render(page, text))


@UNTIMED
@given(st.one_of(DOCUMENT, HOSTILE), st.data())
def test_a_text_that_comes_in_pieces_ends_as_the_whole(
    page: "Page", text: str, data: st.DataObject
) -> None:
    length = len(text.encode("utf-16-le", "surrogatepass")) // 2  # JavaScript's count
    cuts = data.draw(st.lists(st.integers(0, length), max_size=12).map(sorted))
    assert simple(render(page, text, cuts)) == simple(render(page, text))


@pytest.mark.parametrize(
    "text",
    [
        *("*" * 40_000, "**a" * 13_000, "[" * 40_000, "![" * 20_000, "`" * 40_000, "`a``" * 9000),
        *("> " * 20_000, "- " * 20_000, "1. " * 15_000, "|" * 40_000, "[a](" * 10_000),
        *("<" * 40_000, "&" * 40_000, "\\(" * 20_000, "$x" * 20_000, "a\n" * 20_000, "_a" * 20_000),
        *("> a\n" * 5000, "- a\n" * 5000, "  " * 20_000 + "a", "*_" * 20_000, "~~a" * 15_000),
        *("[" * 10_000 + "](https://e.example)" * 1000, "https://e.example/" + ")" * 30_000),
        *("```\n" * 10_000, "a  \n" * 10_000, "|a\n|-\n" + "|x\n" * 8000, "\\" * 40_000),
        *("- a\n\n" * 5000, "> - a\n" * 4000, "[x](<" * 8000, "$$\n" * 15_000, "\\[\n" * 15_000),
    ],
    ids=lambda text: json.dumps(text[:8]),
)
def test_no_text_takes_long(page: "Page", text: str) -> None:
    """A text that is quadratic in an inner loop would exceed Playwright's 15 s."""
    page.evaluate(
        "async ([text]) => { (await import('/page/markdown.js')).renderMarkdown(text); }", [text]
    )


def test_bare_links_end_before_the_sentence_does(page: "Page") -> None:
    text = (
        "See https://e.example/a_(b), (https://e.example/c) or https://e.example/d. nohttps://x.y"
    )
    (paragraph,) = render(page, text)
    links = [node[1]["href"] for node in paragraph[2] if not isinstance(node, str)]
    assert links == ["https://e.example/a_(b)", "https://e.example/c", "https://e.example/d"]


def test_tasks_have_boxes(page: "Page") -> None:
    ((_, _, items),) = render(page, "- [x] done\n- [ ] open\n- [x]no")
    boxes = [item[2][0][1]["aria-label"] for item in items[:2]]
    assert boxes == ["done", "to do"]
    assert items[2][2] == ["[x]no"]


@pytest.mark.parametrize(
    ("formula", "shape"),
    [
        (r"\frac{a}{b+1}", "mfrac(mi(a)mrow(mi(b)mo(+)mn(1)))"),
        (r"x_i^2", "msubsup(mi(x)mi(i)mn(2))"),
        (r"\sqrt[3]{x}", "mroot(mi(x)mn(3))"),
        (r"f'(x)", "mrow(msup(mi(f)mo(′))mo(()mi(x)mo()))"),
        (r"\mathbb{R}^n \to \mathbf{v}", "mrow(msup(mi(ℝ)mi(n))mo(→)mi(𝐯))"),
        (r"\left( \alpha \right]", "mrow(mo(()mi(α)mo(]))"),
        (r"\text{if } x > 0", "mrow(mtext(if\xa0)mi(x)mo(>)mn(0))"),
        (
            r"\begin{cases} 1 & x \\ 0 & y \end{cases}",
            "mrow(mo({)mtable(mtr(mtd(mn(1))mtd(mi(x)))mtr(mtd(mn(0))mtd(mi(y)))))",
        ),
        (r"\sum_{i=1}^n i", "mrow(msubsup(mo(∑)mrow(mi(i)mo(=)mn(1))mi(n))mi(i))"),
    ],
)
def test_formulas_become_mathml(page: "Page", formula: str, shape: str) -> None:
    def told(node: Any) -> str:
        return node if isinstance(node, str) else f"{node[0]}({''.join(map(told, node[2]))})"

    ((_, _, (math,)),) = render(page, f"\\({formula}\\)")
    assert math[1]["alttext"] == formula
    assert told(math) == f"math({shape})"


@pytest.mark.parametrize("formula", [r"\frac{a}", r"\nosuch{x}", "{" * 100, r"x^2^3", r"\left(x"])
def test_a_formula_that_cannot_be_read_is_shown_as_written(page: "Page", formula: str) -> None:
    assert render(page, f"\\({formula}\\)") == [["p", {}, [["span", {"class": "math"}, [formula]]]]]


def test_prices_are_no_formulas(page: "Page") -> None:
    text = "It costs $5 or $10, between $3-$4, and a $20 (not $x$)."
    (formula,) = (node for node in render(page, text)[0][2] if not isinstance(node, str))
    assert (formula[0], formula[1]["alttext"]) == ("math", "x")
    assert render(page, "It costs $5 or $10, between $3-$4.")[0][2] == [
        "It costs $5 or $10, between $3-$4."
    ]


@UNTIMED
@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "\\frac",
                    "\\sqrt",
                    "\\left(",
                    "\\right)",
                    "{",
                    "}",
                    "[",
                    "]",
                    "^",
                    "_",
                    "'",
                    "&",
                ),
                *(
                    "\\begin{cases}",
                    "\\end{cases}",
                    "\\\\\\\\",
                    "a",
                    "1.5",
                    " ",
                    "\\text{x y}",
                    "\\hat",
                ),
                *(
                    "\\sum",
                    "\\alpha",
                    "\\mathbf",
                    "\\not",
                    "\\begin",
                    "\\operatorname",
                    "<img>",
                    "😀",
                ),
            ]
        ),
        max_size=25,
    ).map("".join)
)
def test_no_formula_breaks_the_page(page: "Page", formula: str) -> None:
    check_allowed(render(page, f"$$\n{formula}\n$$\n\nand \\({formula}\\) end"))
