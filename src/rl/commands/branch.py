"""`rl branch RUN[@STEP] --name NEW`: starts a new run from another run's checkpoint, with other
settings."""

import fnmatch
import os
import shlex
import time
from pathlib import Path

import msgspec

from rl.cluster.submit import dry_run, start
from rl.commands.options import find_run, version_number
from rl.config.command_line import (
    CommandLine,
    fail,
    load_config_or_exit,
    need_names,
    take,
    write_config,
)
from rl.config.fields import changed_keys
from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.launch import devices
from rl.launch.children import Children
from rl.launch.prepare import (
    REMEDY,
    clean_run,
    delete_weights,
    edits,
    is_run_or_free,
    moved,
    new_rate,
    ranges,
)
from rl.orchestrator.batches.batch_files import decode_state
from rl.orchestrator.batches.early_stop import RewardHistory
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir.checksums import is_delta, verify_checkpoint
from rl.run_dir.files import link_tree, write_directory, write_file
from rl.run_dir.lease import hold_role
from rl.run_dir.paths import BranchOrigin, Change, RunDir, first_step, numbered
from rl.system.errors import RunError
from rl.system.machine import machine
from rl.wire.batch_file import decode_batch, sound_batch, write_batch

HELP = """usage: rl branch RUN[@STEP] --name NEW [@ FILE] [--KEY VALUE] ...

Starts a new run from a checkpoint of another run, with its optimizer state and with other settings:
outputs/x@40 is the checkpoint of step 40, outputs/x the newest, outputs/x@best the best in the
run's evaluations. Step numbers continue, so the branch's first step is 41. Settings default to
those of RUN, which is not changed: files are linked, or copied to another file system. The branch
records its origin, which `rl doctor` shows and where `rl replay` begins. Resume it like any run: rl
@ outputs/NEW/config.toml --resume. With unchanged settings a branch trains the same bits as RUN
would have on the same batches.

A branch cannot change the model (model.name, model.dtype, trainer.lora), whose weights the
checkpoint holds, nor switch to or from `rl sft`, nor change the examples of `rl sft`, their order
or their batches. If the environments' tasks change, they start from the first again; otherwise they
continue.

  --name NEW                  the new run's name; --output_dir DIR: where, by default beside RUN
  --max_steps N               the last step, counting those of RUN
  --KEY VALUE, @ FILE         any other setting; rl --help SECTION shows them
  --dry-run                   print the resolved configuration, and exit
  --clean                     delete an existing run NEW first
"""
FIXED = {
    "model.name*": "the checkpoint holds the weights of that model; start a new run with the "
    "other model",
    "model.dtype": "its version was published in that dtype and would be another policy in "
    "another one",
    "trainer.lora*": "the checkpoint holds the whole model, or adapters of one shape; start a "
    "new run from the exported model",
}
"""Settings that a branch cannot change -> the reason."""
TASKS = (
    "id",
    "dataset*",
    "args.*",
    "set_kwargs.*",
    "head_server",
    "reward*",
    "name",
    "weight",
    "max_samples",
    "difficulty*",
)
"""Settings of an environment that decide which tasks it has, or how often each is played."""
EXAMPLES = dict.fromkeys(
    ("sft.*", "model.*", "renderer.*", "seed"),
    "decides the examples, their order or their batches, of which some are trained; start a new "
    "run from the exported model",
)
"""Settings of supervised fine-tuning that decide the examples, their order and their batches,
and therefore which were already trained -> the reason why a branch cannot change them."""
NAMES = ("reinforcement learning", "supervised fine-tuning")
HELD_OUT = ("sft.validation", "sft.validation_split")
"""Settings of supervised fine-tuning that decide only on what it is validated."""


def main(args: list[str], children: Children) -> int:
    """Creates the branch and trains it. Checks everything before writing anything."""
    _, rest = take("rl branch", args, (), HELP)
    which = "which run? Give its directory first: rl branch outputs/NAME[@STEP] --name NEW"
    need_names("rl branch", rest[:1], (1,), which)
    flags, (root, version) = rest[1:], find_run(rest[0])
    root = root.resolve()
    parent_config, stored = root / "config.toml", stored_config(root).with_absolute_paths()
    # a dry run would exit in load_config, before the checks below
    wet = [flag for flag in flags if flag != "--dry-run"]
    config, line = load_config_or_exit(
        wet, "rl branch", variables=os.environ, usage=HELP, base=parent_config
    )
    config = config.with_absolute_paths()
    if line.resume is not None:
        fail(
            "rl branch",
            "--resume continues a run unchanged: rl @ RUN/config.toml --resume; a branch is "
            "a new run",
        )
    if config.run_dir.root.resolve() == root:
        fail("rl branch", f"{root.name} is the run itself; name the new run: --name NEW")
    if stored.kind == "serve":
        raise RunError(
            f"{root} belongs to `rl serve`: client.create_training_client_from_state(PATH) makes a "
            "new model of a state that its client has saved"
        )
    parent = run_dir_of(root, stored)
    step = checkpoint_of(parent, version, [entry.label for entry in config.orchestrator.eval])
    changes, refused = list[Change](), [unlike(stored, config, step)]
    for key, old, new in [*changed_keys(stored, config), *edits(parent, config)]:
        if key not in ("name", "output_dir"):
            changes.append(Change(key, repr(old), repr(new)))
            refused.append(
                "" if moved(parent, key, old, new) else refusal(changes[-1], stored, config)
            )
    if any(refused):
        heading = f"a branch at step {step} cannot have these settings:"
        raise RunError("\n".join([heading, *filter(None, refused)]))
    if "--dry-run" in flags:
        print(dry_run(config), end="")
        raise SystemExit(0)  # like the dry run of every command
    if config.cluster is None:
        devices.split(config, machine())  # raises ConfigError before anything is written
    origin = BranchOrigin(str(root), step, round(time.time(), 3), changes)
    make(config, parent, origin, clean="clean" in line.switches)
    head = f"{config.run_dir.root}: {origin}"
    print(head, *changes, *filter(None, [new_rate(stored, config, step)]), sep="\n  ")
    again = f"rl @ {shlex.quote(str(config.run_dir.config))} --resume"
    return start(config, CommandLine(resume=-1), children, again)


