"""The chat page as people use it, in headless Chromium, over a server with a scripted model."""

import json
import os
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from headroom import LLM
from headroom.errors import CapacityError
from headroom.experts.telemetry import ExpertTelemetry
from headroom.options import Options
from headroom.server.http_server import HttpServer
from headroom.server.shelf import Shelf
from headroom.split.upkeep import ExpertView, LayerView
from tests.clients.answers import RESULT, last_turn
from tests.clients.model import CONTEXT, MANNERS, write_model
from tests.clients.scripted import ScriptedEngine, scripted_model
from tests.server.browser import NARROW, WIDE, Complaints, OpenPage, chromium, pages
from tests.server.fakes import serving, wait_until
from tests.synth_models import write_model as write_synthetic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

AXE = "AXE"  # the variable that names axe-core's file
MANNER = MANNERS["qwen3"]
HOSTILE = """\
<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

[press me](javascript:window.hacked=3) [and me](data:text/html,<script>1</script>) \
![a picture](http://127.0.0.1:9/x.png) <javascript:alert(1)> [ok](https://example.org/a)

<iframe src="javascript:window.hacked=4"></iframe><svg onload="window.hacked=5">

| <b>x</b> | `</td><script>window.hacked = 6</script>` |
|---|---|
| "><img src=x onerror=window.hacked=7> | 1 |

```html"><img src=x onerror=window.hacked=8>
</code></pre><script>window.hacked = 9</script>
```
"""
CODE = "```python\ndef f(x):\n    return x  # the same\n```"


def answer(prompt: str) -> str:
    """Return what the model says to the words of the user."""
    turn = last_turn(prompt)
    if results := RESULT.findall(turn):
        return f"The tool said {results[-1]}."
    words = turn.removeprefix("user\n").split("<|im_end|>")[0].strip()
    if words == "think":
        return MANNER.thought(prompt, "I weigh **both** sides.") + "Done thinking."
    if words == "weather":
        return MANNER.call("get_weather", {"city": "Oslo"})
    if words == "hostile":
        return HOSTILE
    if words == "code":
        return f"Here:\n\n{CODE}\n\nThat is all."
    if words == "long":
        return "word " * 2000
    if words.startswith("count"):
        return " ".join(map(str, range(100)))
    return f"You said *{words}*."


class Running(NamedTuple):
    """A server over a scripted model."""

    address: str
    engine: ScriptedEngine
    server: HttpServer


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("model") / "scripted.gguf")


@pytest.fixture(scope="module")
def shared_server(model_path: Path) -> Iterator[Running]:
    with (
        scripted_model(model_path, answer, context=CONTEXT, name="scripted") as llm,
        serving(llm, Options(port=0)) as server,
    ):
        assert isinstance(llm.engine, ScriptedEngine)
        yield Running(server.address, llm.engine, server)


@pytest.fixture
def running(shared_server: Running) -> Iterator[Running]:
    shared_server.engine.forget()
    shared_server.engine.pause_s = 0.0
    shared_server.engine.script = answer
    yield shared_server
    shared_server.engine.pause_s = 0.0


@pytest.fixture
def opened(browser: "Browser", running: Running) -> Iterator[tuple[OpenPage, Complaints]]:
    with pages(browser, running.address) as found:
        yield found
        assert found[1].unexpected == []


@pytest.fixture
def open_page(opened: tuple[OpenPage, Complaints]) -> OpenPage:
    return opened[0]


@pytest.fixture
def complaints(opened: tuple[OpenPage, Complaints]) -> Complaints:
    return opened[1]


@pytest.fixture
def page(open_page: OpenPage) -> "Page":
    return open_page()


def ask(page: "Page", text: str, *, wait: bool = True) -> None:
    """Write a message and send it by its key; wait for the end of its answer."""
    page.fill("#composer-input", text)
    touch = page.evaluate("matchMedia('(pointer: coarse)').matches")
    page.press("#composer-input", "Control+Enter" if touch else "Enter")
    if wait:
        page.wait_for_selector('#send[aria-label="Send"]')
        page.wait_for_selector(".message.assistant:last-child .buttons")


def said(page: "Page") -> list[str]:
    """Return the texts of all answers on the page.

    Not their inner texts: Chromium has none for an old message that it has not yet laid out.
    """
    return [text.strip() for text in page.locator(".message.assistant .body").all_text_contents()]


def sent(running: Running) -> list[dict[str, Any]]:
    """Return what reached the engine, as sampling settings."""
    return [
        {name: getattr(request.params, name) for name in ("temperature", "max_tokens", "seed")}
        for request in running.engine.requests
    ]


def test_a_message_is_answered_with_markdown_and_numbers(page: "Page") -> None:
    ask(page, "hello")
    assert said(page) == ["You said hello."]
    assert page.locator(".markdown em").inner_text() == "hello"
    numbers = page.locator(".numbers").inner_text()
    assert re.search(r"first token \d+", numbers)
    assert re.search(r"[\d,.]+ tok/s", numbers)
    assert re.search(r"\d+ tokens", numbers)
    assert re.search(r"prompt \d+, 0 cached", numbers)
    assert re.fullmatch(r"\d+ of 160,000 tokens", page.locator("#context").inner_text())
    assert page.title() == "hello · headroom"


def test_the_numbers_tell_how_many_drafts_were_accepted(page: "Page") -> None:
    numbers = "import('/page/message.js').then((m) => m.statisticsOf({s}).map((x) => x.text))"
    told = page.evaluate(numbers.replace("{s}", "{ guessed: 2000, accepted: 1200 }"))
    assert told == ["1,200 of 2,000 drafts accepted"]
    assert page.evaluate(numbers.replace("{s}", "{ guessed: 0, accepted: 0 }")) == []


def test_an_answer_streams_and_escape_stops_it(page: "Page", running: Running) -> None:
    running.engine.pause_s = 0.02
    ask(page, "count", wait=False)
    page.wait_for_function("() => document.querySelector('.markdown')?.innerText.includes(' 3 ')")
    assert page.locator("#send").get_attribute("aria-label") == "Stop"
    assert page.locator(".message.running").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector('#send[aria-label="Send"]')
    wait_until(lambda: running.engine.finished["cancelled"] == 1)
    assert "You stopped this answer." in said(page)[0]
    assert "99" not in said(page)[0]
    running.engine.pause_s = 0.0
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector(".ending", state="detached")
    assert running.engine.prompts[-1].endswith(tuple("0123456789 "))  # it goes on with the text


