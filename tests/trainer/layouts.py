"""One rank of many: trains the same batches under every layout of `LAYOUTS`, in one process start.
test_sharding.py forks four of them with the arguments RANK and FOLDER.

FOLDER holds `plan.json` with a model folder and free ports; the results are written there, one file
a layout.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.run_dir.files import CorruptFileError
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import prepare
from rl.trainer.measure.performance import Timer
from rl.trainer.model import head
from rl.trainer.model.dither import dither
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import local, make_optimizer
from rl.trainer.parallel import world as world_module
from rl.trainer.parallel.sharding import finish_gradients, is_whole, shard_model
from rl.trainer.parallel.world import World, check_nodes, start_world
from rl.trainer.store import checkpoint
from rl.trainer.train import TrainContext, train_step
from rl.wire.messages import TrainBatch, VersionSpan
from tests.trainer.samples import make_batch, make_sample, save_checkpoint, truncated
from tests.wire.samples import aligned, changed

STEPS = 3


@dataclass(frozen=True)
class Layout:
    """Ranks, how they are divided, and how a batch is cut for them."""

    ranks: int = 1
    dp_replicate: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    micro_batch_tokens: int = 4096
    alone: bool = False
    """Each sample is packed by itself."""
    model: str = "llama"
    loss: str = "policy_gradient"
    checkpointing: str = "none"
    minibatches: int = 1
    epochs: int = 1
    replay: str = "off"
    lora: bool | list[str] = False
    """Whether adapters are trained; or their targets."""
    kept: bool = False
    """Whether tokens were sampled by truncation."""

    @property
    def reference(self) -> str:
        """The layout on one rank that this one must equal."""
        return next(name for name, other in LAYOUTS.items() if other.task == self.task)

    @property
    def task(self) -> tuple[str, str, bool | list[str], str, bool]:
        """What is trained, however it is divided."""
        return self.model, self.loss, self.lora, self.replay, self.kept


LAYOUTS = {
    "one": Layout(),
    "alone": Layout(micro_batch_tokens=1, alone=True),
    "many": Layout(micro_batch_tokens=40),
    "two": Layout(2, micro_batch_tokens=64),
    "hsdp": Layout(4, dp_replicate=2, micro_batch_tokens=64),
    "replicas": Layout(4, dp_replicate=4),
    "context 2": Layout(2, context_parallel=2, micro_batch_tokens=64),
    "context 2, data 2": Layout(4, context_parallel=2, micro_batch_tokens=32),
    "context 4, hsdp": Layout(
        4, dp_replicate=2, context_parallel=4, micro_batch_tokens=1024, checkpointing="full"
    ),
    "context 4, alone": Layout(4, context_parallel=4, micro_batch_tokens=1, alone=True),
    "context 2, recomputed": Layout(2, context_parallel=2, checkpointing="full"),
}
"""All against the first."""
LAYOUTS |= {
    "one lora": Layout(lora=True),
    "hsdp lora": Layout(4, dp_replicate=2, micro_batch_tokens=64, lora=True),
}
for kind in ("gpt2", "gemma3"):  # learned positions; sliding windows shorter than the samples
    LAYOUTS |= {
        f"one {kind}": Layout(model=kind),
        f"context 4 {kind}": Layout(4, context_parallel=4, micro_batch_tokens=40, model=kind),
    }
# float32 in bfloat16
LAYOUTS |= {
    "one mixed": Layout(model="mixed"),
    "two mixed": Layout(2, micro_batch_tokens=64, model="mixed"),
}
several = {"loss": "clip", "minibatches": 3, "epochs": 2}
LAYOUTS |= {
    "one, several": Layout(**several),
    "two, several": Layout(2, micro_batch_tokens=64, **several),
}
LAYOUTS |= {
    "one gspo": Layout(loss="gspo"),
    "context 4 gspo": Layout(4, context_parallel=4, micro_batch_tokens=40, loss="gspo"),
}
LAYOUTS |= {
    "one kept": Layout(kept=True),
    "context 2, data 2 kept": Layout(4, context_parallel=2, micro_batch_tokens=32, kept=True),
}


def make_batches(alone: bool) -> list[TrainBatch]:
    """Groups of short answers, a long sample, and one of two turns; the second batch is a single
    sample: less than there are ranks."""
    batches = [
        make_batch(step, groups=1 if step == 2 else 5, group_size=1 if step == 2 else 4)
        for step in range(1, STEPS + 1)
    ]
    for batch in batches[::2]:
        batch.samples.append(
            make_sample(
                list(range(10, 90)),
                list(range(40, 60)),
                group=90,
                advantage=0.5,
                logprobs=[-5.5] * 100,
            )
        )
        turns = make_sample(
            list(range(10, 90)), [7, 8, 9], group=90, advantage=-0.25, logprobs=[-5.5] * 83
        )
        lists = aligned(turns)
        lists.loss_mask[40:60], lists.advantages[40:60], lists.logprobs = (
            [True] * 20,
            [0.125] * 20,
            [-5.5] * 83,
        )
        batch.samples.append(
            changed(turns, **vars(lists) | {"policy_versions": [VersionSpan(0, 23)]})
        )
    if alone:
        for batch in batches:
            for i, sample in enumerate(batch.samples):
                sample.group_id = i
    return batches


def give_routes(batch: TrainBatch, layers: int = 2, experts: int = 8) -> None:
    """Two experts for each token and layer, which depend on the token and its position alone, so
    that prefixes are shared as before."""
    for sample in batch.samples:
        ids = sample.token_ids[: sample.trained[-1]]
        first = (ids[:, None] + np.arange(len(ids))[:, None] + np.arange(layers)) % experts
        second = (first + 1 + ids[:, None] % (experts - 1)) % experts
        sample.routes = np.stack([first, second], axis=-1).astype(np.uint8).tobytes()


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
                "router_replay": layout.replay,
                "dp_replicate": layout.dp_replicate,
                "context_parallel": layout.context_parallel,
                "expert_parallel": layout.expert_parallel,
                "loss": {"type": layout.loss},
                "activation_checkpointing": layout.checkpointing,
                # a gradient that is nothing but rounding moves no weight
                "optim": {"lr": 1e-3, "eps": 1e-5},
                "lora": {"targets": layout.lora} if isinstance(layout.lora, list) else layout.lora,
            },
        }
    )


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: whole(parameter).cpu() for name, parameter in model.named_parameters()}


def gradients_of(model) -> dict[str, torch.Tensor]:
    """Those that there are, by the names of their parameters."""
    parameters = model.named_parameters()
    return {name: whole(p.grad).cpu() for name, p in parameters if p.grad is not None}


def state(model, optimizer) -> dict[str, torch.Tensor]:
    """Weights and AdamW's first moments, whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"weight.{name}": whole(parameter) for parameter, name in names.items()}
    return tensors | {
        f"moment.{names[p]}": whole(values["exp_avg"]) for p, values in optimizer.state.items()
    }


