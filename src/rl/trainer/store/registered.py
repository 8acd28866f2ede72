"""An image that servers read over the network, each rank's slices out of that rank's memory.

The index, in rank 0's memory, says where: the name of the content, which is overwritten before any
rank changes a byte, and a JSON object with the header of the version's file, and for each rank its
agent, the address of the first byte of the first tensor, and its slices.
"""

import base64
import json
from typing import Any

import torch

from rl.run_dir.in_memory import OverNetwork, new_name
from rl.system import nixl
from rl.system.linux import pid_scope
from rl.trainer.store.image import Image, ranges
from rl.trainer.store.layout import header


class Registered:
    """The slices of an image's ranks. Every rank makes it together with the others, and calls
    every method."""

    def __init__(self, image: Image):
        """Raises RunError if NIXL cannot be used on any rank."""
        self.image, self.memory = image, image.memory
        self.index = torch.empty(0, dtype=torch.uint8)
        self.name = new_name()
        ranks = image.ranks.share(self._register)
        image.ranks.of_main(lambda: self._write_index(ranks))

    def _register(self) -> dict[str, Any]:
        """Returns what a server needs to read this rank's slices."""
        assert self.memory is not None
        start, self.agent = self.memory.data_ptr() + self.image.start, nixl.make_agent(serves=True)
        with nixl.blamed("the weights cannot be registered"):
            if pieces := [
                (start + first, end - first, 0, "") for first, end in ranges(self.image.slices)
            ]:
                self.agent.register_memory(pieces, nixl.DRAM)
            agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
        numbers = {tensor.name: number for number, tensor in enumerate(self.image.tensors)}
        slices = [(numbers[part.tensor.name], part.first, part.end) for part in self.image.slices]
        return {"agent": agent, "start": start, "slices": slices}

    def _write_index(self, ranks: list[dict[str, Any]]) -> None:
        content = json.dumps(
            {"header": header(self.image.tensors)[8:].decode(), "ranks": ranks}
        ).encode()
        self.index = torch.frombuffer(bytearray(self.name.encode() + content), dtype=torch.uint8)
        with nixl.blamed("the index of the weights cannot be registered"):
            registered = self.agent.register_memory(
                [(self.index.data_ptr(), len(self.index), 0, "")], nixl.DRAM
            )
            self.metadata = self.agent.get_partial_agent_metadata(registered, True, ["UCX"])

    def announce(self) -> OverNetwork | None:
        """Returns where the content is, once all ranks have filled their slices; None on ranks
        other than 0."""
        self.image.ranks.share(lambda: None)
        if not self.image.ranks.is_main:
            return None
        self.name = new_name()
        self._mark(self.name.encode())
        scope = pid_scope() if nixl.is_local() else ""
        return OverNetwork(scope, self.metadata, self.index.data_ptr(), len(self.index), self.name)

    def withdraw(self) -> None:
        """Tells readers, which look at the mark after they have read, that the content is about
        to change."""
        self._mark(bytes(len(self.name)))

    def _mark(self, mark: bytes) -> None:
        if len(self.index):
            self.index[: len(mark)] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