def below_sight(page: "Page") -> float:
    """Return how many pixels of the conversation are below what is seen."""
    told: float = page.evaluate(
        "() => { const log = document.querySelector('#log');"
        " return log.scrollHeight - log.clientHeight - log.scrollTop; }"
    )
    return told


def test_the_end_stays_in_sight_until_the_reader_scrolls_away(
    page: "Page", running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.server.service.UNREAD_EVENTS", 1_000_000)
    running.engine.script = lambda prompt: "A river's soul, it is pure, " * 400
    ask(page, "first")
    assert below_sight(page) < 2
    assert page.locator("#log").evaluate("log => log.scrollHeight > 1.5 * log.clientHeight")
    running.engine.pause_s = 0.003
    ask(page, "second", wait=False)
    page.wait_for_function(
        "() => document.querySelector('.message.running .markdown')?.innerText.length > 1500"
    )
    # Messages before the last two are laid out only when they are seen.
    assert below_sight(page) < 60
    assert page.locator("#jump").is_hidden()
    page.mouse.move(700, 300)
    page.mouse.wheel(0, -600)
    page.wait_for_selector("#jump", state="visible")
    seen = page.locator("#log").evaluate("log => log.scrollTop")
    page.wait_for_function(
        "() => document.querySelector('.message.running .markdown')?.innerText.length > 3000"
    )
    assert page.locator("#log").evaluate("log => log.scrollTop") == seen
    page.click("#jump")
    page.wait_for_selector("#jump", state="hidden")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.assistant:last-child .buttons")
    assert below_sight(page) < 2


def test_a_long_conversation_opens_at_its_end(page: "Page", running: Running) -> None:
    running.engine.script = lambda prompt: "A river's soul, it is pure, " * 60
    for word in ("first", "second", "third", "fourth"):
        ask(page, word)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.wait_for_function("() => document.querySelectorAll('.message').length === 8")
    page.wait_for_timeout(200)  # messages get their heights as they are drawn
    assert below_sight(page) < 2
    assert page.locator("#jump").is_hidden()


def test_verses_and_hard_breaks_take_one_line_each(page: "Page", running: Running) -> None:
    running.engine.script = lambda prompt: (
        "one\ntwo\nthree\n\nhard  \nbreaks\\\nhere\n\nsingle\n\n- a\n  b\n- c"
    )
    ask(page, "a poem")
    heights = page.locator(".markdown p").evaluate_all("all => all.map(p => p.offsetHeight)")
    verses, breaks, single = heights
    assert verses == breaks == 3 * single
    first, second = page.locator(".markdown li").evaluate_all("all => all.map(p => p.offsetHeight)")
    assert first == 2 * second


def test_the_button_stops_too_and_an_answer_in_the_background_goes_on(
    page: "Page", running: Running
) -> None:
    running.engine.pause_s = 0.01
    ask(page, "count to the end", wait=False)
    page.wait_for_selector(".message.running .markdown p")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    ask(page, "count and stop", wait=False)
    page.wait_for_selector(".message.running .markdown p")
    page.click('#send[aria-label="Stop"]')
    page.wait_for_selector(".ending")
    wait_until(lambda: running.engine.finished["stop"] == 1)
    page.get_by_role("button", name="count to the end", exact=True).click()
    page.wait_for_function("() => document.querySelector('.markdown')?.innerText.endsWith(' 99')")
    assert running.engine.finished == {"stop": 1, "cancelled": 1}


def test_regenerating_and_editing_keep_the_old_versions(page: "Page", running: Running) -> None:
    ask(page, "first")
    ask(page, "second")
    page.locator(".message.assistant").last.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".branches")
    assert page.locator(".branches").inner_text() == "2/2"
    assert len(running.engine.prompts) == 3
    assert running.engine.prompts[2] == running.engine.prompts[1]
    question = page.locator(".message.user").first
    question.hover()
    question.get_by_role("button", name="Edit").click()
    page.fill(".edit-field", "changed")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.message.assistant').length === 1")
    page.wait_for_selector(".message.assistant .buttons")
    assert said(page) == ["You said changed."]
    assert "first" not in running.engine.prompts[-1]
    page.get_by_role("button", name="Previous version").first.click()
    assert said(page) == ["You said first.", "You said second."]
    page.get_by_role("button", name="Previous version").last.click()
    assert page.locator(".branches").all_inner_texts() == ["1/2", "1/2"]


def test_an_answer_can_be_edited_and_is_sent_back_as_edited(page: "Page", running: Running) -> None:
    ask(page, "first")
    page.locator(".message.assistant").get_by_role("button", name="Edit").click()
    page.fill(".edit-field", "I never said that.")
    page.get_by_role("button", name="Save").click()
    assert said(page) == ["I never said that."]
    ask(page, "second")
    assert "assistant\nI never said that.<|im_end|>" in running.engine.prompts[-1]


def test_conversations_outlive_a_reload(page: "Page") -> None:
    ask(page, "think")
    page.click("#new-chat")
    ask(page, "other")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert said(page) == ["You said other."]
    names = page.locator(".conversations .open").all_inner_texts()
    assert names == ["other", "think"]
    page.locator(".conversations .open").last.click()
    page.wait_for_selector(".thought")
    assert "Done thinking." in said(page)[0]
    assert page.locator(".numbers").count() == 1


