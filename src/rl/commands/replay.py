"""`rl replay RUN`: retrains a run from its logged batches and compares every version with the
run's, bit for bit."""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rl.commands.options import need_weights, open_run, runs_given
from rl.commands.serve import NAME as SERVER
from rl.config.command_line import fail, option_lines, options, to_toml, write_config
from rl.config.run import RLConfig
from rl.config.stored import stored_config
from rl.config.trainer import CheckpointConfig, ReplayConfig, WeightsConfig
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.run_dir.checksums import newest_sound_checkpoint
from rl.run_dir.files import LineReader
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir, changes_of, first_step, numbers
from rl.run_dir.status import describe, read_json, read_status
from rl.system.children import Child
from rl.system.errors import RunError
from rl.system.machine import machine
from rl.system.terminal import say
from rl.tinker.replay import copy_calls
from rl.tinker.storage import Storage

OPTIONS = options("""
from N: start at checkpoint N, or at the newest intact one before it; default: the beginning of
    the run
until N: the last step to retrain; default: the newest version
dry-run: print the configuration of the trainer, and exit
""")
HELP = f"""usage: rl replay RUN [--from N] [--until N] [--dry-run]

Retrains a run from its stored batches, with its configuration, ranks and threads, in a temporary
directory: neither inference nor environments are needed, and nothing is written into the run. Every
version is compared, tensor by tensor, with the digests that the run has stored of it, and with the
version and checkpoint of that step if they still exist. Exit code 0: all are equal, bit for bit; 1:
something differs (the first step and tensor are printed); 2: the comparison is not possible, for
example because batches are missing. Of a model that a client of `rl serve` has trained
(outputs/serve-NAME/models/MODEL), the client's calls are executed again.

{option_lines(OPTIONS)}
"""
POLL_S = 0.2
CHANGES_BITS = (
    "trainer.ranks",
    "trainer.micro_batch_tokens",
    "trainer.attention",
    "trainer.compile",
    "trainer.dp_replicate",
    "trainer.context_parallel",
    "trainer.expert_parallel",
    "trainer.cpus",
    "trainer.gpus",
)
"""Settings that a resume may change and that change the last bits of the weights."""


def main(args: list[str], children: Children) -> int:
    values, [root] = runs_given("rl replay", args, OPTIONS, HELP)
    try:
        run_dir, config = open_run(root.resolve())
        if config.kind == "serve":
            flags = [name for name in values if values[name]]
            return replay_session(run_dir, config, children, flags)
        need_weights(config, run_dir.root, "rl replay compares weights")
        replay, notes = plan(run_dir, config, values["from"] or 0, values["until"])
        division = division_of(config, run_dir, replay)
    except RunError as error:
        fail("rl replay", str(error))
    for note in [*notes, *changes_within(run_dir, replay, config)]:
        print(f"note: {note}")
    config.wandb, config.trainer.checkpoint = None, CheckpointConfig()
    config.trainer.weights = WeightsConfig()
    with scratch_run(config, replay) as scratch:
        if values["dry_run"]:
            print(to_toml(config), end="")
            return 0
        child = roles.start(children, "trainer", scratch, division, scratch.logs)
        return Verdict(run_dir, scratch, replay).follow(child, children)


@contextlib.contextmanager
def scratch_run(config: RLConfig, replay: ReplayConfig) -> Iterator[RunDir]:
    """Gives a replay a temporary run, whose configuration it writes. Changes `config`."""
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as folder:
        config.output_dir, config.name, config.trainer.data.replay = folder, "replay", replay
        write_config(config.run_dir.config, config)
        yield config.run_dir


def replay_session(run_dir: RunDir, config: RLConfig, children: Children, flags: list[str]) -> int:
    """Executes what a client of `rl serve` has had computed once more. Raises RunError."""
    if flags:
        raise RunError(
            f"--{flags[0]}: the calls of a client of rl serve are executed from the first to "
            "the last; leave it out"
        )
    if not (run_dir.root / "calls.log").exists():
        models = sorted(path.parent for path in run_dir.root.glob("models/*/calls.log"))
        listed = "".join(f"\n  rl replay {model}" for model in models) or ": there is none yet"
        raise RunError(f"{run_dir.root} is a server's directory; give a model of a client{listed}")
    # of the server: its bits depend on the padding
    config.trainer.lora = stored_config(run_dir.root.parents[1]).trainer.lora
    replay = ReplayConfig(run=str(run_dir.root), weights=str(run_dir.weights_dir), until=1)
    with scratch_run(config, replay) as scratch:
        replay.until = copy_calls(run_dir, Storage(scratch))
        write_config(scratch.config, config)
        division = devices.split(config, machine())
        child = roles.start(children, SERVER, scratch, division, scratch.logs)
        return Verdict(run_dir, scratch, replay).follow(child, children)


