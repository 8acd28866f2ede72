"""Measures how long ranks take to check and load a checkpoint: `uv run scripts/bench.py resume --size 0.9B --ranks 2` prints JSON.

A Llama-like model of random weights and its AdamW are sharded over the ranks and written as a checkpoint; new processes find, check and
load it. `--against DIR` measures the code in another checkout as well, in turn with this one; each reads what it has written. Before each
reading the checkpoint is dropped from the page cache, where the system lets it, unless it is to stay (`--warm`). Seconds are those of the
slowest rank, medians of the rounds.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NoReturn

from publish import ROOT, SIZES, random_model, run_ranks


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def leave(is_main: bool) -> NoReturn:
    """Ends a rank; the first waits a moment, because it has the store through which the others meet."""
    time.sleep(2.0 * is_main)
    os._exit(0)


def rank_main(size: str, folder: Path) -> None:
    """One rank; its code is whatever is in the path. Writes the checkpoint if there is none, otherwise reads it."""
    import torch

    from rl.config.trainer import OptimConfig
    from rl.trainer.optim import make_optimizer
    from rl.trainer.parallel.world import start_world
    from rl.trainer.store import checkpoint

    torch.set_num_threads(1)
    world = start_world(False, 600.0)
    model = random_model(size, world)
    optimizer = make_optimizer(model, OptimConfig())
    path = folder / "000001"
    reads = path.exists()
    world.barrier()
    if not reads:
        state = checkpoint.tensors_of(model, optimizer, world)
        checkpoint.write(path, 1, state, checkpoint.fingerprint(model), world)
        leave(world.is_main)
    for parameter in model.parameters():
        parameter.detach().to_local().zero_()
    since = time.perf_counter()
    newest = getattr(checkpoint, "newest", None) or checkpoint.newest_sound  # type: ignore[attr-defined]  # before 2026-11-27
    sound = newest(folder, world)
    assert sound and checkpoint.load(*sound, model, optimizer, world) == 1
    world.barrier()
    seconds = time.perf_counter() - since
    assert all(parameter.detach().to_local().any() for parameter in model.parameters() if parameter.to_local().numel())
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seconds))
    world.barrier()
    leave(world.is_main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B", help="as of `publish`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--warm", action="store_true", help="leave the checkpoint in the page cache")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written; default: the folder for temporary files")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size not in SIZES:
        parser.error(f"--size {args.size}: one of {', '.join(SIZES)}")
    if args.rank_in:
        return rank_main(args.size, args.rank_in)
    checkouts = {"this": ROOT} | ({"against": args.against} if args.against else {})
    rounds: dict[str, list[float]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        folders = {name: Path(root) / name for name in checkouts}
        for number in range(args.rounds + 1):
            for name, checkout in checkouts.items():
                folders[name].mkdir(exist_ok=True)
                if not args.warm:
                    drop_from_cache(folders[name])
                run_ranks(checkout, [__file__, "--size", args.size, "--rank-in", str(folders[name])], args.ranks, args.timeout_s)
                if number:
                    rounds[name].append(max(json.loads((folders[name] / f"rank-{rank}.json").read_text()) for rank in range(args.ranks)))
        bytes_read = sum(path.stat().st_size for path in (folders["this"] / "000001").iterdir())
    print(json.dumps({"gib": round(bytes_read / 2**30, 2)} | {name: round(median(each), 2) for name, each in rounds.items()}))


if __name__ == "__main__":
    main()
