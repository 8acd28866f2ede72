"""Where a server keeps what its clients have made, and how clients name it.

`models/<session>-<n>/` is a run directory: config.toml, metrics, `weights/` with the versions that
were sampled from. Beside them are `calls.log`, `state/` with the newest copies of the trainer's
state, and `saved/` with what clients have named. `sampling/<session>-<n>.log` has the requests of a
sampling session.

A log has the calls of a client in the order of their numbers, and what they answered: one file of
records, appended to by one process. A call is on disk before it is acknowledged. Calls that come
together share an fsync. An answer is only handed to the kernel: it survives the death of the
process, and after a power cut it is computed again from the calls, from which a trainer makes the
same bits. A number that is there is not executed again, so a client may repeat any request.
"""

import asyncio
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rl.run_dir.files import (
    HEADER,
    CorruptFileError,
    blake2b,
    encode_record,
    fsync_path,
    head_of_record,
    make_directory,
    restore,
    with_path,
    write_all,
    write_file,
)
from rl.run_dir.paths import RunDir
from rl.wire.training_calls import CallError

TRAINING, SAMPLER, EXTERNAL = KINDS = ("weights", "sampler_weights", "external_weights")
MODEL_ID = re.compile(r"([\w-]{1,80}):train:(\d{1,9})")
SAMPLING_ID = re.compile(r"([\w-]{1,80}):sample:(\d{1,9})")
PATH = re.compile(rf"tinker://([^/]+)/({'|'.join(KINDS)})/([\w.-]+)")
Name = tuple[str, str, str]
"""Of what a client has named: model id, kind, name."""
NOT_FOUND = "does not exist on this server; it may have expired or been deleted"
OF_KIND = {
    TRAINING: "has no optimizer state: save_state makes one",
    SAMPLER: "cannot be sampled: save_weights_for_sampler can",
}


class Saved(Struct):
    """What a client has named: the trainer's state (`weights`), a policy version
    (`sampler_weights`), or a copy of one to be downloaded (`external_weights`)."""

    time: float
    policy_version: int
    expires: float | None = None
    user_metadata: dict[str, str] | None = None


class Storage:
    """The files of a server."""

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir
        self.models, self.sampling = run_dir.root / "models", run_dir.root / "sampling"
        self.sessions, self.base = run_dir.root / "sessions", run_dir.root / "base_adapter"

    def model(self, model_id: str) -> RunDir:
        """Returns the run directory of a model. Raises CallError for what is not the id of one."""
        if not (match := MODEL_ID.fullmatch(model_id)):
            raise CallError(f"{model_id!r} is not the id of a model: give SESSION:train:NUMBER")
        root = self.models / f"{match[1]}-{match[2]}"
        return RunDir(root, root / "weights")

    def model_ids(self) -> list[str]:
        """Returns the models that were made, the oldest first."""
        logs = sorted(self.models.glob("*/calls.log"), key=lambda path: path.stat().st_ctime)
        return [":train:".join(path.parent.name.rsplit("-", 1)) for path in logs]

    def sampling_log(self, sampling_id: str) -> Path:
        if not (match := SAMPLING_ID.fullmatch(sampling_id)):
            raise CallError(f"{sampling_id!r} is not the id of a sampling session")
        return self.sampling / f"{match[1]}-{match[2]}.log"

    def sampling_logs(self, session: str = "*") -> dict[str, Path]:
        """Returns the logs of the sampling sessions of a session, or of all, by their ids."""
        logs = self.sampling.glob(f"{session}-*.log")
        return {":sample:".join(path.stem.rsplit("-", 1)): path for path in logs}

    def session(self, session_id: str) -> Path:
        return self.sessions / f"{re.sub(r'[^0-9A-Za-z_-]', '', session_id)}.json"

    # What clients have named ----------------------------------------------------------------------

    def restore_replaced(self) -> None:
        """Restores the named states that a death was about to replace. Call it before any is
        saved."""
        for old in self.models.glob("*/saved/*/.*.replaced"):
            restore(old)

    def saved(self, name: Name) -> Path:
        """Returns the folder of the state that has this name; its record is beside it."""
        return self.model(name[0]).root / "saved" / name[1] / name[2]

    def record(self, name: Name) -> Path:
        """Returns the file that says of which version and until when something named is. No name
        begins with a dot."""
        folder = self.saved(name)
        return folder.with_name(f".{folder.name}.json")

    def write_saved(self, name: Name, saved: Saved) -> None:
        write_file(self.record(name), msgspec.json.encode(saved))

    def read_saved(self, name: Name) -> Saved | None:
        """Returns the record of something named; None if there is none, or if it has expired,
        and then deletes it."""
        record = self.record(name)
        if not record.is_file():
            return None
        saved = msgspec.json.decode(record.read_bytes(), type=Saved)
        if saved.expires is None or saved.expires > time.time():
            return saved
        self.delete_saved(name)
        return None

    def delete_saved(self, name: Name) -> None:
        self.record(name).unlink(missing_ok=True)
        shutil.rmtree(self.saved(name), ignore_errors=True)

    def all_saved(self, model_id: str) -> list[tuple[Name, Saved]]:
        """Returns all that a model's client has named, the newest first."""
        records = (self.model(model_id).root / "saved").glob("*/.*.json")
        names = [(model_id, path.parent.name, path.name[1 : -len(".json")]) for path in records]
        pairs = [(name, saved) for name in names if (saved := self.read_saved(name))]
        return sorted(pairs, key=lambda pair: pair[1].time, reverse=True)

    def find(self, path: str, kind: str = "") -> tuple[Name, Saved]:
        """Returns what a client's path names. Raises CallError if there is nothing, or another
        kind."""
        if not (match := PATH.fullmatch(path)):
            raise CallError(
                f"{path!r} is not a path of this server: tinker://MODEL/{TRAINING}/NAME or "
                f"tinker://MODEL/{SAMPLER}/NAME"
            )
        name = (match[1], match[2], match[3])
        if (saved := self.read_saved(name)) is None:
            raise CallError(f"{path} {NOT_FOUND}")
        if kind and name[1] != kind:
            raise CallError(f"{path} {OF_KIND[kind]}")
        return name, saved