def test_conversations_are_found_renamed_and_deleted(page: "Page") -> None:
    for text in ("apples", "pears"):
        page.click("#new-chat")
        ask(page, text)
    page.keyboard.press("Control+k")
    page.keyboard.type("said APPLES"[5:])
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 1")
    page.fill("#search", "no such text")
    page.wait_for_selector(".nothing")
    page.fill("#search", "")
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 2")
    row = page.locator(".conversations li", has_text="apples")
    row.hover()
    row.get_by_role("button", name="Rename apples").click()
    page.keyboard.type("fruit")
    page.keyboard.press("Enter")
    page.wait_for_selector('.conversations .open >> text="fruit"')
    row = page.locator(".conversations li", has_text="pears")
    row.hover()
    row.get_by_role("button", name="Delete pears").click()
    page.get_by_role("button", name="Cancel").click()
    assert page.locator(".conversations .open").count() == 2
    row.hover()
    row.get_by_role("button", name="Delete pears").click()
    page.click("#confirm-yes")
    page.wait_for_function("() => document.querySelectorAll('.conversations .open').length === 1")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".conversations .open").all_inner_texts() == ["fruit"]
    assert page.locator(".message").count() == 0  # the deleted one was shown


def test_conversations_are_exported_and_imported(
    page: "Page", open_page: OpenPage, tmp_path: Path
) -> None:
    ask(page, "code")
    page.locator(".message.assistant").get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".branches")
    page.click("#export")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Markdown").click()
    text = Path(saved.value.path()).read_text()
    assert (saved.value.suggested_filename, text[:7]) == ("code.md", "# code\n")
    assert CODE in text
    with page.expect_download() as saved:
        page.click("#export-all")
    file = tmp_path / "all.json"
    saved.value.save_as(file)
    other = open_page()
    other.set_input_files("#import-file", file)
    other.wait_for_selector(".branches")
    assert other.locator(".branches").inner_text() == "2/2"
    assert said(other) == said(page)
    for wrong in ("{", "[]", '{"nodes": {}}', '{"version": 1, "nodes": {}, "roots": ["x"]}'):
        (tmp_path / "wrong.json").write_text(wrong)
        other.evaluate("document.getElementById('toast').hidden = true")
        other.set_input_files("#import-file", tmp_path / "wrong.json")
        other.wait_for_selector("#toast:not([hidden])")
        assert "file" in other.locator("#toast").inner_text()
    assert other.locator(".conversations .open").count() == 1


@pytest.fixture
def small_context(
    browser: "Browser", model_path: Path
) -> Iterator[tuple["Page", ScriptedEngine, Complaints]]:
    """A page over a model whose context holds a few short turns."""
    with scripted_model(model_path, answer, context=128, name="small") as llm:
        assert isinstance(llm.engine, ScriptedEngine)
        with (
            serving(llm, Options(port=0)) as server,
            pages(browser, server.address) as (open_page, complaints),
        ):
            yield open_page(), llm.engine, complaints
            assert complaints.unexpected == []


LEFT_OUT = ".left-out:not([hidden])"


def test_a_conversation_goes_on_without_its_oldest_turns_when_the_context_is_full(
    small_context: tuple["Page", ScriptedEngine, Complaints],
) -> None:
    page, engine, _ = small_context
    words = [f"question {index} of many" for index in range(12)]
    for text in words:
        ask(page, text)
    assert page.locator(".failure").count() == 0
    assert said(page)[0] == f"You said {words[0]}."
    assert said(page)[-1].endswith(f"You said {words[-1]}.")
    assert engine.finished == {"stop": len(words)}
    kept = [text for text in words if f"user\n{text}<" in engine.prompts[-1]]
    assert kept == words[-len(kept) :]
    assert 1 < len(kept) < len(words)
    assert max(len(request.prompt) for request in engine.requests) <= 128 - 128 // 4
    told = page.locator(LEFT_OUT).last.text_content() or ""
    oldest = f"the oldest {len(words) - len(kept)} turns are"
    assert told == f"The context is full: {oldest} left out from here on."
    first = page.locator(LEFT_OUT).first.text_content() or ""
    assert "the oldest turn is left out" in first
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(LEFT_OUT).last.text_content() == told


def test_a_request_that_is_refused_as_too_long_is_tried_with_fewer_turns(
    small_context: tuple["Page", ScriptedEngine, Complaints],
) -> None:
    page, engine, complaints = small_context
    complaints.expected.append("400 (Bad Request)")  # the browser's own line
    ask(page, "a " + "easily " * 3)
    page.locator(".message.assistant").get_by_role("button", name="Edit").click()
    page.fill(".edit-field", "\u2603" * 55)  # more tokens than characters, and no count of them
    page.get_by_role("button", name="Save").click()
    ask(page, "hello")
    assert said(page)[-1].endswith("You said hello.")
    assert any("400" in line for line in complaints.lines)
    assert page.locator(LEFT_OUT).count() == 1
    assert "\u2603" not in engine.prompts[-1]


def test_a_question_longer_than_the_context_is_refused_and_the_next_one_answered(
    small_context: tuple["Page", ScriptedEngine, Complaints],
) -> None:
    page, engine, complaints = small_context
    complaints.expected.append("400 (Bad Request)")
    ask(page, "first")
    ask(page, "much too long " * 60)
    assert "the context holds 128" in page.locator(".failure").inner_text()
    ask(page, "again")
    assert said(page)[-1] == "You said again."
    assert "too long" not in engine.prompts[-1]
    assert "user\nfirst<" in engine.prompts[-1]


def test_enter_begins_a_line_on_a_touch_screen_and_the_button_sends(open_page: OpenPage) -> None:
    page = open_page(viewport=NARROW, has_touch=True, is_mobile=True)
    assert page.evaluate("matchMedia('(pointer: coarse)').matches")
    page.tap("#composer-input")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    assert page.input_value("#composer-input") == "one\ntwo"
    assert page.get_attribute("#send", "title") == "Send"
    page.tap("#send")
    page.wait_for_selector(".message.assistant .buttons")
    page.locator(".message.user").get_by_role("button", name="Edit").tap()
    page.locator(".edit-field").press("End")
    page.keyboard.press("Enter")
    assert page.input_value(".edit-field").count("\n") == 2
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".branches")


