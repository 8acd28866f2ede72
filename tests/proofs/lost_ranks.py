"""A run with two ranks of which one is lost in each phase of the training: killed, or stopped, as a
machine or driver that hangs.

    uv run -m tests.proofs.lost_ranks [--out DIR] [--signals KILL,STOP] [--phases training,publishing]

Prints a line for each loss: after how many seconds it was named, its group had ended, and the run
had made a step. Exit code 1 if a loss was named after more than NAMED_S, a group ended after more
than ENDED_S, or the replay of the whole run is not equal bit for bit. Losses of machines:
tests/proofs/network.py.
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.paths import numbered
from rl.run_dir.spans import Event
from rl.run_dir.status import Phase, RoleStatus
from tests.proofs import promises
from tests.proofs.chaos_run import Run

NAMED_S, ENDED_S, AGAIN_S = 60.0, 90.0, 300.0
RANKS = ("trainer", "trainer-1")
PHASES = {
    Phase.TRAINING: (0.0, 0.5, 0.9),
    Phase.WAITING_FOR_BATCH: (0.0,),
    Phase.PUBLISHING: (0.0,),
    Phase.COPYING_STATE: (0.0, 1.0),
    Phase.LOADING_MODEL: (0.0, 1.0),
    Phase.WAITING_FOR_RANKS: (0.0,),
}
"""Phase of the rank that is lost, and the seconds after its begin; of training, the fraction of
a step."""
BEFORE_STEPS = (Phase.LOADING_MODEL, Phase.WAITING_FOR_RANKS)
MOST_RESTARTS = 1000
CONFIG = {
    "max_steps": 999999,
    "model": {"dtype": "float32", "max_model_len": 128},
    "trainer": {
        "micro_batch_tokens": 128,
        "gpus": 0,
        "ranks": 2,
        "optim": {"lr": 1e-7},
        "checkpoint": {"interval": 3},
    },
    "orchestrator": {
        "environment": [{"id": "first-half"}],
        "batch_size": 16,
        "sampling": {"max_tokens": 16},
    },
    "inference": {"gpus": 0},
    "supervisor": {"max_restarts": MOST_RESTARTS, "quarantine_after": MOST_RESTARTS},
}


class LateError(Exception):
    """The run does not do what it promises in time."""


def until(what: str, reached, limit_s: float) -> float:
    """Returns the seconds until then."""
    began = time.monotonic()
    while not reached():
        if time.monotonic() - began > limit_s:
            raise LateError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.002)
    return time.monotonic() - began


def deaths(run: Run) -> list[Event]:
    """All deaths of the trainer so far."""
    lines = run.run_dir.events.read_bytes().splitlines() if run.run_dir.events.exists() else []
    events = [msgspec.json.decode(line, type=Event) for line in lines]
    return [event for event in events if event.event == "death" and event.process == "trainer"]


def newest_step(run: Run) -> int:
    return max(numbered(run.run_dir.weights_dir), default=0)


def strike(
    run: Run, phase: Phase, after: float, rank: int, signum: signal.Signals, step_s: float
) -> str:
    """Loses a rank. Returns what happened then. Raises LateError."""
    victim: list[RoleStatus] = []

    def reached() -> bool:
        victim[:] = [run.status(RANKS[rank])]
        return (
            victim[0].phase is phase
            and victim[0].lives() is True
            and (victim[0].step is None or victim[0].step > 1)
        )

    if phase in BEFORE_STEPS and (pid := run.status("trainer").pid):
        os.kill(pid, signal.SIGKILL)  # so that it starts again
    until(f"{RANKS[rank]} to be {phase}", reached, AGAIN_S)
    time.sleep(after * (step_s if phase is Phase.TRAINING else 1.0))
    pids = [pid for name in RANKS if (pid := run.status(name).pid) and run.status(name).lives()]
    before, step = len(deaths(run)), newest_step(run)
    pid = victim[0].pid
    assert pid
    os.kill(pid, signum)
    named_s = until("the death to be told", lambda: len(deaths(run)) > before, ENDED_S)
    ended_s = named_s + until(
        "its group to end", lambda: not any(map(psutil.pid_exists, pids)), ENDED_S
    )
    death = deaths(run)[before]
    again_s = ended_s + until("another step", lambda: newest_step(run) > max(step, 1), AGAIN_S)
    seconds = f"{named_s:.1f} | {ended_s:.1f} | {again_s:.1f}"
    line = f"| {phase} + {after:g} | {rank} | {signum.name} | {seconds} | {death.reason} |"
    if named_s > NAMED_S or ended_s > ENDED_S or f"rank {rank}" not in death.reason:
        raise LateError(line)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the run and its logs; default: a new one"
    )
    parser.add_argument("--signals", default="KILL,STOP")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--ranks", default="1,0")
    options = parser.parse_args()
    folder = (options.out or Path(tempfile.mkdtemp(prefix="rl-lost-"))).absolute()
    folder.mkdir(exist_ok=True)
    model = make_tiny_model(folder / "model")
    place = {
        "name": "run",
        "output_dir": str(folder),
        "model": {**CONFIG["model"], "name": str(model)},
    }
    write_config(folder / "run.toml", RLConfig.model_validate(CONFIG | place))
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1] / "environments"),
    }
    run, broken = Run(["@", str(folder / "run.toml")], folder), list[str]()
    run.start()
    try:
        until("three steps", lambda: newest_step(run) >= 3, AGAIN_S)
        step_s = until("three more", lambda: newest_step(run) >= 6, AGAIN_S) / 3
        print(
            "| phase + seconds | rank | signal | named s | ended s | next step s | said "
            "|\n|---|---|---|---|---|---|---|",
            flush=True,
        )
        cases = itertools.product(
            options.signals.split(","),
            map(Phase, options.phases.split(",")),
            map(int, options.ranks.split(",")),
        )
        for name, phase, rank in cases:
            for after in PHASES[phase]:
                try:
                    print(
                        strike(run, phase, after, rank, signal.Signals[f"SIG{name}"], step_s),
                        flush=True,
                    )
                except LateError as error:
                    broken.append(str(error))
                    print(f"BROKEN: {error}", flush=True)
    finally:
        run.end()
    differs, told = promises.replay_equal(run.run_dir, run.environment(), 1200)
    print(told, *differs, sep="\n")
    return 1 if broken or differs else 0


if __name__ == "__main__":
    sys.exit(main())
