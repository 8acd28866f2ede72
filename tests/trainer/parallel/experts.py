"""One rank of four whose experts are divided in every way of `DIVISIONS`. test_experts.py forks
them with the arguments RANK and FOLDER.

FOLDER holds `plan.json` with model folders, free ports, and the names of divisions to train and to
pass a checkpoint through; the results are written there, one file a division.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl.trainer.optim import gradient_norm
from rl.trainer.parallel.world import World
from rl.trainer.store.threads import RankThreads
from rl.trainer.store.versions import snapshot
from tests.trainer.layouts import Layout, gradients_of, joined, make_config, pass_on, train
from tests.trainer.parallel.loads import load

RANKS = 4
EXPERTS = ["all-linear", "experts"]

DIVISIONS = {
    f"{model} {name}": replace(layout, model=model)
    for model in ("qwen3_moe", "deepseek_v3", "gpt_oss")
    for name, layout in {
        "one": Layout(),
        "1 of 4": Layout(4),
        "2 of 2": Layout(2, expert_parallel=2),
        "2 of 4": Layout(4, expert_parallel=2),
        "4 of 4": Layout(4, expert_parallel=4),
        "copies": Layout(4, dp_replicate=2, expert_parallel=2),
    }.items()
}
"""Each against the first of its model."""
DIVISIONS["six one"] = Layout(model="six")
# two ranks share three experts: FSDP divides the rows of each
DIVISIONS["six 2 of 4"] = Layout(4, expert_parallel=2, model="six")
adapters = {
    "adapters one": Layout(lora=EXPERTS),
    "adapters 1 of 2": Layout(2, lora=EXPERTS),
    "adapters 2 of 4": Layout(4, expert_parallel=2, lora=EXPERTS),
    "adapters 4 of 4": Layout(4, expert_parallel=4, lora=EXPERTS, checkpointing="full"),
}
DIVISIONS |= {name: replace(layout, model="qwen3_moe") for name, layout in adapters.items()}
more = {
    "more one": Layout(),
    "more context": Layout(4, context_parallel=2, expert_parallel=4, micro_batch_tokens=40),
    "more full": Layout(4, expert_parallel=2, checkpointing="full", micro_batch_tokens=64),
}
DIVISIONS |= {name: replace(layout, model="qwen3_moe") for name, layout in more.items()}
replayed = {"loss": "clip", "epochs": 2, "minibatches": 2, "model": "qwen3_moe"}
# routes that inference gave, which the routers would not choose, or those of the first epoch
for given in ("engine", "trainer"):
    DIVISIONS[f"{given} one"] = Layout(replay=given, **replayed)
    DIVISIONS[f"{given} context"] = Layout(
        4,
        context_parallel=2,
        expert_parallel=4,
        micro_batch_tokens=64,
        checkpointing="full",
        replay=given,
        **replayed,
    )
PASSED = (
    "qwen3_moe copies",
    "qwen3_moe one",
    "qwen3_moe 2 of 4",
    "qwen3_moe 4 of 4",
    "qwen3_moe 1 of 4",
    "qwen3_moe 2 of 2",
)
"""The divisions that one checkpoint passes through, one after the other."""
FEW = (
    "qwen3_moe one",
    "qwen3_moe 2 of 4",
    "qwen3_moe copies",
    "adapters one",
    "adapters 2 of 4",
    "engine one",
    "engine context",
)
"""The divisions outside the proofs."""


def rows_of(rank: int) -> Tensor:
    """The token ids of one rank, [2, T]."""
    return torch.randint(
        3, 259, (2, 24 + 3 * rank), generator=torch.Generator().manual_seed(100 + rank)
    )


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean cross entropy of each next token."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
    )


def gradients(folder: str, world: World) -> dict[str, Tensor]:
    """The sum of all ranks' losses, its gradient, and the gradient's norm."""
    model = load(folder, world)
    ids = rows_of(world.rank)
    loss = loss_of(model(input_ids=ids).logits, ids)
    loss.backward()
    norm = gradient_norm(model.parameters())
    return gradients_of(model) | {
        "loss": world.reduce(loss.detach(), dist.ReduceOp.SUM),
        "norm": torch.tensor(norm),
    }


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    world_of = partial(joined, rank, iter(plan["ports"]))
    for name in plan["trained"]:
        layout = DIVISIONS[name]
        with world_of(layout) as world:
            if world:
                model = plan["models"][layout.model]
                metrics, tensors, trained = train(layout, make_config(layout, model), world)
                version = snapshot(
                    trained, Path(model), torch.float32, {}, RankThreads(world, 60.0)
                )
                version.write(folder / f"{name} version", new=True)
                found = gradients(model, world) if layout.ranks == RANKS and not layout.lora else {}
                if world.is_main:
                    (folder / f"{name}.json").write_text(json.dumps(metrics))
                    save_file(tensors, folder / f"{name}.safetensors")
                    save_file(found, folder / f"{name}.gradients")
    source = None
    for name in plan["passed"]:
        layout, target = DIVISIONS[name], folder / "checkpoints" / name
        with world_of(layout) as world:
            if world:
                tensors = pass_on(
                    make_config(layout, plan["models"][layout.model]), world, source, target
                )
                if world.is_main:
                    save_file(tensors, folder / f"passed {name}.safetensors")
        source = target
