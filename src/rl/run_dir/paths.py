"""Names of all files and directories of a run, where the run began, and which of its numbered
entries stay on disk. Anything under its final name is complete, because it was renamed to it."""

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from rl.run_dir.files import UNREADABLE, LineReader, move, remove_directory, write_file
from rl.run_dir.metrics import cut_metrics, sources_dir
from rl.system import faults
from rl.system.errors import RunError

PENDING_LOG = "pending.log"


def numbers(directory: Path, suffix: str = "") -> list[int]:
    """Returns the numbers of the complete entries `000012<suffix>` of a directory, ascending,
    without temporary names. From 1000000 on names have seven digits. Names without suffix are those
    of folders: a file with such a name, which an environment may have written there, does not
    count.

    Lists the whole directory, so it must not be called every step, group or heartbeat.
    """
    names = re.compile(rf"([0-9]{{6}}|[1-9][0-9]{{6,}}){re.escape(suffix)}")
    try:
        with os.scandir(directory) as entries:
            return sorted(
                int(match[1])
                for entry in entries
                if (match := names.fullmatch(entry.name)) and (suffix or entry.is_dir())
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def numbered(directory: Path, suffix: str = "", after: int = -1) -> dict[int, Path]:
    """Returns the entries that `numbers` finds, by number, ascending, from `after` + 1 on."""
    return {
        number: directory / f"{number:06d}{suffix}"
        for number in numbers(directory, suffix)
        if number > after
    }


def is_run(root: Path) -> bool:
    """Returns whether a directory is that of a run, and not just one of the user's with a
    config.toml, and perhaps checkpoints of another program."""
    files = (
        (root / "status").is_dir()
        or numbers(root / "batches", ".batch")
        or numbers(root / "checkpoints")
    )
    return bool(files) and (root / "config.toml").is_file()


def is_model(root: Path) -> bool:
    """Returns whether a directory is that of a model that a client of `rl serve` trains, inside
    the directory of its server."""
    return root.parent.name == "models" and (root / "calls.log").is_file()


class RunDir:
    """The directory of a run. `weights_dir` may lie elsewhere, for example in a memory file
    system."""

    def __init__(self, root: Path, weights_dir: Path):
        self.root, self.weights_dir = root, weights_dir
        self.config = root / "config.toml"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.changes = root / "changes.jsonl"
        """Settings that resumes changed, one JSON object per line: time, step, key, old, new."""
        self.origin = root / "origin.json"
        """Where a branch was made from: a BranchOrigin."""
        self.named_files = root / "named_files.json"
        """Digests of the files that settings name, by key."""
        self.wandb = root / "wandb.json"
        self.tensorboard = root / "tensorboard"
        """Event files, made from metrics.jsonl."""
        self.curves = root / "curves.png"
        self.batches = root / "batches"
        self.pending = self.batches / PENDING_LOG
        self.rollouts_dir = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.digests_dir = root / "digests"
        self.tokens_dir = root / "tokens"
        self.spans = root / "spans"
        """Timed spans of each process, see rl.run_dir.spans."""
        self.evals = root / "evals"
        self.environments = root / "environments"
        """The packages that each environment was played with: a text file each."""
        self.logs = root / "logs"
        self.data = root / "data"
        """The examples of supervised fine-tuning as token ids."""
        self.discarded = root / "discarded"
        self.cleaned = root / ".cleaned"
        """The previous run, moved here by --clean until this one has made something."""
        self.status_dir = root / "status"
        self.run_end = self.status_dir / "orchestrator.end"
        """Why the run ended: a status.RunEnd."""
        self.stop_request = self.status_dir / "stop"
        """Exists once `rl stop` has asked the run's `rl` to stop."""

    @property
    def folders(self) -> list[Path]:
        """All directories that the run writes to."""
        return [
            self.root,
            self.weights_dir,
            sources_dir(self.metrics),
            self.status_dir,
            *dict.fromkeys(directory for directory, _ in self._by_step(self.weights_dir)),
            *self.evals.glob("*/"),
            *self.discarded.glob("*/"),
        ]

    def batch(self, step: int) -> Path:
        return self.batches / f"{step:06d}.batch"

    def quarantined(self, step: int) -> Path:
        """Marker of a batch that killed its reader: its step is skipped, so that version `step`
        equals the one before."""
        return self.batches / f"{step:06d}.quarantined"

    def digests(self, policy_version: int) -> Path:
        """Hashes of the tensors of a version; kept when the version is deleted."""
        return self.digests_dir / f"{policy_version:06d}.json"

    def tokens(self, step: int) -> Path:
        """Values that the trainer computed at each token of a batch, see rl.run_dir.numbers."""
        return self.tokens_dir / f"{step:06d}.safetensors"

    def rollouts(self, step: int) -> Path:
        return self.rollouts_dir / f"{step:06d}.jsonl"

    def rollout_files(self, after: int = -1) -> dict[int, Path]:
        """Rollout files by step, ascending, from `after` + 1 on: `000012.jsonl`, or
        `000012.jsonl.gz` once it is old."""
        compressed, plain = (
            numbered(self.rollouts_dir, suffix, after) for suffix in (".jsonl.gz", ".jsonl")
        )
        return dict(sorted((compressed | plain).items()))

    def weights(self, policy_version: int) -> Path:
        return self.weights_dir / f"{policy_version:06d}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:06d}"

    def eval(self, policy_version: int, name: str) -> Path:
        return self.evals / f"{policy_version:06d}" / f"{name}.jsonl"

    def status(self, process: str) -> Path:
        return self.status_dir / f"{process}.json"

    def exit_code(self, process: str) -> Path:
        """File with the exit code of the rank that ended a trainer of several ranks: torchrun's
        own is always 1."""
        return self.status_dir / f"{process}.exit"

    def lock(self, process: str) -> Path:
        return self.status_dir / f"{process}.lock"

    def newest_batch(self) -> int:
        """Number of the newest batch, 0 if there is none. The listing of a network file system
        may be stale, so later names are tried."""
        newest = max(numbers(self.batches, ".batch"), default=0)
        while self.batch(newest + 1).exists():
            newest += 1
        return newest

    def newest_weights(self) -> tuple[int, Path] | None:
        """Number and folder of the newest complete policy version above 0; None while there is
        only the base model."""
        newest = max(numbers(self.weights_dir), default=0)
        return (newest, self.weights(newest)) if newest else None

    def anything_made(self, after: int = 0) -> bool:
        """Whether there is anything that other settings would invalidate: a batch, checkpoint or
        version later than `after`, or a finished group."""
        by_step = self._by_step(self.root / "weights")
        return (
            any(numbered(directory, suffix, after) for directory, suffix in by_step)
            or (self.pending.is_file() and self.pending.stat().st_size > 0)
            or self.discarded.exists()
        )

    def _by_step(self, weights: Path) -> list[tuple[Path, str]]:
        """Directories and suffixes of what belongs to a step or version. In this order a kill
        while they are moved leaves a resumable run: no checkpoint is ahead of the batches."""
        return [
            (self.evals, ""),
            (self.checkpoints, ""),
            (weights, ""),
            (self.digests_dir, ".json"),
            (self.tokens_dir, ".safetensors"),
            (self.batches, ".quarantined"),
            (self.batches, ".batch"),
            (self.rollouts_dir, ".jsonl"),
            (self.rollouts_dir, ".jsonl.gz"),
            (self.rollouts_dir, ".sha256"),
        ]

    def new_discarded(self) -> Path:
        """Returns a path below `discarded/` that does not exist yet."""
        now = time.strftime("%Y%m%d-%H%M%S")
        names = itertools.chain([now], (f"{now}-{count}" for count in itertools.count(2)))
        return next(path for path in map(self.discarded.joinpath, names) if not path.exists())

    def discard_after(
        self, step: int, away: Path | None = None, *, keep_pending: bool = False
    ) -> Path | None:
        """Moves batches, rollouts, checkpoints, weights, digests, evals and metric lines later than
        `step` to `away`, by default a new directory below `discarded/`. Also moves, or with
        `keep_pending` copies, the groups that wait for a batch.

        Returns that directory, or None if there was nothing to move.
        """
        away = away or self.new_discarded()
        later: list[tuple[Path, Path]] = []
        for directory, suffix in self._by_step(self.weights_dir):
            name = "weights" if directory == self.weights_dir else directory.name
            paths = reversed(numbered(directory, suffix, after=step).values())
            later += [(path, away / name / path.name) for path in paths]
        if self.pending.exists() and later:
            # first: no pending group is ahead of the batches
            waiting = away / "batches" / self.pending.name
            if keep_pending:
                waiting.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.pending, waiting)
            else:
                later.insert(0, (self.pending, waiting))
        for path, target in later:
            faults.point("discard.move")
            move(path, target)
        lines = cut_metrics(self.metrics, step)
        if lines:
            write_file(away / "metrics.jsonl", b"".join(lines))
        return away if later or lines else None