def tinker_path(name: Name) -> str:
    return f"tinker://{'/'.join(name)}"


def new_saved(version: int, ttl_s: int | None, metadata: dict[str, str] | None = None) -> Saved:
    now = time.time()
    return Saved(now, version, now + ttl_s if ttl_s else None, metadata)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content).encode())


class ClientCall(msgspec.Struct, tag="call"):
    """A request."""

    number: int
    kind: str
    body: bytes


class CallAnswer(msgspec.Struct, tag="answer"):
    """What a call has led to."""

    number: int
    body: bytes
    is_json: bool = True


class CallLog:
    """The file, and the (offset, length) of each call and each answer in it. Opening it cuts off
    what a killed process has left of a last record. The file is open only while it is used: a
    server may have made thousands of models."""

    def __init__(self, path: Path):
        self.path, self.size = path, 0
        self.calls: dict[int, tuple[int, int]] = {}
        self.answers: dict[int, tuple[int, int]] = {}
        self.durable = 0
        """Bytes of the file that are known to survive a power cut."""
        self.syncing: asyncio.Task[None] | None = None
        self.writing = threading.Lock()
        is_new = not path.exists()
        make_directory(path.parent)
        with path.open("ab+", buffering=0) as file:
            whole = os.fstat(file.fileno()).st_size
            while payload := self._next(file.fileno(), whole):
                record = msgspec.msgpack.decode(payload, type=ClientCall | CallAnswer)
                self._note(record, len(payload))
            file.truncate(self.size)
        if is_new:
            fsync_path(path.parent)

    def _next(self, file: int, whole: int) -> bytes:
        """Returns the record at the end of what was read of `whole` bytes; nothing if a killed
        process has left a part of it. Raises CorruptFileError."""
        head = os.pread(file, HEADER.size, self.size)
        if len(head) < HEADER.size:
            return b""
        length, checksum = head_of_record(head, str(self.path))
        begin = self.size + HEADER.size
        if begin + length > whole:
            return b""
        payload = os.pread(file, length, begin)
        if blake2b(payload) == checksum:
            return payload
        # an answer need not survive a power cut: it is computed again
        if begin + length == whole:
            return b""
        raise CorruptFileError(
            f"{self.path}: damaged at byte {self.size}; move the folder of this model away"
        )

    def _note(self, record: ClientCall | CallAnswer, length: int) -> None:
        """Notes where the record that now ends the file is."""
        records = self.calls if isinstance(record, ClientCall) else self.answers
        records[record.number] = (self.size + HEADER.size, length)
        self.size += HEADER.size + length

    def _write(self, record: ClientCall | CallAnswer) -> None:
        """Appends a record. Calls come from the event loop, answers from the trainer's thread."""
        payload = msgspec.msgpack.encode(record)
        with self.writing, self.path.open("ab", buffering=0) as file:
            try:
                write_all(file.fileno(), encode_record(payload), self.path)
            except OSError as error:
                file.truncate(self.size)
                raise with_path(error, self.path) from None
            self._note(record, len(payload))

    async def add(self, call: ClientCall) -> None:
        """Writes a call, unless its number is there, and returns when it is durable. Raises
        OSError."""
        if call.number not in self.calls:
            self._write(call)
        while self.durable < sum(self.calls[call.number]):
            self.syncing = self.syncing or asyncio.create_task(self._sync())
            await asyncio.shield(self.syncing)

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self.sync)
        finally:
            self.syncing = None

    def answer(self, answer: CallAnswer) -> None:
        """Writes an answer, unless there is one. Raises OSError."""
        if answer.number not in self.answers:
            self._write(answer)

    def sync(self) -> None:
        """Makes all answers durable."""
        size = self.size
        fsync_path(self.path)
        self.durable = max(self.durable, size)

    def call_of(self, number: int) -> ClientCall:
        return msgspec.msgpack.decode(self._read(*self.calls[number]), type=ClientCall)

    def answer_of(self, number: int) -> CallAnswer:
        return msgspec.msgpack.decode(self._read(*self.answers[number]), type=CallAnswer)

    def _read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)
