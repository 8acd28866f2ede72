"""Measures what our training step costs over a bare one in PyTorch. `uv run scripts/bench.py
trainer --model FOLDER` prints JSON.

Both train the same micro batches with the same attention, log-probabilities and arithmetic:
bfloat16 weights to compute with, float32 masters, gradients and moments, clipping, fused AdamW. The
bare one has no sharding, no ranks and no statistics. They take turns in one process, so that
whatever else the machine does meets both.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import FakeDataConfig
from rl.launch.devices import MALLOC, SPIN
from rl.trainer.data.batch_sources import FakeBatches, prepare
from rl.trainer.data.packing import Packed
from rl.trainer.measure.performance import Timer, peak_memory_gib
from rl.trainer.model.head import score
from rl.trainer.model.modes import is_compiled, possible_modes, set_mode
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel.world import World, start_world
from rl.trainer.train import TrainContext, train_step

Step = Callable[[Packed], dict[str, float]]
"""Trains a batch; returns seconds by part."""


def our_step(folder: str, config: RLConfig, world: World) -> Step:
    """The trainer's own."""
    model = load_policy(folder, config.model, config.trainer, world)
    context = TrainContext(
        model, make_optimizer(model, config.trainer.optim), config.trainer, world
    )

    def step(packed: Packed) -> dict[str, float]:
        timer = Timer(device=world.device)
        train_step(context, packed, 1e-6, timer)
        return {**timer.seconds, "step": timer.step_s}

    return step


def load_whole(folder: str, world: World, **arguments: Any) -> PreTrainedModel:
    """The same model, attention included, not sharded."""
    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


def bare_step(folder: str, config: RLConfig, world: World) -> Step:
    """As one would write it by hand for one process."""

    # without the test at the start, which needs a sharded model
    mode = possible_modes(config.trainer, world)[0]
    compiles = is_compiled(config.trainer, mode)
    with patch.multiple(
        "rl.trainer.model.policy",
        load_rows=load_whole,
        shard_model=lambda *_: None,
        choose_mode=lambda model, settings, *_: set_mode(model, settings, mode, compiles),
    ):
        model = load_policy(folder, config.model, config.trainer, world).to(world.device)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        masters, lr=1e-6, betas=config.trainer.optim.betas, weight_decay=0.0, fused=True
    )

    def step(packed: Packed) -> dict[str, float]:
        timer = Timer(device=world.device)
        for micro_batch in packed.micro_batches:
            batch = micro_batch.to(world.device)
            loss = -(
                score(model, batch, world).trainer_logprobs * batch.advantages * batch.weights
            ).sum()
            loss.backward()
        timer.lap("forward_backward")
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, config.trainer.optim.max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()
        timer.lap("optimizer")
        return {**timer.seconds, "step": timer.step_s}

    return step


def measure(
    folder: str,
    data: FakeDataConfig,
    rounds: int,
    use_gpus: bool,
    **trainer: object,
) -> dict[str, object]:
    """Medians of `rounds` steps of each, after one to warm up, and the median ratio of
    neighbours: of their seconds, and, for a machine that others use too, of the processor time
    that they took."""
    config = RLConfig(
        model=ModelConfig(name=folder), trainer={"micro_batch_tokens": 1 << 16, **trainer}
    )
    world = start_world(use_gpus, 600.0)
    steps = {
        "ours": our_step(folder, config, world),
        "bare": bare_step(folder, config, world),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    shape = AutoConfig.from_pretrained(folder).get_text_config()
    batches = FakeBatches(data, shape.vocab_size, seed=0)
    tokens = 0
    for number in range(rounds + 1):
        batch = batches.receive(1 + number)
        packed = prepare(batch, config, world, shape.hidden_size)
        tokens = sum(len(row.input_ids) for row in packed.micro_batches)
        for name in sorted(steps, reverse=number % 2 == 1):
            began = time.process_time()
            times[name].append({**steps[name](packed), "cpu": time.process_time() - began})
    torch.distributed.destroy_process_group()
    medians = {
        name: {part: round(median(t[part] for t in values[1:]), 4) for part in values[0]}
        for name, values in times.items()
    }
    ratios = {
        part: [a[part] / b[part] for a, b in zip(times["ours"][1:], times["bare"][1:], strict=True)]
        for part in ("step", "cpu")
    }
    return {
        "computed_tokens": tokens,
        "ratio": round(median(ratios["step"]), 4),
        "ratio_of_cpu_time": round(median(ratios["cpu"]), 4),
        **medians,
        "peak_memory_gib": round(peak_memory_gib(world.device), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="folder; `python -m rl.models.folder` prints that of the default model",
    )
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    # as `rl` starts the trainer; read when a process begins
    if not args.gpu and not (MALLOC | SPIN).keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC | SPIN)
    data = FakeDataConfig(
        samples=args.samples,
        group_size=args.group_size,
        prompt_tokens=args.prompt_tokens,
        completion_tokens=args.completion_tokens,
    )
    result = measure(args.model, data, args.rounds, args.gpu)
    print(
        json.dumps(
            {
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                **result,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