# Where a run began --------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """A setting that differs from the original run. Both values are written as Python shows
    them, because JSON has no infinity; None means not set."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class BranchOrigin(msgspec.Struct, frozen=True):
    """The content of origin.json: the run and step that a branch was made from. A branch begins
    after that step; an ordinary run has no such file."""

    run: str
    """Directory of the original run at that time. For people only: no file of it is needed."""
    step: int
    time: float
    changes: list[Change]

    def __str__(self) -> str:
        return f"branch of {self.run} at step {self.step}"


def read_origin(run_dir: RunDir) -> BranchOrigin | None:
    """Reads where a run was branched; None for a run that begins at the base model. Raises
    RunError if the file is damaged."""
    try:
        return msgspec.json.decode(run_dir.origin.read_bytes(), type=BranchOrigin)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise RunError(
            f"{run_dir.origin}: damaged ({error}); the run's first step is unknown: branch it again"
        ) from None


class Changed(msgspec.Struct, frozen=True):
    """A line of changes.jsonl: a setting that a resume changed, and the step after which it did."""

    step: int
    key: str
    old: Any
    new: Any


def changes_of(run_dir: RunDir) -> list[Changed]:
    """Returns the settings that resumes changed. Skips damaged lines, such as the one during
    which the writer was killed."""
    return list(LineReader(run_dir.changes).decoded(msgspec.json.Decoder(Changed)))


