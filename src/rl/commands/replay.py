"""`rl replay RUN`: retrains a run from its logged batches and compares every version with the
run's, bit for bit."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl.commands.policy_spec import named_run, need_weights
from rl.commands.serve_process import NAME as SERVER
from rl.config.command_line import fail, to_toml, write_config
from rl.config.options import Option, option_lines, take
from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.config.trainer import CheckpointConfig, ReplayConfig, WeightsConfig
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.launch.prepare import ranges
from rl.run_dir.checksums import newest_sound_checkpoint
from rl.run_dir.files import LineReader
from rl.run_dir.logs import last_lines
from rl.run_dir.origin import changes_of, first_step
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import describe, read_json, read_status
from rl.system.children import Child
from rl.system.errors import RunError
from rl.system.machine import machine
from rl.tinker.replay import copy_calls
from rl.tinker.storage import Storage

OPTIONS = (
    Option(
        "from",
        "N",
        "start at checkpoint N, or at the newest intact one before it; default: the "
        "beginning of the run",
    ),
    Option("until", "N", "the last step to retrain; default: the newest version"),
    Option("dry-run", "", "print the configuration of the trainer, and exit"),
)
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
    values, rest = take("rl replay", args, OPTIONS, HELP)
    if len(rest) != 1 or rest[0].startswith(("-", "@")):
        fail(
            "rl replay",
            "which run? Give only its directory: rl replay outputs/NAME [--from N] [--until N]",
        )
    try:
        run_dir, config = open_run(rest[0])
        if config.serve:
            return replay_session(
                run_dir, config, children, [name for name in values if values[name]]
            )
        need_weights(config, run_dir.root, "rl replay compares weights")
        replay, notes = plan(run_dir, config, values["from"] or 0, values["until"])
        division = division_of(config, run_dir, replay)
    except RunError as error:
        fail("rl replay", str(error))
    for note in [*notes, *changes_within(run_dir, replay, config)]:
        print(f"note: {note}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as folder:
        config = trainer_config(config, Path(folder), replay)
        if values["dry_run"]:
            print(to_toml(config), end="")
            return 0
        scratch = config.run_dir
        write_config(scratch.config, config)
        child = roles.start(
            children, "trainer", scratch, division.trainer, division.ranks, scratch.logs
        )
        return Verdict(run_dir, scratch, replay).follow(child, children)


def replay_session(run_dir: RunDir, config: RLConfig, children: Children, given: list[str]) -> int:
    """Executes what a client of `rl serve` has had computed once more. Raises RunError."""
    if given:
        raise RunError(
            f"--{given[0]}: the calls of a client of rl serve are executed from the first to "
            "the last; leave it out"
        )
    if not (run_dir.root / "calls.log").exists():
        models = "".join(
            f"\n  rl replay {path.parent}"
            for path in sorted(run_dir.root.glob("models/*/calls.log"))
        )
        raise RunError(
            f"{run_dir.root} is a server's directory; give a model of a client"
            + (models or ": there is none yet")
        )
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as folder:
        config = config.model_copy(deep=True)
        config.output_dir, config.name = folder, "replay"
        scratch = config.run_dir
        # of the server: its bits depend on the padding
        config.trainer.lora = stored_config(run_dir.root.parents[1]).trainer.lora
        versions = copy_calls(run_dir, Storage(scratch))
        config.trainer.data.replay = ReplayConfig(
            run=str(run_dir.root), weights=str(run_dir.weights_dir), until=versions
        )
        write_config(scratch.config, config)
        child = roles.start(
            children, SERVER, scratch, devices.split(config, machine()).trainer, 1, scratch.logs
        )
        return Verdict(run_dir, scratch, config.trainer.data.replay).follow(child, children)


def open_run(spec: str) -> tuple[RunDir, RLConfig]:
    """Returns a run's directory and stored configuration. Raises RunError."""
    root = named_run(spec).resolve()
    config = stored_config(root)
    return run_dir_of(root, config), config


