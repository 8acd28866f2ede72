"""Where a policy version can be read over the network: in the memory of each rank that trains
it."""

from typing import Annotated

import msgspec

from rl.run_dir.in_memory import InMemory


class OverNetwork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The address of rank 0's index of a version in memory. The index begins with the version's
    mark, which is gone before any rank changes a byte of the version; JSON follows (see
    `rl.trainer.store.registered`)."""

    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Scope of process ids (`rl.system.linux.pid_scope`) within which the memory can be read;
    empty: everywhere."""
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """NIXL's metadata of rank 0's agent: its address, and the key of the index."""
    address: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=32, lt=1 << 30)]
    """Of the index, in bytes."""
    name: Annotated[str, msgspec.Meta(pattern=r"^rl-[0-9a-f]{32}$")]
    """Unique name of this content: memory is used again."""

    @property
    def mark(self) -> bytes:
        return self.name.encode()


Memory = InMemory | OverNetwork
"""Where a version can be read before its folder exists."""
