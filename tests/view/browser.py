"""A real browser, for the tests of this folder."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
if not CHROMIUM.exists():
    pytest.skip("there is no chromium (apt-get install chromium)", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (uv sync)")


@pytest.fixture(scope="module")
def browser() -> Iterator["api.Browser"]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


class Tab:
    """A tab of a browser that was let in, and what went wrong in it."""

    def __init__(self, browser: "api.Browser", links: list[str], **options: object):
        """links: those that the server has printed; the last one lets this browser in."""
        self.context, self.faults = browser.new_context(**options), list[str]()
        self.asked = set[api.Request]()
        """Requests that are on their way."""
        self.context.on("page", self.watch)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.page.goto(links[-1])
        self.page.wait_for_selector(".runs tbody tr")
        self.base = self.page.url.partition("#")[0].rstrip("/")

    def watch(self, page: "api.Page") -> None:
        page.on("pageerror", lambda error: self.faults.append(f"{page.url}: {error}"))
        page.on(
            "console",
            lambda said: (
                said.type in ("error", "warning") and self.faults.append(f"{page.url}: {said.text}")
            ),
        )
        page.on("request", lambda request: self.asked.add(request))
        page.on("requestfinished", lambda request: self.asked.discard(request))
        page.on("requestfailed", lambda request: self.asked.discard(request))
        page.on("dialog", lambda dialog: self.faults.append(f"{page.url}: a dialog"))

    def go(self, where: str) -> None:
        self.page.goto(f"{self.base}/{where}")

    def until(self, expression: str, seconds: float = 30.0) -> None:
        """Waits until an expression is true. Playwright's own way to do so is forbidden by the
        page's policy."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"{expression} is not true at {self.page.url}: {self.page.inner_text('main')[:500]}"
            )
            self.page.wait_for_timeout(20)

    def until_answered(self, part: str, seconds: float = 30.0) -> None:
        """Waits until no request whose address contains this is on its way."""
        deadline = time.monotonic() + seconds
        while [asked.url for asked in self.asked if part in asked.url]:
            assert time.monotonic() < deadline, f"requests of {part} are not answered"
            self.page.wait_for_timeout(20)

    def text(self, selector: str, seconds: float = 30.0) -> str:
        """The text of the first such element, as soon as it has any: an element is there before
        its data."""
        self.page.wait_for_selector(selector)
        deadline = time.monotonic() + seconds
        while (
            not (text := self.page.locator(selector).first.inner_text())
            and time.monotonic() < deadline
        ):
            self.page.wait_for_timeout(20)
        return text

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def close(self) -> None:
        assert self.page.evaluate("window.hacked") is None
        assert not self.faults
        self.context.close()
