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
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl.run_dir.digests import blake2b
from rl.run_dir.files import (
    HEADER,
    CorruptFileError,
    encode_record,
    fsync_path,
    head_of_record,
    make_directory,
    with_path,
    write_all,
)

MOST_OPEN = 64
"""Logs of models whose files are open, and as many of sampling sessions."""


class Call(msgspec.Struct, tag="call"):
    """A request."""

    number: int
    kind: str
    body: bytes


class Answer(msgspec.Struct, tag="answer"):
    """What a call has led to."""

    number: int
    body: bytes
    is_json: bool = True


@dataclass
class Place:
    """Where a record is in its file."""

    offset: int
    length: int


@dataclass
class Log:
    """The file, and where in it each call and each answer is. Opening it cuts off what a killed
    process has left of a last record."""

    path: Path
    calls: dict[int, Place] = field(default_factory=dict)
    answers: dict[int, Place] = field(default_factory=dict)
    durable: int = 0
    """Bytes of the file that are known to survive a power cut."""
    syncing: "asyncio.Task[None] | None" = None
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        new = not self.path.exists()
        make_directory(self.path.parent)
        self.file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        if new:
            fsync_path(self.path.parent)
        self.size = 0
        whole = os.fstat(self.file).st_size
        try:
            while self.size < whole and (place := self._next(whole)):
                self._note(self._decode(place), place)
                self.size = place.offset + place.length
        except CorruptFileError:
            self.close()
            raise
        os.ftruncate(self.file, self.size)

    def _next(self, whole: int) -> Place | None:
        """Returns the record at the end of what was read; None if a killed process has left a
        part of it. Raises CorruptFileError."""
        head = os.pread(self.file, HEADER.size, self.size)
        if len(head) < HEADER.size:
            return None
        length, checksum = head_of_record(head, str(self.path))
        place = Place(self.size + HEADER.size, length)
        if place.offset + length > whole:
            return None
        if blake2b(os.pread(self.file, length, place.offset)) != checksum:
            # an answer need not survive a power cut: it is computed again
            if place.offset + length == whole:
                return None
            raise CorruptFileError(
                f"{self.path}: damaged at byte {self.size}; move the folder of this model away"
            )
        return place

    def _decode(self, place: Place) -> Call | Answer:
        return msgspec.msgpack.decode(
            os.pread(self.file, place.length, place.offset), type=Call | Answer
        )

    def _note(self, record: Call | Answer, place: Place) -> None:
        (self.calls if isinstance(record, Call) else self.answers)[record.number] = place

    def _write(self, record: Call | Answer) -> None:
        """Appends a record. Calls come from the event loop, answers from the trainer's thread."""
        payload = msgspec.msgpack.encode(record)
        with self._writing:
            try:
                write_all(self.file, encode_record(payload), "calls")
            except OSError as error:
                os.ftruncate(self.file, self.size)
                raise with_path(error, self.path) from None
            self._note(record, Place(self.size + HEADER.size, len(payload)))
            self.size += HEADER.size + len(payload)

    async def add(self, call: Call) -> None:
        """Writes a call, unless its number is there, and returns when it is durable. Raises
        OSError."""
        if call.number not in self.calls:
            self._write(call)
        place = self.calls[call.number]
        while self.durable < place.offset + place.length:
            self.syncing = self.syncing or asyncio.create_task(self._sync())
            await asyncio.shield(self.syncing)

    async def _sync(self) -> None:
        size = self.size
        try:
            await asyncio.to_thread(os.fsync, self.file)
        finally:
            self.syncing = None
        self.durable = max(self.durable, size)

    def answer(self, answer: Answer) -> None:
        """Writes an answer, unless there is one. Raises OSError."""
        if answer.number not in self.answers:
            self._write(answer)

    def sync(self) -> None:
        """Makes all answers durable."""
        size = self.size
        os.fsync(self.file)
        self.durable = max(self.durable, size)

    def call_of(self, number: int) -> Call:
        found = self._decode(self.calls[number])
        assert isinstance(found, Call)
        return found

    def answer_of(self, number: int) -> Answer:
        found = self._decode(self.answers[number])
        assert isinstance(found, Answer)
        return found

    def close(self) -> None:
        os.close(self.file)