def test_settings_reach_the_request_and_the_defaults_are_the_models(
    page: "Page", running: Running
) -> None:
    page.keyboard.press("Control+,")
    assert page.get_attribute("#setting-temperature", "placeholder") == "0.2"
    assert "1B parameters" in page.locator("#settings-source").inner_text()
    page.fill("#setting-temperature", "0.75")
    page.fill("#setting-max_tokens", "7")
    page.fill("#setting-seed", "42")
    page.fill("#setting-system", "Speak like a pirate.")
    page.select_option("#setting-thinking", "off")
    page.fill("#setting-top_p", "7")  # out of range: not sent
    page.locator("#setting-top_p").blur()
    assert page.get_attribute("#setting-top_p", "aria-invalid") == "true"
    ask(page, "count")
    assert sent(running) == [{"temperature": 0.75, "max_tokens": 7, "seed": 42}]
    assert running.engine.requests[0].params.top_p == 0.9
    prompt = running.engine.prompts[0]
    assert "system\nSpeak like a pirate." in prompt
    assert prompt.endswith("</think>\n\n")
    assert "ended at its limit" in said(page)[0]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.input_value("#setting-temperature") == "0.75"
    page.click("#settings-reset")
    page.click("#new-chat")
    ask(page, "hello")
    assert sent(running)[1]["temperature"] == 0.2
    assert "pirate" not in running.engine.prompts[1]


def test_thoughts_are_folded_and_the_switch_turns_them_off(page: "Page", running: Running) -> None:
    ask(page, "think")
    assert said(page)[0].endswith("Done thinking.")
    assert "both" not in said(page)[0]
    assert "Thought" in page.locator(".thought summary").inner_text()
    page.click(".thought summary")
    assert page.locator(".thought strong").inner_text() == "both"
    page.click("#think")
    assert page.get_attribute("#think", "aria-pressed") == "false"
    ask(page, "think")
    assert page.locator(".thought").count() == 1
    assert running.engine.prompts[-1].endswith("</think>\n\n")


def test_tool_calls_are_shown_and_their_results_sent(page: "Page", running: Running) -> None:
    page.click("#panel-open")
    page.click("text=Stop texts and tools")
    page.fill("#setting-tools", "{")
    page.locator("#setting-tools").blur()
    assert "not JSON" in page.locator("#tools-error").inner_text()
    ask(page, "weather", wait=False)
    assert "not JSON" in page.locator("#toast").inner_text()  # nothing is lost
    assert page.input_value("#composer-input") == "weather"
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
    page.fill("#setting-tools", json.dumps([tool]))
    page.locator("#setting-tools").blur()
    ask(page, "weather")
    assert page.locator(".call-name").inner_text().split() == ["Calls", "get_weather"]
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    page.get_by_label("Result of get_weather").fill("rain")
    page.get_by_role("button", name="Send result").click()
    page.wait_for_function("() => document.body.innerText.includes('The tool said rain.')")
    assert "<tool_response>\nrain" in running.engine.prompts[-1]
    result = page.locator(".message.tool")
    result.get_by_text("Result").click()
    assert result.locator("pre").inner_text() == "rain"
    assert result.locator("button").count() == 1  # that copies the result


def test_a_call_and_its_result_are_pictured(open_page: OpenPage, running: Running) -> None:
    """The variable PAGE_SHOTS names the folder that keeps the picture."""
    running.engine.pause_s = 0.002
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
    page = open_page(color_scheme="dark", viewport=WIDE, reduced_motion="reduce")
    page.click("#panel-open")
    page.click("text=Stop texts and tools")
    page.fill("#setting-tools", json.dumps([tool]))
    page.locator("#setting-tools").blur()
    page.click("#panel-close")
    ask(page, "think")
    page.click(".thought summary")
    assert page.locator(".thought .markdown strong").inner_text() == "both"
    ask(page, "weather")
    page.get_by_label("Result of get_weather").fill('{"celsius": 3}')
    page.get_by_role("button", name="Send result").click()
    page.wait_for_selector(".message.assistant:last-child .buttons")
    place = page.locator(".message.tool summary").bounding_box()
    page.click(".message.tool summary")
    page.wait_for_selector(".message.tool pre", state="visible")
    assert page.locator(".message.tool summary").bounding_box() == place  # it stays where it is
    assert overflow(page) == []
    if page.locator("#jump").is_visible():
        page.click("#jump")
    if folder := os.environ.get("PAGE_SHOTS"):
        page.screenshot(path=Path(folder) / "tools.png")


def test_code_is_coloured_and_copied(page: "Page") -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "code")
    assert page.locator(".code-language").inner_text() == "python"
    assert page.locator(".code-word").all_inner_texts() == ["def", "return"]
    page.get_by_role("button", name="Copy code").click()
    page.wait_for_selector(".code-head .done")
    code = CODE.removeprefix("```python\n").removesuffix("\n```")
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.get_by_role("button", name="Copy answer").click()
    page.wait_for_selector(".message-foot .done")
    assert page.evaluate("navigator.clipboard.readText()") == answer("x<|im_start|>user\ncode")


def test_hostile_text_stays_text(page: "Page") -> None:
    ask(page, "hostile")
    body = page.locator(".message.assistant .body")
    assert page.evaluate("window.hacked") is None
    for tag in ("script", "iframe", "svg[onload]", "img", "b"):
        assert body.locator(f".markdown {tag}").count() == 0
    links = [link.get_attribute("href") for link in body.locator("a").all()]
    assert links == ["http://127.0.0.1:9/x.png", "https://example.org/a"]
    for link in body.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert link.get_attribute("target") == "_blank"
    text = body.inner_text()
    assert '<img src=x onerror="window.hacked = 1">' in text
    assert "</td><script>window.hacked = 6</script>" in text
    page.click(".unsafe-link >> nth=0")
    assert page.evaluate("window.hacked") is None
    # A hostile question and a hostile title, too.
    ask(page, "<img src=x onerror=window.hacked=1>")
    assert page.evaluate("window.hacked") is None
    assert page.locator(".question").last.inner_text() == "<img src=x onerror=window.hacked=1>"


COUNT_BLOCKS = """() => {
  window.added = window.drawings = 0;
  new MutationObserver((changes) => {
    const blocks = changes.filter(({ target }) => target.matches?.('.markdown'));
    window.drawings += blocks.length ? 1 : 0;
    for (const { addedNodes } of blocks) window.added += addedNodes.length;
  }).observe(document.body, { childList: true, subtree: true });
}"""


