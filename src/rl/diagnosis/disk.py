"""Estimates the disk space of a run: policy versions, checkpoints, batches, rollouts, token
logs, spans."""

import contextlib
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rl.config.orchestrator import RetentionConfig
from rl.config.run import RLConfig
from rl.config.trainer import CheckpointConfig, LoraConfig, WeightsConfig
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.safetensors import model_files, read_header
from rl.run_dir.spans import MAX_BYTES as MAX_SPANS_BYTES
from rl.system.terminal import size
from rl.wire.batch_file import PLAIN_STEPS

BYTES_PER_WEIGHT = {"bfloat16": 2, "float32": 4}
CHECKPOINT_BYTES = 12
"""Bytes per weight: float32 and AdamW's two moments."""
TOKEN_BYTES = 26
"""Bytes per token in a batch file (id, mask, log-probability, advantage) and, as text, in
rollouts/."""
TOKEN_LOG_BYTES = 7
"""Bytes per token in a token log: log-probability, entropy, flags."""
SPAN_FILES = 4
"""Trainer, orchestrator, inference and a worker; few runs fill more files."""
SPARE = 1.1
"""Factor over the estimate that a disk must have free; logs, metrics and evals are not
estimated."""
KEYS = "trainer.weights, trainer.checkpoint, orchestrator.batches: keep_last; trainer.token_log"
REMEDY = f"free some space, choose another output_dir, or keep less ({KEYS})"


@dataclass(frozen=True)
class Need:
    """Disk space that a run needs on one file system."""

    place: Path
    free: int
    parts: dict[str, int]
    """Bytes by kind of file."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total * SPARE <= self.free

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {size(count)}" for what, count in self.parts.items())
        return f"up to {size(self.total)} in {self.place} ({parts}), {size(self.free)} are free"


def kept_text(config: RLConfig) -> str:
    """Returns which of its files a run keeps."""

    def newest(settings: RetentionConfig | CheckpointConfig | WeightsConfig) -> str:
        every = f" and every {settings.keep_every}th" if settings.keep_every else ""
        return f"the newest {settings.keep_last}{every}" if settings.keep_last else "all"

    parts = {
        "checkpoints": newest(config.trainer.checkpoint),
        "policy versions": newest(config.trainer.weights),
    }
    if config.trainer.weights.keep_last:
        parts["policy versions"] += (
            ", those of checkpoints, those being written, and the best of each evaluation"
        )
    if config.sft is None:
        batches, rollouts = config.orchestrator.batches, config.orchestrator.rollouts
        needed = " and those since the oldest checkpoint" if batches.keep_last else ""
        tokens = config.trainer.token_log.max_gib
        logs = {0.0: "none", math.inf: "all"}.get(tokens, f"the newest {tokens:g} GiB")
        parts |= {
            "batches": f"{newest(batches)}{needed}",
            "rollouts": f"{newest(rollouts)}, as gzip after {PLAIN_STEPS} steps",
        }
        parts |= {"token logs": logs}
    return "keeps: " + "; ".join(f"{what}: {which}" for what, which in parts.items())


def disk_estimate(config: RLConfig, model_folder: Path) -> list[str]:
    """Returns a line per file system with the most space the run will use, and a warning where
    that does not fit."""
    lines = [kept_text(config)]
    for need in needs(config, model_folder):
        lines.append(f"disk: {need}")
        if not need.fits:
            lines.append(f"warning: {need.place} may become full: {REMEDY}")
    return lines


def needs(config: RLConfig, model_folder: Path) -> list[Need]:
    """Returns what the run will add, by file system; existing files are subtracted, as their
    space is no longer free."""
    run_dir, trainer = config.run_dir, config.trainer
    shapes = tensor_shapes(model_folder)
    weights = adapter_weights(shapes, trainer.lora) if trainer.lora else sum(map(math.prod, shapes))

    def kept(settings: CheckpointConfig | WeightsConfig, others: int) -> int:
        every = config.max_steps // settings.keep_every if settings.keep_every else 0
        return min(config.max_steps, settings.keep_last + every + others)

    checkpoints = kept(trainer.checkpoint, 1)  # the one being written
    # Plus two that are written before an older one is deleted, those of the checkpoint and of the
    # one in progress, each evaluation's best.
    versions = kept(trainer.weights, 4 + len(config.orchestrator.eval))
    parts = {
        f"{checkpoints} checkpoints": checkpoints * weights * CHECKPOINT_BYTES
        - on_disk(run_dir.checkpoints)
    }
    version = weights * BYTES_PER_WEIGHT[config.model.dtype]
    published = {f"{versions} policy versions": versions * version - on_disk(run_dir.weights_dir)}
    if config.sft is None:
        steps = min(config.orchestrator.batches.keep_last or config.max_steps, config.max_steps)
        parts[f"{steps} batches"] = (steps - len(numbers(run_dir.batches, ".batch"))) * batch_bytes(
            config, run_dir
        )
        parts["token logs"] = token_log_bytes(config) - on_disk(run_dir.tokens_dir)
        parts["spans"] = SPAN_FILES * 2 * MAX_SPANS_BYTES - on_disk(run_dir.spans)
    places = [(run_dir.root, parts), (run_dir.weights_dir, published)]
    if existing(run_dir.root).stat().st_dev == existing(run_dir.weights_dir).stat().st_dev:
        places = [(run_dir.root, published | parts)]
    return [
        Need(
            place, shutil.disk_usage(existing(place)).free, {k: max(0, v) for k, v in what.items()}
        )
        for place, what in places
    ]


def token_log_bytes(config: RLConfig) -> int:
    """Returns the most bytes of all token logs: the configured limit, or less if full contexts
    in all steps need less."""
    tokens = config.max_steps * config.orchestrator.batch_size * config.model.max_model_len
    return int(min(config.trainer.token_log.max_gib * 2**30, tokens * TOKEN_LOG_BYTES))


def tensor_shapes(folder: Path) -> list[list[int]]:
    """Returns the shapes of all tensors of a model from its safetensors headers. Raises
    CorruptFileError."""
    return [
        list(tensor.shape) for path in model_files(folder) for tensor in read_header(path).values()
    ]


def adapter_weights(shapes: list[list[int]], lora: LoraConfig) -> int:
    """Returns the most adapter weights: adapters on every matrix except the embedding and
    matrices as large."""
    # also of stacked experts
    matrices = [
        shape[-2:] for shape in shapes if len(shape) in (2, 3) for _ in range(math.prod(shape[:-2]))
    ]
    largest = max((max(shape) for shape in matrices), default=0)
    return sum(lora.rank * sum(shape) for shape in matrices if max(shape) < largest)


def batch_bytes(config: RLConfig, run_dir: RunDir) -> int:
    """Returns the bytes of a step's batch and rollouts: the mean of the newest, or before the
    first the size of full contexts."""
    if newest := numbers(run_dir.batches, ".batch")[-10:]:
        files = [path(step) for path in (run_dir.batch, run_dir.rollouts) for step in newest]
        return sum(path.stat().st_size for path in files if path.exists()) // len(newest)
    return config.orchestrator.batch_size * config.model.max_model_len * TOKEN_BYTES


def on_disk(folder: Path) -> int:
    """Returns the bytes of the files below a folder, hard-linked ones once; 0 if it does not
    exist."""
    sizes = dict[int, int]()
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                there = os.lstat(os.path.join(inside, name))
                sizes[there.st_ino] = there.st_size
    return sum(sizes.values())


def existing(path: Path) -> Path:
    """Returns the path, or its nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
