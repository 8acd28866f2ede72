"""Retraining a run from its log: its batches come in, and in place of publisher and checkpoints stand those who compare.

What they find goes to `replay.jsonl` of the scratch directory, a line for each version and checkpoint; `rl replay` reads it. The training
in between is that of any run.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.digests import DIGESTS, first_difference, read_digests, verify_checkpoint, verify_version, weights_file
from rl.files import CorruptFileError
from rl.messages import TrainBatch
from rl.run_dir import RunDir
from rl.trainer import checkpoint
from rl.trainer.config import ReplayConfig, TrainerConfig, WeightsConfig
from rl.trainer.data import BatchSource, FromLog
from rl.trainer.determinism import unlike
from rl.trainer.distributed import World, ranks_without
from rl.trainer.publisher import Publisher
from rl.trainer.saver import Saver
from rl.trainer.sft import FromExamples
from rl.trainer.weights import Version
from rl.transport import Wait

FOUND = "replay.jsonl"


def origin(replay: ReplayConfig) -> RunDir:
    """The run that is trained again."""
    return RunDir(Path(replay.run), Path(replay.weights))


def open_log(config: RLConfig, replay: ReplayConfig) -> BatchSource:
    """The run's batches: those it has kept, or of supervised fine-tuning those that follow from its examples."""
    return ExamplesUntil(config, Path(replay.run) / "data", replay.until) if config.sft else FromLog(origin(replay), replay.until)


class ExamplesUntil(FromExamples):
    """The first batches of a run of supervised fine-tuning, without its validation."""

    def __init__(self, config: RLConfig, data: Path, until: int):
        super().__init__(config, data)
        self.until = until

    def receive(self, step: int) -> TrainBatch | None:
        return super().receive(step) if step <= self.until else None

    def validation(self, step: int) -> list[TrainBatch]:
        return []


def note(root: Path, found: dict[str, Any]) -> None:
    """Adds a line to what was found."""
    with (root / FOUND).open("a") as file:
        file.write(json.dumps(found) + "\n")


class Comparer(Publisher):
    """Compares each version with what the run has kept of it, in place of writing it."""

    def __init__(self, run_dir: RunDir, config: WeightsConfig, wait: Wait, replayed: RunDir):
        super().__init__(run_dir, config, None, wait)
        self.replayed = replayed

    def _publish(self, number: int, version: Version, checkpoints: Collection[int], since: float) -> None:
        self.wait.about(f"comparing version {number}")
        note(self.run_dir.root, {"version": number, **compare(self.replayed, number, version)})


def compare(replayed: RunDir, number: int, version: Version) -> dict[str, Any]:
    """What a version is against the one of the same number that the run made.

    `kept`: what there is of it; `tensor`: the first that differs, with `max_difference` where the weights are there; `fault`: a file of the
    run that does not hold what was written; `unlike`: under which other conditions the run made it, and whether `deterministic`.
    """
    folder = replayed.weights(number)
    contents, fault = kept_of(replayed.digests(number), folder)
    differing = {kind: first_difference(content["tensors"], version.digests) for kind, content in contents.items()}
    tensor = next(filter(None, differing.values()), None)
    if len(set(differing.values())) > 1 and not fault:
        fault = f"{folder / DIGESTS} and {replayed.digests(number)} differ in {tensor}"
    made_by: dict[str, Any] = next((content.get("made_by", {}) for content in contents.values()), version.made_by)
    return {
        "kept": list(contents),
        "tensor": tensor,
        "max_difference": largest_difference(folder, tensor, version) if tensor and "weights" in contents else None,
        "fault": fault,
        "unlike": unlike(made_by, version.made_by),
        "deterministic": made_by.get("deterministic", False),
    }


def kept_of(record: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """(the digests of a version by where they stand, the first file that is damaged)."""
    contents: dict[str, dict[str, Any]] = {}
    fault = None
    for kind, path in (("digests", record), ("weights", folder)):
        try:
            if path.exists():
                contents[kind] = read_digests(path) if kind == "digests" else verify_version(path)
        except CorruptFileError as error:
            fault = fault or str(error)
    return contents, fault


def largest_difference(folder: Path, name: str, version: Version) -> float | None:
    """Of one tensor, largest absolute difference of an element; None where shapes or names differ."""
    with safe_open(weights_file(folder), "pt") as file:
        if name not in version.named or name not in file.keys():  # noqa: SIM118
            return None
        theirs, ours = file.get_tensor(name), version.named[name]
    if theirs.shape != ours.shape:
        return None
    return float((theirs.double() - ours.double()).abs().max())


class StateComparer(Saver):
    """Compares the whole state, float32 weights and optimizer, with the checkpoints that the run has kept, in place of saving it."""

    def __init__(self, run_dir: RunDir, settings: TrainerConfig, world: World, step: int, replayed: RunDir):
        super().__init__(run_dir, settings, world, step)
        self.replayed = replayed

    def due(self, step: int, last: int) -> bool:
        """Every checkpoint counts, and none is made at the end."""
        self.began = step
        return bool(self.world.broadcast_int(self.replayed.checkpoint(step).is_dir()))

    def save(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> None:
        path = self.replayed.checkpoint(step)
        fault = ""
        if self.world.is_main:
            try:
                verify_checkpoint(path)
            except CorruptFileError as error:
                fault = str(error)
        fault = self.world.broadcast_bytes(fault.encode()).decode()
        names = [] if fault else checkpoint.differing(path, model, optimizer, self.world)
        ranks = ranks_without(self.world, not names)
        if self.world.is_main:
            note(self.run_dir.root, {"checkpoint": step, "tensor": next(iter(names), None), "ranks": ranks, "fault": fault or None})
