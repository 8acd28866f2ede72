"""Divides the GPUs and cores of this machine between trainer and inference. Pure functions without
torch.

GPUs are numbered as this process sees them: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1, as
everywhere in CUDA.
"""

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

from rl.config.base import as_ids
from rl.config.run import RLConfig
from rl.system.errors import ConfigError
from rl.system.machine import Machine

SHARED_GPU_MEMORY = 0.35
"""vLLM's fraction of a GPU shared with the trainer, whose weights, gradients and two float32
moments need most of the rest."""
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc settings that keep freed memory. Without them page faults took 90 s of system time in a
benchmark (FSDP2, 135M, on CPU)."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Lets one thread reuse the memory of replaced weights that another thread has freed."""
SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long OpenMP threads spin before they sleep: some 10 us, which leaves vLLM the cores it
needs. A step has ten thousand small operators: with threads that sleep at once
(OMP_WAIT_POLICY=PASSIVE) a step of 2.4 s took 3.3 s."""
PARALLEL = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
IMPLIED = (PARALLEL[0], "gpu_memory_utilization")
"""vLLM's arguments that follow from its GPUs."""

FOR_GPUS = (
    "`uv sync --no-group cpu --group gpu`, and `uv run --no-group cpu --group gpu` in place of "
    "each `uv run`"
)


@dataclass(frozen=True)
class Share:
    """The devices of one process."""

    gpus: list[int]
    """Empty if it runs on the CPU."""
    cores: list[int]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """The division of the machine."""

    trainer: Share
    inference: Share
    ranks: int
    vllm: dict[str, Any]
    """Engine arguments implied by the division, except those that the user set."""


def pick(
    key: str,
    asked: int | list[int] | None,
    available: list[int],
    kind: str,
    *,
    from_end: bool = False,
) -> list[int] | None:
    """Returns the devices that setting `key`, a count or a list of ids, requests; None if it is
    not set. Raises ConfigError."""
    if asked is None:
        return None
    if isinstance(asked, list):
        missing = sorted(set(asked) - set(available))
        if missing or len(set(asked)) != len(asked) or not asked:
            raise ConfigError(
                f"{key} = {asked}\n    there are {len(available)} {kind} here: {available}; "
                "name each one once"
            )
        return asked
    if not 0 <= asked <= len(available):
        raise ConfigError(
            f"{key} = {asked}\n    there are {len(available)} {kind} here; ask for at most "
            "that many"
        )
    return available[len(available) - asked :] if from_end else available[:asked]


def split_gpus(config: RLConfig, box: Machine) -> tuple[list[int], list[int]]:
    """Returns (GPUs of the trainer, GPUs of inference). By default the trainer gets one and
    inference the rest; a single GPU is shared."""
    every = list(range(len(box.gpus)))
    trainer_asked, inference_asked = config.trainer.gpus, config.inference.gpus
    if trainer_asked is None and every:
        trainer_asked = config.trainer.ranks or (1 if config.plays else len(every))
    if not config.plays:  # there is no inference
        return pick("trainer.gpus", trainer_asked, every, "GPUs") or [], []
    if config.orchestrator.inference_urls or (inference_asked is None and not box.gpu_inference):
        inference_asked = 0

    def without(taken: int | list[int] | None) -> list[int]:
        """Returns the GPUs that the other process does not have; the only GPU of a machine is
        shared."""
        return [gpu for gpu in every if len(every) == 1 or gpu not in as_ids(taken)]

    named = isinstance(trainer_asked, list)
    trainer = (
        pick(
            "trainer.gpus",
            trainer_asked,
            every if named else without(inference_asked),
            "GPUs" if named else "free GPUs",
        )
        or []
    )
    if isinstance(inference_asked, list):
        return trainer, pick("inference.gpus", inference_asked, every, "GPUs") or []
    free = without(trainer)
    if every and not free and inference_asked is None:
        remedy = (
            "takes all of them and inference has none (only the single GPU of a box is shared): "
            "leave it one, or give inference.gpus = 0"
        )
        raise ConfigError(f"trainer.gpus = {config.trainer.gpus}\n    {remedy}")
    inference = pick("inference.gpus", inference_asked, free, "free GPUs", from_end=True)
    return trainer, free if inference is None else inference