def plan(
    run_dir: RunDir, config: RLConfig, start: int, until: int | None
) -> tuple[ReplayConfig, list[str]]:
    """Returns the steps to retrain, and notes for the user. Raises RunError, also for damaged
    examples and files of a newer rl."""
    root, first, is_given = run_dir.root, first_step(run_dir), bool(start)
    digests, weights = numbers(run_dir.digests_dir, ".json"), numbers(run_dir.weights_dir)
    newest = max([0, *digests, *weights])
    until = newest if until is None else until
    if newest <= first:
        whose = "the branch has no version of its own" if first else "the run has no version"
        raise RunError(f"{root}: {whose} yet; there is nothing to compare with")
    if until > newest:
        raise RunError(
            f"--until {until}: the newest version of {root} is {newest}; give at most that"
        )
    if is_given and start < first:
        raise RunError(
            f"--from {start}: {root} is a branch and begins at step {first}; give at least that, "
            "or leave it out"
        )
    wanted, notes = start or first, list[str]()
    start, damaged = newest_sound_checkpoint(run_dir.checkpoints, wanted) if wanted else (0, {})
    if start < first:
        raise RunError(
            f"{root}: checkpoint {first}, where this branch begins, is damaged or missing"
        )
    notes += [f"checkpoint {n} is damaged and is skipped ({why})" for n, why in damaged.items()]
    if start != wanted:
        where = f"checkpoint {start}" if start else "the base model"
        notes.append(f"there is no intact checkpoint {wanted}: starting at {where}")
    if start >= until:
        raise RunError(
            f"--from {wanted}: leaves no step to train before --until {until}; give a smaller one"
        )
    if config.sft:
        from rl.trainer.sft.tokens import verify_data

        verify_data(run_dir.data)  # damaged examples would retrain a different run
    elif missing := missing_batches(run_dir, start, until):
        later = oldest_complete(run_dir, missing[-1], until)
        if later is None or is_given:
            remedy = "there is no later checkpoint; give a smaller --until"
            if later:
                remedy = f"give --from {later}"
            present = ranges(numbers(run_dir.batches, ".batch"))
            raise RunError(
                f"{root}: batches {ranges(missing)} are missing (there are {present}; "
                f"orchestrator.batches sets which are kept): {remedy}"
            )
        start = later
        notes.append(
            f"batches {ranges(missing)} were deleted (orchestrator.batches): starting at "
            f"checkpoint {later}, the oldest with all later batches"
        )
    weights_dir = str(run_dir.weights_dir)
    return ReplayConfig(run=str(root), weights=weights_dir, start=start, until=until), notes


def missing_batches(run_dir: RunDir, start: int, until: int) -> list[int]:
    """Returns the steps after `start` whose batch was deleted."""
    present = {*numbers(run_dir.batches, ".batch"), *numbers(run_dir.batches, ".quarantined")}
    return [step for step in range(start + 1, until + 1) if step not in present]


def oldest_complete(run_dir: RunDir, first: int, until: int) -> int | None:
    """Returns the step of the oldest intact checkpoint from `first` to before `until`; None if
    there is none."""
    for step in numbers(run_dir.checkpoints):
        is_sound = first <= step < until
        if is_sound and newest_sound_checkpoint(run_dir.checkpoints, step)[0] == step:
            return step
    return None


def division_of(config: RLConfig, run_dir: RunDir, replay: ReplayConfig) -> devices.Split:
    """Returns the devices of the replay, all of this machine: as many ranks and threads as the run
    had, on GPUs if it had any."""
    record = read_json(run_dir.digests(replay.start + 1), dict[str, Any]) or {}
    config.cluster, config.inference.gpus = None, 0
    if not (made_by := record.get("made_by")):
        return devices.split(config, machine())
    on_gpus = machine().gpus and not made_by["device"].startswith("cpu")
    config.trainer.ranks, config.trainer.cpus = made_by["ranks"], None
    config.trainer.gpus = made_by["ranks"] if on_gpus else 0
    division = devices.split(config, machine())
    division.trainer.env["OMP_NUM_THREADS"] = str(made_by["threads"])
    return division


def changes_within(run_dir: RunDir, replay: ReplayConfig, config: RLConfig) -> list[str]:
    """Returns notes on settings that a resume changed: a replay uses their last values, so
    earlier steps may differ."""
    is_scheduled = config.trainer.optim.schedule != "constant"
    keys = (*CHANGES_BITS, "max_steps") if is_scheduled else CHANGES_BITS
    return [
        f"{change.key} was changed from {change.old!r} to {change.new!r} after step {change.step}: "
        f"steps up to it may differ; --from {change.step} retrains the later ones"
        for change in changes_of(run_dir)
        if change.key.startswith(keys) and change.step > replay.start
    ]


