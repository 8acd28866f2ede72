"""One rank of three that load models: each finds what transformers loads, and holds no more than
its rows. test_loading.py forks them with the arguments RANK and FOLDER; FOLDER holds `plan.json`,
and gets what each rank has found.
"""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import LoraConfig, TrainerConfig
from rl.system.errors import RunError
from rl.trainer.model.dither import dither
from rl.trainer.model.lora import add_adapters
from rl.trainer.model.modes import is_compiled, set_mode
from rl.trainer.model.policy import DTYPES, freeze_rope, load_policy
from rl.trainer.optim import local
from rl.trainer.parallel.world import World
from tests.trainer.layouts import Layout, joined

RANKS = 3
MAX_LEN = 128


def load(
    folder: str, world: World, dtype: str = "float32", frozen: bool = False, **settings: object
) -> PreTrainedModel:
    """The policy, without the test of its attention."""

    def set_eager(model: PreTrainedModel, trainer: TrainerConfig, *_: object) -> None:
        set_mode(model, trainer, "eager", is_compiled(trainer, "eager"))

    with patch("rl.trainer.model.policy.choose_mode", set_eager):
        config = ModelConfig(
            name=folder, dtype=dtype, max_model_len=MAX_LEN, trust_remote_code=True
        )
        return load_policy(folder, config, TrainerConfig(**settings), world, frozen)


def plain(folder: str, dtype: str, frozen: bool = False) -> PreTrainedModel:
    """What transformers loads, with frozen frequencies."""
    more = {"attn_implementation": "eager", "trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **more)
    freeze_rope(model, MAX_LEN)
    return model.requires_grad_(False) if frozen else model


def places(model: PreTrainedModel) -> list[list[str]]:
    """The names of parameters that stand in several places."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return sorted(names for names in found.values() if len(names) > 1)


def differences(ours: PreTrainedModel, theirs: PreTrainedModel) -> list[str]:
    """What is not the same in a sharded model and a plain one."""
    found = (
        [] if places(ours) == places(theirs) else [f"tied: {places(ours)}, not {places(theirs)}"]
    )
    for mine, yours in (
        (ours.named_parameters(), theirs.named_parameters()),
        (ours.named_buffers(), theirs.named_buffers()),
    ):
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in mine
        }
        expected = dict(yours)
        found += sorted(whole.keys() ^ expected.keys())
        found += [
            name
            for name, value in whole.items()
            if value.dtype != expected[name].dtype or not value.equal(expected[name])
        ]
    trained, wanted = (
        {name for name, p in model.named_parameters() if p.requires_grad}
        for model in (ours, theirs)
    )
    return found + sorted(trained ^ wanted)


def dithered_differences(*models: PreTrainedModel) -> list[str]:
    """Rounds the weights of a sharded and of a plain model to bfloat16, and gives them the same
    noise."""
    for model in models:
        for parameter in model.parameters():
            local(parameter.detach()).copy_(local(parameter.detach()).bfloat16())
        dither(model, 3)
    return differences(*models)


def with_adapters(folder: str, world: World) -> list[str]:
    """Adapters begin alike on a sharded model and on a whole one."""
    settings = LoraConfig(rank=4)
    torch.manual_seed(3)
    ours = load(folder, world, "bfloat16", lora=settings)
    torch.manual_seed(3)
    theirs = plain(folder, "bfloat16")
    add_adapters(theirs, settings)
    return differences(ours, theirs)


def resident(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since that was forgotten."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def memory(folder: str, world: World) -> dict[str, int]:
    """Bytes that loading takes at most, and of what is loaded."""
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    parameters = list(load(folder, world).parameters())
    taken = resident("VmHWM") - before
    shard = sum(local(parameter).nbytes for parameter in parameters)
    return {
        "taken": taken,
        "shard": shard,
        "largest": max(parameter.nbytes for parameter in parameters),
    }


def everything(folder: Path, names: list[str], world: World) -> dict[str, object]:
    """What this rank finds."""
    found: dict[str, object] = {}
    for name in names:
        for dtype, frozen in (("float32", False), ("bfloat16", True)):
            ours = load(str(folder / name), world, dtype, frozen)
            theirs = plain(str(folder / name), dtype, frozen)
            found[f"{name}, {dtype}"] = differences(ours, theirs)
            if not frozen:
                found[f"{name}, dither"] = dithered_differences(ours, theirs)
    found["adapters"] = with_adapters(str(folder / "llama"), world)
    try:
        load(str(folder / "torn"), world)
    except RunError as error:
        found["torn"] = str(error)
    return found | {"memory": memory(str(folder / "large"), world)}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    with joined(rank, iter([plan["port"]]), Layout(RANKS)) as world:
        found = everything(folder, plan["same"], world)
        (folder / f"found-{rank}.json").write_text(json.dumps(found))
