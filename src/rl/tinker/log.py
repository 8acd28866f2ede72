"""The calls of a client in the order of their numbers, and what they answered: one file of records,
appended to by one process.

A call is on disk before it is acknowledged. Calls that come together share an fsync. An answer is
only handed to the kernel: it survives the death of the process, and after a power cut it is
computed again from the calls, from which a trainer makes the same bits. A number that is there is
not executed again, so a client may repeat any request.
"""

import asyncio
import os
import threading
from pathlib import Path

import msgspec

from rl.run_dir.files import (
    HEADER,
    CorruptFileError,
    blake2b,
    encode_record,
    fsync_path,
    head_of_record,
    make_directory,
    with_path,
    write_all,
)


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
