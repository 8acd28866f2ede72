"""Retraining a run from its log: versions and checkpoints are compared with those of the run, in place of being written."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.config.trainer import ReplayConfig, TrainerConfig, WeightsConfig
from rl.run_dir.checksums import DIGESTS, first_difference, read_digests, verify_checkpoint, verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import weights_file
from rl.run_dir.status import Phase
from rl.trainer.batch_sources import BatchSource, FromLog
from rl.trainer.determinism import differing_conditions
from rl.trainer.parallel.world import World, ranks_without
from rl.trainer.sft.source import FromExamples
from rl.trainer.store import checkpoint
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.trainer.store.versions import Version
from rl.wire.transport import Wait

FOUND = "replay.jsonl"


def origin(replay: ReplayConfig) -> RunDir:
    """The run that is trained again."""
    return RunDir(Path(replay.run), Path(replay.weights))


def open_log(config: RLConfig, replay: ReplayConfig) -> BatchSource:
    """The source of the run's batches: those it has kept; in supervised fine-tuning those that follow from its examples."""
    return FromExamples(config, Path(replay.run) / "data") if config.sft else FromLog(origin(replay))


def record(root: Path, found: dict[str, Any]) -> None:
    """Adds a line, about a version or a checkpoint, to `replay.jsonl` of the scratch directory, which `rl replay` reads."""
    with (root / FOUND).open("a") as file:
        file.write(json.dumps(found) + "\n")


class Comparer(Publisher):
    """Compares each version with what the run has kept of it, in place of writing it."""

    def __init__(self, run_dir: RunDir, config: WeightsConfig, wait: Wait, replayed: RunDir):
        super().__init__(run_dir, config, None, wait)
        self.replayed = replayed

    def _publish(self, number: int, version: Version, checkpoints: Collection[int], since: float) -> None:
        self.wait.about(Phase.COMPARING, number)
        record(self.run_dir.root, {"version": number, **compare(self.replayed, number, version)})


def compare(replayed: RunDir, number: int, version: Version) -> dict[str, Any]:
    """Compares a version with the one of the same number that the run made.

    `kept`: which of its digests and weights there are; `tensor`: the first that differs, with `max_difference` where the weights are
    there; `fault`: of a file of the run that does not hold what was written; `unlike`: the other conditions under which the run made it;
    `deterministic`: whether they make the same bits.
    """
    folder = replayed.weights(number)
    contents, fault = kept_of(replayed.digests(number), folder)
    differing = {kind: first_difference(content["tensors"], version.digests_by(content["hash"])) for kind, content in contents.items()}
    tensor = next(filter(None, differing.values()), None)
    if len(set(differing.values())) > 1 and not fault:
        fault = f"{folder / DIGESTS} and {replayed.digests(number)} differ in {tensor}"
    made_by: dict[str, Any] = next((content.get("made_by", {}) for content in contents.values()), version.made_by)
    return {
        "kept": list(contents),
        "tensor": tensor,
        "max_difference": largest_difference(folder, tensor, version) if tensor and "weights" in contents else None,
        "fault": fault,
        "unlike": differing_conditions(made_by, version.made_by),
        "deterministic": made_by.get("deterministic", False),
    }


def kept_of(digests: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """(the digests of a version by where they were found, the fault of the first damaged file)."""
    contents: dict[str, dict[str, Any]] = {}
    fault = None
    for kind, path in (("digests", digests), ("weights", folder)):
        try:
            if path.exists():
                contents[kind] = read_digests(path) if kind == "digests" else verify_version(path)
        except CorruptFileError as error:
            fault = fault or str(error)
    return contents, fault


def largest_difference(folder: Path, name: str, version: Version) -> float | None:
    """Largest absolute difference of an element of one tensor; None where shapes or names differ."""
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
        """Whether the run has kept a checkpoint of this step."""
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
            record(self.run_dir.root, {"checkpoint": step, "tensor": next(iter(names), None), "ranks": ranks, "fault": fault or None})
