"""Does anything grow? A real run, and memory, file descriptors, threads and shared memory of each
of its processes over its steps.

    uv run -m tests.proofs.soak @ CONFIG [rl's flags] --max_steps 1200

Prints a slope per 100 steps for each process and a verdict. Exit code 1 if something grows.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression, pvariance

import psutil

from rl.config.command_line import load_config_or_exit
from rl.run_dir.metrics import MetricsReader
from rl.run_dir.status import read_status
from tests.proofs import promises

MIB = 2**20
MEASURES = ("rss_mib", "pss_mib", "fds", "threads", "shm_mib")
BOUNDS = {"rss_mib": 0.01, "pss_mib": 0.01, "fds": 0.01, "threads": 0.01, "shm_mib": 0.01}
"""Growth per 100 steps, as a share of the mean, that is taken for none: below it a run of 10000
steps at most doubles."""
LEAST = {"rss_mib": 2.0, "pss_mib": 2.0, "fds": 1.0, "threads": 1.0, "shm_mib": 1.0}
"""And as a number: less than this per 100 steps is none."""
WARM_UP = 0.5
"""Share of the steps that is left out: caches fill (oneDNN keeps 1024 kernels, a few hundred
MiB), pools start."""


@dataclass(frozen=True)
class Line:
    """A straight line through samples, by least squares."""

    mean: float
    per_100: float
    error_per_100: float
    """Standard error of the slope."""


def role(process: psutil.Process) -> str | None:
    """What a process is, over its restarts: trainer, orchestrator, engine, ..."""
    try:
        command = process.cmdline()
        words = f"{process.name()} {' '.join(command)}"
    except psutil.NoSuchProcess:
        return None
    names = {
        "EngineCore": "engine",
        "rl.inference.main": "inference",
        "rl.orchestrator.main": "orchestrator",
        "rl.envs.worker": "worker",
        "rl.trainer.main": "trainer",
        "process_table.py": "guard",
        "resource_tracker": "resource tracker",
    }
    found = [name for word, name in names.items() if word in words]
    is_rl = len(command) > 1 and Path(command[1]).name == "rl"
    return found[0] if found else "rl" if is_rl else None


def sample(processes: Iterable[psutil.Process], active: set[int]) -> dict[str, dict[str, float]]:
    """The measures now, by role; of several processes with one role (workers, ranks) the sum.
    `active`: those that have a status; others of these roles are copies that wait."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(MEASURES, 0.0))
    for process in processes:
        if (name := role(process)) is None:
            continue
        if name in ("trainer", "orchestrator", "inference") and process.pid not in active:
            name = "copies that wait"
        try:
            memory, segments = process.memory_full_info(), promises.shared_memory_of([process])
            values = (
                memory.rss / MIB,
                memory.pss / MIB,
                process.num_fds(),
                process.num_threads(),
                size_mib(segments),
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        for measure, value in zip(MEASURES, values, strict=True):
            found[name][measure] += value
    return dict(found)


def size_mib(segments: set[str]) -> float:
    return sum(Path(segment).stat().st_size for segment in segments if Path(segment).exists()) / MIB


def fit(points: list[tuple[float, float]]) -> Line:
    """The line through pairs of step and value, by ordinary least squares."""
    steps, values = zip(*points, strict=True)
    mean = fmean(values)
    if len(points) < 3 or min(steps) == max(steps):
        return Line(mean, 0.0, math.inf)
    slope, start = linear_regression(steps, values)
    residual = fmean((value - start - slope * step) ** 2 for step, value in points)
    error = math.sqrt(residual / (len(points) - 2) / pvariance(steps))
    return Line(mean, 100 * slope, 100 * error)


def grows(measure: str, line: Line) -> bool:
    """More than the bounds, and more than twice its own uncertainty."""
    return (
        line.per_100 > max(LEAST[measure], BOUNDS[measure] * line.mean)
        and line.per_100 > 2 * line.error_per_100
    )


def judge(samples: list[tuple[float, dict[str, dict[str, float]]]]) -> dict[str, dict[str, Line]]:
    """A line for each role and measure, over all but the first steps. `samples`: (step, measures
    by role)."""
    last = max(step for step, _ in samples)
    late = [(step, roles) for step, roles in samples if step >= WARM_UP * last]
    names = sorted({name for _, roles in late for name in roles})
    return {
        name: {
            measure: fit([(step, roles[name][measure]) for step, roles in late if name in roles])
            for measure in MEASURES
        }
        for name in names
    }


def table(lines: dict[str, dict[str, Line]]) -> str:
    """Markdown: mean, slope per 100 steps with its error, and what grows."""
    rows = ["| process | measure | mean | per 100 steps | verdict |", "|---|---|---|---|---|"]
    for name, measures in lines.items():
        for measure, line in measures.items():
            verdict = "GROWS" if grows(measure, line) else "flat"
            rows.append(
                f"| {name} | {measure} | {line.mean:.1f} | {line.per_100:+.2f} ± "
                f"{line.error_per_100:.2f} | {verdict} |"
            )
    return "\n".join(rows)


def soak(
    args: list[str], folder: Path, every_s: float
) -> list[tuple[float, dict[str, dict[str, float]]]]:
    """Runs `rl` to its end and takes samples. Step: that of the trainer."""
    config, _ = load_config_or_exit(args, "rl")
    word = f"soak-{os.getpid()}-{time.time_ns()}"
    samples, step, reader = [], 0, MetricsReader(config.run_dir.metrics)
    with (folder / "rl.log").open("wb") as output:
        command = [str(Path(sys.executable).parent / "rl"), *args]
        with subprocess.Popen(
            command, env=os.environ | {"RL_CHAOS": word}, stdout=output, stderr=output
        ) as rl:
            try:
                while rl.poll() is None:
                    time.sleep(every_s)
                    step = max(
                        [
                            step,
                            *(line["step"] for line in reader.new() if line["source"] == "trainer"),
                        ]
                    )
                    if step:
                        statuses = map(
                            read_status, config.run_dir.status("x").parent.glob("*.json")
                        )
                        active = {status.pid or 0 for status in statuses if status}
                        samples.append((float(step), sample(promises.processes_with(word), active)))
            finally:
                rl.terminate()
    if rl.returncode:
        sys.exit(f"rl ended with {rl.returncode}; see {folder / 'rl.log'}")
    return [(at, roles) for at, roles in samples if at < step]  # at the end processes go


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--sample-every", type=float, default=3.0, help="seconds")
    parser.add_argument(
        "--out", type=Path, help="folder of run, log and report; default: a new one under outputs/"
    )
    options, rest = parser.parse_known_args()
    folder = options.out or Path("outputs") / f"soak-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    samples = soak(
        [*rest, "--output_dir", str(folder), "--name", "run"], folder, options.sample_every
    )
    lines = judge(samples)
    (folder / "soak.json").write_text(
        json.dumps(
            {
                name: {measure: asdict(line) for measure, line in each.items()}
                for name, each in lines.items()
            },
            indent=1,
        )
    )
    (folder / "soak.md").write_text(table(lines) + "\n")
    print(table(lines))
    (folder / "samples.json").write_text(json.dumps(samples))
    print(f"over {samples[-1][0]:.0f} steps, the first half left out")
    guilty = [
        f"{name} ({measure})"
        for name, each in lines.items()
        for measure, line in each.items()
        if grows(measure, line)
    ]
    print(f"growing: {', '.join(guilty)}" if guilty else "nothing grows")
    return 1 if guilty else 0


if __name__ == "__main__":
    sys.exit(main())
