"""Every file and directory name of one run. A thing under its final name is complete: it got there by rename."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rl import faults
from rl.files import move, write_file
from rl.messages import WeightVersion
from rl.metrics import cut_metrics


def numbered(directory: Path, suffix: str = "") -> dict[int, Path]:
    """Complete entries `000012<suffix>` of a directory by number, ascending; temporary names are not among them."""
    if not directory.is_dir():
        return {}
    found = {}
    for path in directory.iterdir():
        stem = path.name.removesuffix(suffix) if suffix else path.name
        if len(stem) == 6 and stem.isascii() and stem.isdigit() and path.name == stem + suffix:
            found[int(stem)] = path
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class RunDir:
    """The directory of a run. `weights_dir` may lie elsewhere (a memory file system)."""

    root: Path
    weights_dir: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What befell the processes, one JSON object a line: see rl/supervisor.py."""
        return self.root / "events.jsonl"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    @property
    def pending(self) -> Path:
        return self.batches / "pending.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def discarded(self) -> Path:
        return self.root / "discarded"

    @property
    def folders(self) -> list[Path]:
        """Every directory in which things of the run are written."""
        names = ("batches", "rollouts", "checkpoints", "digests", "evals", "status")
        return [self.root, self.weights_dir, *(self.root / name for name in names), *self.evals.glob("*/"), *self.discarded.glob("*/")]

    def batch(self, step: int) -> Path:
        return self.batches / f"{step:06d}.batch"

    def quarantined(self, step: int) -> Path:
        """Marker of a batch that killed its reader: its step is skipped, so that version `step` equals the one before."""
        return self.batches / f"{step:06d}.quarantined"

    def digests(self, policy_version: int) -> Path:
        """SHA-256 of each tensor of a version; kept when the version itself is not."""
        return self.root / "digests" / f"{policy_version:06d}.json"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"{step:06d}.jsonl"

    def weights(self, policy_version: int) -> Path:
        return self.weights_dir / f"{policy_version:06d}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{step:06d}"

    @property
    def data(self) -> Path:
        """Of supervised fine-tuning: the examples as token ids."""
        return self.root / "data"

    @property
    def evals(self) -> Path:
        return self.root / "evals"

    def eval(self, policy_version: int, name: str) -> Path:
        return self.evals / f"{policy_version:06d}" / f"{name}.jsonl"

    def status(self, process: str) -> Path:
        return self.root / "status" / f"{process}.json"

    def exit_code(self, process: str) -> Path:
        """Exit code of the rank that ended a process of several: torchrun's own is 1 whatever theirs is."""
        return self.root / "status" / f"{process}.exit"

    def lock(self, process: str) -> Path:
        return self.root / "status" / f"{process}.lock"

    def newest_batch(self) -> int:
        """Number of the newest batch, 0 when there is none."""
        return max(numbered(self.batches, ".batch"), default=0)

    def newest_weights(self) -> WeightVersion | None:
        """The newest complete policy version above 0, or None while there is only the base model."""
        versions = numbered(self.weights_dir)
        return WeightVersion(max(versions), str(versions[max(versions)])) if versions else None

    def new_discarded(self) -> Path:
        """A directory below `discarded/` that is not there yet."""
        name, count = time.strftime("%Y%m%d-%H%M%S"), 1
        while (self.discarded / (name if count == 1 else f"{name}-{count}")).exists():
            count += 1
        return self.discarded / (name if count == 1 else f"{name}-{count}")

    def discard_after(self, step: int, away: Path | None = None, *, keep_pending: bool = False) -> Path | None:
        """Moves batches, rollouts, checkpoints, weights, digests, evals and metric lines later than `step` to `discarded/<time>/`, or to
        `away`; and the groups that wait for a batch, unless they are to stay.

        Returns that directory, or None if there was nothing to move.
        """
        away = away or self.new_discarded()
        # In this order a kill in between leaves a run that can be resumed: no checkpoint or pending group is ahead of the batches.
        later: list[tuple[Path, Path]] = []
        for directory, kind, suffix in [
            (self.evals, "evals", ""),
            (self.checkpoints, "checkpoints", ""),
            (self.weights_dir, "weights", ""),
            (self.digests(0).parent, "digests", ".json"),
            (self.batches, "batches", ".quarantined"),
            (self.batches, "batches", ".batch"),
            (self.rollouts(0).parent, "rollouts", ".jsonl"),
            (self.rollouts(0).parent, "rollouts", ".sha256"),
        ]:
            newest_first = reversed(numbered(directory, suffix).items())
            later += [(path, away / kind / path.name) for number, path in newest_first if number > step]
        if self.pending.exists() and later:
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
