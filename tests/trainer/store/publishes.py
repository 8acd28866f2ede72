"""One rank of up to four that publish versions together. test_versions.py forks them with the
arguments RANK and FOLDER; FOLDER holds `plan.json`, and gets the versions and what each rank has
found.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from rl.run_dir.checksums import first_difference
from rl.run_dir.in_memory import opened
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import tensor_digests
from rl.system.errors import RunError
from rl.trainer.model import lora
from rl.trainer.parallel.world import World, start_world
from rl.trainer.replay import compare
from rl.trainer.store import versions
from rl.trainer.store.image import LastVersion
from rl.trainer.store.threads import RankThreads
from tests.trainer.parallel.loads import load

LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "hsdp": (4, 2)}
"""Ranks and replicas."""


def place_experts(model: PreTrainedModel, placements: tuple[Shard, Shard]) -> None:
    """Divides the experts of a layer over a mesh of its own, over the first dimension, and each
    over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    for name, parameter in list(model.named_parameters()):
        if name.endswith(("gate_up_proj", "down_proj")):
            assert isinstance(parameter, DTensor)
            whole = parameter.detach().full_tensor()
            module, _, leaf = name.rpartition(".")
            placed = distribute_tensor(whole, mesh, placements)
            model.get_submodule(module)._parameters[leaf] = torch.nn.Parameter(placed)


def draw_adapters(model: PreTrainedModel) -> None:
    """Gives adapters the same values on any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in lora.trainable(model).values():
        assert isinstance(parameter, DTensor)
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def twice(model: PreTrainedModel) -> None:
    """Other weights."""
    for parameter in model.parameters():
        parameter.data.mul_(2)


def publish(model: PreTrainedModel, base: Path, ranks: RankThreads, path: Path) -> dict:
    """Writes two versions, one after the other into the same memory, and a delta, and returns
    what is to be known of it."""
    version = versions.snapshot(model, base, torch.bfloat16, {}, ranks)
    version.write(path, new=True)
    before, files = version.image.memory.data_ptr(), {}
    with opened(version.in_memory) as memory:
        if memory and ranks.is_main:
            files["same"] = first_difference(
                version.digests, tensor_digests(memory, version.digests)
            )
    shared = version.in_memory is not None
    twice(model)
    version = versions.snapshot(model, base, torch.bfloat16, {}, ranks, version)
    version.write_record(path.parent.parent / "digests" / "000002.json")
    version.write(path.with_name("000002"), new=True)
    again = version.image.memory.data_ptr() == before
    held = sum(part.end - part.first for part in version.image.slices)
    if not lora.has_adapters(model):
        last = LastVersion()
        last.keep(2, version.image)
        twice(model)
        version = versions.snapshot(model, base, torch.bfloat16, {}, ranks, version)
        version.write(path.with_name("000003"), new=True, last=last)
        for parameter in model.parameters():
            parameter.data.div_(2)
    return files | {
        "held": held,
        "size": version.image.tensors[-1].end,
        "again": again,
        "shared": shared,
    }


def replay(model: PreTrainedModel, base: Path, ranks: RankThreads, other: Path) -> dict:
    """Compares the second version with that of other ranks."""
    version = versions.snapshot(model, base, torch.bfloat16, {}, ranks)
    return compare(RunDir(other, other / "weights"), 2, version, ranks)


def full(model: PreTrainedModel, base: Path, ranks: RankThreads, path: Path) -> str:
    """The last rank's disk is full."""

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    version = versions.snapshot(model, base, torch.bfloat16, {}, ranks)
    assert version.digests
    real = os.pwrite
    try:
        with patch("os.pwrite", pwrite if ranks.rank == ranks.size - 1 else real):
            version.write(path, new=True)
    except (OSError, RunError) as error:
        return str(error)
    return ""


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((folder / "plan.json").read_text())
    torch.set_num_threads(1)
    ports = iter(plan["ports"])
    found: dict[str, object] = {}

    @contextmanager
    def world_of(size: int, replicas: int) -> Iterator[World | None]:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(next(ports)),
        }
        if rank >= size:
            yield None
            return
        # the others have layouts of their own before
        yield start_world(False, 60.0, replicas, start_timeout_s=240.0)
        torch.distributed.destroy_process_group()

    for name, (size, replicas) in LAYOUTS.items():
        with world_of(size, replicas) as world:
            if not world:
                continue
            ranks = RankThreads(world, 60.0)
            for family, settings in plan["models"].items():
                if replicas > 1 and "lora" in settings:
                    continue
                base = folder / plan["bases"].get(family, family)
                model = load(str(base), world, **settings)
                if "lora" in settings:
                    draw_adapters(model)
                path = folder / name / family / "weights" / "000001"
                found[f"{name} {family}"] = publish(model, base, ranks, path)
                if name != "1":
                    found[f"{name} {family} as 1"] = replay(
                        model, base, ranks, folder / "1" / family
                    )
            if name == "2":
                model = load(str(folder / "llama"), world)
                found["full"] = full(model, folder / "llama", ranks, folder / "full" / "000001")
                with patch("rl.trainer.store.threads.pid_scope", lambda: f"host{rank}"):
                    found["hosts"] = publish(
                        model,
                        folder / "llama",
                        RankThreads(world, 60.0),
                        folder / "hosts" / "weights" / "000001",
                    )
            if name == "hsdp":
                for kind, placements in {
                    "experts 0": (Shard(0), Shard(0)),
                    "experts 1": (Shard(0), Shard(1)),
                }.items():
                    model = load(str(folder / "qwen3_moe"), world)
                    place_experts(model, placements)
                    found[kind] = publish(
                        model, folder / "qwen3_moe", ranks, folder / kind / "weights" / "000001"
                    )
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
