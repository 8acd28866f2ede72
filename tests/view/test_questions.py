"""What a newcomer asks, answered by the clicks and keys that docs/view.md names: each in well
under a minute."""

import json
import re
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from rl.run_dir.numbers import write_token_log
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import Span
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
STEPS, TOKENS = 14, 3000
TASK = 77
LIMIT_S = 30.0
"""A person has a minute; what the page itself takes of it is to be little."""


@pytest.fixture(scope="module")
def moment() -> float:
    """Shortly before 10:41 yesterday, when everyone began to wait."""
    return datetime.now().replace(hour=10, minute=40, second=55, microsecond=0).timestamp() - 86400


@pytest.fixture(scope="module")
def place(tmp_path_factory, moment) -> Path:
    """Two runs that differ in the learning rate; one learns faster a sample. Version 12 answers
    task 77 otherwise than version 11."""
    root = tmp_path_factory.mktemp("story")
    write_run(make_run(root / "fast", max_steps=STEPS), moment, 0.06)
    write_run(
        make_run(root / "slow", max_steps=STEPS, trainer={"optim": {"lr": 2e-7}}), moment, 0.02
    )
    return root


def write_run(run_dir: RunDir, moment: float, slope: float) -> None:
    for step in range(1, STEPS + 1):
        rewards = {"mean": slope * step, "sums/exact": slope * step, "sums/brief": 0.5}
        rewards |= {"sums/format": 1 - slope * step}
        for source, values in (
            ("orchestrator", {f"reward/{name}": value for name, value in rewards.items()}),
            ("orchestrator", {"rollouts/finished": 8.0}),
            ("trainer", {"loss/mean": 0.1, "time/step": 2.0}),
        ):
            line = {"step": step, "time": moment - 70 + 8 * step, "source": source} | values
            with run_dir.metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
        word = "five" if step <= 12 else "four"
        groups = [
            group(10 * step + i, rewards, task=task, version=step - 1, text=f"it is {word}")
            for i, rewards, task in (
                (0, [0.0, 1.0], TASK),
                (1, [0.0, 1.0], step),
                (9, [1.0, 1.0], 3),
            )
        ]
        write_step(run_dir, step, groups)
    write_samples(run_dir, 1, [sample(10, 1, tokens=TOKENS)])
    columns = {
        "trainer_logprobs": np.full(TOKENS, -0.5, np.float32),
        "entropies": np.zeros(TOKENS, np.float16),
    }
    write_token_log(run_dir.tokens(1), columns | {"flags": np.zeros(TOKENS, np.uint8)})
    run_dir.status_dir.mkdir()
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


def start(tab: Tab, run: str, page: str) -> None:
    """From the list of runs to a page of one."""
    tab.page.get_by_role("link", name=run, exact=True).click()
    tab.page.get_by_role("navigation", name="Pages").get_by_role("link", name=page).click()


def test_what_did_step_12_change_on_task_77(tab):
    start(tab, "fast", "Tasks")
    tab.page.wait_for_selector("[data-search]")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("77")
    tab.page.get_by_role("link", name="task 77").click()
    tab.page.get_by_label("What did this step change:").fill("12")
    tab.page.wait_for_selector(".side ins")
    tab.until("location.hash.includes('step=12')")
    assert re.search(
        r"0.500 \(version 11, 2 rollouts\) → 0.500 \(version 12, 2 rollouts\)",
        tab.page.locator(".detail").inner_text(),
    )
    assert tab.page.locator(".side del").all_inner_texts() == ["five"] and tab.page.locator(
        ".side ins"
    ).all_inner_texts() == ["four"]
    start_of = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(start_of)  # as a colleague who got the link
    tab.page.wait_for_selector(".side ins")


def test_which_reward_function_fell(tab):
    start(tab, "fast", "Curves")
    tab.page.get_by_label("Order").select_option("fell most")
    tab.page.locator("summary", has_text="Rewards").click()
    section = tab.page.locator("details", has=tab.page.locator("summary", has_text="Rewards"))
    section.locator(".chart").first.wait_for()
    tab.until(f"({FIRST_CURVE})() === 'reward/sums/format'")
    assert section.locator(".chart").first.inner_text().startswith("reward/sums/format\n\u22120.")


FIRST_CURVE = """() => [...document.querySelectorAll('details')].find((one) => one.querySelector('summary').innerText.includes('Rewards'))
  ?.querySelector('.chart .title')?.innerText"""


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
    assert (
        "At 10:41:00" in said
        and "trainer wait for batch; it waited for orchestrator filling batch; it waited for "
        "inference pause"
        in said
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
