"""Seconds from the command until the quickstart answers 0.95 of its held-out pairs.

`uv run scripts/bench.py quickstart --seeds 1 2 3 4 5` prints JSON. `--checkout PATH` runs another
commit in a worktree with its own `.venv`; flags behind it are those of `rl`. Commits whose
quickstart has no target evaluate as often with `--orchestrator.eval.interval 2
--orchestrator.eval.samples 8`. The evaluation's line in metrics.jsonl tells when it was there;
`cpu_s` are the user and system seconds by then of `rl` and all its processes, by /proc.
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TARGET, REWARD = 0.95, "eval/single-digit-addition/reward_mean"
POLL_S, PATIENCE_S = 0.2, 1200.0


def command(folder: str, *flags: str, checkout: Path = ROOT) -> list[str]:
    """The command that runs a checkout's quickstart, whose run is `folder`/run."""
    rl, settings = checkout / ".venv" / "bin" / "rl", checkout / "configs" / "quickstart.toml"
    return [str(rl), "@", str(settings), "--output_dir", folder, "--name", "run", *flags]


def cpu_s(process: psutil.Popen) -> float:
    """User and system seconds of a process and its descendants, with those that have ended."""
    seconds = 0.0
    for part in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(part.cpu_times()[:4])
    return seconds


def play(checkout: Path, seed: str, flags: list[str]) -> dict[str, Any]:
    """Runs the quickstart to its end. Returns the seed alone if it has not reached the target."""
    figures, began = {"seed": seed}, time.time()
    with tempfile.TemporaryDirectory() as folder:
        words = command(folder, "--seed", seed, *flags, checkout=checkout)
        process = psutil.Popen(words, cwd=checkout, stdout=subprocess.DEVNULL)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        while process.poll() is None:
            if len(figures) == 1 and metrics.exists():
                whole = metrics.read_text().rpartition("\n")[0]
                lines = [json.loads(line) for line in whole.split("\n") if line]
                trained = [line["time"] for line in lines if line["source"] == "trainer"]
                reached = [line for line in lines if line.get(REWARD, 0.0) >= TARGET - 1e-9]
                if reached:
                    figures |= {
                        "reward": reached[0][REWARD],
                        "first_step_s": trained[0] - began,
                        "seconds": reached[0]["time"] - began,
                        "cpu_s": cpu_s(process),
                        "steps": reached[0]["step"],
                        "rollouts": sum(line.get("rollouts/finished", 0) for line in lines),
                    }
            if time.time() - began > PATIENCE_S:
                process.terminate()
            time.sleep(POLL_S)
    return {**figures, "whole_s": time.time() - began, "exit_code": process.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3", "4", "5"])
    parser.add_argument("--checkout", type=Path, default=ROOT)
    args, flags = parser.parse_known_args()
    runs = []
    for seed in args.seeds:
        runs.append(play(args.checkout.absolute(), seed, flags))
        print(json.dumps(runs[-1]), flush=True)
    reached = [run for run in runs if "seconds" in run]
    names = ("first_step_s", "seconds", "cpu_s", "steps", "rollouts", "whole_s")
    medians = {name: round(median(run[name] for run in reached), 1) for name in names if reached}
    print(json.dumps({"reached": len(reached), "of": len(runs), "medians": medians}))


if __name__ == "__main__":
    main()
