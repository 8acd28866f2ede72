"""One run directory, live or finished, as an object; see docs/python.md."""

import math
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.diagnosis.problems import Problem
from rl.diagnosis.waits import Diagnosis, diagnose
from rl.models.folder import (
    folder_here,
    has_tokenizer,
    read_json,
    resolve_model,
    template_text,
    with_template,
)
from rl.records.cache import cache_file
from rl.records.columns import Kind
from rl.records.index import RolloutIndex
from rl.records.rollouts import KINDS, Rollouts, all_rollouts, frame, is_number
from rl.records.spans import Recording
from rl.records.timeline import Timeline, read_timeline
from rl.records.tokens import BatchTokens, SampleTokens
from rl.run_dir.checksums import is_delta
from rl.run_dir.deltas import readable
from rl.run_dir.events import Event, read_events
from rl.run_dir.files import files_in
from rl.run_dir.logs import attempts, last_lines
from rl.run_dir.metric_names import METRICS, OWN, meaning
from rl.run_dir.numbers import Curve, Numbers
from rl.run_dir.origin import Origin, read_origin
from rl.run_dir.paths import RunDir, numbered, numbers
from rl.run_dir.status import RoleStatus, RunEnd, Staleness, read_status
from rl.run_dir.status import read_json as read_struct
from rl.run_dir.version_files import REMOTE, is_remote
from rl.system.errors import RunError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCES = ("trainer", "orchestrator", "eval")
"""Processes that write metrics."""
LOG_NAME = re.compile(r"(.+)-(\d+)\.log")
KEPT_BATCHES = 4
"""Maximum number of decoded batches in memory."""


class UnknownMetricError(RunError):
    """A name is neither a metric of rl nor of a run."""


def check_metric(name: str, known: Collection[str]) -> None:
    """Raises UnknownMetricError for a name that is neither `known` nor a metric of rl, which may
    still appear."""
    if name not in known and meaning(name)[0] == OWN:
        near = get_close_matches(name, {*known, *METRICS}, n=3)
        raise UnknownMetricError(
            f"{name}: there is no such metric"
            + (f"; similar: {', '.join(near)}" if near else "; see docs/metrics.md")
        )


def plain(path: Path) -> Path:
    """A path as it is shown: absolute, and without `..`. A link keeps its name unless the path
    goes up from it."""
    path = path.expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


@dataclass(frozen=True)
class Version:
    """A policy version with remaining weights, a checkpoint or an evaluation."""

    number: int
    weights: Path | None
    """The folder in Hugging Face format; None if deleted, or for the base model."""
    checkpoint: Path | None
    evals: dict[str, float]
    """Mean reward by evaluation."""
    best_of: tuple[str, ...]
    """The evaluations in which it is the best version."""


