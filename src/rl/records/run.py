"""One run directory, live or finished, as an object: `rl.open("outputs/x")`; docs/python.md shows
what it has.

Never writes to it, and imports neither torch nor vllm. Every call reflects the files at that
moment, and reads only what is new in them. A damaged or deleted file affects only itself: the index
leaves it out (`run.damaged`), and a rollout whose file was deleted raises RunError when its text is
accessed. A Run is thread-safe.
"""

import math
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.diagnosis.problems import Problem
from rl.diagnosis.state import read_statuses
from rl.diagnosis.waits import Diagnosis, diagnose
from rl.models.folder import (
    folder_here,
    has_tokenizer,
    read_json,
    resolve_model,
    template_text,
    with_template,
)
from rl.records.index import RolloutIndex, cache_file, identity_of
from rl.records.rollouts import Rollouts, frame
from rl.records.timeline import SpanRecording, Timeline, read_timeline
from rl.records.tokens import BatchTokens, SampleTokens
from rl.run_dir.checksums import REMOTE, is_delta, is_remote, readable
from rl.run_dir.logs import attempts, last_lines
from rl.run_dir.metrics import METRICS, OWN, meaning
from rl.run_dir.numbers import Curve, Numbers
from rl.run_dir.paths import BranchOrigin, RunDir, numbered, numbers, read_origin
from rl.run_dir.spans import Event, read_events
from rl.run_dir.status import RoleStatus, RunEnd, Staleness
from rl.run_dir.status import read_json as read_struct
from rl.system.errors import RunError
from rl.system.terminal import nearest

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCES = ("trainer", "orchestrator", "eval", "rl")
"""Processes that write metrics."""
LOG_NAME = re.compile(r"(.+)-(\d+)\.log")
KEPT_BATCHES = 4
"""Maximum number of decoded batches in memory."""


