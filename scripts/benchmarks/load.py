"""Loading a policy on several ranks of the CPU: memory of each rank and seconds, by slices and, as a comparison, whole. Prints JSON.

`uv run scripts/bench.py load`. The model is random, in bfloat16 files, its masters are float32; --hidden and --layers say how large, or
--model names a folder. Memory is a rank's peak resident set while it loads, over what it held before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
GIB = 1024**3


def make_model(folder: Path, hidden: int, layers: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 16384}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank(folder: str, whole: bool) -> None:
    """One rank; rank 0 prints the largest numbers of all."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers.utils.logging import disable_progress_bar

    from rl.config.run import ModelConfig
    from rl.config.trainer import TrainerConfig
    from rl.trainer.model.policy import load_policy
    from rl.trainer.model.selftest import Choice
    from rl.trainer.parallel.world import start_world

    disable_progress_bar()
    world, config, settings = start_world(False, 600.0), ModelConfig(name=folder), TrainerConfig()
    world.barrier()
    forget_peak()
    before, began = resident("VmRSS"), time.monotonic()
    untested = patch(
        "rl.trainer.model.policy.choose_mode", lambda *_: Choice("blocks", "rl_blocks")
    )  # a part of the start, but not of loading
    with untested, patch("rl.trainer.parallel.loading.why_whole", lambda *_: "asked for") if whole else nullcontext():
        model = load_policy(folder, config, settings, world)
    found = [time.monotonic() - began, (resident("VmHWM") - before) / GIB]
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    found += [sum(shard.nbytes for shard in shards) / GIB, max(p.nbytes for p in model.parameters()) / GIB]
    most = world.reduce(torch.tensor(found), dist.ReduceOp.MAX).tolist()
    if world.is_main:
        print(json.dumps(dict(zip(("seconds", "peak_gib", "shard_gib", "largest_tensor_gib"), (round(x, 3) for x in most), strict=True))))
    dist.destroy_process_group()


def measure(folder: Path, ranks: int, whole: bool) -> dict[str, Any]:
    from rl.launch.devices import MALLOC

    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, __file__, "--rank", str(folder), *(["--whole"] if whole else [])]
    done = subprocess.run(command, env=os.environ | MALLOC | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model (default: a random one)")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.whole)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model) if args.model else make_model(Path(scratch), args.hidden, args.layers)
        found = {name: measure(folder, args.ranks, name == "whole") for name in ("slices", "whole")}
    print(json.dumps({"ranks": args.ranks, **found}, indent=1))


if __name__ == "__main__":
    main()
