"""The same batches give the same bits: what that depends on, and torch's settings for it."""

import os
from typing import Any

import torch

from rl.config.trainer import TrainerConfig
from rl.trainer.modes import Mode, is_compiled
from rl.trainer.packing import micro_batch_tokens
from rl.trainer.parallel.world import World

ARITHMETIC = "2 (attention in bundles, fewer roundings in norms and rotary embeddings)"
"""The sums and roundings that this code makes of a batch. What changes a bit of a result gets another number here."""
UNRECORDED = {"arithmetic": "1 (attention block by block, norms and rotary embeddings as transformers has them)"}
"""Conditions of versions that were made before these were recorded."""


def is_deterministic(settings: TrainerConfig, device: torch.device) -> bool:
    """trainer.deterministic, or its default for the device."""
    return device.type == "cpu" if settings.deterministic is None else settings.deterministic


def apply(settings: TrainerConfig, device: torch.device) -> None:
    """Has torch choose only operations whose result does not depend on the order in which threads get to it, or leaves it as it is.

    On GPUs an operation that has no such form raises, and names itself. Before the first product on a GPU.
    """
    if not is_deterministic(settings, device):
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own workspaces would be shared between streams
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # that finds bugs, and costs a write of every buffer


def conditions(settings: TrainerConfig, world: World, mode: Mode) -> dict[str, Any]:
    """The conditions that a version's bits depend on, beside base model, configuration and batches. Recorded with its digests."""
    on_gpu = world.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "bfloat16": "" if on_gpu else bfloat16_instructions(),
        "threads": torch.get_num_threads(),
        "ranks": world.size,
        "micro_batch_tokens": micro_batch_tokens(settings, world.device, mode),
        "attention": mode,
        "compiled": is_compiled(settings, mode),
        "deterministic": is_deterministic(settings, world.device),
        "arithmetic": ARITHMETIC,
    }


def bfloat16_instructions() -> str:
    """What this processor has for products of bfloat16: each adds up in an order of its own. Empty without any, or where torch is older."""
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return " ".join(name for name in ("amx_bf16", "avx512_bf16") if found.get(name))


def differing_conditions(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The conditions that differ, as text; empty when all are equal. What was not recorded there, in an older run, is as in UNRECORDED or
    not compared."""
    there = UNRECORDED | there
    return ", ".join(f"{key} {there[key]} there and {here.get(key)} here" for key in there if there[key] != here.get(key))
