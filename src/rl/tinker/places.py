"""Where a server keeps what its clients have made, and how clients name it.

`models/<session>-<n>/` is a run directory: config.toml, metrics, `weights/` with the versions that
were sampled from. Beside them are `calls.log`, `state/` with the newest copies of the trainer's
state, and `saved/` with what clients have named. `sampling/<session>-<n>.log` has the requests of a
sampling session.
"""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rl.run_dir.files import write_file
from rl.run_dir.paths import RunDir
from rl.wire.training_calls import CallError

TRAINING, SAMPLER, EXTERNAL = KINDS = ("weights", "sampler_weights", "external_weights")
MODEL_ID, SAMPLING_ID = (
    re.compile(r"([\w-]{1,80}):train:(\d{1,9})"),
    re.compile(r"([\w-]{1,80}):sample:(\d{1,9})"),
)
PATH = re.compile(rf"tinker://([^/]+)/({'|'.join(KINDS)})/([\w.-]+)")


class Saved(Struct):
    """What a client has named: the trainer's state (`weights`), a policy version
    (`sampler_weights`), or a copy of one to be downloaded (`external_weights`)."""

    time: float
    policy_version: int
    expires: float | None = None
    user_metadata: dict[str, str] | None = None


class Places:
    """The files of a server."""

    def __init__(self, run_dir: RunDir):
        self.run_dir, root = run_dir, run_dir.root
        self.models, self.sampling, self.sessions, self.base = (
            root / "models",
            root / "sampling",
            root / "sessions",
            root / "base_adapter",
        )

    def model(self, model_id: str) -> RunDir:
        """Returns the run directory of a model. Raises CallError for what is not the id of one."""
        if not (found := MODEL_ID.fullmatch(model_id)):
            raise CallError(f"{model_id!r} is not the id of a model: give SESSION:train:NUMBER")
        root = self.models / f"{found[1]}-{found[2]}"
        return RunDir(root, root / "weights")

    def model_ids(self) -> list[str]:
        """Returns the models that were made, the oldest first."""
        folders = sorted(self.models.glob("*/calls.log"), key=lambda path: path.stat().st_ctime)
        return [":train:".join(path.parent.name.rsplit("-", 1)) for path in folders]

    def sampling_log(self, sampling_id: str) -> Path:
        if not (found := SAMPLING_ID.fullmatch(sampling_id)):
            raise CallError(f"{sampling_id!r} is not the id of a sampling session")
        return self.sampling / f"{found[1]}-{found[2]}.log"

    def session(self, session_id: str) -> Path:
        return self.sessions / f"{re.sub(r'[^0-9A-Za-z_-]', '', session_id)}.json"

    # What clients have named ----------------------------------------------------------------------

    def saved(self, model_id: str, kind: str, name: str) -> Path:
        """Returns the folder of the state that has this name; its record is beside it."""
        return self.model(model_id).root / "saved" / kind / name

    def record(self, model_id: str, kind: str, name: str) -> Path:
        """Returns the file that says of which version and until when something named is. No name
        begins with a dot."""
        folder = self.saved(model_id, kind, name)
        return folder.with_name(f".{folder.name}.json")

    def write_saved(self, model_id: str, kind: str, name: str, saved: Saved) -> str:
        """Writes the record of something named, and returns its path for clients."""
        write_file(self.record(model_id, kind, name), msgspec.json.encode(saved))
        return tinker_path(model_id, kind, name)

    def read_saved(self, model_id: str, kind: str, name: str) -> Saved | None:
        """Returns the record of something named; None if there is none, or if it has expired,
        and then deletes it."""
        record = self.record(model_id, kind, name)
        if not record.is_file():
            return None
        saved = msgspec.json.decode(record.read_bytes(), type=Saved)
        if saved.expires is None or saved.expires > time.time():
            return saved
        self.delete_saved(model_id, kind, name)
        return None

    def delete_saved(self, model_id: str, kind: str, name: str) -> None:
        folder = self.saved(model_id, kind, name)
        self.record(model_id, kind, name).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def all_saved(self, model_id: str) -> list[tuple[str, str, Saved]]:
        """Returns (kind, name, record) of all that a model's client has named, the newest first."""
        found = []
        for kind in KINDS:
            for record in (self.model(model_id).root / "saved" / kind).glob(".*.json"):
                name = record.name[1 : -len(".json")]
                if saved := self.read_saved(model_id, kind, name):
                    found.append((kind, name, saved))
        return sorted(found, key=lambda one: one[2].time, reverse=True)

    def find(self, path: str, kind: str | None = None) -> tuple[str, str, str, Saved]:
        """Returns (model id, kind, name, record) of a client's path. Raises CallError if there
        is nothing, or another kind."""
        parts = PATH.fullmatch(path)
        if not parts:
            raise CallError(
                f"{path!r} is not a path of this server: tinker://MODEL/{TRAINING}/NAME or "
                f"tinker://MODEL/{SAMPLER}/NAME"
            )
        saved = self.read_saved(parts[1], parts[2], parts[3])
        if saved is None:
            raise CallError(
                f"{path} does not exist on this server; it may have expired or been deleted"
            )
        if kind and parts[2] != kind:
            does = (
                "has no optimizer state: save_state makes one"
                if kind == TRAINING
                else "cannot be sampled: save_weights_for_sampler can"
            )
            raise CallError(f"{path} {does}")
        return parts[1], parts[2], parts[3], saved


def tinker_path(model_id: str, kind: str, name: str) -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def new_saved(version: int, ttl_s: int | None, metadata: dict[str, str] | None) -> Saved:
    now = time.time()
    return Saved(now, version, now + ttl_s if ttl_s else None, metadata)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content).encode())
