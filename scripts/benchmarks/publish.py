"""Measures what publishing costs the ranks of a trainer: `uv run scripts/bench.py publish --size 0.5B --ranks 2` prints JSON.

A Llama-like model of random weights, float32 masters and bfloat16 versions, is sharded over the ranks and published several times, with a
client in place of the orchestrator. `--against DIR` measures the code in another checkout as well, in turn with this one. Of each figure
the median over the versions after the first, whose memory is new, and over the rounds; memory: the largest.

stand_s: training stands until the weights are copied; announced_s: until servers may use the version; written_s: until its folder is there;
durable_s: until the next version may begin. received: bytes that a rank got from others, for a version. taken_gib: how far the resident
memory of a rank rose above what it was before, with what is shared of it in shared_gib.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "0.1B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 32000},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936},
    "0.9B": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 20, "num_attention_heads": 12, "vocab_size": 151936},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "vocab_size": 151936},
}
"""Of Qwen2.5's models, with a tied head; one between two of them, for a checkpoint of 10 GiB."""
GIB = 1 << 30


class Client:
    """Notes when a version was announced."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def hint_prepare(self, version: Any) -> None:
        """Called by checkouts before 2026-11-26."""

    coming = hint_prepare
    """Its earlier name."""

    def published(self, version: Any, wait: Any) -> Any:
        from rl.wire.messages import Acknowledged

        self.times.append(time.perf_counter())
        return Acknowledged(version.policy_version)


def resident() -> dict[str, int]:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssShmem")}


def random_model(size: str, world: Any) -> Any:
    """Returns a Llama of random weights that is sharded over the ranks; the weights were never in one place."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rl.trainer.parallel.sharding import shard_model

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[size], num_key_value_heads=2, tie_word_embeddings=True))
    shard_model(model, torch.bfloat16, world)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02)
    return model


def rank_main(size: str, versions: int, folder: Path) -> None:
    """One rank; its code is whatever is in the path."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rl.config.trainer import WeightsConfig
    from rl.run_dir.lease import hold_role
    from rl.run_dir.paths import RunDir
    from rl.trainer.parallel.world import start_world
    from rl.trainer.store import versions as store
    from rl.trainer.store.publisher import Publisher
    from rl.wire.transport import Wait

    class Received(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if "all_gather_into_tensor" in str(function):
                self.total += result.nbytes - args[0].nbytes
            return result

    torch.set_num_threads(1)
    world = start_world(False, 600.0)
    run_dir = RunDir(folder, folder / "weights")
    lock = hold_role(run_dir.lock("trainer"), 5.0) if world.is_main else None
    model = random_model(size, world)
    base = folder / "base"
    if world.is_main:
        model.config.save_pretrained(base)
    world.barrier()
    client = Client() if world.is_main else None
    new = hasattr(store, "image_of")
    publisher = Publisher(run_dir, WeightsConfig(keep_last=2), client, Wait(600, lambda *_: None), **({"world": world} if new else {}))
    found: list[dict[str, float]] = []
    version, before = None, resident()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")
    for number in range(1, versions + 1):
        world.barrier()
        if client:
            client.times.clear()
        since = time.perf_counter()
        with Received() as received:
            version = store.snapshot(model, base, torch.bfloat16, {}, publisher.ranks if new else world, version)
        publisher.start(number, version, {0})
        line = {"stand_s": time.perf_counter() - since, "received": received.total}
        publisher.finish()
        line["durable_s"] = time.perf_counter() - since
        if client:
            line |= {"announced_s": client.times[0] - since, "written_s": client.times[-1] - since}
        found.append(line)
    now = resident()
    memory = {"taken_gib": (now["VmHWM"] - before) / GIB, "shared_gib": now["RssShmem"] / GIB}
    shard = sum(parameter.to_local().numel() for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    (folder / f"rank-{world.rank}.json").write_text(json.dumps({"lines": found, "shard": shard, "parameters": parameters, **memory}))
    world.barrier()
    if lock:
        lock.close()
    os._exit(0)


def run_ranks(checkout: Path, command: list[str], count: int, timeout_s: float) -> None:
    """Runs a command as each of `count` ranks with the code of a checkout; exits if one fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(checkout / "src"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, *command], env=env | {"RANK": str(rank)}) for rank in range(count)]
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        sys.exit(f"{checkout}: the ranks ended with {codes}")


def measure(checkout: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One start of all ranks with the code of a checkout; what each has found."""
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        command = [__file__, "--size", args.size, "--versions", str(args.versions), "--rank-in", folder]
        run_ranks(checkout, command, args.ranks, args.timeout_s)
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(args.ranks)]


def summary(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over versions and rounds, the slowest rank of each; memory by rank, the largest."""
    ranks = range(len(rounds[0]))
    lines = [[one[rank]["lines"][number] for rank in ranks] for one in rounds for number in range(1, len(one[0]["lines"]))]
    names = ("stand_s", "announced_s", "written_s", "durable_s")
    result: dict[str, Any] = {name: round(median(max(line.get(name, 0.0) for line in each) for each in lines), 3) for name in names}
    result["received"] = [int(median(each[rank]["received"] for each in lines)) for rank in ranks]
    for name in ("taken_gib", "shared_gib"):
        result[name] = [round(max(one[rank][name] for one in rounds), 3) for rank in ranks]
    return result | {
        "parameters": rounds[0][0]["parameters"],
        "shard_gib": [round(4 * rounds[0][rank]["shard"] / GIB, 3) for rank in ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--versions", type=int, default=4, help="of each start; the first is not counted")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--dir", type=Path, help="where versions are written; default: the folder for temporary files")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in:
        return rank_main(args.size, args.versions, args.rank_in)
    checkouts = {"this": ROOT} | ({"against": args.against} if args.against else {})
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in checkouts}
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(measure(checkout, args))
    print(json.dumps({name: summary(each) for name, each in rounds.items()}, indent=1))


if __name__ == "__main__":
    main()