def noise_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What dither makes of a model whose weights are all 1. The model keeps its own."""
    weights = [local(parameter.detach()) for parameter in model.parameters()]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.fill_(1.0)
    dither(model, 3)
    found = {
        f"dither.{name}": whole(parameter)
        for name, parameter in model.named_parameters()
        if not is_whole(parameter)
    }
    torch._foreach_copy_(weights, kept)
    return found


class Kept:
    """In place of TokenFiles: the columns of each step, of rank 0."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}

    def start(self, step, columns):
        for name in ("trainer_logprobs", "flags") if columns else ():
            self.tensors[f"tokens.{step}.{name}"] = torch.from_numpy(columns[name]).float()


def train(
    layout: Layout, config: RLConfig, world: World
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], PreTrainedModel]:
    """Metrics of each step; the weights after the last, the first step's gradient (AdamW's
    moment is a tenth of it, clipped), and the dither; the model."""
    torch.manual_seed(0)
    model = load_policy(config.model.name, config.model, config.trainer, world)
    optimizer = make_optimizer(model, config.trainer.optim)
    metrics, first, kept, noise = [], {}, Kept(), noise_of(model)
    for batch in make_batches(layout.alone):
        if layout.replay == "engine":
            give_routes(batch)
        if layout.kept:
            batch = truncated(batch)
        packed = prepare(
            batch, config, world, model.config.get_text_config().hidden_size, layout.minibatches
        )
        metrics.append(
            train_step(
                TrainContext(model, optimizer, config.trainer, world, token_files=kept),
                packed,
                1e-3,
                Timer(),
            )
        )
        first = first or state(model, optimizer)
    gradients = {name: value for name, value in first.items() if name.startswith("moment.")}
    weights = {
        name: value for name, value in state(model, optimizer).items() if name.startswith("weight.")
    }
    return metrics, kept.tensors | gradients | weights | noise, model


def pass_on(
    config: RLConfig, world: World, source: Path | None, target: Path
) -> dict[str, torch.Tensor]:
    """A checkpoint from layout to layout: loads `source`, if there is one, else trains a step;
    saves to `target`; returns the state."""
    model = load_policy(config.model.name, config.model, config.trainer, world)
    optimizer = make_optimizer(model, config.trainer.optim)
    if source:
        assert checkpoint.load(checkpoint.newest(source, world), model, optimizer, world) == 1
    else:
        batch = make_batches(False)[0]
        packed = prepare(batch, config, world, 64)
        train_step(TrainContext(model, optimizer, config.trainer, world), packed, 1e-3, Timer())
    save_checkpoint(target / "000001", 1, model, optimizer, world)
    assert checkpoint.load(checkpoint.newest(target, world), model, optimizer, world) == 1
    return state(model, optimizer)


def damaged(config: RLConfig, source: Path, world: World) -> str:
    """What this rank says where the file of rank 1 is damaged in the newest of two checkpoints."""
    if world.is_main:
        shutil.copytree(source / "000001", source / "000002")
        with (source / "000002" / "__1_0.distcp").open("r+b") as file:
            file.write(b"no")
    world.barrier()
    model = load_policy(config.model.name, config.model, config.trainer, world)
    try:
        optimizer = make_optimizer(model, config.trainer.optim)
        checkpoint.load(checkpoint.newest(source, world), model, optimizer, world)
    except CorruptFileError as error:
        return str(error)
    return ""