def plan(
    run_dir: RunDir, config: RLConfig, start: int, until: int | None
) -> tuple[ReplayConfig, list[str]]:
    """Returns the steps to retrain, and notes for the user. Raises RunError, also for damaged
    examples and files of a newer rl."""
    made, given = numbers(run_dir.digests_dir, ".json"), start
    newest = max([*made, *numbers(run_dir.weights_dir)], default=0)
    until = newest if until is None else until
    if not newest:
        raise RunError(
            f"{run_dir.root}: the run has no version yet; there is nothing to compare with"
        )
    if until > newest:
        raise RunError(
            f"--until {until}: the newest version of {run_dir.root} is {newest}; give at most that"
        )
    first = first_step(run_dir)
    if newest <= first:
        raise RunError(
            f"{run_dir.root}: the branch has no version of its own yet; there is nothing to "
            "compare with"
        )
    if start and start < first:
        raise RunError(
            f"--from {start}: {run_dir.root} is a branch and begins at step {first}; give at "
            "least that, or leave it out"
        )
    notes, wanted = [], start or first
    if wanted:
        start, damaged = newest_sound_checkpoint(run_dir.checkpoints, wanted)
        notes += [
            f"checkpoint {step} is damaged and is skipped ({fault})"
            for step, fault in damaged.items()
        ]
        if start != wanted:
            if start < first:
                raise RunError(
                    f"{run_dir.root}: checkpoint {first}, where this branch begins, is "
                    "damaged or missing"
                )
            notes.append(
                f"there is no intact checkpoint {wanted}: starting at "
                f"{f'checkpoint {start}' if start else 'the base model'}"
            )
    if start >= until:
        raise RunError(
            f"--from {wanted}: leaves no step to train before --until {until}; give a smaller one"
        )
    if config.sft:
        from rl.trainer.sft.tokens import verify_data

        verify_data(run_dir.data)  # damaged examples would retrain a different run
    else:
        there = {*numbers(run_dir.batches, ".batch"), *numbers(run_dir.batches, ".quarantined")}
        missing = [step for step in range(start + 1, until + 1) if step not in there]
        if missing and not given and (later := oldest_complete(run_dir, missing[-1], until)):
            what = f"batches {ranges(missing)} were deleted (orchestrator.batches)"
            notes.append(
                f"{what}: starting at checkpoint {later}, the oldest with all later batches"
            )
            start, missing = later, []
        if missing:
            remedies = [
                step for step in numbers(run_dir.checkpoints) if missing[-1] <= step < until
            ]
            remedy = (
                f"give --from {remedies[0]}"
                if remedies
                else "there is no later checkpoint; give a smaller --until"
            )
            have = (
                f"there are {ranges(numbers(run_dir.batches, '.batch'))}; orchestrator.batches "
                "sets which are kept"
            )
            raise RunError(
                f"{run_dir.root}: batches {ranges(missing)} are missing ({have}): {remedy}"
            )
    return ReplayConfig(
        run=str(run_dir.root), weights=str(run_dir.weights_dir), start=start, until=until
    ), notes


def division_of(config: RLConfig, run_dir: RunDir, replay: ReplayConfig) -> devices.Split:
    """Returns the devices of the replay. What trained on a cluster is retrained with as many
    ranks and threads, all on this machine."""
    if config.cluster is None:
        return devices.split(config, machine())
    recorded = (read_json(run_dir.digests(replay.start + 1), dict[str, Any]) or {}).get(
        "made_by", {}
    )
    ranks = recorded.get("ranks", 1)
    config.trainer.ranks, config.trainer.gpus = (
        ranks,
        ranks if machine().gpus and config.trainer.gpus != 0 else 0,
    )
    division = devices.split(config, machine())
    division.trainer.env["OMP_NUM_THREADS"] = str(recorded.get("threads", 1))
    return division


def oldest_complete(run_dir: RunDir, first: int, until: int) -> int | None:
    """Returns the step of the oldest intact checkpoint from `first` to before `until`; None if
    there is none."""
    steps = (step for step in numbers(run_dir.checkpoints) if first <= step < until)
    return next(
        (step for step in steps if newest_sound_checkpoint(run_dir.checkpoints, step)[0] == step),
        None,
    )


def changes_within(run_dir: RunDir, replay: ReplayConfig, config: RLConfig) -> list[str]:
    """Returns notes on settings that a resume changed: a replay uses their last values, so
    earlier steps may differ."""
    notes = list[str]()
    for change in changes_of(run_dir):
        scheduled = change.key == "max_steps" and config.trainer.optim.schedule != "constant"
        if (scheduled or change.key.startswith(CHANGES_BITS)) and change.step > replay.start:
            said = (
                f"{change.key} was changed from {change.old!r} to {change.new!r} after step "
                f"{change.step}"
            )
            notes.append(
                f"{said}: steps up to it may differ; --from {change.step} retrains the later ones"
            )
    return notes


