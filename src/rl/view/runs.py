"""The list of runs, and the comparison of several runs."""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.run import RLConfig
from rl.config.stored import rl_dir_of
from rl.diagnosis.disk import on_disk
from rl.records.comparison import eval_points, setting_diffs
from rl.records.run import Run
from rl.run_dir.metrics import source_files
from rl.system.errors import RunError
from rl.system.terminal import visible
from rl.view.curves import AxisPlaces
from rl.view.library import Library
from rl.view.responses import Comparison, EvalChange, Learned, RunRow
from rl.view.timeline import extent

STRETCHES = 40
"""Maximum number of points in a small curve."""
LIVE_S = 3.0
"""Seconds for which a live run's row is cached; a finished run's row is cached until one of its
files changes."""
DISK_S = 60.0
"""Seconds for which a run's size is cached: counting it visits every file."""
SHARES, SPAN = (0.25, 0.5, 0.75, 1.0), 0.1
"""Where the rewards of several runs are compared, and the span of their means, as shares of the
shortest run."""
DAMAGE = (RunError, OSError, ValueError)
"""Exceptions from reading files that were not written by a run: one such run must not hide the
others. Any other exception is a bug of the page and must show as one."""


class RunList:
    """Rows of runs, cached while nothing changes. Thread-safe: a row whose run another thread is
    reading may be the previous one."""

    def __init__(self, library: Library):
        self.library = library
        self.rows: dict[str, tuple[tuple[float, ...], float, RunRow]] = {}
        """Key -> fingerprint of the files, time when the row was made, the row."""
        self.paths: dict[str, list[Path]] = {}
        """Key -> the files of the fingerprint: a row that is still right opens no run."""
        self.sizes: dict[str, tuple[float, int]] = {}

    def all(self) -> list[RunRow]:
        """All runs, live ones first, then most recently changed first."""
        rows = [self._row(key) for key in self.library.keys()]  # noqa: SIM118
        return sorted(rows, key=lambda row: (row.state != "live", -row.changed))

    def _row(self, key: str) -> RunRow:
        now = time.monotonic()
        looks, since, row = self.rows.get(key, ((), 0.0, None))
        try:
            is_right = row and looks == fingerprint(self.paths[key])
            if row and is_right and (row.state != "live" or now - since < LIVE_S):
                return row
            run = self.library.run(key)
            self.paths[key] = watched(run)
            looks = fingerprint(self.paths[key])
        except DAMAGE as error:
            return unreadable(key, f"{type(error).__name__}: {error}")
        size, changed = self._bytes(key, run, now), max(looks)
        if not run.reading.acquire(blocking=row is None):
            assert row
            return row
        try:
            row = run_row(key, run, size, changed)
        except DAMAGE as error:
            row = unreadable(key, f"{type(error).__name__}: {error}", size, changed)
        finally:
            run.reading.release()
        self.rows[key] = looks, now, row
        return row

    def _bytes(self, key: str, run: Run, now: float) -> int:
        counted, size = self.sizes.get(key, (-math.inf, 0))
        if now - counted > DISK_S:
            self.sizes[key] = (now, size := on_disk(run.root))
        return size


def watched(run: Run) -> list[Path]:
    """The files of a run that change with it, and those that say whether its processes live."""
    files = lives = run.run_dir
    with contextlib.suppress(RunError, OSError):
        lives = rl_dir_of(files, run.config)
    paths = [
        files.config,
        files.metrics,
        files.run_end,
        files.rollouts_dir,
        files.evals,
        *source_files(files.metrics),
    ]
    return [*paths, lives.events, lives.status_dir]


def fingerprint(paths: Sequence[Path]) -> tuple[float, ...]:
    """The mtimes of files, 0 for one that does not exist."""
    return tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)