def check_metric(name: str, known: Collection[str]) -> None:
    """Raises RunError for a name that is neither `known` nor a metric of rl, which may
    still appear."""
    if name not in known and meaning(name)[0] == OWN:
        near = nearest(name, {*known, *METRICS})
        hint = f"similar: {near}" if near else "see docs/metrics.md"
        raise RunError(f"{name}: there is no such metric; {hint}")


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
        read_batch = lru_cache(KEPT_BATCHES)
        self._batch = read_batch(lambda step, _changed: BatchTokens(self.run_dir, step))
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

        source: only `trainer`, `orchestrator` or `eval`. kind: `pandas` (the default), `polars`,
        or `columns` for a dict of numpy arrays. Raises RunError for an unknown source.
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

        kind: `train` (in a step's file, trained or not), `pending` (not settled by a batch yet)
        or `eval`; None: `train`, then `pending`.
        wanted: see Rollouts.where: `step=range(10, 20), env="sums", why=["trained",
        "no_signal"], reward=(0.5, None)`. Raises RunError for an unknown field, environment or
        evaluation.
        """
        with self._lock:
            self._index.refresh()
            kinds = kind or ["train", "pending"]
            chosen = Rollouts.of(self._index).where(kind=kinds, **wanted)
        return chosen.sorted("version" if kind == "eval" else "step")

    def group(self, group_id: int) -> Rollouts:
        """The rollouts of a group, settled or pending, by index in the group. Raises RunError if
        there are none."""
        if rollouts := self.rollouts(group_id=group_id):
            return rollouts.sorted("rollout_id")
        raise RunError(f"group {group_id}: has no rollouts in {self.run_dir.rollouts_dir}")

    def task(self, env: str, task: int, kind: str | None = None) -> dict[int, Rollouts]:
        """One task over the run: its rollouts by the newest policy version that sampled them,
        ascending; -1 if they failed before the first token. Raises RunError if there are none."""
        if rollouts := self.rollouts(kind, env=env, task=task):
            return rollouts.by("version")
        raise RunError(f"task {task} of {env}: has no rollouts")

    @property
    def damaged(self) -> dict[Path, str]:
        """Unreadable files and folders of rollouts, with the reason; their rollouts are missing
        everywhere."""
        with self._lock:
            self._index.refresh()
            damaged = self._index.damaged.items()
            return self._index.denied | {self._index.path(file): fault for file, fault in damaged}

    # Tokens ---------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchTokens:
        """A batch and the trainer's token log. Raises RunError if the batch does not exist (any
        more), CorruptFileError if damaged."""
        files = map(identity_of, (self.run_dir.batch(step), self.run_dir.tokens(step)))
        return self._batch(step, (*files,))

    def tokens(
        self, step: int, group: int | None = None, rollout: int | None = None
    ) -> list[SampleTokens]:
        """The samples of a batch token by token; only those of a group or rollout, if given.
        Raises the errors of `batch`, and RunError if there are no such samples."""
        if samples := list(self.batch(step).of(group, rollout)):
            return samples
        raise RunError(
            f"batch {step} has no sample of group {group}, rollout {rollout} (None means any)"
        )

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer. Imports transformers. Raises the errors of `tokenizer_folder`."""
        from transformers import AutoTokenizer

        folder, template = self.tokenizer_folder, self.config.model.chat_template
        if template and not folder.is_relative_to(self.run_dir.weights_dir):  # else it has it
            folder = with_template(folder, template_text(folder, template))
        # The checker takes a mapping of transformers for its lazy values.
        return AutoTokenizer.from_pretrained(str(folder))  # ty: ignore[invalid-explicit-return]

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer: the newest kept version, else the model if it is on this
        machine. Downloads nothing. Raises RunError with the way to get it."""
        for folder in reversed(numbered(self.run_dir.weights_dir).values()):
            if has_tokenizer(folder):
                return folder
        folder, name = folder_here(self.config.model), self.config.model.name
        if folder and has_tokenizer(folder):
            return folder
        is_on_hub = name.count("/") == 1
        hint = f"`hf download {name} tokenizer.json` gets it" if is_on_hub else "copy it there"
        raise RunError(
            f"the tokenizer of {name} is neither on this machine nor in "
            f"{self.run_dir.weights_dir}: {hint}"
        )

    # Versions -------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[Version]:
        """Policy versions with remaining weights, a checkpoint or an evaluation, ascending from
        0, the base model."""
        weights = numbered(self.run_dir.weights_dir)
        checkpoints = numbered(self.run_dir.checkpoints)
        evals, best = self.eval_values(), self._best_versions()
        return [
            Version(
                number,
                weights.get(number),
                checkpoints.get(number),
                {name: means[number] for name, means in evals.items() if number in means},
                tuple(name for name in best if best[name] == number),
            )
            for number in sorted({0, *weights, *checkpoints}.union(*evals.values()))
        ]

    def eval_values(self, metric: str = "reward_mean") -> dict[str, dict[int, float]]:
        """A metric of each evaluation by policy version, ascending."""
        values = {}
        for name in self.numbers.names:
            if match := re.fullmatch(rf"eval/(.+)/{metric}", name):
                steps, means = self.numbers.curve(name, "eval")
                values[match[1]] = dict(zip(steps.tolist(), means.tolist(), strict=True))
        return values

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
        """A policy version as a model of transformers, adapters on their base. Raises RunError
        if the version does not exist.

        version: a number (0 is the base model), `best` if there is only one evaluation,
        `best:NAME`, or None for the newest.
        options: keyword arguments of `from_pretrained`, such as `dtype`.
        """
        from transformers import AutoModelForCausalLM

        number = self._number(version)
        folder, is_adapter = self.run_dir.weights(number), False
        if number:
            self._check_weights(folder)
            is_adapter = (folder / "adapter_config.json").is_file()
            if not is_adapter:
                with readable(folder) as weights:
                    return AutoModelForCausalLM.from_pretrained(weights, **options)
        base = resolve_model(self.config.model, needs_template=False)
        model = AutoModelForCausalLM.from_pretrained(base, **options)
        if not is_adapter:
            return model
        from peft import PeftModel

        # Else peft would take some layers for experts of transformers 4.
        with patch.dict(vars(model.config), model_type=""):
            return PeftModel.from_pretrained(model, folder)

    def _check_weights(self, folder: Path) -> None:
        if not folder.is_dir():
            known = ", ".join(map(str, numbers(folder.parent))) or "none"
            raise RunError(
                f"version {int(folder.name)} is not in {folder.parent}; there are: {known} (and 0, "
                "the base model)"
            )
        if not any(folder.glob("*.safetensors")) and not is_delta(folder):
            service = f" (the service that trains the run has them, see {folder}/{REMOTE})"
            raise RunError(
                f"{folder} has no weights, *.safetensors{service if is_remote(folder) else ''}: "
                "copy them there, or give another version"
            )

    def _number(self, version: int | str | None) -> int:
        if version is None:
            return max(numbers(self.run_dir.weights_dir), default=0)
        if isinstance(version, int):
            return version
        best = self._best_versions()
        name = version.removeprefix("best").removeprefix(":")
        chosen = {best[label] for label in best if name in ("", label)}
        if not version.startswith("best") or len(chosen) != 1:
            raise RunError(
                f"version {version!r}: give a number, or best:NAME; evaluations and their best "
                f"versions: {best or 'none'}"
            )
        return chosen.pop()

    # What happened --------------------------------------------------------------------------------

    @property
    def events(self) -> list[Event]:
        """Starts, deaths, restarts and repairs, oldest first."""
        return read_events(self.run_dir.events)

    @cached_property
    def _recording(self) -> SpanRecording:
        return SpanRecording(self.run_dir.spans)

    @property
    def recording(self) -> SpanRecording:
        """The up-to-date spans and gauges of all processes."""
        with self.reading:
            self._recording.refresh()
            return self._recording

    def timeline(self, begin: float | None = None, end: float | None = None) -> Timeline:
        """What each process did between two times in seconds since the epoch; None: unbounded.
        Raises RunError if they are invalid."""
        first, last = -math.inf if begin is None else begin, math.inf if end is None else end
        if not first <= last:
            raise RunError(f"begin = {begin}, end = {end}: give them in this order")
        # Before the spans: what ends in between is then in both, not in neither.
        statuses = self.status
        with self.reading:
            return read_timeline(self.recording, self.numbers, self.events, statuses, first, last)

    @property
    def status(self) -> dict[str, RoleStatus]:
        """The last status of each process: its phase and heartbeat."""
        return read_statuses(self.run_dir.status_dir)

    @property
    def end(self) -> RunEnd | None:
        """Why the run ended; None if it is running, or was stopped or killed."""
        return read_struct(self.run_dir.run_end, RunEnd)

    @property
    def origin(self) -> BranchOrigin | None:
        """The run and step that a branch began from; None if it is not a branch. Raises RunError
        for a damaged file."""
        return read_origin(self.run_dir)

    @property
    def logs(self) -> dict[str, dict[int, Path]]:
        """The log files of each process by attempt."""
        matches = (LOG_NAME.fullmatch(path.name) for path in self.run_dir.logs.glob("*.log"))
        names = sorted({match[1] for match in matches if match})
        return {name: dict(sorted(attempts(self.run_dir.logs, name).items())) for name in names}

    def log(self, process: str, attempt: int | None = None, lines: int = 100) -> list[str]:
        """The last non-empty lines of a process's log, by default of its newest attempt. Raises
        RunError if it has no log."""
        logs = self.logs
        paths = logs.get(process, {})
        if path := paths.get(max(paths, default=0) if attempt is None else attempt):
            return last_lines(path, lines) if lines else []
        known = f"attempt {attempt}; there are {', '.join(map(str, paths))}" if paths else "log"
        raise RunError(
            f"the {process} has no {known} in {self.run_dir.logs}, which has those of: "
            f"{', '.join(logs) or 'nobody'}"
        )

    def quick_diagnosis(self, reads_tokens: bool = False) -> Diagnosis:
        """The diagnosis without damaged rollout files (finding them reads all files at first), and
        by default without token logs. Raises RunError without a configuration."""
        with self.reading:
            return diagnose(self.run_dir, self.config, self.heartbeats, self.numbers, reads_tokens)

    def diagnosis(self) -> Diagnosis:
        """What the run waits for and what is wrong with it, as reported by `rl doctor RUN`,
        including damaged rollout files.

        Raises RunError without a configuration.
        """
        diagnosis = self.quick_diagnosis(reads_tokens=True)
        damaged = [Problem(text, files=(path,)) for path, text in self.damaged.items()]
        return replace(diagnosis, problems=diagnosis.problems + damaged)

    @property
    def problems(self) -> list[Problem]:
        """Problems, then hints on what may hold the reward down, each with evidence; empty if
        there are none."""
        diagnosis = self.diagnosis()
        return diagnosis.problems + diagnosis.hints
