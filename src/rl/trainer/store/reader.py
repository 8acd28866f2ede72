"""Reads torch.distributed.checkpoint's files without running what they say.

DCP's `.metadata` is a pickle, and the manifest with its hash lies beside it: whoever made the
checkpoint controls both. So only what DCP itself writes for tensors is made of it. What it keeps of
other objects would be unpickled by torch, and is refused with the rest.
"""

import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch
from blake3 import blake3
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from rl.run_dir.digests import HASH
from rl.system.errors import RunError

METADATA = ".metadata"
PIECE_BYTES = 1 << 20
"""Bytes that are hashed at once."""
OF_METADATA = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""All that the metadata of tensors are made of."""
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class TensorsOnly(pickle.Unpickler):
    """Unpickles only the classes in NAMES."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(
                f"{module}.{name} does not occur in checkpoints written by rl"
            )
        # its module has another name in Python 3.13
        return Path if name == "PosixPath" else super().find_class(module, name)


class Reader(FileSystemReader):
    """The reader of one checkpoint. Raises RunError for one that another program than rl's
    trainer has written."""

    def __init__(self, path: Path, hashed: bool = False):
        """`hashed`: whether to hash what is read."""
        super().__init__(path)
        self.metadata, self.hashed = metadata_of(path), hashed
        self.hashes: dict[str, tuple[int, blake3]] = {}
        """How many of its first bytes were read, and their hash, by a file's name."""

    def sums(self) -> dict[str, dict[str, Any]]:
        """Returns size and hash, as in a manifest, of what was read of each file."""
        return {
            name: {"size": size, HASH: found.hexdigest()}
            for name, (size, found) in self.hashes.items()
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Has each file read from its beginning to its end."""

        def place(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        plan.items.sort(key=place)
        return super().prepare_local_plan(plan)

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        size, found = self.hashes.setdefault(sinfo.relative_path, (0, blake3()))
        # in small pieces, which need no new memory; torch then reads from the page cache
        if self.hashed and size == sinfo.offset:
            file.seek(size)
            while (left := sinfo.offset + sinfo.length - size) and (
                piece := file.read(min(left, PIECE_BYTES))
            ):
                found.update(piece)
                size += len(piece)
            self.hashes[sinfo.relative_path] = size, found
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def metadata_of(path: Path) -> Metadata:
    """What a checkpoint holds and where. Raises as Reader does."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = TensorsOnly(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        if not all(
            DATA_FILE.fullmatch(info.relative_path) for info in metadata.storage_data.values()
        ):
            raise ValueError("it names files outside of the checkpoint")
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,
    ) as error:
        raise RunError(
            f"{path / METADATA}: not written by rl's trainer ({error}), and nothing of it was run. "
            f"Do not trust this run directory; to go on without this checkpoint move {path} away"
        ) from None
    return metadata
