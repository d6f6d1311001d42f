"""The files of the chat page: complete, self-contained, and served with strict headers."""

import re
from pathlib import Path

import httpx
import pytest

from headroom.options import Options
from headroom.plan.show.palette import LOOKS
from headroom.server import chat_page
from headroom.server.chat_page import MEDIA_TYPES, page_files
from tests.server.fakes import FakeLLM, serving

FOLDER = Path(chat_page.__file__).parent / "page"
FILES = sorted(path.name for path in FOLDER.iterdir())
SOURCES = {name: (FOLDER / name).read_text() for name in FILES}
# The name spaces of SVG; nothing is loaded from there.
NAME_SPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")


def test_the_root_is_the_page_and_every_file_has_its_type(shared: httpx.Client) -> None:
    page = shared.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (FOLDER / "index.html").read_bytes()
    assert set(page_files()) == set(FILES)
    for name in FILES:
        file = shared.get(f"/page/{name}")
        assert (file.status_code, file.text) == (200, SOURCES[name])
        assert file.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css", "/page/icon.svg"])
def test_every_answer_forbids_foreign_code_frames_and_guesses(
    shared: httpx.Client, path: str
) -> None:
    headers = shared.get(path).headers
    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[kind] == "'self'"
    for kind in ("frame-ancestors", "base-uri", "form-action"):
        assert policy[kind] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"


def test_a_browser_asks_whether_a_file_has_changed(shared: httpx.Client) -> None:
    for path in ("/", "/page/app.js"):
        first = shared.get(path)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f'"x", W/{tag}', "*"):
            again = shared.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
            assert "content-security-policy" in again.headers
        assert shared.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        head = shared.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(first.content))


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2Fchat_page.py", "..%2f..%2fllm.py", "%2e%2e", "x" * 3000, "a%00b"]
)
def test_other_files_are_not_served(shared: httpx.Client, name: str) -> None:
    refused = shared.get(f"/page/{name}")
    assert refused.status_code == 404
    assert len(refused.content) < 500 or name.startswith("..")


def test_the_page_needs_no_key_and_its_data_does() -> None:
    with (
        serving(FakeLLM(), Options(port=0, api_key="k")) as server,
        httpx.Client(base_url=server.address) as client,
    ):
        for path in ("/", "/page/app.js"):
            assert client.get(path).status_code == 200
        for path in ("/plan", "/experts", "/props", "/v1/models"):
            assert client.get(path).status_code == 401


def test_every_file_that_another_names_is_there() -> None:
    html = SOURCES["index.html"]
    named = re.findall(r'(?:src|href)="/page/([^"]+)"', html)
    assert {"app.js", "theme.js", "style.css", "icon.svg"} <= set(named)
    for source in SOURCES.values():
        named += re.findall(r'from "\./([^"]+)"', source)
    assert set(named) <= set(FILES)
    assert set(FILES) - set(named) == {"index.html"}  # and no file is left over


def test_every_element_that_the_code_asks_for_is_in_the_page() -> None:
    ids = re.findall(r'\bid="([^"]+)"', SOURCES["index.html"])
    assert len(ids) == len(set(ids))
    for name in FILES:
        if name.endswith(".js"):
            asked = re.findall(r'\b(?:byId|on)\("([\w-]+)"', SOURCES[name])
            assert set(asked) <= set(ids), name


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    source = SOURCES[name]
    for space in NAME_SPACES:
        source = source.replace(space, "")
    assert re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", source, re.IGNORECASE) == []
    assert not re.search(r"@import|url\(", source)


@pytest.mark.parametrize("name", FILES)
def test_no_text_becomes_html_or_code(name: str) -> None:
    """The content policy forbids these, too; a page that tried would only break."""
    source = SOURCES[name]
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert not re.search(rf"{forbidden}|DOMParser|srcdoc|javascript:", source)
    if name == "index.html":
        assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", source)


def test_every_line_of_a_plan_has_a_name_and_a_colour_of_its_own() -> None:
    """In the light colours and in the dark ones, which are written twice."""
    source = SOURCES["memory.js"]
    names = source.partition("const NAMES = {")[2].partition("};")[0]
    kinds = source.partition("const KINDS = {")[2].partition("};")[0]
    assert set(re.findall(r"(\w+): \"", names)) == set(LOOKS)
    classes = dict(re.findall(r"(\w+): \"([\w-]+)\"", kinds))
    assert set(classes) == set(LOOKS)
    style = SOURCES["style.css"]
    for kind in (*classes.values(), "other"):
        assert f"\n.{kind} {{ background: var(--{kind}); }}\n" in style
    shades = [
        re.findall(rf"^ +--{kind}: (#\w+);$", style, re.MULTILINE)
        for kind in (*classes.values(), "other")
    ]
    for scheme in zip(*shades, strict=True):
        assert len(set(scheme)) == len(LOOKS) + 1
    assert [len(found) for found in shades] == [3] * len(shades)
