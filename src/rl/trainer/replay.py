"""Retrains a run from its log: versions and checkpoints are compared with the run's instead of
being written."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig, WeightsConfig
from rl.run_dir.checksums import first_difference, read_digests, readable, verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir
from rl.run_dir.safetensors import model_files
from rl.run_dir.status import Phase
from rl.trainer.determinism import differing_conditions
from rl.trainer.parallel.world import World, ranks_without
from rl.trainer.store import checkpoint
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.trainer.store.threads import RankThreads
from rl.trainer.store.versions import PublishedVersion
from rl.wire.transport import Wait

LINES = "replay.jsonl"


def record(root: Path, line: dict[str, Any]) -> None:
    """Appends a line about a version or checkpoint to `replay.jsonl` in the scratch directory,
    which `rl replay` reads."""
    with (root / LINES).open("a") as file:
        file.write(json.dumps(line) + "\n")


class Comparer(Publisher):
    """Compares each version with what the run has kept of it, instead of writing it."""

    def __init__(
        self, run_dir: RunDir, config: WeightsConfig, wait: Wait, world: World, replayed: RunDir
    ):
        super().__init__(run_dir, config, None, wait, world=world)
        self.replayed = replayed

    def _publish(
        self, number: int, version: PublishedVersion, checkpoints: Collection[int], since: float
    ) -> None:
        self.wait.about(Phase.COMPARING, number)
        line = {"version": number, **compare(self.replayed, number, version, self.ranks)}
        self.ranks.of_main(lambda: record(self.run_dir.root, line))


def compare(
    replayed: RunDir, number: int, version: PublishedVersion, ranks: RankThreads
) -> dict[str, Any]:
    """Compares a version with the run's version of the same number. Every rank calls this.

    Returns `kept`: which of the run's digests and weights exist; `tensor`: the first tensor that
    differs, with `max_difference` if the weights exist; `fault`: the fault of a damaged file of the
    run; `unlike`: conditions of the run's version that differ from those here; `deterministic`:
    whether equal conditions give equal bits.
    """
    folder = replayed.weights(number)
    kept, content, fault = ranks.of_main(lambda: kept_of(replayed.digests(number), folder))
    made_by, tensor, difference = content.get("made_by", version.made_by), None, None
    if content:
        ours = version.digests_like(content["tensors"])
        tensor = first_difference(content["tensors"], ours)
    if tensor and "weights" in kept:
        difference = largest_difference(folder, tensor, version, ranks)
    return {
        "kept": kept,
        "tensor": tensor,
        "max_difference": difference,
        "fault": fault,
        "unlike": differing_conditions(made_by, version.made_by),
        "deterministic": made_by.get("deterministic", False),
    }


def kept_of(digests: Path, folder: Path) -> tuple[list[str], dict[str, Any], str | None]:
    """Returns what is sound of a version; the content of the digests of its weights if these are,
    else of its record; and the fault of the first damaged file."""
    kept, content, fault = list[str](), {}, None
    for kind, path, read in (
        ("digests", digests, read_digests),
        ("weights", folder, verify_version),
    ):
        try:
            if path.exists():
                content = read(path)
                kept.append(kind)
        except CorruptFileError as error:
            fault = fault or str(error)
    return kept, content, fault


def largest_difference(
    folder: Path, name: str, version: PublishedVersion, ranks: RankThreads
) -> float | None:
    """Returns the largest absolute difference between elements of one tensor; None if shapes or
    names differ. Every rank calls this."""
    ours = next((tensor for tensor in version.image.tensors if tensor.name == name), None)
    if ours is None:
        return None
    values = version.whole(ours).view(ours.dtype).view(ours.shape)

    def difference() -> float | None:
        with readable(folder) as weights:
            for path in model_files(weights):
                with safe_open(path, "pt") as file:
                    if name in file.keys():  # noqa: SIM118
                        theirs = file.get_tensor(name)
                        if theirs.shape == ours.shape:
                            return float((theirs.double() - values.double()).abs().max())
        return None

    return ranks.of_main(difference)


class StateComparer(Saver):
    """Compares the whole state, float32 weights and optimizer, with the checkpoints that the run
    has kept, instead of saving it."""

    def __init__(
        self, run_dir: RunDir, settings: TrainerConfig, world: World, step: int, replayed: RunDir
    ):
        super().__init__(run_dir, settings, world, step)
        self.replayed = replayed

    def due(self, step: int, last: int) -> bool:
        """Whether the run has a checkpoint of this step."""
        self.newest_started = step
        return bool(self.world.broadcast_int(self.replayed.checkpoint(step).is_dir()))

    def copy(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> Callable[[], None]:
        path = self.replayed.checkpoint(step)
        fault = checkpoint.fault_of(path, self.world)
        names = [] if fault else checkpoint.differing(path, model, optimizer, self.world)
        ranks = ranks_without(self.world, not names)
        if self.world.is_main:
            line = {"checkpoint": step, "tensor": next(iter(names), None), "ranks": ranks}
            record(self.run_dir.root, line | {"fault": fault or None})
        return lambda: None  # nothing is written
