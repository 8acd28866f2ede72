"""Measures the roads of a version to a server's worker: `uv run scripts/bench.py transport --gib 0.5` prints JSON. Needs the extra `nixl`.

A process has a version of `--tensors` matrices in memory, as a trainer's rank has, and in a file in the page cache. This one reads half of
it, rows of the even tensors and columns of the odd ones: from the file, and over the network by NIXL (UCX_NET_DEVICES; TCP on this host by
default), in turn, `--rounds` times. GiB a second and processor seconds a GiB, of this process alone; ratios of the same round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import torch
from safetensors.torch import save_file

from rl.inference.file_tensor import Weights
from rl.inference.over_network import NetworkWeights
from rl.run_dir.over_network import OverNetwork
from rl.trainer.store.image import Image
from rl.trainer.store.layout import FileTensor, Slice
from rl.trainer.store.ranks import Ranks
from rl.trainer.store.registered import Registered

COLUMNS = 4096


def rank_main(rows: int, count: int, folder: Path) -> None:
    """Has the version until it is killed."""
    shape = torch.Size([rows, COLUMNS])
    size = 2 * shape.numel()
    tensors = [FileTensor(f"{number:03d}", torch.bfloat16, shape, number * size, ("",), 0) for number in range(count)]
    image = Image(tensors, [Slice(tensor, 0, tensor.size) for tensor in tensors], Ranks())
    image.claim()
    for tensor in tensors:
        image.bytes_of(tensor).view(torch.bfloat16).normal_()
    save_file({t.name: image.bytes_of(t).view(torch.bfloat16).view(shape).clone() for t in tensors}, folder / "model.safetensors")
    registered = Registered(image)
    (folder / "new").write_bytes(msgspec.json.encode(registered.announce()))
    (folder / "new").rename(folder / "announced")
    time.sleep(3600)


def read_half(weights: Weights, into: list[torch.Tensor]) -> tuple[float, float]:
    """Returns GiB a second and processor seconds a GiB of reading half of each tensor."""
    since, cpu, before = time.perf_counter(), time.process_time(), weights.bytes_read
    for number, (_, tensor) in enumerate(weights):
        rows, columns = tensor.shape
        into[number].copy_(tensor[:, : columns // 2] if number % 2 else tensor[: rows // 2])
    weights.confirm()
    gib = (weights.bytes_read - before) / 2**30
    return gib / (time.perf_counter() - since), (time.process_time() - cpu) / gib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the version")
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = int(args.gib * 2**30 / args.tensors / COLUMNS / 2)
    if args.rank_in:
        return rank_main(rows, args.tensors, args.rank_in)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--gib", str(args.gib), "--tensors", str(args.tensors), "--rank-in", folder]
        rank = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 300
            while not (Path(folder) / "announced").exists():
                if rank.poll() is not None or time.monotonic() > deadline:
                    sys.exit("waited 300 s for the process with the version")
                time.sleep(0.1)
            announced = msgspec.json.decode((Path(folder) / "announced").read_bytes(), type=OverNetwork)
            since = time.perf_counter()
            roads = {"files": Weights(Path(folder)), "nixl": NetworkWeights(announced)}
            connected = time.perf_counter() - since
            halves = [(rows // 2, COLUMNS), (rows, COLUMNS // 2)]
            targets = {road: [torch.zeros(halves[n % 2], dtype=torch.bfloat16) for n in range(args.tensors)] for road in roads}
            found = [{road: read_half(weights, targets[road]) for road, weights in roads.items()} for _ in range(1 + args.rounds)][1:]
            for pair in zip(*targets.values(), strict=True):
                assert torch.equal(*pair)
        finally:
            rank.kill()
            rank.wait()
    ratios = [one["nixl"][0] / one["files"][0] for one in found]
    result: dict[str, object] = {
        road: {"gib_s": median(one[road][0] for one in found), "cpu_s_gib": median(one[road][1] for one in found)} for road in roads
    }
    result |= {"nixl over files": median(ratios), "each round": sorted(ratios), "connect_s": connected, "load": os.getloadavg()[0]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
