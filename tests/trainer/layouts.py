"""One rank of many: trains the same batches under every layout of `LAYOUTS`, in one process start. test_sharding.py forks four of
them with the arguments RANK and FOLDER.

FOLDER holds `plan.json` with a model folder and free ports; the results are written there, one file a layout.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rl.config.run import RLConfig
from rl.system.errors import RunError
from rl.trainer.data.prefetch import prepare
from rl.trainer.measure.performance import Timer
from rl.trainer.model.policy import load_policy, score
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel import world as world_module
from rl.trainer.parallel.sharding import RowGather
from rl.trainer.parallel.world import World, check_nodes, start_world
from rl.trainer.start import TrainContext
from rl.trainer.store import checkpoint
from rl.trainer.train import train_step
from rl.wire.messages import TrainBatch, VersionSpan
from tests.trainer.samples import make_batch, make_sample, save_checkpoint

STEPS = 3


@dataclass(frozen=True)
class Layout:
    """Ranks, how they are divided, and how a batch is cut for them."""

    ranks: int = 1
    dp_replicate: int = 1
    context_parallel: int = 1
    micro_batch_tokens: int = 4096
    alone: bool = False
    """Each sample is packed by itself."""
    model: str = "llama"
    loss: str = "policy_gradient"
    checkpointing: str = "none"
    minibatches: int = 1
    epochs: int = 1
    lora: bool = False

    @property
    def reference(self) -> str:
        """The layout on one rank that this one must equal."""
        return next(name for name, other in LAYOUTS.items() if other.task == self.task)

    @property
    def task(self) -> tuple[str, str, bool]:
        """What is trained, however it is divided."""
        return self.model, self.loss, self.lora


LAYOUTS = {
    "one": Layout(),
    "alone": Layout(micro_batch_tokens=1, alone=True),
    "many": Layout(micro_batch_tokens=40),
    "two": Layout(2, micro_batch_tokens=64),
    "hsdp": Layout(4, dp_replicate=2, micro_batch_tokens=64),
    "replicas": Layout(4, dp_replicate=4),
    "context 2": Layout(2, context_parallel=2, micro_batch_tokens=64),
    "context 2, data 2": Layout(4, context_parallel=2, micro_batch_tokens=32),
    "context 4, hsdp": Layout(4, dp_replicate=2, context_parallel=4, micro_batch_tokens=1024, checkpointing="selective"),
    "context 4, alone": Layout(4, context_parallel=4, micro_batch_tokens=1, alone=True),
    "context 2, recomputed": Layout(2, context_parallel=2, checkpointing="full"),
}
"""All against the first."""
LAYOUTS |= {"one lora": Layout(lora=True), "two lora": Layout(2, micro_batch_tokens=64, lora=True)}
for kind in ("gpt2", "gemma3"):  # learned positions; sliding windows shorter than the samples
    LAYOUTS |= {f"one {kind}": Layout(model=kind), f"context 4 {kind}": Layout(4, context_parallel=4, micro_batch_tokens=40, model=kind)}
several = {"loss": "clip", "minibatches": 3, "epochs": 2}
LAYOUTS |= {"one, several": Layout(**several), "two, several": Layout(2, micro_batch_tokens=64, **several)}
LAYOUTS |= {"one gspo": Layout(loss="gspo"), "context 4 gspo": Layout(4, context_parallel=4, micro_batch_tokens=40, loss="gspo")}


def make_batches(alone: bool) -> list[TrainBatch]:
    """Groups of short answers, a long sample, and one of two turns; the second batch is a single sample: less than there are ranks."""
    batches = [make_batch(step, groups=1 if step == 2 else 5, group_size=1 if step == 2 else 4) for step in range(1, STEPS + 1)]
    for batch in batches[::2]:
        batch.samples.append(make_sample(list(range(10, 90)), list(range(40, 60)), group=90, advantage=0.5, logprobs=[-5.5] * 100))
        turns = make_sample(list(range(10, 90)), [7, 8, 9], group=90, advantage=-0.25, logprobs=[-5.5] * 83)
        turns.loss_mask[40:60], turns.advantages[40:60] = [True] * 20, [0.125] * 20
        turns.policy_versions = [VersionSpan(0, 23)]
        batch.samples.append(turns)
    if alone:
        for batch in batches:
            for i, sample in enumerate(batch.samples):
                sample.group_id = i
    return batches


def make_config(layout: Layout, folder: str) -> RLConfig:
    return RLConfig.model_validate(
        {
            "name": "run",
            "model": {"name": folder, "dtype": "float32", "max_model_len": 512},
            "orchestrator": {"environment": [{"id": "test"}]},
            "trainer": {
                "micro_batch_tokens": layout.micro_batch_tokens,
                "minibatches": layout.minibatches,
                "epochs": layout.epochs,
                "dp_replicate": layout.dp_replicate,
                "context_parallel": layout.context_parallel,
                "loss": {"type": layout.loss},
                "activation_checkpointing": layout.checkpointing,
                "optim": {"lr": 1e-3},
                "lora": layout.lora,
            },
        }
    )


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def state(model, optimizer) -> dict[str, torch.Tensor]:
    """Weights and AdamW's first moments, whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"weight.{name}": whole(parameter) for parameter, name in names.items()}
    return tensors | {f"moment.{names[p]}": whole(values["exp_avg"]) for p, values in optimizer.state.items()}


