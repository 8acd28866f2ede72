"""Processes that have a version in memory for others to read over the network: RANK of two ranks
of a trainer, and readers of theirs."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl.inference.weights import NetworkWeights
from rl.run_dir.checksums import content_of
from rl.run_dir.files import write_file
from rl.run_dir.in_memory import OverNetwork
from rl.run_dir.safetensors import digest
from rl.trainer.parallel.world import World
from rl.trainer.store.image import Image, Slice
from rl.trainer.store.publisher import Registered
from rl.trainer.store.threads import RankThreads
from tests.trainer.layouts import Layout, joined
from tests.trainer.store.images import laid_out

SIZE = 2


def halves(tensor: Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor that each of two ranks has."""
    middle, end = tensor.numel() // 2 * tensor.itemsize, tensor.numel() * tensor.itemsize
    return [(0, middle), (middle, end)]


def content_in_halves(tensors: Mapping[str, Tensor]) -> str:
    """The content_id of a version of two ranks."""
    held = {
        name: (memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), halves(tensor))
        for name, tensor in tensors.items()
    }
    return content_of(
        {
            name: [[*part, digest(data[slice(*part)])] for part in parts]
            for name, (data, parts) in held.items()
        }
    )


def read_announced(path: Path) -> OverNetwork:
    return msgspec.json.decode(path.read_bytes(), type=OverNetwork)


def hold(rank: int, world: World, tensors: dict[str, Tensor], announced: Path) -> None:
    """Has this rank's half of a version in memory, and says so."""
    found = laid_out(tensors)
    slices = [Slice(tensor, *halves(tensors[tensor.name])[rank]) for tensor in found]
    image = Image(found, slices, RankThreads(world, 60.0))
    image.claim()
    for part in image.slices:
        values = tensors[part.tensor.name].reshape(-1).view(torch.uint8)
        image.bytes_of(part.tensor, part.first, part.end).copy_(values[part.first : part.end])
    registered = Registered(image)  # while it lives, others can connect
    if memory := registered.announce():
        write_file(announced, msgspec.json.encode(memory))
    time.sleep(600)


def main() -> None:
    """A rank, until it is killed: RANK PORT VERSION ANNOUNCED."""
    rank, port, version, announced = sys.argv[1:]
    with joined(int(rank), iter([port]), Layout(SIZE)) as world:
        hold(int(rank), world, load_file(f"{version}/model.safetensors"), Path(announced))


def read_forever() -> None:
    """A reader, until it is killed: ANNOUNCED READ, a file that exists once it reads."""
    version, began = read_announced(Path(sys.argv[1])), Path(sys.argv[2])
    weights = NetworkWeights(version)
    while True:
        began.write_text(json.dumps(weights.content()))
