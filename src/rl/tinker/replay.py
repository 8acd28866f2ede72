"""The replay of a model that a client has trained: its calls are executed again, and the answers
and versions compared with the first."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rl.run_dir.checksums import first_difference, read_digests
from rl.run_dir.files import CorruptFileError, remove_directory
from rl.run_dir.paths import RunDir
from rl.system.errors import GIVE_UP, RunError
from rl.tinker.requests import LoadWeights, decode
from rl.tinker.storage import PATH, CallLog, Storage
from rl.tinker.training import FAILED, MAKING, Training, encoded, was_left_out
from rl.wire.training_calls import CallError

EXACT = ("forward_backward", "optim_step")
"""Calls whose answers are numbers alone, which must be the same."""
UNCHANGING = ("save_weights_for_sampler", "save_weights_external")


def copy_calls(model: RunDir, to: Storage) -> int:
    """Copies the calls of a model, whose client may go on, and the states of other models that they
    load.

    Returns the number of its versions. Raises RunError if there is none.
    """
    root, copy = model.root, to.models / model.root.name
    origin = Storage(RunDir(root.parents[1], root))
    copy.mkdir(parents=True)
    shutil.copyfile(root / "calls.log", copy / "calls.log")
    log, versions = CallLog(copy / "calls.log"), 0
    for number in log.answers:
        call = log.call_of(number)
        if log.answer_of(number).body.startswith(FAILED):
            continue
        versions += call.kind in ("optim_step", "load_weights")
        if call.kind == "load_weights":
            path = PATH.fullmatch(decode(call.body, LoadWeights).path)
            if not path or origin.model(path[1]).root == root:
                continue
            name = (path[1], path[2], path[3])
            if origin.saved(name).is_dir():
                shutil.copytree(origin.saved(name), to.saved(name), dirs_exist_ok=True)
                shutil.copyfile(origin.record(name), to.record(name))
    if not versions:
        raise RunError(f"{root}: its client has made no step yet; there is nothing to compare with")
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
        call, before = model.log.call_of(number), model.version
        answer = model.log.answer_of(number).body
        if call.kind in UNCHANGING or was_left_out(call, answer):
            continue
        had_failed = answer.startswith(FAILED)
        try:
            body = encoded(training.actions[call.kind](model, call, True))
        except CallError as error:
            if not had_failed and call.kind in MAKING:
                raise RunError(
                    f"call {number} ({call.kind}) cannot be executed again: {error}", GIVE_UP
                ) from None
            body = answer if had_failed else FAILED
        if call.kind in EXACT and body != answer:
            different = different or f"the answer to call {number} ({call.kind})"
        if model.version > before or different:
            result = compare(training, original, model.version, unlike, different)
            yield {"version": model.version, **result}


def compare(
    training: Training,
    original: RunDir,
    version: int,
    unlike: Callable[[dict[str, Any]], str],
    different: str | None,
) -> dict[str, Any]:
    (model,) = training.models.values()
    result = {
        "kept": ["answers"],
        "tensor": different,
        "max_difference": None,
        "fault": None,
        "unlike": "",
        "deterministic": True,
    }
    if different or not original.digests(version).exists():
        return result
    try:
        before = read_digests(original.digests(version))
    except CorruptFileError as error:
        return result | {"fault": str(error)}
    folder, record = model.run_dir.weights(version), model.run_dir.digests(version)
    training.learner.publish(model.id, folder, record)
    remove_directory(folder)
    conditions = before.get("made_by", {})
    return result | {
        "kept": ["answers", "digests"],
        "tensor": first_difference(before["tensors"], read_digests(record)["tensors"]),
        "unlike": unlike(conditions),
        "deterministic": conditions.get("deterministic", False),
    }
