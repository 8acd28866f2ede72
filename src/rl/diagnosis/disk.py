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
SPARE = 1.1
"""Factor over the estimate that a disk must have free; logs, metrics and evals are not
estimated."""
KEYS = "trainer.weights, trainer.checkpoint, orchestrator.batches: keep_last; trainer.token_log"
REMEDY = f"free some space, choose another output_dir, or keep less ({KEYS})"


@dataclass(frozen=True)
class Need:
    """Disk space that a run needs on one file system."""

    folder: Path
    free: int
    files: dict[str, int]
    """Bytes by kind of file."""

    @property
    def total(self) -> int:
        return sum(self.files.values())

    @property
    def fits(self) -> bool:
        return self.total * SPARE <= self.free

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.files.items())
        return f"up to {size(self.total)} in {self.folder} ({kinds}), {size(self.free)} are free"


def kept_text(config: RLConfig) -> str:
    """Returns which of its files a run keeps."""

    def newest(settings: RetentionConfig | CheckpointConfig | WeightsConfig) -> str:
        every = f" and every {settings.keep_every}th" if settings.keep_every else ""
        return f"the newest {settings.keep_last}{every}" if settings.keep_last else "all"

    trainer, orchestrator = config.trainer, config.orchestrator
    others = ", those of checkpoints, those being written, and the best of each evaluation"
    kinds = [
        f"checkpoints: {newest(trainer.checkpoint)}",
        f"policy versions: {newest(trainer.weights)}{others if trainer.weights.keep_last else ''}",
    ]
    if config.kind != "sft":
        needed = " and those since the oldest checkpoint" if orchestrator.batches.keep_last else ""
        tokens = trainer.token_log.max_gib
        logs = {0.0: "none", math.inf: "all"}.get(tokens, f"the newest {tokens:g} GiB")
        kinds += [
            f"batches: {newest(orchestrator.batches)}{needed}",
            f"rollouts: {newest(orchestrator.rollouts)}, as gzip after {PLAIN_STEPS} steps",
            f"token logs: {logs}",
        ]
    return f"keeps: {'; '.join(kinds)}"


def disk_estimate(config: RLConfig, model_folder: Path) -> list[str]:
    """Returns a line per file system with the most space the run will use, and a warning where
    that does not fit."""
    lines = [kept_text(config)]
    for need in needs(config, model_folder):
        lines.append(f"disk: {need}")
        if not need.fits:
            lines.append(f"warning: {need.folder} may become full: {REMEDY}")
    return lines


def needs(config: RLConfig, model_folder: Path) -> list[Need]:
    """Returns what the run will add, by file system; existing files are subtracted, as their
    space is no longer free."""
    run_dir, trainer, steps = config.run_dir, config.trainer, config.max_steps
    shapes = tensor_shapes(model_folder)
    weights = adapter_weights(shapes, trainer.lora) if trainer.lora else sum(map(math.prod, shapes))

    def kept(settings: CheckpointConfig | WeightsConfig, others: int) -> int:
        every = steps // settings.keep_every if settings.keep_every else 0
        return min(steps, settings.keep_last + every + others)

    checkpoints = kept(trainer.checkpoint, 1)  # the one being written
    # Plus two that are written before an older one is deleted, those of the checkpoint and of the
    # one in progress, each evaluation's best.
    versions = kept(trainer.weights, 4 + len(config.orchestrator.eval))
    version = weights * BYTES_PER_WEIGHT[config.model.dtype]
    published = {f"{versions} policy versions": versions * version - on_disk(run_dir.weights_dir)}
    saved = checkpoints * weights * CHECKPOINT_BYTES - on_disk(run_dir.checkpoints)
    others = {f"{checkpoints} checkpoints": saved}
    if config.kind != "sft":
        batches = min(config.orchestrator.batches.keep_last or steps, steps)
        new_batches = batches - len(numbers(run_dir.batches, ".batch"))
        tokens = config.orchestrator.batch_size * config.model.max_model_len
        logs = min(trainer.token_log.max_gib * 2**30, steps * tokens * TOKEN_LOG_BYTES)
        others[f"{batches} batches"] = new_batches * (batch_bytes(run_dir) or tokens * TOKEN_BYTES)
        others["token logs"] = int(logs) - on_disk(run_dir.tokens_dir)
    folders = {run_dir.root: others, run_dir.weights_dir: published}
    if existing(run_dir.root).stat().st_dev == existing(run_dir.weights_dir).stat().st_dev:
        folders = {run_dir.root: published | others}
    return [
        Need(
            folder,
            shutil.disk_usage(existing(folder)).free,
            {kind: max(0, count) for kind, count in kinds.items()},
        )
        for folder, kinds in folders.items()
    ]


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


def batch_bytes(run_dir: RunDir) -> int:
    """Returns the mean bytes of the newest steps' batches and rollouts; 0 before the first."""
    newest = numbers(run_dir.batches, ".batch")[-10:]
    files = [path(step) for path in (run_dir.batch, run_dir.rollouts) for step in newest]
    return sum(path.stat().st_size for path in files if path.exists()) // max(1, len(newest))


def on_disk(folder: Path) -> int:
    """Returns the bytes of the files below a folder, hard-linked ones once; 0 if it does not
    exist."""
    sizes = dict[int, int]()
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                stat = os.lstat(os.path.join(inside, name))
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def existing(path: Path) -> Path:
    """Returns the path, or its nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
