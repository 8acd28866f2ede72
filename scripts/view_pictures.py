"""Pictures of the page of `rl view`, for docs/view.md: `uv run scripts/view_pictures.py RUN OTHER
[--to docs/view]`.

They show RUN, and both compared. Needs chromium, as the browser tests do.
"""

import argparse
import io
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from rl.records.run import Run

CHROMIUM = "/usr/bin/chromium"
SIZES = {"wide": (1280, 800), "phone": (390, 780)}


def pages(run: Run, key: str, other: str) -> dict[str, tuple[str, str, str]]:
    """Name of a picture -> address behind the #, size, theme."""
    best = run.rollouts("train", why="trained").sorted("advantage", descending=True)
    good = next(
        (
            rollout
            for rollout in reversed(best[:50])
            if rollout["num_turns"] and rollout["num_tokens"] > 5
        ),
        best[0],
    )
    at = f"run={key}&at={good.group_id}/{good.rollout_id}"
    tasks = run.rollouts("eval")
    of = (
        f"run={key}&kind=eval&env={tasks[0].env}&task={tasks[0].task}"
        if len(tasks)
        else f"run={key}"
    )
    return {
        "runs": ("/runs", "wide", "light"),
        "compare": (f"/compare?run={key}&run={other}", "wide", "light"),
        "curves": (f"/curves?run={key}", "wide", "dark"),
        "rollouts": (f"/rollouts?{at}&why=trained", "wide", "light"),
        "tokens": (f"/rollouts?{at}&why=trained&tab=tokens", "wide", "dark"),
        "tasks": (f"/tasks?{of}", "wide", "light"),
        "timeline": (f"/timeline?run={key}", "wide", "light"),
        "health": (f"/health?run={key}", "wide", "light"),
        "phone": (f"/rollouts?{at}", "phone", "dark"),
    }


def picture(page: Page, base: str, where: str, size: str, theme: str) -> Image.Image:
    """What a browser shows, with 128 colours."""
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)
    page.goto("about:blank")
    page.goto(f"{base}/#{where}")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1500)
    if token := page.locator(".tokens .t:not(.off)").all():
        token[0].hover()
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs/view"))
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "rl.main",
        "view",
        str(given.run),
        str(given.other),
        "--no-browser",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        link = re.search(r"http\S+", server.stdout.readline())[0]
        with sync_playwright() as playwright:
            page = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            ).new_page()
            page.goto(link)
            page.wait_for_selector(".brand")
            base = page.url.partition("#")[0].rstrip("/")
            for name, (where, size, theme) in pages(
                Run(given.run), given.run.name, given.other.name
            ).items():
                picture(page, base, where, size, theme).save(
                    given.to / f"{name}.png", optimize=True
                )
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