def check_build(config: RLConfig, box: Machine) -> str:
    """Returns a warning if inference runs on the CPU despite GPUs, because the installed vLLM is
    built for CPUs; else empty.

    Raises ConfigError if `inference.gpus` nevertheless requests GPUs.
    """
    if (
        box.gpu_inference
        or not box.gpus
        or not config.starts_inference
        or config.inference.gpus == 0
    ):
        return ""
    if config.inference.gpus:
        raise ConfigError(
            f"inference.gpus = {config.inference.gpus}\n    the installed vLLM is the one "
            f"for CPUs: {FOR_GPUS}"
        )
    return (
        "warning: the installed vLLM is the one for CPUs, so inference runs on the CPU although "
        f"there are GPUs: {FOR_GPUS}"
    )


def split(config: RLConfig, box: Machine) -> Split:
    """Divides the machine. Raises ConfigError for settings that it cannot satisfy."""
    trainer_gpus, inference_gpus = split_gpus(config, box)
    ranks = config.trainer.ranks or len(trainer_gpus) or 1
    if trainer_gpus and ranks != len(trainer_gpus):
        raise ConfigError(
            f"trainer.ranks = {ranks}\n    must be the number of trainer GPUs, "
            f"{len(trainer_gpus)}; leave it out"
        )
    for key in ("dp_replicate", "context_parallel", "expert_parallel"):
        value, copies = (
            getattr(config.trainer, key),
            config.trainer.dp_replicate if key == "expert_parallel" else 1,
        )
        if ranks % (value * copies):
            of = f" / trainer.dp_replicate, {ranks // copies}" if copies > 1 else f", {ranks}"
            remedy = (
                f"must divide the trainer's ranks{of} (one per GPU; trainer.ranks without GPUs): "
                "change either of them"
            )
            raise ConfigError(f"trainer.{key} = {value}\n    {remedy}")
    trainer_cores = (
        pick("trainer.cpus", config.trainer.cpus or None, box.cores, "cores") or box.cores
    )
    inference_cores = (
        pick("inference.cpus", config.inference.cpus or None, box.cores, "cores", from_end=True)
        or box.cores
    )
    trainer_env = {"CUDA_VISIBLE_DEVICES": ",".join(box.gpus[gpu] for gpu in trainer_gpus)}
    trainer_env["OMP_NUM_THREADS"] = str(max(1, threads(trainer_cores, box) // ranks))
    inference_env = {"CUDA_VISIBLE_DEVICES": ",".join(box.gpus[gpu] for gpu in inference_gpus)}
    if not trainer_gpus:
        trainer_env |= MALLOC | SPIN
    if not inference_gpus:
        # otherwise vLLM uses one thread
        inference_env["OMP_NUM_THREADS"] = str(threads(inference_cores, box))
        inference_env |= MALLOC | ONE_ARENA
    return Split(
        trainer=Share(trainer_gpus, trainer_cores, trainer_env),
        inference=Share(inference_gpus, inference_cores, inference_env),
        ranks=ranks,
        vllm=engine_arguments(
            config.inference.vllm,
            inference_gpus,
            shared=bool(set(trainer_gpus) & set(inference_gpus)),
        ),
    )


def threads(cores: list[int], box: Machine) -> int:
    """Returns the number of threads that can run at once on `cores` within the container's
    quota."""
    return max(
        1, min(len(cores), math.floor(box.quota) if math.isfinite(box.quota) else len(cores))
    )


def engine_arguments(given: dict[str, Any], gpus: list[int], *, shared: bool) -> dict[str, Any]:
    """Returns vLLM's arguments implied by its GPUs: its fraction of a shared one, and as many
    data-parallel replicas as fit."""
    given = {key.replace("-", "_"): value for key, value in given.items()}
    implied: dict[str, Any] = {}
    if shared and "gpu_memory_utilization" not in given:
        implied["gpu_memory_utilization"] = SHARED_GPU_MEMORY
    if not gpus:
        return implied
    used = math.prod(int(given.get(key, 1)) for key in PARALLEL)
    if used > len(gpus):
        sizes = ", ".join(f"{key} = {given[key]}" for key in PARALLEL if key in given)
        raise ConfigError(
            f"inference.vllm: {sizes}\n    needs {used} GPUs, inference has {len(gpus)}; see "
            "--inference-gpus"
        )
    if PARALLEL[0] not in given and len(gpus) % used:
        remedy = (
            f"must be a multiple of {used}, the GPUs of one replica (inference.vllm): set it, or "
            "trainer.gpus"
        )
        raise ConfigError(f"inference.gpus: {len(gpus)}\n    {remedy}")
    if PARALLEL[0] not in given and len(gpus) > used:
        implied[PARALLEL[0]] = len(gpus) // used
    return implied


def implied_again(config: RLConfig, stored: RLConfig, box: Machine) -> RLConfig:
    """Returns a configuration without what `write_into` has added to the stored one that it
    comes from, so that this machine's GPUs imply it. GPUs themselves stay as they are if this
    machine has them: the user may have chosen them."""
    config = config.model_copy(deep=True)
    trainer, inference = as_ids(stored.trainer.gpus), as_ids(stored.inference.gpus)
    if config.trainer.ranks == stored.trainer.ranks == (len(trainer) or 1):
        config.trainer.ranks = None
    with contextlib.suppress(ConfigError):
        own = {key: value for key, value in stored.inference.vllm.items() if key not in IMPLIED}
        for key, value in engine_arguments(
            own, inference, shared=bool(set(trainer) & set(inference))
        ).items():
            if config.inference.vllm.get(key) == stored.inference.vllm.get(key) == value:
                del config.inference.vllm[key]
        if not box.gpus or max([*trainer, *inference], default=0) < len(box.gpus):
            return config
        before = Machine(
            [str(number) for number in range(max([*trainer, *inference]) + 1)], box.cores
        )
        default = stored.model_copy(deep=True)
        default.trainer.gpus = default.inference.gpus = default.trainer.ranks = None
        if split_gpus(default, before) == (trainer, inference) and config.trainer.gpus == trainer:
            config.trainer.gpus = None
        default.trainer.gpus = stored.trainer.gpus
        if (
            split_gpus(default, before)[1] == inference
            and config.inference.gpus == stored.inference.gpus
        ):
            config.inference.gpus = None
    return config


def unused(config: RLConfig, division: Split, box: Machine) -> str:
    """Returns a note about GPUs that no process of the run has; empty if there are none."""
    left = [
        str(gpu)
        for gpu in range(len(box.gpus))
        if gpu not in [*division.trainer.gpus, *division.inference.gpus]
    ]
    if not left or config.is_remote:
        return ""
    given = f"trainer.gpus = {config.trainer.gpus}, inference.gpus = {config.inference.gpus}"
    return (
        f"GPU{'s' * (len(left) > 1)} {', '.join(left)} of this machine "
        f"{'are' if len(left) > 1 else 'is'} not used by this run: {given}"
    )


def write_into(config: RLConfig, division: Split) -> RLConfig:
    """Returns the configuration with the division written into it, so that a process can be
    restarted from config.toml alone."""
    config = config.model_copy(deep=True)
    config.trainer.gpus = division.trainer.gpus or 0
    config.trainer.ranks = division.ranks
    config.inference.gpus = division.inference.gpus or 0
    for section, share in (
        (config.trainer, division.trainer),
        (config.inference, division.inference),
    ):
        section.cpus = share.cores if section.cpus else None
    config.inference.vllm = {**config.inference.vllm, **division.vllm}
    return config
