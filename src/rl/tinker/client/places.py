"""Where a run's versions and states are at the service: `tinker.json` in the folders of `weights/`
and `checkpoints/`, with checksums as every version and checkpoint has them. Old ones are deleted
here and there.

The versions after a state are of the same model of the service until the trainer starts again,
which makes a new model from that state.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tinker

from rl.run_dir.checksums import DIGESTS, MANIFEST, REMOTE, checksum, verify_version
from rl.run_dir.digests import HASH, digest
from rl.run_dir.files import CorruptFileError, write_directory, write_file
from rl.run_dir.paths import RunDir
from rl.run_dir.retention import Retention
from rl.tinker.client.service import ERRORS


class Place(msgspec.Struct, frozen=True):
    """Weights or a state at the service."""

    path: str
    """`tinker://...`"""
    step: int
    """Number of batches that it was trained on."""
    model_id: str = ""
    calls: tuple[int, int] = (0, 0)
    """The first and the last number (`seq_id`) of the model's calls that trained this step; 0:
    none."""


def read_place(folder: Path) -> Place:
    """Raises CorruptFileError."""
    try:
        return msgspec.json.decode((folder / REMOTE).read_bytes(), type=Place)
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptFileError(f"{folder / REMOTE}: missing or damaged ({error})") from None


def sound_version(folder: Path) -> Place:
    """Returns the place of a version whose files are intact. Raises CorruptFileError."""
    verify_version(folder)
    return read_place(folder)


def write_version(run_dir: RunDir, place: Place, fence: Callable[[], None]) -> None:
    """Writes the folder of a version, in place of an older one, and the record by which versions
    with the same number differ."""
    text, step = msgspec.json.encode(place), place.step
    content = {"hash": HASH, "tensors": {"path": digest(place.path.encode())}}

    def fill(folder: Path) -> None:
        (folder / REMOTE).write_bytes(text)
        (folder / DIGESTS).write_text(json.dumps(content | {"files": {REMOTE: digest(text)}}))

    write_file(run_dir.digests(step), json.dumps(content).encode(), fence=fence)
    write_directory(run_dir.weights(step), fill, fence=fence)


def write_checkpoint(run_dir: RunDir, place: Place, model: str, fence: Callable[[], None]) -> None:
    """Writes the folder of a checkpoint."""

    def fill(folder: Path) -> None:
        (folder / REMOTE).write_bytes(msgspec.json.encode(place))
        manifest = {
            "step": place.step,
            "world_size": 1,
            "model": model,
            "files": {REMOTE: checksum(folder / REMOTE)},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest))

    write_directory(run_dir.checkpoint(place.step), fill, fence=fence)


class RemoteRetention(Retention):
    """Deletes old entries at the service, too, which need not succeed: what is left over there
    costs only its room."""

    rest: "tinker.RestClient"

    def _delete(self, number: int) -> None:
        folder = self.directory / f"{number:06d}"
        try:
            request: Any = self.rest.delete_checkpoint_from_tinker_path(read_place(folder).path)
            # an older SDK returns the future itself
            getattr(request, "future", lambda: request)().add_done_callback(tell_failure)
        except (CorruptFileError, *ERRORS) as error:
            print(f"not deleted at the service: {error}", file=sys.stderr, flush=True)
        super()._delete(number)


def tell_failure(future) -> None:
    """Logs why the service has not deleted something."""
    if not future.cancelled() and (error := future.exception()):
        print(f"not deleted at the service: {error}", file=sys.stderr, flush=True)