@pytest.mark.parametrize("shape", ["paragraphs", "code", "line"])
def test_an_answer_of_a_hundred_thousand_tokens_can_be_watched(
    page: "Page", running: Running, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens come as fast as the server can send them; no real model is ahead so far."""
    monkeypatch.setattr("headroom.server.service.UNREAD_EVENTS", 1_000_000)
    rows, words = 1700, "word " * 19 + "end"
    text = {
        "paragraphs": f"{words}\n\n" * rows,
        "code": "```\n" + f"{words}\n" * rows + "```",
        "line": f"{words} " * rows,
    }[shape]
    running.engine.script = lambda prompt: text
    page.evaluate(COUNT_BLOCKS)
    ask(page, "go", wait=False)
    page.wait_for_selector(".message.running .markdown > *")
    page.fill("#composer-input", "still there")  # the page takes what is typed meanwhile
    page.wait_for_selector('#send[aria-label="Send"]', timeout=200_000)
    page.wait_for_selector(".numbers")
    assert len(running.engine.answers[-1]) > 100_000
    shown = page.locator(".message.assistant .markdown").text_content() or ""
    assert (shown.count("word"), shown.count("end")) == (19 * rows, rows)
    assert page.input_value("#composer-input") == "still there"
    # Each drawing makes the last block anew and what follows, never the blocks before.
    blocks = page.locator(".markdown > *").count()
    assert page.evaluate("window.added - 3 * window.drawings") <= blocks


def test_a_full_server_is_shown_and_the_request_tried_again(
    page: "Page", running: Running, complaints: Complaints, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints.expected.append("503 (Service Unavailable)")  # the browser's own line
    submit = running.engine.submit

    def refuse(*_: object) -> None:
        raise CapacityError("5 requests are running or waiting, which is the limit.")

    monkeypatch.setattr(running.engine, "submit", refuse)
    ask(page, "hello")
    assert "which is the limit" in page.locator(".failure").inner_text()
    page.reload()
    page.wait_for_selector(".failure")  # it is kept with its question
    monkeypatch.setattr(running.engine, "submit", submit)
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".message.assistant .numbers")
    assert said(page) == ["You said hello."]
    assert page.locator(".failure").count() == 0
    assert page.locator(".branches").count() == 0  # the failed try is no version


def test_an_error_in_the_middle_of_an_answer_keeps_what_came(
    page: "Page", running: Running
) -> None:
    running.engine.script = lambda prompt: {}[prompt]  # type: ignore[return-value]
    ask(page, "hello")
    assert "The script failed" in page.locator(".failure").inner_text()
    running.engine.script = answer
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".message.assistant .numbers")
    assert said(page) == ["You said hello."]
    assert page.locator(".failure").count() == 0


def test_a_server_that_goes_away_is_shown(browser: "Browser", model_path: Path) -> None:
    with scripted_model(model_path, answer, context=CONTEXT, name="m") as llm:
        assert isinstance(llm.engine, ScriptedEngine)
        llm.engine.pause_s = 0.05
        with serving(llm, Options(port=0)) as server:
            options = Options(port=int(server.address.rpartition(":")[2]))
            with pages(browser, server.address) as (open_page, complaints):
                page = open_page()
                ask(page, "count", wait=False)
                page.wait_for_function(
                    "() => document.querySelector('.markdown')?.innerText.includes('0 1 2')"
                )
                server.should_exit = True
                page.wait_for_selector(".failure")
                assert "0 1" in said(page)[0]
                wait_until(lambda: not server.started or not server.servers[0].is_serving())
                ask(page, "hello")
                assert "cannot be reached" in page.locator(".failure").last.inner_text()
                llm.engine.pause_s = 0.0
                with serving(llm, options):
                    page.get_by_role("button", name="Try again").last.click()
                    page.wait_for_function(
                        "() => document.body.innerText.includes('You said hello.')"
                    )
                complaints.expected.append("net::ERR")
                assert complaints.unexpected == []


def test_the_key_is_asked_for_once_and_kept_for_the_session(
    browser: "Browser", model_path: Path
) -> None:
    with (
        scripted_model(model_path, answer, context=CONTEXT, name="m") as llm,
        serving(llm, Options(port=0, api_key="open-sesame")) as server,
        pages(browser, server.address) as (open_page, complaints),
    ):
        page = open_page(ready=False)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.getElementById('key-error').innerText.includes('wrong')"
        )
        page.fill("#key-input", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("html[data-ready]")
        ask(page, "hello")
        assert said(page) == ["You said hello."]
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert page.locator("#key-dialog[open]").count() == 0
        stored = page.evaluate("JSON.stringify({...localStorage})")
        assert "open-sesame" not in stored
        complaints.expected.append("401 (Unauthorized)")
        assert complaints.unexpected == []


def test_several_models_can_be_chosen(browser: "Browser", tmp_path: Path, tiny_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    path = write_model("qwen3", tmp_path / "chat.gguf")
    options = Options(port=0, context=128, parallel=2, threads=1)
    with Shelf.of_files({"one": path, "two": path, "broken": broken}, options) as shelf:
        shelf.load_first()
        with (
            serving(shelf, options) as server,
            pages(browser, server.address) as (open_page, complaints),
        ):
            page = open_page()
            texts = page.locator("#model option").all_inner_texts()
            assert texts == ["one", "two (not loaded)", "broken (cannot be loaded)"]
            page.select_option("#model", "two")
            page.click("#panel-open")
            page.fill("#setting-max_tokens", "3")
            page.locator("#setting-max_tokens").blur()
            assert shelf.models[1].llm is None  # choosing loads nothing
            ask(page, "Hi")
            assert shelf.models[1].llm is not None
            page.wait_for_function(
                "() => document.querySelector('#model').selectedOptions[0].text === 'two'"
            )
            page.reload()
            page.wait_for_selector("html[data-ready]")
            assert page.input_value("#model") == "two"
            assert complaints.unexpected == []


def test_the_first_load_is_shown_until_it_ends(browser: "Browser", tmp_path: Path) -> None:
    path = write_model("qwen3", tmp_path / "chat.gguf")
    options = Options(port=0, context=128, parallel=2, threads=1)
    going = threading.Event()

    def open_late(**settings: Any) -> LLM:
        settings["progress"](42, 100)
        assert going.wait(60)
        return LLM(**settings)

    with Shelf.of_files({"late": path}, options, open_late) as shelf:
        shelf.announce_first_load()
        with (
            serving(shelf, options) as server,
            pages(browser, server.address) as (open_page, complaints),
        ):
            page = open_page()
            page.wait_for_selector("text=late is being loaded: 42 % are done.")
            page.click("#panel-open")
            page.click("#tab-memory")
            page.wait_for_selector("text=no plan before it is first loaded")
            page.click("#tab-experts")
            page.wait_for_selector("text=The model is not loaded.")
            going.set()
            page.wait_for_selector("#banner", state="hidden")
            page.click("#tab-memory")
            page.wait_for_selector(".plan-bar")
            assert complaints.unexpected == []


def test_colours_follow_the_system_and_the_switch(open_page: OpenPage) -> None:
    def background(page: "Page") -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = "rgb(255, 255, 255)", "rgb(22, 24, 26)"
    page = open_page(color_scheme="dark")
    assert background(page) == dark
    page.click("#theme")
    assert background(page) == light
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert background(page) == light
    page.click("#theme")
    assert background(page) == dark
    page.emulate_media(color_scheme="light")
    assert background(page) == dark
    page.click("#theme")
    assert background(page) == light


def overflow(page: "Page") -> list[str]:
    """Return what sticks out of a page at its right."""
    return page.evaluate(  # type: ignore[no-any-return]
        """() => [...document.querySelectorAll('body *')].filter((node) => {
          const box = node.getBoundingClientRect();
          const scrolls = node.closest('pre, .table-box, .visually-hidden, [inert], .math');
          return box.width && !scrolls && (box.right > innerWidth + 1 || box.left < -1);
        }).map((node) => `${node.tagName}.${node.className}`)"""
    )


def test_a_narrow_screen_shows_everything(open_page: OpenPage) -> None:
    page = open_page(viewport=NARROW, has_touch=True)
    assert page.locator("#sidebar").is_hidden()
    for text in ("code", "hostile", "x" * 3000, "think"):
        ask(page, text)
        assert overflow(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.tap("#sidebar-open")
    page.wait_for_function(
        "() => document.getElementById('sidebar').getBoundingClientRect().left === 0"
    )
    assert page.evaluate("document.getElementById('main').inert")
    page.tap("#new-chat")
    assert page.locator("#sidebar").is_hidden()
    page.tap("#panel-open")
    assert overflow(page) == []
    page.tap("#tab-memory")
    page.wait_for_selector(".plan-bar")
    assert overflow(page) == []
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    assert not page.evaluate("document.getElementById('main').inert")


def test_everything_is_done_by_keyboard_alone(page: "Page", running: Running) -> None:
    press = page.keyboard.press

    def focused() -> str:
        code = "(document.activeElement.ariaLabel || document.activeElement.innerText).trim()"
        return str(page.evaluate(code))

    def tab_to(name: str) -> None:
        for _ in range(60):
            press("Tab")
            if focused() == name:
                return
        raise AssertionError(f"Tab does not reach {name!r}")

    assert page.evaluate("document.activeElement.id") == "composer-input"
    page.keyboard.type("line one")
    press("Shift+Enter")
    page.keyboard.type("line two")
    press("Enter")
    page.wait_for_selector(".message.assistant .buttons")
    assert "line one\nline two" in running.engine.prompts[0]
    press("ArrowUp")
    assert focused() == "Edit your message"
    press("Control+a")
    page.keyboard.type("code")
    press("Enter")
    page.wait_for_selector(".code-block")
    page.wait_for_selector(".message.assistant .buttons")
    page.evaluate("document.activeElement.blur()")
    press("?")
    assert page.locator("#shortcuts-dialog").is_visible()
    press("Escape")
    assert page.locator("#shortcuts-dialog").is_hidden()
    press("/")
    assert page.evaluate("document.activeElement.id") == "composer-input"
    press("Control+,")
    assert focused() == "Settings"
    press("ArrowRight")
    assert focused() == "Memory"
    assert page.locator("#view-memory").is_visible()
    press("Control+Shift+o")
    assert page.locator(".message").count() == 0
    page.keyboard.type("hello")
    press("Enter")
    page.wait_for_selector(".message.assistant .buttons")
    press("Control+k")
    tab_to("hello")
    press("ArrowDown")
    press("Enter")
    page.wait_for_selector(".code-block")
    tab_to("Regenerate")
    press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.branches').length === 2")
    tab_to("Previous version")


def test_screen_readers_hear_the_begin_and_the_end_not_every_token(
    page: "Page", running: Running
) -> None:
    page.evaluate(
        """() => {
          window.heard = [];
          const live = '[aria-live]:not([aria-live=off]), [role=status], [role=alert], [role=log]';
          new MutationObserver((changes) => {
            for (const { target } of changes) {
              const region = (target.nodeType === 1 ? target : target.parentElement)?.closest(live);
              if (region && region.textContent) window.heard.push(region.textContent);
            }
          }).observe(document.body, { childList: true, characterData: true, subtree: true });
        }"""
    )
    running.engine.pause_s = 0.005
    ask(page, "count")
    page.wait_for_function("() => window.heard.includes('The answer is complete.')")
    heard = page.evaluate("window.heard")
    assert list(dict.fromkeys(heard)) == ["The answer begins.", "The answer is complete."]
    assert page.locator(".message.assistant").get_attribute("aria-busy") == "false"


ACCESSIBILITY = Path(__file__).with_name("accessibility.js")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "360"])
def test_every_view_is_accessible(
    open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    page = open_page(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
    check = ACCESSIBILITY.read_text()
    page.evaluate("document.body.append(document.createElement('button'))")
    assert page.evaluate(check)  # it finds what is wrong
    page.evaluate("document.body.lastElementChild.remove()")
    assert page.evaluate(check) == []
    for text in ("think", "code", "hostile"):
        ask(page, text)
    assert page.evaluate(check) == []
    page.click("#panel-open")
    for name in ("settings", "memory", "experts"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(300)
        assert page.evaluate(check) == []
    assert page.evaluate("document.getAnimations().length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page: OpenPage, scheme: str) -> None:
    """The rules of axe-core, where the variable AXE names its file axe.min.js."""
    if not (file := os.environ.get(AXE)):
        pytest.skip(f"axe-core is missing: name its file axe.min.js by {AXE}")
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    page.evaluate(Path(file).read_text())

    def check() -> None:
        found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
        told = [
            (rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]
        ]
        assert told == []

    check()
    for text in ("think", "code", "hostile"):
        ask(page, text)
    check()
    page.click("#panel-open")
    for name in ("settings", "memory", "experts"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(300)
        check()
    page.evaluate("document.getElementById('shortcuts-dialog').showModal()")
    check()


def test_the_memory_plan_is_a_picture_with_all_lines(page: "Page", running: Running) -> None:
    page.click("#panel-open")
    page.click("#tab-memory")
    page.wait_for_selector(".plan-bar")
    plan = page.evaluate("fetch('/plan').then((answer) => answer.json())")
    shown = page.locator(".legend .bytes").count()
    lines = [x for d in (*plan["devices"], plan["host"]) for x in d["lines"] if x["bytes"]]
    free = [d for d in (*plan["devices"], plan["host"]) if d["lines"] and d["free_bytes"] > 0]
    assert shown == len(lines) + len(free)
    facts = page.locator("#view-memory .facts").inner_text()
    assert plan["predicted"]["estimate"]
    assert re.search(r"Predicted speed\n[1-9][\d,.]* tok/s, estimated", facts)
    part = "[...document.querySelectorAll('.plan-bar .part:not(.free)')]"
    colours = page.evaluate(f"{part}.map((part) => getComputedStyle(part).backgroundColor)")
    names = [x["name"] for d in (*plan["devices"], plan["host"]) for x in d["lines"] if x["bytes"]]
    assert len(set(colours)) == len(set(names))
    widths = page.evaluate(
        "[...document.querySelectorAll('.plan-bar')[0].children]"
        ".map((part) => part.getBoundingClientRect().width)"
    )
    largest = max(range(len(lines)), key=lambda index: lines[index]["bytes"])
    assert max(range(len(lines)), key=lambda index: widths[index]) == largest
    page.click(".legend summary >> nth=0")
    assert plan["devices"][0]["lines"][0]["why"] in page.locator(".legend li").first.inner_text()
    page.click("#tab-experts")
    page.wait_for_selector("text=no routed experts")


def test_the_heat_map_is_alive(browser: "Browser", tmp_path: Path) -> None:
    path = write_synthetic("qwen3moe", "q8_0", tmp_path)
    options = Options(
        model=str(path), port=0, context=512, parallel=2, threads=1, routing_stats="off"
    )
    with (
        LLM(str(path), options=options) as llm,
        serving(llm, options) as server,
        pages(browser, server.address) as (open_page, complaints),
    ):
        page = open_page()
        page.click("#panel-open")
        page.click("#tab-experts")
        page.wait_for_selector("canvas.heat")
        drawn = "document.querySelector('canvas.heat').toDataURL()"
        before = page.evaluate(drawn)
        page.click("#tab-settings")
        page.fill("#setting-temperature", "0")  # other tokens may include one that ends the answer
        page.fill("#setting-max_tokens", "200")
        page.locator("#setting-max_tokens").blur()
        page.click("#tab-experts")
        ask(page, "hello")
        page.wait_for_function(f"(old) => {drawn} !== old", arg=before)
        told = page.evaluate("fetch('/experts').then((answer) => answer.json())")
        assert told["tokens"] > 200
        page.wait_for_function(
            "(tokens) => document.querySelector('#view-experts .facts').innerText.includes(tokens)",
            arg=f"Tokens\n{told['tokens']:,}",
        )
        assert "Hit rate\n100.0 %" in page.locator("#view-experts .facts").inner_text()
        page.locator("canvas.heat").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        layer = told["layers"][0]
        cell = page.locator("#heat-cell").inner_text()
        assert cell.startswith(f"Layer {layer['layer']}, expert 1: {layer['picks'][1]:,} pick")
        assert page.locator(".heat-head [aria-pressed=true]").inner_text() == "Recent"
        page.click("text=Layers as a table")
        page.wait_for_selector(".layers tbody tr")
        assert page.locator(".layers tbody tr").count() == len(told["layers"])
        # Opened after an answer, the map shows what was picked until then.
        alive = page.evaluate(drawn)
        page.click("#tab-settings")
        page.click("#tab-experts")
        page.wait_for_selector("canvas.heat")
        assert page.locator(".heat-head [aria-pressed=true]").inner_text() == "Since start"
        assert page.evaluate(drawn) not in (before, alive)
        page.click(".heat-head >> text=Recent")
        assert "Nothing was picked since" in page.locator("#heat-cell").inner_text()
        assert complaints.unexpected == []


class InventedExperts:
    """Experts of a model with skewed picks: each view has 32 more tokens, and 60 % of them are hot.

    In the first five views any experts are hot, then those that are picked most.
    """

    LAYERS, EXPERTS, USED, HOT, TOKENS = 24, 128, 8, 77, 32

    def __init__(self) -> None:
        self.random = random.Random(1)
        rows = range(self.LAYERS)
        self.orders = [self.random.sample(range(self.EXPERTS), self.EXPERTS) for _ in rows]
        self.hot = [set(self.random.sample(order, self.HOT)) for order in self.orders]
        self.picks = [[0] * self.EXPERTS for _ in rows]
        self.hits = [0] * self.LAYERS
        self.views = self.exchanges = 0

    def view_experts(self) -> Future[ExpertView]:
        """Answer as an engine does."""
        self.views += 1
        if self.views == 6:
            best = [set(order[: self.HOT]) for order in self.orders]
            self.exchanges = sum(len(a - b) for a, b in zip(best, self.hot, strict=True))
            self.hot = best
        weights = [1 / (rank + 4) ** 0.9 for rank in range(self.EXPERTS)]
        for layer, order in enumerate(self.orders):
            for expert in self.random.choices(order, weights, k=self.USED * self.TOKENS):
                self.picks[layer][expert] += 1
                self.hits[layer] += expert in self.hot[layer]
        hits = sum(self.hits)
        missed = self.LAYERS * self.USED * self.TOKENS * self.views - hits
        told = ExpertTelemetry(
            picks=tuple(map(sum, self.picks)),
            hits=tuple(self.hits),
            tokens=self.TOKENS * self.views,
            exchanges=self.exchanges,
            causes={"pinned": hits},
            misses={"in_place": missed // 3, "cpu": missed - missed // 3},
        )
        layers = [
            LayerView(self.USED, tuple(picks), tuple(x in hot for x in range(self.EXPERTS)))
            for picks, hot in zip(self.picks, self.hot, strict=True)
        ]
        found: Future[ExpertView] = Future()
        found.set_result(ExpertView(tuple(layers), told))
        return found


def test_cold_experts_are_shown_and_the_curves_follow_the_hit_rate(
    open_page: OpenPage, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable PAGE_SHOTS names a folder that keeps a picture, after more readings."""
    invented = InventedExperts()
    monkeypatch.setattr(running.engine, "view_experts", invented.view_experts, raising=False)
    running.engine.script = lambda prompt: MANNER.thought(prompt, "A short answer.") + EXPLANATION
    running.engine.pause_s = 0.002
    page = open_page(color_scheme="dark", viewport=WIDE, reduced_motion="reduce")
    ask(page, "How does a mixture of experts work?")
    page.click("#panel-open")
    page.click("#tab-experts")
    page.wait_for_selector(".heat-legend .cold")
    page.wait_for_selector(".mix-legend:not([hidden])")  # after two readings
    words = page.locator(".mix-legend").text_content() or ""
    assert re.search(r"own slot [\d.]+ %, read over link [\d.]+ %, CPU [\d.]+ %", words)
    assert page.locator(".heat-head [aria-pressed=true]").inner_text() == "Recent"
    facts = page.locator("#view-experts .facts").inner_text()
    assert "Hot experts\n1,848 of 3,072" in facts
    page.locator("canvas.heat").focus()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    place = "hot" if 8 in invented.hot[0] else "cold"
    told = page.locator("#heat-cell").inner_text()
    assert re.fullmatch(rf"Layer 0, expert 8: [\d,]+ picks? \([\d.]+ %\), {place}\.", told)
    cells = page.locator("canvas.heat").bounding_box()
    assert cells is not None
    right, below = cells["x"] + cells["width"], cells["y"] + cells["height"]
    for across, down, expected in (
        (right - 1, cells["y"] + 1, "Layer 0, expert 127: "),
        (right - 1, below - 18, "Layer 23, expert 127: "),
        (cells["x"] + 29, below - 18, "Layer 23, expert 0: "),
        (cells["x"] + 29, below - 2, "Layer 23, expert 0: "),  # below: numbers of experts
        (cells["x"] + 2, cells["y"] + 1, "Layer 23, expert 0: "),  # to the left: those of layers
    ):
        page.mouse.move(across, down)
        assert page.locator("#heat-cell").inner_text().startswith(expected)
    assert overflow(page) == []
    if folder := os.environ.get("PAGE_SHOTS"):
        wait_until(lambda: invented.views > 20, timeout_s=60)
        page.locator("canvas.heat").blur()
        page.locator("canvas.heat").hover(position={"x": 122, "y": 90})
        page.screenshot(path=Path(folder) / "experts.png")


EXPLANATION = """\
A **mixture of experts** replaces one large feed-forward network by many small ones. For each \
token a *router* picks a few of them:

1. The router scores all experts.
2. The **top-k** experts compute.
3. Their outputs are weighed by $g_i = \\frac{e^{s_i}}{\\sum_j e^{s_j}}$ and added.

| model | experts | picked |
|:---|---:|---:|
| Qwen3-30B-A3B | 128 | 8 |
| Qwen3.5-35B-A3B | 256 | 8 |

```python
def route(scores: list[float], k: int) -> list[int]:
    # The best k experts, best first.
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]
```

> Only the picked experts are read, so a model of 35B parameters reads about 3B for each token.
"""


@pytest.mark.parametrize("name", ["light", "dark", "narrow", "memory", "settings"])
def test_pictures_of_the_page_are_taken(open_page: OpenPage, running: Running, name: str) -> None:
    """The variable PAGE_SHOTS names the folder that keeps them."""
    running.engine.script = lambda prompt: MANNER.thought(prompt, "A short answer.") + EXPLANATION
    running.engine.pause_s = 0.002
    scheme = "dark" if name == "dark" else "light"
    viewport = NARROW if name == "narrow" else WIDE
    page = open_page(color_scheme=scheme, viewport=viewport, reduced_motion="reduce")
    ask(page, "How does a mixture of experts work?")
    if name in ("memory", "settings"):
        page.click("#panel-open")
        page.click(f"#tab-{name}")
        page.wait_for_selector(".plan-bar" if name == "memory" else "#setting-system")
    assert page.locator(".markdown math mfrac").count() == 1
    assert overflow(page) == []
    if folder := os.environ.get("PAGE_SHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_default_model_talks(browser: "Browser", smollm2_path: Path) -> None:
    options = Options(model=str(smollm2_path), port=0, context=512, parallel=1, threads=2)
    with (
        LLM(str(smollm2_path), options=options) as llm,
        serving(llm, options) as server,
        pages(browser, server.address) as (open_page, complaints),
    ):
        page = open_page()
        page.click("#panel-open")
        page.fill("#setting-max_tokens", "24")
        page.fill("#setting-temperature", "0")
        page.locator("#setting-temperature").blur()
        ask(page, "What is the capital of France? Answer in one sentence.")
        assert "Paris" in said(page)[0]
        assert complaints.unexpected == []


def test_two_tabs_show_the_same_conversations(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "hello")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("html[data-ready]")
    assert said(other) == ["You said hello."]
    ask(other, "again")
    page.wait_for_function("() => document.querySelectorAll('.message.assistant').length === 2")
    assert said(page) == said(other) == ["You said hello.", "You said again."]


def test_nothing_leaves_for_another_host(page: "Page", running: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_selector("html[data-ready]")
    ask(page, "hostile")
    page.click("#panel-open")
    page.click("#tab-memory")
    page.wait_for_selector(".plan-bar")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(running.address)] == []