def checkpoint_of(parent: RunDir, version: str, evals: list[str]) -> int:
    """Returns the step of the checkpoint named after the @. Raises RunError if the run does not
    have it."""
    root, steps = parent.root, numbered(parent.checkpoints)
    step = version_number(root, version, steps, tuple(evals))
    if step == 0:
        what = f"{root}@0: is the base model" if version else f"{root}: has no checkpoint yet"
        raise RunError(f"{what}; start a new run there instead: rl @ {parent.config} --name NEW")
    if step not in steps:
        raise RunError(
            f"{root}@{version}: there is no checkpoint of step {step}, only of {ranges(steps)}. "
            "Which ones a run keeps is set by trainer.checkpoint: interval, keep_last, keep_every"
        )
    return step


def refusal(change: Change, stored: RLConfig, config: RLConfig) -> str:
    """Returns why a branch cannot change a setting; empty if it can."""
    is_sft = stored.kind == config.kind == "sft"
    if change.key in (*HELD_OUT, "sft.validation_interval"):
        return ""
    for pattern, why in {**FIXED, **(EXAMPLES if is_sft else {})}.items():
        if fnmatch.fnmatchcase(change.key, pattern):
            return f"  {change}\n    {why}"
    return ""


def unlike(stored: RLConfig, config: RLConfig, step: int) -> str:
    """Returns why a branch of another kind, or without steps, cannot be; empty if it can."""
    was_sft, is_sft = stored.kind == "sft", config.kind == "sft"
    if was_sft != is_sft:
        return (
            f"  {NAMES[was_sft]} -> {NAMES[is_sft]}\n    set model.name to the version instead: "
            "its optimizer state belongs to the other loss"
        )
    if config.max_steps > step or (config.sft and config.sft.epochs):
        return ""
    return f"  max_steps = {config.max_steps}\n    is already reached at step {step}; raise it"


def make(config: RLConfig, parent: RunDir, origin: BranchOrigin, *, clean: bool) -> None:
    """Creates the directory of the branch atomically, by rename. Raises RunError."""
    run_dir, step = config.run_dir, origin.step
    weights = parent.weights(step)
    # the trainer makes what is not there, from the checkpoint
    has_weights = weights.is_dir() and not is_delta(weights)
    verify_checkpoint(parent.checkpoint(step))
    batch = None if config.sft else sound_batch(parent.batch(step))
    take_place(run_dir, clean=clean)

    def fill(folder: Path) -> None:
        new = RunDir(folder, folder / "weights")
        link_tree(parent.checkpoint(step), new.checkpoint(step))
        if batch is not None:
            new.batches.mkdir()
            prefix = "orchestrator.environment.*."
            keys = [change.key for change in origin.changes]
            if any(fnmatch.filter(keys, prefix + pattern) for pattern in TASKS):
                write_with_new_tasks(new, step, batch)
            else:
                link_tree(parent.batch(step), new.batch(step))
        if parent.digests(step).exists():
            new.digests_dir.mkdir()
            link_tree(parent.digests(step), new.digests(step))
        if has_weights and not config.trainer.weights.dir:
            link_tree(parent.weights(step), new.weights(step))
        other_data = any(change.key in HELD_OUT for change in origin.changes)
        # a branch reads recorded rollouts from the first, also of another file
        if config.sft and parent.data.is_dir() and not other_data:
            link_tree(parent.data, new.data)
        if parent.environments.is_dir():
            link_tree(parent.environments, new.environments)
        write_file(new.origin, msgspec.json.encode(origin) + b"\n")
        write_config(new.config, config)

    try:
        if config.trainer.weights.dir and has_weights:
            write_directory(
                run_dir.weights(step), lambda folder: link_tree(parent.weights(step), folder)
            )
        write_directory(run_dir.root, fill)
    except FileNotFoundError as error:
        if config.trainer.weights.dir:
            delete_weights(run_dir.weights_dir)
        raise RunError(
            f"{error.filename}: was deleted by the running run while being linked; try again"
        ) from None


def take_place(run_dir: RunDir, *, clean: bool) -> None:
    """Makes room for a new run. Replaces a branch that has trained nothing, as after a failed
    start. Raises RunError."""
    if is_run_or_free(run_dir.root):
        lease = hold_role(run_dir.lock("rl"))
        try:
            if not clean and run_dir.anything_made(after=first_step(run_dir)):
                raise RunError(f"{run_dir.root} exists: {REMEDY}")
            clean_run(run_dir, lease, away=None)
        finally:
            lease.close()
    if versions := numbered(run_dir.weights_dir):
        raise RunError(
            f"{run_dir.weights_dir} holds versions {ranges(versions)} of another run; choose "
            "another --name"
        )


def write_with_new_tasks(run_dir: RunDir, step: int, data: bytes) -> None:
    """Writes the batch with the state of an orchestrator that has issued none of the
    environments' tasks. Group numbers continue."""
    content = decode_batch(data, str(run_dir.batch(step)))
    state = decode_state(content.state)
    tasks = TaskState(next_group=state.tasks.next_group, issued={}, in_flight=[])
    write_batch(
        run_dir.batch(step),
        content.batch,
        msgspec.structs.replace(state, tasks=tasks, history=RewardHistory(), pending=[]),
    )