class Kept:
    """In place of TokenFiles: the columns of each step, of rank 0."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}

    def start(self, step, columns):
        for name in ("trainer_logprobs", "flags") if columns else ():
            self.tensors[f"tokens.{step}.{name}"] = torch.from_numpy(columns[name]).float()


def train(layout: Layout, config: RLConfig, world: World) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of each step; the weights after the last, and the first step's gradient (AdamW's moment is a tenth of it, clipped)."""
    torch.manual_seed(0)
    model = load_policy(config.model.name, config.model, config.trainer, world)
    optimizer = make_optimizer(model, config.trainer.optim)
    metrics, first, kept = [], {}, Kept()
    for batch in make_batches(layout.alone):
        packed = prepare(batch, config, world, model.config.get_text_config().hidden_size, layout.minibatches)
        metrics.append(train_step(TrainContext(model, optimizer, config.trainer, world, token_files=kept), packed, 1e-3, Timer()))
        first = first or state(model, optimizer)
    gradients = {name: value for name, value in first.items() if name.startswith("moment.")}
    return metrics, kept.tensors | gradients | {
        name: value for name, value in state(model, optimizer).items() if name.startswith("weight.")
    }


def pass_on(config: RLConfig, world: World, source: Path | None, target: Path) -> dict[str, torch.Tensor]:
    """A checkpoint from layout to layout: loads `source`, if there is one, else trains a step; saves to `target`; returns the state."""
    model = load_policy(config.model.name, config.model, config.trainer, world)
    optimizer = make_optimizer(model, config.trainer.optim)
    if source:
        assert checkpoint.load(*checkpoint.newest_sound(source, world), model, optimizer, world) == 1
    else:
        batch = make_batches(False)[0]
        packed = prepare(batch, config, world, 64)
        train_step(TrainContext(model, optimizer, config.trainer, world), packed, 1e-3, Timer())
    save_checkpoint(target / "000001", 1, model, optimizer, world)
    return state(model, optimizer)


def node_faults(world: World, shared: Path) -> list[str]:
    """What this rank says when all is well, when the configurations differ, and when rank 1 does not see the run directory."""
    world_module.SEEN_WITHIN_S = 0.5
    said = []
    for directory, config in ((shared, b"1"), (shared, b"%d" % world.rank), (shared.with_name(f"run-{world.rank}"), b"1")):
        try:
            check_nodes(world, directory, config)
            said.append("")
        except RunError as error:
            said.append(str(error))
    return said


def bytes_kept(config: RLConfig, world: World) -> list[int]:
    """What autograd keeps of a long row: when this rank computes all of it, and with its part of it."""
    model = load_policy(config.model.name, config.model, config.trainer, world)
    long = make_sample(list(range(3, 250)) * 4, list(range(3, 250)) * 2, logprobs=[-5.5] * 247 * 6)
    kept, pack = [], RowGather.pack

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.nbytes
        return tensor

    def count_parts(row: RowGather, tensor: torch.Tensor):
        packed = pack(row, tensor)
        kept[-1] += (packed if isinstance(packed, torch.Tensor) else packed[0]).nbytes
        return packed

    RowGather.pack = count_parts
    for seen in (replace(world, context_size=1, context_group=None), world):
        (row,) = prepare(
            TrainBatch(step=1, samples=[long]), config, replace(seen, size=seen.context_size, rank=seen.context_rank), 64
        ).micro_batches
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            score(model, row, seen).logprobs.sum().backward()
        model.zero_grad()
    RowGather.pack = pack
    return kept


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    ports = iter(plan["ports"])

    @contextmanager
    def world_of(layout: Layout) -> Iterator[World | None]:
        """None for a rank that the layout has no use for."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(ports))}
        if rank >= layout.ranks:
            yield None
            return
        yield start_world(False, 60.0, layout.dp_replicate, layout.context_parallel, start_timeout_s=60.0)
        torch.distributed.destroy_process_group()

    for name, layout in LAYOUTS.items():
        with world_of(layout) as world:
            if world:
                metrics, tensors = train(layout, make_config(layout, plan["models"][layout.model]), world)
                if world.is_main:
                    (folder / f"{name}.json").write_text(json.dumps(metrics))
                    save_file(tensors, folder / f"{name}.safetensors")
    with world_of(Layout(4, context_parallel=4)) as world:
        kept = bytes_kept(make_config(Layout(context_parallel=4), plan["models"]["llama"]), world)
        (folder / f"kept-{rank}.json").write_text(json.dumps(kept))
    with world_of(Layout(2)) as world:
        if world:
            (folder / f"nodes-{rank}.json").write_text(json.dumps(node_faults(world, folder / "run")))
    source = None
    for name in ("two", "hsdp", "one"):
        layout, target = LAYOUTS[name], folder / "checkpoints" / name
        with world_of(layout) as world:
            if world:
                tensors = pass_on(make_config(layout, plan["models"]["llama"]), world, source, target)
                if world.is_main:
                    save_file(tensors, folder / f"passed-{name}.safetensors")
        source = target
