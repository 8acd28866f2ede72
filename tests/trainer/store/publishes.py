"""One rank of up to four that publish versions together. test_versions.py forks them with the
arguments RANK and FOLDER; FOLDER holds `plan.json`, and gets the versions and what each rank has
found.
"""

import errno
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rl.run_dir.checksums import first_difference
from rl.run_dir.in_memory import opened
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import tensor_digests
from rl.system.errors import RunError
from rl.trainer.model import lora
from rl.trainer.replay import compare
from rl.trainer.store import versions
from rl.trainer.store.image import LastVersion
from rl.trainer.store.threads import RankThreads
from tests.trainer.layouts import Layout, joined
from tests.trainer.parallel.loads import load

LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "hsdp": (4, 2)}
"""Ranks and replicas."""


def draw_adapters(model: PreTrainedModel) -> None:
    """Gives adapters the same values on any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in lora.trainable(model).values():
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(whole)


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
    ports, found = iter(plan["ports"]), {}
    for name, (size, replicas) in LAYOUTS.items():
        with joined(rank, ports, Layout(size, replicas)) as world:
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
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
