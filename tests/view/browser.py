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
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Tab:
    """A tab of a browser that was let in, and what went wrong in it."""

    def __init__(self, browser: "api.Browser", address: str, **options: object):
        self.context, self.faults = browser.new_context(**options), list[str]()
        self.context.on("page", self.watch)
        self.page, self.base = self.context.new_page(), address.split("/?")[0]
        self.page.set_default_timeout(10_000)
        self.page.goto(address)
        self.page.wait_for_selector(".runs tbody tr")

    def watch(self, page: "api.Page") -> None:
        page.on("pageerror", lambda error: self.faults.append(f"{page.url}: {error}"))
        page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(f"{page.url}: {said.text}"))
        page.on("dialog", lambda dialog: self.faults.append(f"{page.url}: a dialog"))

    def go(self, where: str) -> None:
        self.page.goto(f"{self.base}/{where}")

    def until(self, expression: str, seconds: float = 10.0) -> None:
        """Waits until an expression is true. Playwright's own way to do so is forbidden by the page's policy."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} is not true at {self.page.url}: {self.page.inner_text('main')[:500]}"
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        self.page.wait_for_selector(selector)
        return self.page.locator(selector).first.inner_text()

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def close(self) -> None:
        assert self.page.evaluate("window.hacked") is None
        assert not self.faults
        self.context.close()
