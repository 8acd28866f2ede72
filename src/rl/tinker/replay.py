"""The replay of a model that a client has trained: its calls are executed again, and the answers
and versions compared with the first."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rl.run_dir.checksums import first_difference, read_digests
from rl.run_dir.files import CorruptFileError, remove_directory
from rl.run_dir.paths import RunDir
from rl.system.errors import GIVE_UP, RunError
from rl.tinker.log import Log
from rl.tinker.places import PATH, Places
from rl.tinker.requests import LoadWeights
from rl.tinker.training import FAILED, MAKING, Training, decode, was_left_out
from rl.wire.training_calls import CallError

EXACT = ("forward_backward", "optim_step")
"""Calls whose answers are numbers alone, which must be the same."""
UNCHANGING = ("save_weights_for_sampler", "save_weights_external")


def copy_calls(root: RunDir, to: Places) -> int:
    """Copies the calls of the model in the directory `root`, whose client may go on, and the states
    of other models that they load.

    Returns the number of its versions. Raises RunError if there is none.
    """
    there, copy = Places(RunDir(root.root.parents[1], root.root)), to.models / root.root.name
    copy.mkdir(parents=True)
    shutil.copyfile(root.root / "calls.log", copy / "calls.log")
    log, versions = Log(copy / "calls.log"), 0
    for number in log.answers:
        call, failed = log.call_of(number), log.answer_of(number).body.startswith(FAILED)
        versions += not failed and call.kind in ("optim_step", "load_weights")
        if (
            call.kind == "load_weights"
            and not failed
            and (path := PATH.fullmatch(decode(call.body, LoadWeights).path))
        ):
            source, target = there.saved(*path.groups()), to.saved(*path.groups())
            if source.is_dir() and source.parents[2] != root.root:
                shutil.copytree(source, target, dirs_exist_ok=True)
                shutil.copyfile(there.record(*path.groups()), to.record(*path.groups()))
    log.close()
    if not versions:
        raise RunError(
            f"{root.root}: its client has made no step yet; there is nothing to compare with"
        )
    return versions


def replay(
    training: Training, original: RunDir, unlike: Callable[[dict[str, Any]], str]
) -> Iterator[dict[str, Any]]:
    """Yields, for each version of the one model of `training`, how it compares with the `original`,
    as rl.trainer.replay.compare does.

    `unlike` describes how the conditions of a version differ from those here. Raises RunError for a
    call that cannot be executed again.
    """
    (model,) = training.models.values()
    different = None
    for number in sorted(model.log.answers):
        call, then = model.log.call_of(number), model.log.answer_of(number).body
        failed = then.startswith(FAILED)
        if call.kind in UNCHANGING or was_left_out(call, then):
            continue
        before = model.version
        try:
            body = training.actions[call.kind](model, call, True)[0]
        except CallError as error:
            if not failed and call.kind in MAKING:
                raise RunError(
                    f"call {number} ({call.kind}) cannot be executed again: {error}", GIVE_UP
                ) from None
            body = FAILED
        if call.kind in EXACT and (body != then) and not (failed and body.startswith(FAILED)):
            different = different or f"the answer to call {number} ({call.kind})"
        if model.version > before or different:
            yield {
                "version": model.version,
                **compare(training, original, model.version, unlike, different),
            }


def compare(
    training: Training,
    original: RunDir,
    version: int,
    unlike: Callable[[dict[str, Any]], str],
    different: str | None,
) -> dict[str, Any]:
    (model,) = training.models.values()
    found = {
        "kept": ["answers"],
        "tensor": different,
        "max_difference": None,
        "fault": None,
        "unlike": "",
        "deterministic": True,
    }
    if not different and original.digests(version).exists():
        try:
            then = read_digests(original.digests(version))
        except CorruptFileError as error:
            return found | {"fault": str(error)}
        training.learner.publish(
            model.id, model.run_dir.weights(version), model.run_dir.digests(version)
        )
        remove_directory(model.run_dir.weights(version))
        made_by = then.get("made_by", {})
        found |= {
            "kept": ["answers", "digests"],
            "unlike": unlike(made_by),
            "deterministic": made_by.get("deterministic", False),
        }
        found["tensor"] = first_difference(
            then["tensors"], read_digests(model.run_dir.digests(version))["tensors"]
        )
    return found
