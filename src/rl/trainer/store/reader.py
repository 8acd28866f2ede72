"""Reads torch.distributed.checkpoint's files without running what they say.

DCP's `.metadata` is a pickle, and the manifest with its hash lies beside it: whoever made the
checkpoint controls both. So only what DCP itself writes for tensors is made of it. What it keeps of
other objects would be unpickled by torch, and is refused with the rest.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from rl.system.errors import RunError

METADATA = ".metadata"
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


class CheckpointReader(FileSystemReader):
    """The reader of one checkpoint, which was verified. Raises RunError for one that another
    program than rl's trainer has written."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = metadata_of(path)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def metadata_of(path: Path) -> Metadata:
    """What a checkpoint holds and where. Raises as CheckpointReader does."""
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
