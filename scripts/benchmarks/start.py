"""What passes between the command and the first trained step, and between an optimizer step and the
next sampled token.

`uv run scripts/bench.py start` runs the quickstart for a few steps, on a machine that does nothing
else, and prints seconds as JSON. Flags behind it are those of `rl`. The first run on a machine also
converts the model and makes the environment's home: count the second.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rl.records.timeline import Done, SpanRecording

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
PATIENCE_S = 900.0
MARKS = {
    "environments ready": ("orchestrator", "waiting_for_inference", None),
    "server imported": ("inference", "starting", None),
    "server up": ("inference", "serving", None),
    "trainer ready": ("trainer", "waiting_for_batch", 1),
    "batch 1": ("trainer", "training", 1),
    "step 1 trained": ("trainer", "publishing", 1),
}
"""What has come -> the phase that begins with it: process, name, step."""
PARTS = {
    "copy the weights": ("trainer", "publishing"),
    "write the version": ("trainer", "write_version"),
    "load the version": ("orchestrator", "load_version"),
    "of that stage it": ("inference", "stage"),
}
"""What is done between two steps, one thing after the other."""


def run(folder: Path, flags: list[str]) -> tuple[float, list[Done]]:
    """Runs the quickstart. Returns when it was started, seconds since the epoch, and the spans
    of all its processes."""
    own = [
        "--output_dir",
        str(folder),
        "--name",
        "run",
        "--max_steps",
        str(STEPS),
        "--orchestrator.show_rollout_every",
        "0",
    ]
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "rl.main",
        "@",
        str(ROOT / "configs" / "quickstart.toml"),
        *own,
        *flags,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=PATIENCE_S)
    recording = SpanRecording(folder / "run" / "spans")
    recording.refresh()
    return began, recording.between(0.0, math.inf)[0]


def gaps(spans: list[Done]) -> list[float]:
    """Seconds from each optimizer step to the first request that is sampled for after it."""
    ends = sorted(span.end for span in spans if span.name == "optimizer")
    begins = sorted(span.begin for span in spans if span.name == "sampling")
    found = [(end, next((begin for begin in begins if begin > end), None)) for end in ends]
    return [begin - end for end, begin in found if begin]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        began, spans = run(Path(folder), flags)
    marks = {}
    for mark, (process, name, step) in MARKS.items():
        first = min(
            span.begin
            for span in spans
            if (span.process, span.name, span.step) == (process, name, step)
        )
        marks[mark] = round(first - began, 2)
    parts = {
        part: [span.end - span.begin for span in spans if (span.process, span.name) == where]
        for part, where in PARTS.items()
    }
    training = [
        span.end - span.begin
        for span in spans
        if (span.process, span.name) == ("trainer", "training") and span.step != 1
    ]
    between = {"optimizer to next sampled request": gaps(spans), **parts}
    medians = {what: round(median(seconds), 2) for what, seconds in between.items() if seconds}
    print(
        json.dumps(
            {
                "seconds from the command": marks,
                "between steps, median": medians,
                "training, median": round(median(training), 2),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
