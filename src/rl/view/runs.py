"""The list of runs, and several runs side by side."""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl.config.differences import changed_keys
from rl.config.run import RLConfig
from rl.records.run import Run
from rl.run_dir.metrics import source_files
from rl.system.credentials import hidden
from rl.system.errors import RunError
from rl.system.terminal import visible
from rl.view.answers import Comparison, EvalChange, EvalPoint, Learned, RunRow, SettingDiff, State
from rl.view.curves import Places
from rl.view.library import Library
from rl.view.timeline import extent

STRETCHES = 40
"""Points of a small curve."""
LIVE_S = 3.0
"""For so long what was found of a live run is believed; a finished one's until a file of it changes."""
PATIENCE_S = 0.2
"""For so long a row waits for whoever else reads its run."""
DISK_S = 60.0
"""For so long the size of a run that changes is believed: counting it looks at every file."""
SHARES, SPAN = (0.25, 0.5, 0.75, 1.0), 0.1
"""Where several runs' rewards are compared, as parts of the shortest run, and over which part of it each is a mean."""
DAMAGE = (RunError, OSError, ValueError)
"""What reading files raises that hold something else than a run wrote: one such run must not hide the others. The readers know no other
way to fail, so anything else is a fault of the page, which is to be seen as one."""
PLACE_KEYS = ("name", "output_dir")
"""Settings that say where a run is, not what it does."""


class RunList:
    """Rows of runs, kept while nothing changes. Several threads may ask: a row whose run another one reads is given as it was."""

    def __init__(self, library: Library):
        self.library = library
        self.rows: dict[str, tuple[tuple[float, ...], float, RunRow]] = {}
        """Key -> what the files looked like, when it was made, the row."""
        self.sizes: dict[str, tuple[float, int]] = {}

    def all(self) -> list[RunRow]:
        """All runs, those that changed last first."""
        rows = [self._row(key) for key in self.library.keys()]  # noqa: SIM118
        return sorted(rows, key=lambda row: (row.state != "live", -row.changed))

    def _row(self, key: str) -> RunRow:
        now, made = time.monotonic(), self.rows.get(key)
        try:
            run = self.library.run(key)
            looks = fingerprint(run)
        except DAMAGE as error:
            return unreadable(key, f"{type(error).__name__}: {error}")
        if made and made[0] == looks and (made[2].state != "live" or now - made[1] < LIVE_S):
            return made[2]
        size, changed = self._bytes(key, run, now), max(looks)
        if not run.reading.acquire(timeout=PATIENCE_S if made else -1):
            return made[2]
        try:
            row = run_row(key, run, size, changed)
        except DAMAGE as error:
            row = unreadable(key, f"{type(error).__name__}: {error}", size, changed)
        finally:
            run.reading.release()
        self.rows[key] = (looks, now, row)
        return row

    def _bytes(self, key: str, run: Run, now: float) -> int:
        counted, size = self.sizes.get(key, (-math.inf, 0))
        if now - counted > DISK_S:
            self.sizes[key] = (now, size := disk_bytes(run.root))
        return size


def fingerprint(run: Run) -> tuple[float, ...]:
    """What changes with a run: when its files were last written."""
    files = run.run_dir
    paths = (files.config, files.metrics, files.events, files.run_end, files.status_dir, files.rollouts_dir, files.evals)
    return tuple(path.stat().st_mtime if path.exists() else 0.0 for path in (*paths, *source_files(files.metrics)))


def disk_bytes(root: Path) -> int:
    """Bytes of the files of a run; of hard links each once."""
    seen, total = set(), 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                there = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if there.st_ino not in seen:
                seen.add(there.st_ino)
                total += there.st_size
    return total


def run_row(key: str, run: Run, size: int, changed: float) -> RunRow:
    """A run in the list."""
    try:
        config = run.config
        state, why = state_of(run)
    except (RunError, OSError) as error:
        config, state, why = None, "unreadable", " ".join(str(error).split())
    first, last = extent(run)
    measure = "loss/mean" if config and config.sft else "reward/mean"
    values = run.numbers.curve(measure)[1]
    return RunRow(
        key=key,
        name=visible(run.root.name),
        model=visible(Path(config.model.name).name) if config else "",
        environments=[visible(env.label) for env in config.orchestrator.environment] if config and not config.sft else [],
        state=state,
        why=visible(why),
        step=run.step,
        max_steps=config.max_steps if config else 0,
        reward=last_mean(values),
        rewards=stretches(values),
        measure=measure,
        evals=eval_changes(run),
        lag=last_mean(run.numbers.curve("lag/mean")[1]),
        tokens_per_s=last_mean(run.numbers.curve("perf/tokens_per_s")[1]),
        seconds=last - first,
        heard=last,
        changed=changed,
        bytes=size,
    )