class Verdict:
    """Prints the trainer's comparisons as they are made, and determines the exit code."""

    def __init__(self, run_dir: RunDir, scratch: RunDir, replay: ReplayConfig):
        self.run_dir, self.scratch, self.replay = run_dir, scratch, replay
        self.results = LineReader(self.scratch.root / "replay.jsonl")
        self.compared: list[int] = []
        self.checkpoints: list[int] = []
        self.unlike, self.exact = "", True

    def follow(self, child: Child, children: Children) -> int:
        """Prints comparisons until the trainer has ended or something differs. Returns the exit
        code."""
        since, shown, has_ended = time.monotonic(), "", False
        while not has_ended:
            # checked before reading results, so that none are missed
            has_ended = child.exit_code is not None
            for line in self.results.new():
                if difference := self.check(json.loads(line)):
                    print(difference)
                    children.stop()
                    return 1
            status = read_status(self.scratch.status(child.name))
            if not self.compared and status and status.phase and describe(status) != shown:
                shown = describe(status)
                say(f"{shown} ...")
            if not has_ended:
                time.sleep(POLL_S)
        if child.exit_code:
            lines = "\n".join(f"  | {line}" for line in last_lines(child.log))
            say(
                f"rl replay: the trainer {child.ending()}; nothing differed until then. The end "
                f"of its log:\n{lines}"
            )
            return 2
        return self.summary(time.monotonic() - since)

    def check(self, result: dict[str, Any]) -> str | None:
        """Prints the result for a version or checkpoint. Returns how it differs, or None if it
        is equal."""
        if "checkpoint" in result:
            return self.check_checkpoint(result)
        step = result["version"]
        if result["unlike"] and result["unlike"] != self.unlike:
            self.unlike = result["unlike"]
            print(
                f"note: version {step} was trained under other conditions, so its bits may "
                f"differ: {self.unlike}"
            )
        if self.exact and not result["deterministic"]:
            self.exact = False
            print("note: the run was trained without trainer.deterministic, so its bits may differ")
        if result["tensor"] is not None:
            return self.difference(result)
        if result["fault"]:
            return (
                f"DIFFERENT: version {step}: the retrained version is equal, but a file of the "
                f"run is damaged: {result['fault']}"
            )
        if not result["kept"]:
            print(f"version {step}: the run has kept nothing to compare with")
            return None
        self.compared.append(step)
        skipped = "; its batch is quarantined" if self.run_dir.quarantined(step).exists() else ""
        print(f"version {step}: equal to its {' and '.join(result['kept'])}{skipped}")
        return None

    def check_checkpoint(self, result: dict[str, Any]) -> str | None:
        """Does the same as `check` for a checkpoint."""
        step, tensor, ranks = result["checkpoint"], result["tensor"], result["ranks"]
        if result["fault"]:
            return f"DIFFERENT: checkpoint {step} is damaged: {result['fault']}"
        if ranks:
            where = f"first in {tensor}" if tensor else f"on ranks {ranks}"
            return f"DIFFERENT: the state after step {step} differs from its checkpoint, {where}"
        self.checkpoints.append(step)
        print(f"checkpoint {step}: equal (float32 weights, optimizer, random numbers)")
        return None

    def difference(self, result: dict[str, Any]) -> str:
        """Returns the message for the first version that differs."""
        by, known = (
            "(by how much is unknown without weights to compare)",
            "it is the first one compared",
        )
        if result["max_difference"] is not None:
            by = f"by at most {result['max_difference']:.3g}"
        if self.compared:
            known = f"versions {ranges(self.compared)} are equal"
        why = f"\n  {result['fault']}" if result["fault"] else ""
        if self.unlike:
            why += (
                f"\n  it was trained under other conditions, which may be the reason: {self.unlike}"
            )
        return (
            f"DIFFERENT: version {result['version']} differs from the run's: first in "
            f"{result['tensor']}, {by}; {known}{why}"
        )

    def summary(self, seconds: float) -> int:
        """Prints the summary. Returns the exit code: 0 if all are equal, 2 if there was nothing
        to compare."""
        if not self.compared:
            say(
                "rl replay: no version could be compared: the run has kept neither digests nor "
                "weights of these steps"
            )
            return 2
        began = f"checkpoint {self.replay.start}" if self.replay.start else "the base model"
        pace_s, states = seconds / (self.replay.until - self.replay.start), ""
        if self.checkpoints:
            states = f"; so is the full state at checkpoint {ranges(self.checkpoints)}"
        print(
            f"EQUAL: versions {ranges(self.compared)}, retrained from {began} in {seconds:.0f} s "
            f"({pace_s:.1f} s a step), equal those of the run, bit for bit{states}"
        )
        return 0