def trainer_config(config: RLConfig, folder: Path, replay: ReplayConfig) -> RLConfig:
    """Returns the configuration of a trainer that reads batches from the run and writes to a run
    below `folder`."""
    config = config.model_copy(deep=True)
    config.output_dir, config.name, config.wandb = str(folder), "replay", None
    config.trainer.checkpoint, config.trainer.weights = CheckpointConfig(), WeightsConfig()
    config.trainer.data.replay = replay
    return config


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
        since, shown = time.monotonic(), (None, None)
        while True:
            # checked before reading results, so that none are missed
            ended = child.exit_code is not None
            for line in self.results.new():
                if different := self.check(json.loads(line)):
                    print(different, flush=True)
                    children.stop()
                    return 1
            if ended:
                break
            status = read_status(self.scratch.status(child.name))
            if (
                not self.compared
                and status
                and status.phase
                and (status.phase, status.step) != shown
            ):
                shown = status.phase, status.step
                print(f"{describe(status)} ...", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        if child.exit_code:
            lines = "\n".join(f"  | {line}" for line in last_lines(child.log))
            print(
                f"rl replay: the trainer {child.ending()}; nothing differed until then. The "
                f"end of its log:\n{lines}",
                file=sys.stderr,
            )
            return 2
        return self.summary(time.monotonic() - since)

    def check(self, found: dict[str, Any]) -> str | None:
        """Prints the result for a version or checkpoint. Returns how it differs, or None if it
        is equal."""
        if "checkpoint" in found:
            return self.check_checkpoint(found)
        step = found["version"]
        if found["unlike"] and found["unlike"] != self.unlike:
            self.unlike = found["unlike"]
            print(
                f"note: version {step} was trained under other conditions, so its bits may "
                f"differ: {self.unlike}",
                flush=True,
            )
        if self.exact and not found["deterministic"]:
            self.exact = False
            print(
                "note: the run was trained without trainer.deterministic, so its bits may differ",
                flush=True,
            )
        if found["tensor"] is not None:
            return self.difference(found)
        if found["fault"]:
            return (
                f"DIFFERENT: version {step}: the retrained version is equal, but a file of the "
                f"run is damaged: {found['fault']}"
            )
        if not found["kept"]:
            print(f"version {step}: the run has kept nothing to compare with", flush=True)
            return None
        self.compared.append(step)
        skipped = "; its batch is quarantined" if self.run_dir.quarantined(step).exists() else ""
        print(f"version {step}: equal to its {' and '.join(found['kept'])}{skipped}", flush=True)
        return None

    def check_checkpoint(self, found: dict[str, Any]) -> str | None:
        """Does the same as `check` for a checkpoint."""
        step = found["checkpoint"]
        if found["fault"]:
            return f"DIFFERENT: checkpoint {step} is damaged: {found['fault']}"
        if found["ranks"]:
            where = (
                f"first in {found['tensor']}" if found["tensor"] else f"on ranks {found['ranks']}"
            )
            return f"DIFFERENT: the state after step {step} differs from its checkpoint, {where}"
        self.checkpoints.append(step)
        print(f"checkpoint {step}: equal (float32 weights, optimizer, random numbers)", flush=True)
        return None

    def difference(self, found: dict[str, Any]) -> str:
        """Returns the message for the first version that differs."""
        step, size = found["version"], found["max_difference"]
        by = (
            f"by at most {size:.3g}"
            if size is not None
            else "(by how much is unknown without weights to compare)"
        )
        known = (
            f"versions {ranges(self.compared)} are equal"
            if self.compared
            else "it is the first one compared"
        )
        why = f"\n  {found['fault']}" if found["fault"] else ""
        why += (
            f"\n  it was trained under other conditions, which may be the reason: {self.unlike}"
            if self.unlike
            else ""
        )
        return (
            f"DIFFERENT: version {step} differs from the run's: first in {found['tensor']}, "
            f"{by}; {known}{why}"
        )

    def summary(self, seconds: float) -> int:
        """Prints the summary. Returns the exit code: 0 if all are equal, 2 if there was nothing
        to compare."""
        if not self.compared:
            print(
                "rl replay: no version could be compared: the run has kept neither digests "
                "nor weights of these steps",
                file=sys.stderr,
            )
            return 2
        began = f"checkpoint {self.replay.start}" if self.replay.start else "the base model"
        states = (
            f"; so is the full state at checkpoint {ranges(self.checkpoints)}"
            if self.checkpoints
            else ""
        )
        pace = seconds / (self.replay.until - self.replay.start)
        made = f"retrained from {began} in {seconds:.0f} s ({pace:.1f} s a step)"
        print(
            f"EQUAL: versions {ranges(self.compared)}, {made}, equal those of the run, bit "
            f"for bit{states}"
        )
        return 0
