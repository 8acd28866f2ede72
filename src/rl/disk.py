"""How much disk a run will use, said before it starts: policy versions, checkpoints, batches, rollouts."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from rl.config import RLConfig
from rl.digests import places_of_tensors
from rl.run_dir import RunDir, numbered
from rl.trainer.config import CheckpointConfig, LoraConfig, WeightsConfig

BYTES_PER_WEIGHT = {"bfloat16": 2, "float32": 4}
CHECKPOINT_BYTES = 12
"""A weight in float32 and AdamW's two means."""
TOKEN_BYTES = 26
"""A token in a batch file: id, mask, log-probability, advantage; and its text in rollouts/."""
SPARE = 1.1
"""Below this much more than is needed a disk counts as too small: logs, metrics and evals have no estimate."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Need:
    """What a run will hold on one file system."""

    place: Path
    free: int
    parts: dict[str, int]
    """Bytes by what they are."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{what} {size(count)}" for what, count in self.parts.items())
        return f"disk: up to {size(self.total)} in {self.place} ({parts}); {size(self.free)} are free"


def disk_estimate(config: RLConfig, model_folder: Path) -> list[str]:
    """What a run will use at most, a line for each file system, and a warning where it does not fit."""
    lines = []
    for need in needs(config, model_folder):
        lines.append(str(need))
        if need.total * SPARE > need.free:
            remedy = (
                "free some, choose another output_dir, or keep less (trainer.weights, trainer.checkpoint, orchestrator.batches: keep_last)"
            )
            lines.append(f"warning: {need.place} may get full: {remedy}")
    return lines


def needs(config: RLConfig, model_folder: Path) -> list[Need]:
    """What the run adds, by file system: what is there already is not free any more."""
    run_dir, trainer = config.run_dir, config.trainer
    shapes = tensor_shapes(model_folder)
    weights, trained = sum(map(math.prod, shapes)), sum(map(math.prod, shapes))
    if trainer.lora:
        weights = trained = adapter_weights(shapes, trainer.lora)
    versions, checkpoints = kept_versions(trainer.weights, config), kept_checkpoints(trainer.checkpoint, config)
    version, checkpoint = weights * BYTES_PER_WEIGHT[config.model.dtype], trained * CHECKPOINT_BYTES
    parts = {f"{checkpoints} checkpoints": checkpoints * checkpoint - on_disk(run_dir.checkpoints)}
    published = {f"{versions} policy versions": versions * version - on_disk(run_dir.weights_dir)}
    if config.sft is None:
        orchestrator = config.orchestrator
        steps = min(orchestrator.batches.keep_last or config.max_steps, config.max_steps)
        batch = batch_bytes(config, run_dir)
        parts[f"{steps} batches"] = max(0, steps - len(numbered(run_dir.batches, ".batch"))) * batch
    places = [(run_dir.root, parts), (run_dir.weights_dir, published)]
    if device(run_dir.root) == device(run_dir.weights_dir):
        places = [(run_dir.root, published | parts)]
    return [Need(place, shutil.disk_usage(existing(place)).free, {k: max(0, v) for k, v in what.items()}) for place, what in places]


def tensor_shapes(folder: Path) -> list[list[int]]:
    """Of all tensors of a model, from the headers of its safetensors files. Raises CorruptFileError."""
    return [place.shape for path in sorted(folder.glob("*.safetensors")) for place in places_of_tensors(path).values()]


def adapter_weights(shapes: list[list[int]], lora: LoraConfig) -> int:
    """Of adapters on every matrix but those as large as the embedding, which are none of theirs; more than on some of them."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    largest = max((max(shape) for shape in matrices), default=0)
    return sum(lora.rank * sum(shape) for shape in matrices if max(shape) < largest)


def kept_versions(settings: WeightsConfig, config: RLConfig) -> int:
    """With the one that is written, the newest checkpoint's, and the best of each evaluation."""
    every = config.max_steps // settings.keep_every if settings.keep_every else 0
    return min(config.max_steps, settings.keep_last + 2 + len(config.orchestrator.eval) + every)


def kept_checkpoints(settings: CheckpointConfig, config: RLConfig) -> int:
    """With the one that is written."""
    every = config.max_steps // settings.keep_every if settings.keep_every else 0
    return min(config.max_steps, settings.keep_last + 1 + every)


def batch_bytes(config: RLConfig, run_dir: RunDir) -> int:
    """Of a step's batch and rollouts: as those that are there, else as much as full contexts would be."""
    there = list(numbered(run_dir.batches, ".batch").values())[-10:]
    if there:
        rollouts = [run_dir.rollouts(int(path.stem)) for path in there]
        return sum(path.stat().st_size for path in [*there, *(path for path in rollouts if path.exists())]) // len(there)
    return config.orchestrator.batch_size * config.model.max_model_len * TOKEN_BYTES


def on_disk(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def device(path: Path) -> int:
    return existing(path).stat().st_dev


def size(count: float) -> str:
    """`1.5 GiB` for 1610612736."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {UNITS[unit]}" if unit else f"{count:.0f} B"
