"""Bit-exact reproducibility from the same batches: the conditions it depends on, and torch's
settings for it."""

import os
from typing import Any

import torch

from rl.config.trainer import TrainerConfig
from rl.trainer.data.micro_batch import micro_batch_tokens
from rl.trainer.model.modes import Mode, is_compiled
from rl.trainer.parallel.world import World

ARITHMETIC = "8 (the head sums the exponentials of its logits, and no autograd does)"
"""Version of this code's arithmetic. Any change that alters a bit of a result must change the
number."""


def is_deterministic(settings: TrainerConfig, device: torch.device) -> bool:
    """Returns trainer.deterministic, or its default for the device."""
    return device.type == "cpu" if settings.deterministic is None else settings.deterministic


def apply(settings: TrainerConfig, device: torch.device) -> None:
    """If the run is deterministic, makes torch use only operations whose result does not depend on
    the order of threads.

    On GPUs an operation without a deterministic form raises an error that names it. Call this
    before the first product on a GPU.
    """
    if not is_deterministic(settings, device):
        return
    if device.type == "cuda":
        # cuBLAS's own workspaces would be shared between streams
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # only helps to find bugs, and writes every buffer
    torch.utils.deterministic.fill_uninitialized_memory = False


def conditions(settings: TrainerConfig, world: World, mode: Mode) -> dict[str, Any]:
    """Returns the conditions, besides base model, configuration and batches, that a version's
    bits depend on. Recorded with its digests."""
    on_gpu = world.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(world.device)
        if on_gpu
        else f"cpu {torch.backends.cpu.get_cpu_capability()}",
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
    """Returns this processor's bfloat16 product instructions, which differ in the order of sums;
    empty if none or if torch is older."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return " ".join(name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name))


def differing_conditions(recorded: dict[str, Any], here: dict[str, Any]) -> str:
    """Returns the conditions that differ, as text; empty if all are equal. Conditions that are
    not in `recorded` are not compared."""
    return ", ".join(
        f"{key} {recorded[key]} there and {here.get(key)} here"
        for key in recorded
        if recorded[key] != here.get(key)
    )
