"""A real run (vLLM, workers, trainer) in which each process dies at every fault point that it comes by; then the promise is checked.

    uv run -m tests.proofs.kill_everywhere @ CONFIG [rl's flags] [--processes trainer,orchestrator,worker]

First a short run is traced, to learn the points. Then one run goes through all of them: a process that died is started again by whoever
watches over it, and dies at its next point. tests/test_kill_everywhere.py does the same with an inference stub in a minute.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.proofs import promises
from tests.proofs.chaos_run import UP_S, Run

STEPS = 6
"""Of the traced run: with checkpoint.interval = 2 each kind of write comes twice."""
PASSED_OVER = ("RunEnded", "GetProbe", "Probe")
"""Points that only come at the end, or only now and then."""
ONCE = re.compile(r"token\.|environments\.|([a-z]+-)?[0-9a-f]{16}\.")
"""Points that come once: in a run its token and the record of its homes, on a machine what bears a checksum for a name."""


def traced(args: list[str], folder: Path, processes: list[str]) -> list[str]:
    """The faults for a second run: each process's points in the order in which it first came by."""
    trace = folder / "points.txt"
    command = [str(Path(sys.executable).parent / "rl"), *args, "--output_dir", str(folder), "--name", "traced", "--max_steps", str(STEPS)]
    with (folder / "traced.log").open("wb") as output:
        subprocess.run(command, env=os.environ | {"RL_FAULT_TRACE": str(trace)}, stdout=output, stderr=output, check=True)
    points = Counter(" ".join(line.split()[:2]) for line in trace.read_text().splitlines())
    pairs = [point.split() for point in points]
    return [
        f"{process}:{name}:1" for process, name in pairs if process in processes and not name.endswith(PASSED_OVER) and not ONCE.match(name)
    ]


class FaultyRun(Run):
    """A run whose processes take their next death out of a list."""

    def __init__(self, args: list[str], folder: Path, faults: list[str]):
        super().__init__(args, folder)
        self.faults, self.mark = faults, folder / "died.txt"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"RL_FAULT": ",".join(self.faults), "RL_FAULT_MARK": str(self.mark)}

    def died(self) -> list[str]:
        return self.mark.read_text().split() if self.mark.exists() else []


def go(run: FaultyRun) -> list[str]:
    """Until everything has died of everything. Returns what is broken."""
    run.start()
    assert run.rl
    before, since = -1, time.monotonic()
    while len(run.died()) < len(run.faults):
        time.sleep(0.5)
        if len(died := run.died()) > before:
            before, since = len(died), time.monotonic()
            print(f"{len(died):4}/{len(run.faults)}  {died[-1] if died else 'started'}", flush=True)
        if (code := run.rl.poll()) is not None:
            return [f"`rl` ended with {code} after {died[-1:]}"]
        if time.monotonic() - since > UP_S:
            return [f"not reached: {sorted(set(run.faults) - set(died))}"]
    newest, deadline = run.run_dir.newest_batch(), time.monotonic() + UP_S
    while run.run_dir.newest_batch() < newest + 2 and time.monotonic() < deadline and run.rl.poll() is None:
        time.sleep(0.5)
    run.rl.terminate()
    code = run.rl.wait(120)
    return [] if code in (0, 143) else [f"`rl` ended with {code} after SIGTERM"]


def check(run: FaultyRun) -> list[str]:
    """The promise."""
    broken = promises.nothing_left(run.run_dir, run.temporary, set(), run.word)
    broken += promises.exactly_once(run.run_dir, set())[0] + promises.lag(run.run_dir, run.config)[0]
    broken += promises.every_step_trained(run.run_dir) + promises.numbers_once(run.run_dir)
    broken += promises.replay_equal(run.run_dir, dict(os.environ), 3600.0)[0]
    shutil.rmtree(run.temporary, ignore_errors=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--processes", default="trainer,orchestrator,worker", help="whose points")
    parser.add_argument("--out", type=Path, help="folder of run, log and report; default: a new one under outputs/")
    options, rest = parser.parse_known_args()
    folder = (options.out or Path("outputs") / f"points-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    folder.mkdir(parents=True)
    faults = traced(rest, folder, options.processes.split(","))
    limits = ["--supervisor.max_restarts", "1000", "--supervisor.quarantine_after", "1000", "--supervisor.backoff_s", "0.1"]
    run = FaultyRun([*rest, *limits, "--output_dir", str(folder), "--name", "run", "--max_steps", "999999"], folder, faults)
    try:
        broken = go(run)
    finally:
        if run.rl and run.rl.poll() is None:
            run.rl.terminate()
            run.rl.wait(120)
    broken += check(run)
    print(f"{len(faults)} deaths;", "every promise was kept" if not broken else "BROKEN:", *broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
