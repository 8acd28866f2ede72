"""A policy version in the memory of its trainer's ranks, read over the network (see
`rl.trainer.store.registered`).

Nothing keeps the trainer from making its next version meanwhile. A reader therefore looks at the
version's mark after it has read (`confirm`), and what it has read counts only then.
"""

import base64
import itertools
import json
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl.inference.file_tensor import Weights, memory
from rl.inference.weight_files import Tensors, WeightsGoneError, check_weights
from rl.run_dir.checksums import content_of
from rl.run_dir.digests import Digest, covers, digest
from rl.run_dir.in_memory import OverNetwork
from rl.run_dir.safetensors import entry_of
from rl.system import nixl
from rl.system.errors import RunError
from rl.system.linux import pid_scope

BUFFER, MOST = 8 << 20, 1024
"""Bytes that are read at once, and in how many pieces at most: NIXL looks at all of them each
time that it is asked for news."""
READ_S, POLL_S = 4.0, 0.0002
"""How long reading that much may take, and the interval at which NIXL is asked."""


class Piece(NamedTuple):
    """Bytes of a rank's memory."""

    agent: str
    address: int
    size: int


class Owned(NamedTuple):
    """The bytes first..end of a version, which a rank's memory has from address `start + first`
    on."""

    first: int
    end: int
    agent: str
    start: int


class NixlReader:
    """Reads the memory of other processes, in order, into that of this one. `bytes_read` counts."""

    def __init__(self) -> None:
        """Raises RunError without NIXL."""
        self.bytes_read, self.owned = 0, [Owned(0, 0, "", 0)]
        self.agent, self.buffer = (
            nixl.make_agent(serves=False),
            torch.empty(BUFFER, dtype=torch.uint8),
        )
        # keeps it: until NIXL's agent has gone, a network card may write into it
        weakref.finalize(self.agent.agent, self.buffer.numel)
        with nixl.blamed("cannot register memory"):
            self.agent.register_memory([(self.buffer.data_ptr(), BUFFER, 0, "")], nixl.DRAM)

    def connect(self, metadata: bytes) -> str:
        """Returns the name of the agent that can be read now."""
        with nixl.blamed("cannot connect to a rank of the trainer"):
            return self.agent.add_remote_agent(metadata).decode()

    def read(self, starts: list[int], length: int, into: memoryview) -> None:
        """See Reader. The offsets are those in a version, from the first byte of its first
        tensor."""
        self.copy((piece for start in starts for piece in self.pieces(start, length)), into)

    def pieces(self, start: int, length: int) -> Iterator[Piece]:
        """Yields where the ranks have `length` bytes of a version. Raises RunError if none has
        them."""
        end = start + length
        while start < end:
            owner = self.owned[bisect_right(self.owned, start, key=lambda owned: owned.first) - 1]
            if not owner.first <= start < owner.end:
                raise RunError(
                    f"no rank of the trainer has byte {start} of the version: please report this"
                )
            stop = min(end, owner.end)
            yield Piece(owner.agent, owner.start + start, stop - start)
            start = stop

    def copy(self, pieces: Iterator[Piece], into: memoryview) -> None:
        """Fills `into` with pieces, one after the other. Raises RunError if that takes too long
        or a process has ended; then this reader cannot be used any more."""
        small = (
            Piece(p.agent, p.address + at, min(BUFFER, p.size - at))
            for p in pieces
            for at in range(0, p.size, BUFFER)
        )
        batch: list[Piece] = []
        size = done = 0
        for piece in itertools.chain(small, [None]):
            if batch and (piece is None or len(batch) == MOST or size + piece.size > BUFFER):
                self._fetch(batch)
                into[done : done + size] = memory(self.buffer[:size])
                done, self.bytes_read, size, batch = done + size, self.bytes_read + size, 0, []
            if piece is not None:
                batch.append(piece)
                size += piece.size

    def _fetch(self, batch: list[Piece]) -> None:
        """Fills the buffer."""
        at, deadline, transfers = self.buffer.data_ptr(), time.monotonic() + READ_S, []
        with nixl.blamed("a rank of the trainer cannot be read"):
            ends = itertools.accumulate((piece.size for piece in batch), initial=at)
            by_agent: dict[str, tuple[list, list]] = {}
            for piece, place in zip(batch, ends, strict=False):
                here, there = by_agent.setdefault(piece.agent, ([], []))
                here.append((place, piece.size, 0))
                there.append((piece.address, piece.size, 0))
            for agent, both in by_agent.items():
                here, there = (self.agent.get_xfer_descs(places, nixl.DRAM) for places in both)
                transfers.append(self.agent.initialize_xfer("READ", here, there, agent))
            states = [self.agent.transfer(transfer) for transfer in transfers]
            while "PROC" in states and time.monotonic() < deadline:
                time.sleep(POLL_S)
                states = [
                    self.agent.check_xfer_state(one) if state == "PROC" else state
                    for one, state in zip(transfers, states, strict=True)
                ]
            if {*states} != {"DONE"}:
                raise RunError(
                    f"waited {READ_S:.0f} s for {len(states)} ranks of the trainer to send "
                    f"{BUFFER >> 20} MiB at most: {states}"
                )
            for transfer in transfers:
                transfer.release()


