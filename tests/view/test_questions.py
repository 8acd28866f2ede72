"""What a newcomer asks, answered by the clicks and keys that docs/view.md names: each in well
under a minute."""

import time
from datetime import datetime

import numpy as np
import pytest

from rl.run_dir.numbers import write_token_log
from rl.run_dir.spans import Span
from tests import jsonl
from tests.records.made import (
    clock,
    group,
    make_run,
    sample,
    write_lines,
    write_samples,
    write_step,
)
from tests.view.browser import Tab
from tests.view.browser import browser as browser
from tests.view.serving import serving

pytestmark = pytest.mark.proof
TOKENS = 3000
LIMIT_S = 30.0
"""A person has a minute; what the page itself takes of it is to be little."""


@pytest.fixture(scope="module")
def moment():
    """Shortly before 10:41 yesterday, when everyone began to wait."""
    return datetime.now().replace(hour=10, minute=40, second=55, microsecond=0).timestamp() - 86400


@pytest.fixture(scope="module")
def place(tmp_path_factory, moment):
    """A run that waits, and has a long rollout."""
    root = tmp_path_factory.mktemp("story")
    run_dir = make_run(root / "fast")
    numbers = [
        {"step": step, "time": moment, "source": "orchestrator"}
        | {"reward/mean": step / 10, "reward/sums/format": 1 - step / 10}
        for step in range(1, 9)
    ]
    run_dir.metrics.write_text(jsonl.text(*numbers))
    run_dir.status_dir.mkdir()
    write_step(run_dir, 1, [group(10, [0.0, 1.0])])
    write_samples(run_dir, 1, [sample(10, 1, tokens=TOKENS)])
    columns = {
        "trainer_logprobs": np.full(TOKENS, -0.5, np.float32),
        "entropies": np.zeros(TOKENS, np.float16),
    }
    write_token_log(run_dir.tokens(1), columns | {"flags": np.zeros(TOKENS, np.uint8)})
    for process, lane, name, begin, end in (
        ("trainer", "prefetch", "fetch_batch", -60, 40),
        ("trainer", "step", "forward_backward", -60, -5),
        ("trainer", "step", "wait_for_batch", -5, 40),
        ("orchestrator", "phase", "waiting_for_version", -60, -5),
        ("orchestrator", "phase", "filling_batch", -5, 40),
        ("inference", "requests", "sampling", -60, -5),
        ("inference", "weights", "pause", -5, 30),
    ):
        span = Span(name=name, lane=lane, begin=1000.0 + begin, end=1000.0 + end)
        write_lines(run_dir.spans / f"{process}.jsonl", clock(process, moment, 1000.0), span)
    return root


@pytest.fixture(scope="module")
def links(place):
    with serving(place) as found:
        yield found


@pytest.fixture
def tab(browser, links):
    found, began = Tab(browser, links), time.monotonic()
    yield found
    assert time.monotonic() - began < LIMIT_S
    found.close()


def start(tab, run, page):
    """From the list of runs to a page of one."""
    tab.page.get_by_role("link", name=run, exact=True).click()
    tab.page.get_by_role("navigation", name="Pages").get_by_role("link", name=page).click()


FIRST_CURVE = """() => [...document.querySelectorAll('details')].find((one) => one.querySelector('summary').innerText.includes('Rewards'))
  ?.querySelector('.chart .title')?.innerText"""


def test_which_reward_function_fell(tab):
    start(tab, "fast", "Curves")
    tab.page.get_by_label("Order").select_option("fell most")
    tab.page.locator("summary", has_text="Rewards").click()
    section = tab.page.locator("details", has=tab.page.locator("summary", has_text="Rewards"))
    section.locator(".chart").first.wait_for()
    tab.until(f"({FIRST_CURVE})() === 'reward/sums/format'")
    assert section.locator(".chart").first.inner_text().startswith("reward/sums/format\n\u22120.")


def test_what_was_everyone_waiting_for_at_a_time(tab):
    start(tab, "fast", "Timeline")
    tab.page.wait_for_selector("[data-search]")
    tab.page.wait_for_selector(".lanes svg")  # of which the clock is a time
    tab.page.keyboard.press("/")
    tab.until("document.activeElement?.dataset.search === 'yes'")
    tab.page.keyboard.type("10:41")
    tab.until("document.querySelector('[data-search]').value === '10:41'")
    tab.page.keyboard.press("Enter")
    said = tab.text(".then")
    assert "At 10:41:00" in said
    assert (
        "trainer wait for batch; it waited for orchestrator filling batch; it waited for "
        "inference pause" in said
    )
    assert "waits for orchestrator" in said and "waits for inference" in said
    box = tab.page.locator(".lanes svg").bounding_box()
    # when inference had ended its pause, and nobody did anything
    tab.page.mouse.click(box["x"] + box["width"] - 5, box["y"] + 60)
    tab.until("document.querySelector('.then').innerText.includes('No process worked')")
    clock = tab.page.locator("[data-search]")
    clock.fill("10:40:30")
    clock.press("Enter")
    tab.until("document.querySelector('.then').innerText.includes('At 10:40:30')")
    # its thread that fetches the next batch waits all the time: that is not what the trainer does
    said = tab.text(".then")
    assert "trainer forward backward\n" in said and "it waited for" not in said


def test_a_long_rollout_is_read_to_its_end_though_little_of_it_is_drawn(tab):
    tab.go("#/rollouts?run=fast&at=10/1&tab=tokens")
    tab.page.wait_for_selector(".tokens [data-i='0']")
    tab.until(
        "(document.querySelector('.detail').scrollTop = 1e6) && "
        "!!document.querySelector(`.tokens [data-i='3001']`)"
    )
    assert tab.count(".tokens .t") < 1500 and tab.count(".tokens [data-i='0']") == 0
    tab.page.locator(".tokens [data-i='3001']").click()
    tab.until("location.hash.includes('token=3001')")
    tab.page.keyboard.press("ArrowLeft")
    tab.until("document.querySelector('.reader').innerText.includes('#3000')")
    tab.go("#/rollouts?run=fast&at=10/1&tab=tokens&token=1500")
    tab.page.wait_for_selector(".tokens .pinned[data-i='1500']")
