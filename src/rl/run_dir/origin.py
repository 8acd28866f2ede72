"""`origin.json`: the run and step that a branch was made from. A branch begins after that step;
an ordinary run has no such file."""

from typing import Any

import msgspec

from rl.run_dir.files import UNREADABLE, LineReader
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError


class Change(msgspec.Struct, frozen=True):
    """A setting that differs from the original run. Both values are written as Python shows
    them, because JSON has no infinity; None means not set."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class BranchOrigin(msgspec.Struct, frozen=True):
    """The content of origin.json."""

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