def run_row(key: str, run: Run, size: int, changed: float) -> RunRow:
    """The row of a run in the list."""
    try:
        config, diagnosis = run.config, run.quick_diagnosis()
        state, outcome = diagnosis.state, diagnosis.outcome
        why = outcome.lasting if outcome else diagnosis.bottleneck
    except (RunError, OSError) as error:
        config, state, why = None, "unreadable", " ".join(str(error).split())
    first, last = extent(run)
    kind, about = "", dict[str, Any]()
    if config:
        kind = config.kind
        about = {
            "model": visible(Path(config.model.name).name),
            "environments": []
            if kind == "sft"
            else [visible(env.label) for env in config.orchestrator.environment],
            "max_steps": 0 if kind == "serve" else config.max_steps,
        }
    measure = "loss/mean" if kind in ("sft", "serve") else "reward/mean"
    values = (run.numbers.curve(measure) if measure == "loss/mean" else run.numbers.reward())[1]
    return RunRow(
        key=key,
        name=visible(run.root.name),
        state=state,
        why=visible(why),
        step=run.step,
        reward=last_mean(values),
        rewards=stretches(values),
        measure=measure,
        evals=eval_changes(run),
        lag=last_mean(run.numbers.curve("lag/mean")[1]),
        tokens_per_s=last_mean(run.numbers.curve("perf/tokens_per_s")[1]),
        seconds=last - first,
        last_sign=last,
        changed=changed,
        bytes=size,
        **about,
    )


def unreadable(key: str, why: str, size: int = 0, changed: float = 0.0) -> RunRow:
    """The row of a run that cannot be read."""
    text = visible(" ".join(why.split()))
    return RunRow(
        key=key, name=Path(key).name, state="unreadable", why=text, changed=changed, bytes=size
    )


def last_mean(values: np.ndarray) -> float | None:
    """Mean of the newest tenth of the values, from one to five of them; None without values."""
    return float(values[-max(1, min(5, len(values) // 10)) :].mean()) if len(values) else None


def stretches(values: np.ndarray) -> list[float | None]:
    """Means over at most STRETCHES stretches of nearly equal length."""
    return (
        [float(part.mean()) for part in np.array_split(values, min(STRETCHES, len(values)))]
        if len(values)
        else []
    )


def eval_changes(run: Run) -> list[EvalChange]:
    """The first and the newest mean reward of each evaluation."""
    changes, errors = [], run.eval_values("reward_mean_stderr")
    for name, means in run.eval_values().items():
        if means:
            first, last = min(means), max(means)
            error = math.hypot(*(errors.get(name, {}).get(at, 0.0) for at in (first, last)))
            changes.append(
                EvalChange(
                    name=name,
                    first=means[first],
                    last=means[last],
                    first_version=first,
                    last_version=last,
                    clear=abs(means[last] - means[first]) > 2 * error,
                )
            )
    return changes


def compare(keys: Sequence[str], runs: Sequence[Run]) -> Comparison:
    """Compares runs: settings that differ, evaluations by version, and rewards."""
    configs, faults, notes = list[RLConfig | None](), list[str](), list[str]()
    for key, run in zip(keys, runs, strict=True):
        configs.append(None)
        try:
            if run.origin:
                origin = visible(str(run.origin))
                notes.append(f"{key}: {origin}; it began with what that run had learned")
            configs[-1] = run.config
        except RunError as error:
            faults.append(f"{key}: {visible(str(error))}")
    return Comparison(
        settings=setting_diffs(configs),
        evals=eval_points(runs),
        learned=learned(runs),
        faults=faults,
        notes=notes,
    )


def learned(runs: Sequence[Run]) -> list[Learned]:
    """The runs' rewards after equal numbers of rollouts, each a mean over the preceding SPAN."""
    curves = [
        (AxisPlaces(run, "rollouts")(steps), values)
        for run in runs
        for steps, values in [run.numbers.reward()]
    ]
    if (
        not all(len(values) for _, values in curves)
        or not (shortest := min(float(at[-1]) for at, _ in curves)) > 0
    ):
        return []
    return [
        Learned(
            rollouts=share * shortest,
            rewards=[mean_before(*curve, share * shortest, SPAN * shortest) for curve in curves],
        )
        for share in SHARES
    ]


def mean_before(at: np.ndarray, values: np.ndarray, end: float, span: float) -> float | None:
    """The mean of the values in the last `span` up to `end`, or at least the newest value up
    to it; None if there is none."""
    is_before = at <= end
    count = max(1, int((is_before & (at > end - span)).sum()))
    return float(values[is_before][-count:].mean()) if is_before.any() else None
