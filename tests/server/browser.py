"""The chat page in headless Chromium: a browser, and pages whose complaints are collected."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the package is optional
    from playwright.sync_api import Browser, Page

CHROMIUM = "CHROMIUM"  # the variable that names another Chromium than that of the PATH
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 360, "height": 740}


def find_chromium() -> str:
    """Return where Chromium is; skip the test if there is none."""
    named = os.environ.get(CHROMIUM)
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"Chromium is missing: put it on the PATH, or name it by {CHROMIUM}")
    return found


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Start Chromium; skip the test if it or the package `playwright` is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    path = find_chromium()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass(slots=True)
class Complaints:
    """What a page said on its console, its errors, and its breaches of the content policy."""

    lines: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # parts of lines that may come

    def watch(self, page: "Page") -> None:
        """Collect the complaints of a page from now on."""
        page.on("console", lambda message: self.lines.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.lines.append(f"error: {error}"))
        page.on("crash", lambda _: self.lines.append("the page crashed"))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error('policy', event.violatedDirective, event.blockedURI))"
        )

    @property
    def unexpected(self) -> list[str]:
        """The lines that nobody expected."""
        return [line for line in self.lines if not any(part in line for part in self.expected)]


OpenPage = Callable[..., "Page"]


@contextmanager
def pages(browser: "Browser", address: str) -> Iterator[tuple[OpenPage, Complaints]]:
    """Yield a function that opens the chat page in a browser without history."""
    complaints = Complaints()
    contexts = []

    def open_page(*, ready: bool = True, path: str = "/", **options: Any) -> "Page":
        options = {"viewport": WIDE, "accept_downloads": True, **options}
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        complaints.watch(page)
        page.goto(address + path)
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page

    try:
        yield open_page, complaints
    finally:
        for context in contexts:
            context.close()
