"""What the page of `rl view` costs on a long run, in a real browser: `uv run scripts/bench.py page --steps 100000` prints JSON.

The page of a run of `--steps` steps is opened, filtered and searched; then a rollout of `--tokens` tokens is read token by token from its
first to its last, and as a conversation. `longest_task_ms` is the longest time for which the page did not answer meanwhile, and
`most_nodes` the most elements that it had. Needs chromium, as the browser tests do.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from records import make

from rl.run_dir.paths import RunDir
from rl.run_dir.token_log import write_token_log
from rl.wire.batch_file import write_batch, write_rollouts
from rl.wire.messages import TrainBatch, TrainingSample, VersionSpan

CHROMIUM = "/usr/bin/chromium"
SCROLLS, SCROLL_MS = 60, 50
"""Parts in which a rollout is scrolled through, and the pause after each."""
WATCH = """() => {
  window.tasks = [];
  new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((one) => one.duration))).observe({type: "longtask"});
}"""
"""The browser's own list of tasks of more than 50 ms."""

DRAWN = "[...document.querySelectorAll('.chunk')].every((one) => one.querySelector('.t'))"
SCROLL = """(share) => {
  const box = document.querySelector(".detail"), own = box.scrollHeight > box.clientHeight + 5 ? box : document.scrollingElement;
  own.scrollTop = share * (own.scrollHeight - own.clientHeight);
  return own.scrollTop;
}"""


def make_long(folder: Path, tokens: int) -> RunDir:
    """A run of one step, whose only rollout has so many tokens."""
    run_dir = make(folder / "long", 1, 1, 100)
    sample = TrainingSample(
        token_ids=[i % 50 + 1 for i in range(tokens)], loss_mask=[i >= 10 for i in range(tokens)], logprobs=[-0.5] * tokens,
        advantages=[1.0] * tokens, policy_versions=[VersionSpan(0, tokens - 10)], env="env-1", group_id=1, rollout_id=0,
    )  # fmt: skip
    run_dir.batches.mkdir()
    write_batch(run_dir.batch(1), TrainBatch(step=1, samples=[sample]), {})
    noise = np.random.default_rng(0).normal(-0.5, 0.3, tokens - 10).astype(np.float32)
    columns = {"trainer_logprobs": noise, "entropies": np.abs(noise).astype(np.float16), "flags": np.zeros(tokens - 10, np.uint8)}
    write_token_log(run_dir.tokens(1), columns)
    text = "".join(f"word{i} " if i % 12 else "\n" for i in range(tokens))
    row = {
        "step": 1, "env": "env-1", "task": 1, "group_id": 1, "rollout_id": 0, "episode": 0, "advantage": 1.0, "trained": True, "why": None,
        "messages": [{"role": "user", "content": "long"}, {"role": "assistant", "content": text}], "reward": 1.0, "metrics": {},
        "outcome": "finished", "num_tokens": tokens, "num_turns": 1, "versions": [0],
    }  # fmt: skip
    write_rollouts(run_dir.rollouts(1), json.dumps(row).encode() + b"\n")
    return run_dir


def write_metrics(run_dir: RunDir, steps: int) -> None:
    """A line of the orchestrator and one of the trainer for each step, with a dozen numbers."""
    names = {
        "orchestrator": ("reward/mean", "rollouts/finished", "rollouts/length_mean", "rollouts/truncated", "entropy/mean", "lag/mean"),
        "trainer": ("loss/mean", "validation/loss", "mismatch_kl/mean", "optim/grad_norm", "time/step", "perf/tokens_per_s"),
    }  # fmt: skip
    values = np.random.default_rng(0).uniform(0.1, 0.9, (steps, 6)).round(6).tolist()
    with run_dir.metrics.open("w") as file:
        for step in range(1, steps + 1):
            for source, own in names.items():
                line = {"step": step, "time": 1.7e9 + 10 * step, "source": source, **dict(zip(own, values[step - 1], strict=True))}
                file.write(json.dumps(line) + "\n")


