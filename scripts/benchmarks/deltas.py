"""Measures the bytes of delta versions over those of a whole one: `uv run scripts/bench.py deltas --model FOLDER --lr 1e-6,1e-5`.

A model takes real optimizer steps, as `trainer.optim` does by default, on a policy gradient: tokens of texts with drawn advantages. Each
version is published, in bfloat16, as the trainer does, and read back by a server that follows and by one that joins late, in memory.
Prints JSON: of each learning rate the bytes of each delta over those of the whole version, and whether all versions came out exact.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.config.trainer import OptimConfig, WeightsConfig
from rl.run_dir.deltas import Mirror
from rl.run_dir.digests import digest
from rl.run_dir.paths import RunDir
from rl.trainer.model.dither import dither
from rl.trainer.optim import make_optimizer
from rl.trainer.store import versions
from rl.trainer.store.publisher import Publisher
from rl.wire.transport import Wait

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def measure(model_folder: Path, lr: float, steps: int, rows: int, length: int, folder: Path) -> dict[str, Any]:
    """Trains and publishes `steps` versions."""
    run_dir = RunDir(folder, folder / "weights")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    dither(model, 0)  # as in a run: without it next to nothing would change at first
    optimizer = make_optimizer(model, OptimConfig(lr=lr))
    publisher = Publisher(run_dir, WeightsConfig(anchor_every=steps + 1, keep_last=steps), None, Wait(600, lambda *_: None))
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model_folder)(TEXT)["input_ids"])
    follower, seconds, exact, version = Mirror(), [], True, None
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(tokens) - length, (rows,), generator=generator)
        batch = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        logits = model(input_ids=batch).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(rows, -1)
        (losses.mean(1) @ torch.randn(rows, generator=generator) / rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OptimConfig().max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        began = time.perf_counter()
        version = versions.snapshot(model, model_folder, torch.bfloat16, {}, publisher.ranks, version)
        publisher.start(step, version, ())
        publisher.finish()
        seconds.append(round(time.perf_counter() - began, 2))
        for mirror in (follower, *([Mirror()] if step == steps else [])):
            mirror.become(run_dir.weights(step))
            published = digest(version.image.memory[version.image.start :].numpy())
            exact &= digest(mirror.data) == published
    whole = size_of(run_dir.weights(1))
    shares = [round(size_of(run_dir.weights(step)) / whole, 4) for step in range(2, steps + 1)]
    return {"lr": lr, "whole_bytes": whole, "delta_over_whole": shares, "largest": max(shares), "exact": exact, "publish_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lr", default="1e-6,1e-5")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=48)
    given = parser.parse_args()
    for lr in map(float, given.lr.split(",")):
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(given.model, lr, given.steps, given.rows, given.length, Path(name))), flush=True)


if __name__ == "__main__":
    main()