class Run:
    """A run directory, read-only. Every answer reflects the files at that moment."""

    def __init__(self, root: Path | str):
        """Opens a run. Raises RunError if there is none."""
        self.root = plain(Path(root))
        if not (self.root / "config.toml").is_file():
            raise RunError(
                f"{self.root}: not a run directory; give the directory that has its config.toml"
            )
        self._lock = threading.RLock()
        self.reading = threading.RLock()
        """Held while metrics or spans are read, as another thread may update them. The index of
        rollouts, which may take a minute to build, has its own lock."""
        self.heartbeats: Staleness | None = None
        """Set by callers that diagnose repeatedly; if None, a diagnosis may wait for heartbeats
        from other clocks."""
        self._batch = lru_cache(KEPT_BATCHES)(
            lambda step, _changed: BatchTokens(self.run_dir, step)
        )
        self._config = lru_cache(1)(lambda _changed: stored_config(self.root))

    def __repr__(self) -> str:
        return f"<Run {self.root}>"

    # Settings and numbers -------------------------------------------------------------------------

    @property
    def config(self) -> RLConfig:
        """The resolved configuration. Raises RunError if another version of rl wrote it."""
        return self._config((self.root / "config.toml").stat().st_mtime_ns)

    @cached_property
    def run_dir(self) -> RunDir:
        """The paths of the run's files. If its configuration cannot be read, weights are
        expected inside the run directory."""
        try:
            return run_dir_of(self.root, self.config)
        except (RunError, PermissionError):
            return RunDir(self.root, self.root / "weights")

    @cached_property
    def _metrics(self) -> Numbers:
        return Numbers(self.run_dir.metrics)

    @property
    def numbers(self) -> Numbers:
        """All metrics as columns, up to date."""
        with self.reading:
            self._metrics.refresh()
            return self._metrics

    def metrics(self, source: str | None = None, kind: str | None = None) -> Any:
        """A table with a row per (step, source) and a column per metric; missing values are nan.

        source: only `trainer`, `orchestrator` or `eval`. kind: `pandas` (the default), `polars`, or
        `columns` for a dict of numpy arrays. Raises RunError for an unknown source.
        """
        with self.reading:
            self._check_source(source)
            return frame(self.numbers.columns(source), kind)

    def curve(self, metric: str, source: str | None = None) -> Curve:
        """Steps and finite values of a metric; empty if it has none yet. Raises RunError for an
        unknown metric or source."""
        with self.reading:
            self._check_source(source)
            check_metric(metric, self.numbers.names)
            return self.numbers.curve(metric, source)

    def _check_source(self, source: str | None) -> None:
        if source is not None and source not in SOURCES and source not in self.numbers.tables:
            raise RunError(f"source = {source!r}: give {', '.join(SOURCES)}, or None for all")

    @property
    def step(self) -> int:
        """The last step that the trainer reported; 0 before the first."""
        table = self.numbers.tables.get("trainer")
        return max(table.rows, default=0) if table else 0

    # Rollouts -------------------------------------------------------------------------------------

    @cached_property
    def _index(self) -> RolloutIndex:
        return RolloutIndex(self.run_dir, cache_file(self.root))

    def rollouts(self, kind: str | None = None, **wanted: Any) -> Rollouts:
        """Selects rollouts by fields: `step`, `version`, `env`, `task`, `group_id`, `outcome`,
        `why`, `reward`, ..., or a metric's name.

        kind: `train` (in a step's file, trained or not), `pending` (not settled by a batch yet) or
        `eval`; None: `train`, then `pending`. wanted: see Rollouts.where: `step=range(10, 20),
        env="sums", why=["trained", "no_signal"], reward=(0.5, None)`. Raises RunError for an
        unknown field, environment or evaluation.
        """
        kinds = {
            number
            for number, word in KINDS.items()
            if word == kind or (kind is None and number is not Kind.EVAL)
        }
        if not kinds:
            raise RunError(f"kind = {kind!r}: give {', '.join(KINDS.values())}")
        with self._lock:
            self._index.refresh()
            there = self._index.columns.words["env"]
            named = wanted.get("env")
            several = (
                named
                if isinstance(named, (list, tuple, set, frozenset))
                else [named]
                if named
                else ()
            )
            unknown = [str(name) for name in several if name not in there.codes]
            if unknown and there.words:
                raise RunError(
                    f"env = {', '.join(unknown)}: has no rollouts; there are: "
                    f"{', '.join(there.words)}"
                )
            return all_rollouts(self._index, kinds).where(**wanted)

    def group(self, group_id: int) -> Rollouts:
        """The rollouts of a group, settled or pending, by index in the group. Raises RunError if
        there are none."""
        if found := self.rollouts(group_id=group_id):
            return found.sorted("rollout_id")
        raise RunError(f"group {group_id}: has no rollouts in {self.run_dir.rollouts_dir}")

    def task(self, env: str, task: int, kind: str | None = None) -> dict[int, Rollouts]:
        """One task over the run: its rollouts by the newest policy version that sampled them,
        ascending; -1 if they failed before the first token. Raises RunError if there are none."""
        if found := self.rollouts(kind, env=env, task=task):
            return found.by("version")
        raise RunError(f"task {task} of {env}: has no rollouts")

    @property
    def damaged(self) -> dict[Path, str]:
        """Unreadable files and folders of rollouts, with the reason; their rollouts are missing
        everywhere."""
        with self._lock:
            self._index.refresh()
            return {
                **self._index.denied,
                **{
                    self._index.path(source): fault for source, fault in self._index.damaged.items()
                },
            }

    # Tokens ---------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchTokens:
        """A batch and the trainer's token log. Raises RunError if the batch does not exist (any
        more), CorruptFileError if damaged."""
        if not isinstance(step, Integral) or step < 1:
            raise RunError(f"step = {step!r}: give a whole number from 1")
        paths = self.run_dir.batch(step), self.run_dir.tokens(step)
        batch, log = (path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
        return self._batch(step, (batch, log))

    def tokens(
        self, step: int, group: int | None = None, rollout: int | None = None
    ) -> list[SampleTokens]:
        """The samples of a batch token by token; only those of a group or rollout, if given.
        Raises the errors of `batch`, and RunError if there are no such samples."""
        if found := list(self.batch(step).of(group, rollout)):
            return found
        raise RunError(
            f"batch {step} has no sample of group {group}, rollout {rollout} (None means any)"
        )

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer. Imports transformers. Raises the errors of `tokenizer_folder`."""
        from transformers import AutoTokenizer

        folder, model = self.tokenizer_folder, self.config.model
        # saved versions include it
        if model.chat_template and not folder.is_relative_to(self.run_dir.weights_dir):
            folder = with_template(folder, template_text(folder, model.chat_template))
        # a mapping that is not lazy
        return AutoTokenizer.from_pretrained(str(folder))  # ty: ignore[invalid-explicit-return]

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer: the newest kept version, else the model if it is on this
        machine. Downloads nothing. Raises RunError with the way to get it."""
        for folder in reversed(numbered(self.run_dir.weights_dir).values()):
            if has_tokenizer(folder):
                return folder
        base, name = folder_here(self.config.model), self.config.model.name
        if base is None or not has_tokenizer(base):
            get = (
                f"`hf download {name} tokenizer.json` gets it"
                if name.count("/") == 1
                else "copy it there"
            )
            raise RunError(
                f"the tokenizer of {name} is neither on this machine nor in "
                f"{self.run_dir.weights_dir}: {get}"
            )
        return base

    # Versions -------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[Version]:
        """Policy versions with remaining weights, a checkpoint or an evaluation, ascending from
        0, the base model."""
        weights, checkpoints = (
            numbered(self.run_dir.weights_dir),
            numbered(self.run_dir.checkpoints),
        )
        evals, best = self.eval_values(), self._best_versions()
        there = sorted(
            {0, *weights, *checkpoints, *(version for of in evals.values() for version in of)}
        )
        return [
            Version(
                number,
                weights.get(number),
                checkpoints.get(number),
                {name: of[number] for name, of in evals.items() if number in of},
                tuple(name for name, of in best.items() if of == number),
            )
            for number in there
        ]

    def eval_values(self, metric: str = "reward_mean") -> dict[str, dict[int, float]]:
        """A metric of each evaluation by policy version, ascending."""
        names = {
            match[1]: name
            for name in self.numbers.names
            if (match := re.fullmatch(rf"eval/(.+)/{metric}", name))
        }
        curves = {label: self.numbers.curve(name, "eval") for label, name in names.items()}
        return {
            label: dict(zip(steps.tolist(), values.tolist(), strict=True))
            for label, (steps, values) in curves.items()
        }

    def _best_versions(self) -> dict[str, int]:
        path = self.run_dir.evals / "best.json"
        entries = read_json(path, "delete it: a resume rewrites it") if path.exists() else {}
        return {
            name: entry["policy_version"]
            for name, entry in entries.items()
            if isinstance(entry, dict) and "policy_version" in entry
        }

    def load_model(
        self, version: int | str | None = None, **options: Any
    ) -> "PreTrainedModel | PeftModel":
        """A policy version as a model of transformers, adapters on their base. Raises RunError if
        the version does not exist.

        version: a number (0 is the base model), `best` if there is only one evaluation,
        `best:NAME`, or None for the newest. options: keyword arguments of `from_pretrained`, such
        as `dtype`.
        """
        from transformers import AutoModelForCausalLM

        number, base = (
            self._number(version),
            lambda: resolve_model(self.config.model, needs_template=False),
        )
        if number == 0:
            return AutoModelForCausalLM.from_pretrained(base(), **options)
        folder = self.run_dir.weights(number)
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and not is_delta(folder):
            where = (
                f" (the service that trains the run has them, see {folder}/{REMOTE})"
                if is_remote(folder)
                else ""
            )
            raise RunError(
                f"{folder} has no weights, *.safetensors{where}: copy them there, or give "
                "another version"
            )
        if not folder.is_dir():
            there = ", ".join(map(str, numbers(self.run_dir.weights_dir))) or "none"
            raise RunError(
                f"version {number} is not in {self.run_dir.weights_dir}; there are: {there} "
                "(and 0, the base model)"
            )
        if not (folder / "adapter_config.json").is_file():
            with readable(folder) as place:
                return AutoModelForCausalLM.from_pretrained(place, **options)
        from peft import PeftModel

        model = AutoModelForCausalLM.from_pretrained(base(), **options)
        # by which peft would take some layers for experts of transformers 4
        with patch.dict(vars(model.config), model_type=""):
            return PeftModel.from_pretrained(model, folder)

    def _number(self, version: int | str | None) -> int:
        if version is None:
            return max(numbers(self.run_dir.weights_dir), default=0)
        if isinstance(version, int):
            return version
        name, best = version.removeprefix("best").removeprefix(":"), self._best_versions()
        found = {of for label, of in best.items() if name in ("", label)}
        if not version.startswith("best") or len(found) != 1:
            raise RunError(
                f"version {version!r}: give a number, or best:NAME; evaluations and their "
                f"best versions: {best or 'none'}"
            )
        return found.pop()

    # What happened --------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        """Starts, deaths, restarts and repairs, oldest first."""
        return read_events(self.run_dir.events)

    @cached_property
    def _recording(self) -> Recording:
        return Recording(self.run_dir.spans)

    @property
    def recording(self) -> Recording:
        """The up-to-date spans and gauges of all processes."""
        with self.reading:
            self._recording.refresh()
            return self._recording

    def timeline(self, begin: float | None = None, end: float | None = None) -> Timeline:
        """What each process did between two times in seconds since the epoch; None: unbounded.
        Raises RunError if they are invalid."""
        if not all(one is None or is_number(one) for one in (begin, end)) or (
            begin is not None and end is not None and begin > end
        ):
            raise RunError(
                f"begin = {begin!r}, end = {end!r}: give two numbers in this order, seconds "
                "since the epoch, or None"
            )
        # read before the spans: what ends in between is then in both, not in neither
        statuses = self.status
        with self.reading:
            ends = -math.inf if begin is None else begin, math.inf if end is None else end
            return read_timeline(self.recording, self.numbers, self.events, statuses, *ends)

    @property
    def status(self) -> dict[str, RoleStatus]:
        """The last status of each process: its phase and heartbeat."""
        found = {
            path.stem: read_status(path) for path in files_in(self.run_dir.status_dir, ".json")
        }
        return {name: status for name, status in found.items() if status and status.pid is not None}

    @property
    def end(self) -> RunEnd | None:
        """Why the run ended; None if it is running, or was stopped or killed."""
        return read_struct(self.run_dir.run_end, RunEnd)

    @property
    def origin(self) -> Origin | None:
        """The run and step that a branch began from; None if it is not a branch. Raises RunError
        for a damaged file."""
        return read_origin(self.run_dir)

    @property
    def logs(self) -> dict[str, dict[int, Path]]:
        """The log files of each process by attempt."""
        names = {
            match[1]
            for path in self.run_dir.logs.glob("*.log")
            if (match := LOG_NAME.fullmatch(path.name))
        }
        return {
            name: dict(sorted(attempts(self.run_dir.logs, name).items())) for name in sorted(names)
        }

    def log(self, process: str, attempt: int | None = None, lines: int = 100) -> list[str]:
        """The last non-empty lines of a process's log, by default of its newest attempt. Raises
        RunError if it has no log."""
        if not isinstance(lines, Integral) or lines < 0:
            raise RunError(f"lines = {lines!r}: give a whole number from 0")
        there = self.logs.get(process, {})
        path = there.get(max(there, default=0) if attempt is None else attempt)
        if path is None:
            what = (
                f"the {process} has no log"
                if not there
                else f"the {process} has no attempt {attempt}; there are "
                f"{', '.join(map(str, there))}"
            )
            raise RunError(
                f"{what} in {self.run_dir.logs}, which has those of: "
                f"{', '.join(self.logs) or 'nobody'}"
            )
        return last_lines(path, lines) if lines else []

    def quick_diagnosis(self) -> Diagnosis:
        """The diagnosis without damaged rollout files (finding them reads all files at first).
        Raises RunError without a configuration."""
        with self.reading:
            return diagnose(self.run_dir, self.config, self.heartbeats, self.numbers)

    def diagnosis(self) -> Diagnosis:
        """What the run waits for and what is wrong with it, as reported by `rl doctor RUN`,
        including damaged rollout files.

        Raises RunError without a configuration.
        """
        found = self.quick_diagnosis()
        return replace(
            found,
            problems=[
                *found.problems,
                *(Problem(text, files=(path,)) for path, text in self.damaged.items()),
            ],
        )

    @property
    def problems(self) -> list[Problem]:
        """Problems, then hints on what may hold the reward down, each with evidence; empty if
        there are none."""
        found = self.diagnosis()
        return [*found.problems, *found.hints]