def scroll(page: Page) -> dict[str, float]:
    """Scrolls what scrolls on the page from its top to its end; the longest task and the most elements meanwhile."""
    page.evaluate(WATCH)
    page.wait_for_timeout(300)
    page.evaluate("window.tasks.length = 0")
    nodes = []
    for i in range(1, SCROLLS + 1):
        page.evaluate(SCROLL, i / SCROLLS)
        page.wait_for_timeout(SCROLL_MS)
        until(page, DRAWN)
        nodes.append(page.evaluate("document.querySelectorAll('*').length"))
    page.wait_for_timeout(500)
    tasks, scrolled = page.evaluate("window.tasks"), page.evaluate(SCROLL, 1)
    assert scrolled > 20_000, f"the page is {scrolled} px high: that is no long rollout"
    return {"longest_task_ms": max(tasks, default=0), "long_tasks": len(tasks), "most_nodes": max(nodes)}


def until(page: Page, expression: str, timeout_s: float = 300.0) -> float:
    """Seconds until something is true in the page. Raises TimeoutError."""
    began = time.perf_counter()
    while not page.evaluate(expression):
        if time.perf_counter() - began > timeout_s:
            raise TimeoutError(f"{expression} is not true after {timeout_s:.0f} s")
        page.wait_for_timeout(5)
    return round(time.perf_counter() - began, 3)


def look(page: Page, base: str) -> dict[str, float]:
    """How long each page takes until it is there, the first time and again, and a list that is filtered."""
    shown = (
        "/rollouts/.test(document.querySelector('.list [aria-live]')?.innerText ?? '') && document.querySelectorAll('.rows li').length > 0"
    )
    pages = {
        "runs": ("runs", "document.querySelectorAll('.runs tbody tr').length > 1"),
        "curves": ("curves?run=x", "document.querySelectorAll('.chart canvas').length > 9"),
        "rollouts": ("rollouts?run=x", shown),
        "tasks": ("tasks?run=x", "document.querySelectorAll('.tasks tbody tr').length > 9"),
    }
    found = {}
    for name, (where, there) in pages.items():
        for state in ("cold", "warm"):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{base}/#/{where}")
            until(page, there)
            found[f"{name}_{state}_s"] = round(time.perf_counter() - began, 3)
    page.goto(f"{base}/#/rollouts?run=x")
    until(page, shown)
    before = page.locator(".list [aria-live]").inner_text()
    page.get_by_role("button", name=re.compile("^no signal")).click()
    found["filter_s"] = until(page, f"{shown} && document.querySelector('.list [aria-live]').innerText !== {json.dumps(before)}")
    return found


def resident_mib(pid: int) -> float:
    return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def measure(folder: Path, steps: int, rollouts: int, characters: int, tokens: int) -> dict[str, object]:
    many, long = make(folder / "x", steps, rollouts, characters), make_long(folder, tokens)
    write_metrics(many, steps)
    command = [sys.executable, "-m", "rl.main", "view", str(many.root), str(long.root), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")})
    assert server.stdout
    try:
        link = re.search(r"http\S+", server.stdout.readline())[0]  # type: ignore[index]
        with sync_playwright() as playwright:
            page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]).new_page()
            page.set_viewport_size({"width": 1280, "height": 800})
            page.goto(link)
            page.wait_for_selector(".brand")
            base = page.url.partition("#")[0].rstrip("/")
            found: dict[str, object] = {"rollouts": steps * rollouts, **look(page, base), "server_mib": resident_mib(server.pid)}
            page.goto(f"{base}/#/rollouts?run=long&at=1/0&tab=tokens")
            page.wait_for_selector(".tokens .t")
            found["tokens"] = scroll(page)
            page.goto(f"{base}/#/rollouts?run=long&at=1/0")
            page.get_by_role("button", name="more characters").click()
            found["conversation"] = scroll(page)
        return found
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--characters", type=int, default=1000, help="of an answer")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the long rollout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), args.steps, args.rollouts, args.characters, args.tokens), indent=2))


if __name__ == "__main__":
    main()