def refusal(config: RLConfig, world: World) -> str:
    """What this rank says where only rank 1 scores something else."""
    right = head.head_logprobs
    head.head_logprobs = lambda *args: [x * (1.0 + 0.1 * world.rank) for x in right(*args)]
    try:
        load_policy(config.model.name, config.model, config.trainer, world)
    except RunError as error:
        return str(error)
    finally:
        head.head_logprobs = right
    return ""


def node_faults(world: World, shared: Path) -> list[str]:
    """What this rank says when all is well, when the configurations differ, and when rank 1 does
    not see the run directory."""
    world_module.SEEN_WITHIN_S = 0.5
    said = []
    for directory, config in (
        (shared, b"1"),
        (shared, b"%d" % world.rank),
        (shared.with_name(f"run-{world.rank}"), b"1"),
    ):
        try:
            check_nodes(world, directory, config)
            said.append("")
        except RunError as error:
            said.append(str(error))
    return said


class Chosen(torch.nn.Module):
    """A block whose tokens of a rank pass some of its four experts, each a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(4)])

    def forward(self, values: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return torch.stack([self.experts[i](values) for i in chosen]).sum()


class Router(torch.nn.Module):
    _no_split_modules = ("Chosen",)

    def __init__(self) -> None:
        super().__init__()
        self.block = Chosen()
        self.spare = torch.nn.Linear(4, 4, bias=False)

    def forward(self, values: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return self.block(values, chosen)


def gradients_of_experts(world: World) -> list[list[float | None]]:
    """The first entry of each expert's gradient, and that of a weight that nothing uses, in two
    steps: first rank 0's tokens, of ones, pass the first two experts, in two micro batches, and
    rank 1's, of twos, the second and third; then those of both ranks the first."""
    model, found = Router(), []
    shard_model(model, torch.float32, world)
    for passes in ([[[0], [1]], [[1], [2]]][world.rank], [[0]]):
        for chosen in passes:
            model(torch.full((1, 4), world.rank + 1.0), chosen).backward()
        finish_gradients(model, world)
        found.append(
            [
                None if parameter.grad is None else float(whole(parameter.grad)[0, 0])
                for parameter in model.parameters()
            ]
        )
        model.zero_grad()
    return found


def deadlines() -> list[float]:
    """The deadline of the collectives of each process group that this rank has."""
    backends = [
        group._get_backend(torch.device("cpu"))
        for group in torch.distributed.distributed_c10d._world.pg_map
    ]
    return [backend.options._timeout.total_seconds() for backend in backends]


@contextmanager
def joined(rank: int, ports: Iterator[int], layout: Layout) -> Iterator[World | None]:
    """The world of a layout's ranks, with one deadline for all of its groups; None for a rank
    that the layout has no use for."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(next(ports)),
    }
    if rank >= layout.ranks:
        yield None
        return
    divided = (layout.dp_replicate, layout.context_parallel, layout.expert_parallel)
    # other ranks may be busy with the layouts before
    world = start_world(False, 60.0, *divided, start_timeout_s=240.0)
    world.set_timeout(61.0)
    waits = [60.0] * (world.size > 1)  # the group of the main threads' waits keeps its own
    assert deadlines() == [61.0] * len(world.groups) + waits, deadlines()
    yield world
    torch.distributed.destroy_process_group()


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    world_of = partial(joined, rank, iter(plan["ports"]))
    for name, layout in LAYOUTS.items():
        with world_of(layout) as world:
            if world:
                metrics, tensors, _ = train(
                    layout, make_config(layout, plan["models"][layout.model]), world
                )
                if world.is_main:
                    (folder / f"{name}.json").write_text(json.dumps(metrics))
                    save_file(tensors, folder / f"{name}.safetensors")
    with world_of(Layout(2)) as world:
        if world:
            (folder / f"experts-{rank}.json").write_text(json.dumps(gradients_of_experts(world)))
            (folder / f"nodes-{rank}.json").write_text(
                json.dumps(node_faults(world, folder / "run"))
            )
            (folder / f"refusal-{rank}.txt").write_text(
                refusal(make_config(Layout(2), plan["models"]["llama"]), world)
            )
    source = None
    for name in ("two", "hsdp", "one"):
        layout, target = LAYOUTS[name], folder / "checkpoints" / name
        with world_of(layout) as world:
            if world:
                tensors = pass_on(
                    make_config(layout, plan["models"]["llama"]), world, source, target
                )
                if world.is_main:
                    save_file(tensors, folder / f"passed-{name}.safetensors")
                if name == "hsdp":
                    (folder / f"damaged-{rank}.txt").write_text(
                        damaged(
                            make_config(layout, plan["models"]["llama"]),
                            folder / "checkpoints" / "two",
                            world,
                        )
                    )
        source = target
