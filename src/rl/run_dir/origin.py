"""`origin.json`: where a branch comes from. Its log begins behind the step of another run's checkpoint; an ordinary run has none."""

import msgspec

from rl.run_dir.paths import RunDir
from rl.run_dir.status import UNREADABLE
from rl.system.errors import RunError


class Change(msgspec.Struct, frozen=True):
    """A setting that differs from the run that was branched, with both values as Python shows them: JSON has no infinity. None stands for
    one that is not set."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class Origin(msgspec.Struct, frozen=True):
    """The content of origin.json."""

    run: str
    """Directory of the other run, where it lay then. For people: nothing of it is needed."""
    step: int
    time: float
    changes: list[Change]

    def __str__(self) -> str:
        return f"branch of {self.run} at step {self.step}"


def read_origin(run_dir: RunDir) -> Origin | None:
    """Where a run was branched; None for one that begins at the base model. Raises RunError for a file that cannot be read."""
    try:
        return msgspec.json.decode(run_dir.origin.read_bytes(), type=Origin)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise RunError(f"{run_dir.origin}: damaged ({error}); the run cannot tell at which step it begins: branch it again") from None


def first_step(run_dir: RunDir) -> int:
    """The step that a run begins behind: 0, or that of its origin."""
    origin = read_origin(run_dir)
    return origin.step if origin else 0