def first_step(run_dir: RunDir) -> int:
    """Returns the step after which a run begins: 0, or the step of its origin."""
    origin = read_origin(run_dir)
    return origin.step if origin else 0


# What stays ---------------------------------------------------------------------------------------


NEVER = 2**62


class Retention:
    """Deletes old batches, rollouts, checkpoints or policy versions. Lists their directory only
    once: the one process that adds entries reports each.

    Keeps the newest `keep_last` (None: all), multiples of `keep_every`, those that the caller
    needs, and what any of these continues.
    """

    def __init__(
        self,
        directory: Path,
        suffixes: Collection[str],
        keep_last: int | None,
        keep_every: int | None,
    ):
        """`suffixes`: suffixes of the files or directories that make up one entry."""
        self.directory, self.suffixes = directory, suffixes
        self.keep_last, self.keep_every = keep_last, keep_every
        self.known: set[int] | None = None
        """Numbers of the entries, but for older ones that stay for ever; None before the directory
        was listed."""
        self.continues: Callable[[int], bool] = lambda number: False
        """Whether there is an entry `number` that is of no use without the one before."""

    def delete_old(
        self, added: int, needed: Collection[int] = (), needed_from: int = NEVER
    ) -> None:
        """Deletes old entries, newest first, now that `added` exists; keeps those in `needed`
        and all from `needed_from` on."""
        if self.keep_last is None:
            return
        if self.known is None:
            listed = [numbers(self.directory, suffix) for suffix in self.suffixes]
            self.known = set().union(*listed)
        self.known.add(added)
        for number in sorted(self.known, reverse=True)[self.keep_last :]:
            if self.keep_every and number % self.keep_every == 0:
                self.known.remove(number)
            elif not (number in needed or number >= needed_from or self.continues(number + 1)):
                self.known.remove(number)
                self._delete(number)

    def _delete(self, number: int) -> None:
        for suffix in self.suffixes:
            path = self.directory / f"{number:06d}{suffix}"
            if path.is_dir():
                remove_directory(path)
            else:
                path.unlink(missing_ok=True)