class NetworkWeights(Weights):
    """The tensors of a version, to be read by one thread."""

    def __init__(self, version: OverNetwork):
        """Raises RunError if it cannot be read from here, WeightsGoneError if it is gone."""
        if version.place not in ("", pid_scope()):
            raise RunError(
                "the trainer lets processes of its own host alone read its memory: "
                f"{nixl.SEVERAL_HOSTS}"
            )
        self.version, self.reader = version, NixlReader()
        self.main, index = self.reader.connect(version.agent), bytearray(version.size)
        self.reader.copy(iter([Piece(self.main, version.address, version.size)]), memoryview(index))
        self.check(bytes(index[: len(version.mark)]))
        content = json.loads(index[len(version.mark) :])
        header: dict[str, Any] = {
            name: entry
            for name, entry in json.loads(content["header"]).items()
            if name != "__metadata__"
        }
        self.tensors: Tensors = {name: entry_of(entry, 0) for name, entry in header.items()}
        self.slices: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        starts, owned = [entry.start for entry in self.tensors.values()], []
        for rank in content["ranks"]:
            agent = self.reader.connect(base64.b64decode(rank["agent"]))
            for number, first, end in rank["slices"]:
                self.slices[number].append((first, end))
                owned.append(
                    Owned(starts[number] + first, starts[number] + end, agent, rank["start"])
                )
        self.reader.owned = sorted(owned) or self.reader.owned
        self.reader.bytes_read = 0
        self.files = [(self.tensors, self.reader)]

    def check(self, mark: bytes) -> None:
        if mark != self.version.mark:
            raise WeightsGoneError(
                "the trainer has begun to make its next version: this one is only in its folder"
            )

    def confirm(self) -> None:
        """Raises WeightsGoneError if the version has changed since it was made: then something
        else may have been read."""
        mark = bytearray(len(self.version.mark))
        self.reader.copy(
            iter([Piece(self.main, self.version.address, len(mark))]), memoryview(mark)
        )
        self.check(bytes(mark))

    def content(self) -> str:
        """Reads all, a slice at a time, and returns its content_id (see rl.run_dir.checksums)."""
        digests: dict[str, Digest] = {}
        for (name, entry), slices in zip(self.tensors.items(), self.slices, strict=True):
            hashed: list[list] = []
            for first, end in sorted(slices) or [(0, 0)]:
                data = bytearray(end - first)
                self.reader.read([entry.start + first], end - first, memoryview(data))
                hashed.append([first, end, digest(data)])
            if not covers(hashed, entry.end - entry.start):
                raise RunError(
                    f"{name}: the trainer's ranks have {slices} of {entry.end - entry.start} "
                    "bytes: please report this"
                )
            digests[name] = hashed if len(hashed) > 1 else hashed[0][2]
        return content_of(digests)


def check_content(
    version: OverNetwork, base: Path, expected: Tensors, tied: bool, content: str
) -> None:
    """Reads all of a version. Raises RunError if it cannot be read, does not fit the served
    model (see check_weights), or does not have the content_id `content`, which is empty if it is
    not known."""
    weights = NetworkWeights(version)
    check_weights(
        Path("the version in the trainer's memory"), base, expected, tied, weights.tensors
    )
    found = weights.content()
    weights.confirm()
    if found != content:
        raise RunError(
            "what the trainer's ranks have in memory does not match its digests, or these "
            "cannot be read"
        )
