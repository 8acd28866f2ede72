"""The tensors of a policy version, read one after the other: from its files, or over the network
from the memory of its trainer's ranks (see `rl.trainer.store.publisher`).

There, nothing keeps the trainer from making its next version meanwhile. A reader therefore looks at
the version's mark after it has read (`confirm`), and what it has read counts only then.
"""

import base64
import json
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl.inference.weight_files import Tensors, WeightsGoneError, check_weights, weight_files
from rl.run_dir.checksums import content_of
from rl.run_dir.in_memory import OverNetwork
from rl.run_dir.safetensors import Digest, covers, digest, entry_of, read_header
from rl.system import nixl
from rl.system.errors import RunError
from rl.system.linux import pid_scope

DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BOOL": torch.bool, "U8": torch.uint8},
}
"""Types by their names in the safetensors format."""
BUFFER, MOST = 8 << 20, 1024
"""Bytes that are read at once, and in how many pieces at most: NIXL looks at all of them each
time that it is asked for news."""
READ_S, POLL_S = 4.0, 0.0002
"""How long reading that much may take, and the interval at which NIXL is asked."""


class Weights:
    """The tensors of a model's files, which stay open until they are read."""

    def __init__(self, folder: Path):
        """Raises RunError if a file is not whole, OSError if it cannot be opened."""
        self.files = [(read_header(path), path.open("rb")) for path in weight_files(folder)]
        self.bytes_read = 0

    def confirm(self) -> None:
        """Raises RunError if what was read may be of another version; an open file stays."""

    def fill(self, source: Any, start: int, into: memoryview) -> None:
        """Reads from byte `start` of a file on. Raises RunError if it is too short, OSError."""
        source.seek(start)
        if source.readinto(into) < len(into):
            raise RunError(f"{source.name}: it was cut short while it was read")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for header, source in self.files:
            for name, entry in header.items():
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                self.fill(source, entry.start, memory(tensor))
                self.bytes_read += tensor.nbytes
                yield name, tensor


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


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
    """Reads the memory of other processes, in order, into that of this one."""

    def __init__(self) -> None:
        """Raises RunError without NIXL."""
        self.owned = [Owned(0, 0, "", 0)]
        self.agent = nixl.make_agent(serves=False)
        self.buffer = torch.empty(BUFFER, dtype=torch.uint8)
        # keeps it: until NIXL's agent has gone, a network card may write into it
        weakref.finalize(self.agent.agent, self.buffer.numel)
        with nixl.blamed("cannot register memory"):
            self.agent.register_memory([(self.buffer.data_ptr(), BUFFER, 0, "")], nixl.DRAM)

    def connect(self, metadata: bytes) -> str:
        """Returns the name of the agent that can be read now."""
        with nixl.blamed("cannot connect to a rank of the trainer"):
            return self.agent.add_remote_agent(metadata).decode()

    def pieces(self, start: int, length: int) -> Iterator[Piece]:
        """Yields where the ranks have `length` bytes of a version from byte `start` on, counted
        from the first of its first tensor. Raises RunError if none has them."""
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

    def copy(self, pieces: Iterable[Piece], into: memoryview) -> None:
        """Fills `into` with pieces, one after the other. Raises RunError if that takes too long
        or a process has ended; then this reader cannot be used any more."""
        batch: list[Piece] = []
        size = done = 0

        def fetch() -> None:
            nonlocal size, done
            if batch:
                self._fetch(batch)
                into[done : done + size] = memory(self.buffer[:size])
                done, size = done + size, 0
                batch.clear()

        for piece in pieces:
            for offset in range(0, piece.size, BUFFER):
                length = min(BUFFER, piece.size - offset)
                if len(batch) == MOST or size + length > BUFFER:
                    fetch()
                batch.append(Piece(piece.agent, piece.address + offset, length))
                size += length
        fetch()

    def _fetch(self, batch: list[Piece]) -> None:
        """Fills the buffer."""
        deadline, address = time.monotonic() + READ_S, self.buffer.data_ptr()
        with nixl.blamed("a rank of the trainer cannot be read"):
            by_agent: dict[str, tuple[list, list]] = {}
            for piece in batch:
                ours, theirs = by_agent.setdefault(piece.agent, ([], []))
                ours.append((address, piece.size, 0))
                theirs.append((piece.address, piece.size, 0))
                address += piece.size
            transfers = []
            for agent, both in by_agent.items():
                ours, theirs = (self.agent.get_xfer_descs(memories, nixl.DRAM) for memories in both)
                transfers.append(self.agent.initialize_xfer("READ", ours, theirs, agent))
            states = [self.agent.transfer(transfer) for transfer in transfers]
            while "PROC" in states and time.monotonic() < deadline:
                time.sleep(POLL_S)
                states = [
                    self.agent.check_xfer_state(transfer) if state == "PROC" else state
                    for transfer, state in zip(transfers, states, strict=True)
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
        self.version, self.reader, self.bytes_read = version, NixlReader(), 0
        self.main = self.reader.connect(version.agent)
        index = json.loads(self.read_index(version.size))
        header = json.loads(index["header"])
        header.pop("__metadata__", None)
        self.tensors: Tensors = {name: entry_of(entry, 0) for name, entry in header.items()}
        self.slices: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        starts, owned = [entry.start for entry in self.tensors.values()], []
        for rank in index["ranks"]:
            agent = self.reader.connect(base64.b64decode(rank["agent"]))
            for number, first, end in rank["slices"]:
                start = starts[number]
                self.slices[number].append((first, end))
                owned.append(Owned(start + first, start + end, agent, rank["start"]))
        self.reader.owned = sorted(owned) or self.reader.owned
        self.files = [(self.tensors, self.reader)]  # type: ignore[assignment]

    def fill(self, source: NixlReader, start: int, into: memoryview) -> None:
        source.copy(source.pieces(start, len(into)), into)

    def read_index(self, size: int) -> bytes:
        """Returns the first bytes of the index without its mark. Raises WeightsGoneError."""
        index, mark = bytearray(size), self.version.mark
        self.reader.copy([Piece(self.main, self.version.address, size)], memoryview(index))
        if index[: len(mark)] != mark:
            raise WeightsGoneError(
                "the trainer has begun to make its next version: this one is only in its folder"
            )
        return bytes(index[len(mark) :])

    def confirm(self) -> None:
        """Raises WeightsGoneError if the version has changed since it was made: then something
        else may have been read."""
        self.read_index(len(self.version.mark))

    def content(self) -> str:
        """Reads all, a slice at a time, and returns its content_id (see rl.run_dir.checksums)."""
        digests: dict[str, Digest] = {}
        for (name, entry), slices in zip(self.tensors.items(), self.slices, strict=True):
            hashed: list[list] = []
            for first, end in sorted(slices) or [(0, 0)]:
                data = bytearray(end - first)
                self.fill(self.reader, entry.start + first, memoryview(data))
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
    weights, where = NetworkWeights(version), Path("the version in the trainer's memory")
    check_weights(where, base, expected, tied, weights.tensors)
    actual = weights.content()
    weights.confirm()
    if actual != content:
        raise RunError(
            "what the trainer's ranks have in memory does not match its digests, or these "
            "cannot be read"
        )