def unreadable(key: str, why: str, size: int = 0, changed: float = 0.0) -> RunRow:
    """The row of a run of which nothing can be told."""
    return RunRow(
        key=key,
        name=Path(key).name,
        model="",
        environments=[],
        state="unreadable",
        why=visible(" ".join(why.split())),
        step=0,
        max_steps=0,
        reward=None,
        rewards=[],
        measure="reward/mean",
        evals=[],
        lag=None,
        tokens_per_s=None,
        seconds=0.0,
        heard=0.0,
        changed=changed,
        bytes=size,
    )


def state_of(run: Run) -> tuple[State, str]:
    """Whether a run lives, and what it waits for or how it ended, in a sentence, without how long ago: that does not stay true."""
    found = run.quick_diagnosis()
    return found.state, found.bottleneck.replace(found.age, "", 1) if found.age else found.bottleneck


def last_mean(values: np.ndarray) -> float | None:
    """Mean of the newest values, five at most and no more than a tenth; None without any."""
    return float(values[-max(1, min(5, len(values) // 10)) :].mean()) if len(values) else None


def stretches(values: np.ndarray) -> list[float | None]:
    """Means over at most STRETCHES stretches of nearly equal length."""
    return [float(part.mean()) for part in np.array_split(values, min(STRETCHES, len(values)))] if len(values) else []


def eval_changes(run: Run) -> list[EvalChange]:
    """Each evaluation's first and newest mean reward."""
    found = []
    for name in eval_names(run):
        versions, values = run.numbers.curve(f"eval/{name}/reward_mean", "eval")
        if len(values):
            first, last = map(float, (values[0], values[-1]))
            begin, end = int(versions[0]), int(versions[-1])
            errors = dict(zip(*run.numbers.curve(f"eval/{name}/reward_mean_stderr", "eval"), strict=True))
            clear = abs(last - first) > 2 * math.hypot(errors.get(begin, 0.0), errors.get(end, 0.0))
            found.append(EvalChange(name=name, first=first, last=last, first_version=begin, last_version=end, clear=clear))
    return found


def eval_names(run: Run) -> list[str]:
    """The evaluations that a run has results of."""
    ends = ("eval/", "/reward_mean")
    return [
        name.removeprefix(ends[0]).removesuffix(ends[1])
        for name in run.numbers.names
        if name.startswith(ends[0]) and name.endswith(ends[1])
    ]


def compare(keys: Sequence[str], runs: Sequence[Run]) -> Comparison:
    """Settings that differ, and evaluations by version."""
    configs, faults = [], []
    for key, run in zip(keys, runs, strict=True):
        try:
            configs.append(run.config)
        except RunError as error:
            faults.append(f"{key}: {visible(str(error))}")
            configs.append(None)
    return Comparison(runs=list(keys), settings=setting_diffs(configs), evals=eval_points(runs), learned=learned(runs), faults=faults)


def learned(runs: Sequence[Run]) -> list[Learned]:
    """The rewards after the same numbers of rollouts, each the mean over the tenth before."""
    curves = [(Places(run, "samples")(steps), values) for run in runs for steps, values in [run.numbers.curve("reward/mean")]]
    if not all(len(values) for _, values in curves) or not (shortest := min(float(at[-1]) for at, _ in curves)) > 0:
        return []
    return [
        Learned(samples=share * shortest, rewards=[mean_before(*curve, share * shortest, SPAN * shortest) for curve in curves])
        for share in SHARES
    ]


def mean_before(at: np.ndarray, values: np.ndarray, place: float, span: float) -> float | None:
    """The mean of the values that lie within `span` before a place, of the newest one before it at least; None where none is."""
    before = values[at <= place]
    return float(before[-max(1, int(((at > place - span) & (at <= place)).sum())) :].mean()) if len(before) else None


def setting_diffs(configs: Sequence[RLConfig | None]) -> list[SettingDiff]:
    """The settings in which the configurations differ, without those of place and without secrets."""
    known = [i for i, config in enumerate(configs) if config]
    if not known:
        return []
    first = known[0]
    found: dict[str, list[object]] = {}
    for i in known[1:]:
        for key, before, after in changed_keys(configs[first], configs[i]):
            if key not in PLACE_KEYS and not (before in (None, []) and after in (None, [])):
                found.setdefault(key, [None if j not in known else before for j in range(len(configs))])[i] = after
    return [SettingDiff(key=key, values=hidden(key, values)) for key, values in found.items()]


def eval_points(runs: Sequence[Run]) -> list[EvalPoint]:
    """Every evaluation of every version that one of the runs has."""
    means = [{(name, int(v)): float(x) for name in eval_names(run) for v, x in curve(run, name, "reward_mean")} for run in runs]
    errors = [{(name, int(v)): float(x) for name in eval_names(run) for v, x in curve(run, name, "reward_mean_stderr")} for run in runs]
    return [
        EvalPoint(
            name=name, version=version, means=[m.get((name, version)) for m in means], errors=[e.get((name, version)) for e in errors]
        )
        for name, version in sorted({key for of in means for key in of})
    ]


def curve(run: Run, name: str, metric: str) -> list[tuple[int, float]]:
    """(version, value) of a metric of an evaluation."""
    return list(zip(*map(list, run.numbers.curve(f"eval/{name}/{metric}", "eval")), strict=True))
