"""`rl replay RUN`: retrains a run from its logged batches and says whether every version comes out the same, bit for bit."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl import devices
from rl.cli import ConfigError, fail, from_toml, to_toml
from rl.commands.options import WIDTH, Option, take
from rl.commands.policy import PolicyError, check_not_a_run, place_of, split_run
from rl.config import RLConfig
from rl.digests import newest_sound_checkpoint
from rl.files import write_file
from rl.main import command
from rl.prepare import ranges
from rl.processes import Child, Children, last_lines
from rl.run_dir import RunDir, numbered
from rl.status import read_status
from rl.trainer.config import CheckpointConfig, ReplayConfig, WeightsConfig

OPTIONS = (
    Option("from", "N", "start at the checkpoint of step N, or the newest sound one before it; default: the base model"),
    Option("until", "N", "the last step to train again; default: the newest version"),
)
HELP = """usage: rl replay RUN [--from N] [--until N]

Trains a run again from the batches it has kept, with its configuration, ranks and threads, in a directory of its own: neither inference
nor environments are needed, and nothing is written into the run. Every version is compared with the digests that the run has kept of it,
tensor by tensor, and with the version and the checkpoint of that step where they are still there. Exit code 0: all are equal, bit for
bit; 1: something differs (the first step and tensor are named); 2: it cannot be told, for example because batches are missing.

{options}
"""
POLL_S = 0.2
TELLS = ("trainer.ranks", "trainer.micro_batch_tokens", "trainer.dp_replicate", "trainer.context_parallel", "trainer.cpus", "trainer.gpus")
"""Settings that a resume may change and that change the last bits."""


class ReplayError(Exception):
    """The run cannot be replayed as asked; the message says what there is."""


def main(args: list[str], children: Children) -> int:
    """The command."""
    if {"-h", "--help"} & set(args):
        print(HELP.replace("{options}", "\n".join(f"  {f'--{o.name} {o.value}'.strip():<{WIDTH}} {o.help}" for o in OPTIONS)))
        return 0
    values, rest = take("rl replay", args, OPTIONS)
    if len(rest) != 1 or rest[0].startswith(("-", "@")):
        fail("rl replay", "which run? Give its directory and nothing else: rl replay outputs/NAME [--from N] [--until N]")
    try:
        root, config = open_run(rest[0])
        run_dir = place_of(root, config)
        replay, notes = plan(run_dir, config, values["from"] or 0, values["until"])
        division = devices.split(config, devices.machine())
    except (PolicyError, ReplayError, devices.DeviceError) as error:
        fail("rl replay", str(error))
    for note in [*notes, *changes_within(run_dir, replay, config)]:
        print(f"note: {note}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rl-replay-") as scratch:
        config = scratch_config(config, Path(scratch), replay)
        child = start(config, division, children)
        return Verdict(run_dir, config, replay).follow(child, children)


def open_run(spec: str) -> tuple[Path, RLConfig]:
    """A run's directory and stored configuration. Raises PolicyError."""
    found = split_run(spec)
    if not found or found[1]:
        check_not_a_run(spec)
        raise PolicyError(f"{spec}: is no run of rl; give the directory with its config.toml")
    root = found[0].resolve()
    try:
        return root, from_toml(root / "config.toml")
    except ConfigError as error:
        raise PolicyError(f"{root / 'config.toml'} was not written by this version of rl:\n{error}") from None


def plan(run_dir: RunDir, config: RLConfig, start: int, until: int | None) -> tuple[ReplayConfig, list[str]]:
    """Which steps are trained again, and what is to be said of it. Raises ReplayError."""
    made = numbered(run_dir.digests(0).parent, ".json")
    newest = max([*made, *numbered(run_dir.weights_dir)], default=0)
    until = newest if until is None else until
    if not newest:
        raise ReplayError(f"{run_dir.root}: has made no version yet; there is nothing to compare with")
    if until > newest:
        raise ReplayError(f"--until {until}: the newest version of {run_dir.root} is {newest}; give at most that")
    notes, wanted = [], start
    if wanted:
        start, damaged = newest_sound_checkpoint(run_dir.checkpoints, wanted)
        notes += [f"checkpoint {step} is damaged and is passed over ({fault})" for step, fault in damaged.items()]
        if start != wanted:
            notes.append(f"there is no sound checkpoint {wanted}: starting at {f'checkpoint {start}' if start else 'the base model'}")
    if start >= until:
        raise ReplayError(f"--from {wanted}: leaves no step to train before --until {until}; give a smaller one")
    if not config.sft:
        there = {*numbered(run_dir.batches, ".batch"), *numbered(run_dir.batches, ".quarantined")}
        missing = [step for step in range(start + 1, until + 1) if step not in there]
        if missing:
            raise ReplayError(missing_batches(run_dir, missing, until))
    return ReplayConfig(run=str(run_dir.root), weights=str(run_dir.weights_dir), start=start, until=until), notes


def missing_batches(run_dir: RunDir, missing: list[int], until: int) -> str:
    """What is missing, and from which checkpoint on it is not needed."""
    remedies = [step for step in numbered(run_dir.checkpoints) if missing[-1] <= step < until]
    remedy = f"give --from {remedies[0]}" if remedies else "no checkpoint lies behind them; give a smaller --until"
    have = ranges(list(numbered(run_dir.batches, ".batch")))
    return f"{run_dir.root}: batches {ranges(missing)} are missing (there are {have}; what is kept is a setting of the run): {remedy}"


def changes_within(run_dir: RunDir, replay: ReplayConfig, config: RLConfig) -> list[str]:
    """Settings that were changed on the way, so that the steps before can come out otherwise. A replay trains all with the last ones."""
    path = run_dir.root / "changes.jsonl"
    notes = []
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        scheduled = line["key"] == "max_steps" and config.trainer.optim.schedule != "constant"
        if (scheduled or line["key"].startswith(TELLS)) and line["step"] > replay.start:
            change = f"{line['key']} was changed from {line['old']!r} to {line['new']!r}"
            notes.append(f"{change} after step {line['step']}: steps up to it may differ; --from {line['step']} trains those behind it")
    return notes


def scratch_config(config: RLConfig, scratch: Path, replay: ReplayConfig) -> RLConfig:
    """The run's configuration for a trainer that reads from the run and writes to `scratch`."""
    config = config.model_copy(deep=True)
    config.output_dir, config.name, config.wandb = str(scratch), "replay", None
    config.trainer.checkpoint, config.trainer.weights = CheckpointConfig(), WeightsConfig()
    config.trainer.data.replay = replay
    return config


def start(config: RLConfig, division: devices.Split, children: Children) -> Child:
    """The trainer as `rl` starts it."""
    run_dir = config.run_dir
    write_file(run_dir.config, to_toml(config).encode())
    env = {**os.environ, **division.trainer.env}
    return children.start("trainer", command("trainer", run_dir, division.ranks), env, run_dir.logs, division.trainer.cores)


class Verdict:
    """What has come out so far, told step by step."""

    def __init__(self, run_dir: RunDir, config: RLConfig, replay: ReplayConfig):
        self.run_dir, self.replay, self.scratch = run_dir, replay, config.run_dir
        self.found = self.scratch.root / "replay.jsonl"
        self.offset = 0
        self.compared: list[int] = []
        self.checkpoints: list[int] = []
        self.unlike, self.exact = "", True

    def follow(self, child: Child, children: Children) -> int:
        """Until the trainer has ended, or something differs. Returns the exit code."""
        since, said = time.monotonic(), ""
        while True:
            ended = child.exit_code is not None  # before the look: so that its last words are read
            for found in self.new():
                if different := self.tell(found):
                    print(different, flush=True)
                    children.stop()
                    return 1
            if ended:
                break
            doing = (read_status(self.scratch.status("trainer")) or {}).get("doing", "")
            if not self.compared and doing != said:
                said = doing
                print(f"{doing} ...", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        if child.exit_code:
            lines = "\n".join(f"  | {line}" for line in last_lines(child.log))
            print(f"rl replay: the trainer {child.ending()}; nothing differs up to there. The end of its log:\n{lines}", file=sys.stderr)
            return 2
        return self.summary(time.monotonic() - since)

    def new(self) -> Iterator[dict[str, Any]]:
        """What was found since the last call."""
        if self.found.exists():
            with self.found.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            yield from map(json.loads, whole.splitlines())

    def tell(self, found: dict[str, Any]) -> str | None:
        """Prints what was found of a version or checkpoint. Returns how it differs, if it does."""
        if "checkpoint" in found:
            return self.tell_checkpoint(found)
        step = found["version"]
        if found["unlike"] and found["unlike"] != self.unlike:
            self.unlike = found["unlike"]
            print(f"note: version {step} was made under other conditions, so its bits may differ: {self.unlike}", flush=True)
        if self.exact and not found["deterministic"]:
            self.exact = False
            print("note: the run was not made with trainer.deterministic, so its bits may differ", flush=True)
        if found["tensor"] is not None:
            return self.difference(found)
        if found["fault"]:
            return f"DIFFERENT: version {step}: what was trained again fits, but a file of the run is damaged: {found['fault']}"
        if not found["kept"]:
            print(f"version {step}: nothing was kept of it to compare with", flush=True)
            return None
        self.compared.append(step)
        skipped = "; its batch is quarantined" if self.run_dir.quarantined(step).exists() else ""
        print(f"version {step}: equal to its {' and '.join(found['kept'])}{skipped}", flush=True)
        return None

    def tell_checkpoint(self, found: dict[str, Any]) -> str | None:
        step = found["checkpoint"]
        if found["fault"]:
            return f"DIFFERENT: checkpoint {step} is damaged: {found['fault']}"
        if found["ranks"]:
            where = f"first in {found['tensor']}" if found["tensor"] else f"on ranks {found['ranks']}"
            return f"DIFFERENT: the state after step {step} is not that of its checkpoint, {where}"
        self.checkpoints.append(step)
        print(f"checkpoint {step}: equal (float32 weights, optimizer, random numbers)", flush=True)
        return None

    def difference(self, found: dict[str, Any]) -> str:
        """The first version that is another one."""
        step, size = found["version"], found["max_difference"]
        by = f"by at most {size:.3g}" if size is not None else "(the weights are no longer there to say by how much)"
        known = f"versions {ranges(self.compared)} are equal" if self.compared else "it is the first that was compared"
        why = f"\n  {found['fault']}" if found["fault"] else ""
        why += f"\n  it was made under other conditions, which can be the reason: {self.unlike}" if self.unlike else ""
        return f"DIFFERENT: version {step} is not what the run made of batch {step}: first in {found['tensor']}, {by}; {known}{why}"

    def summary(self, seconds: float) -> int:
        """The last line: all are equal, unless there was nothing to compare."""
        if not self.compared:
            print("rl replay: no version could be compared: the run has kept neither digests nor weights of these steps", file=sys.stderr)
            return 2
        began = f"checkpoint {self.replay.start}" if self.replay.start else "the base model"
        states = f"; so is the whole state at checkpoint {ranges(self.checkpoints)}" if self.checkpoints else ""
        pace = seconds / (self.replay.until - self.replay.start)
        made = f"trained again from {began} in {seconds:.0f} s ({pace:.1f} s a step)"
        print(f"EQUAL: versions {ranges(self.compared)}, {made}, are those of the run, bit for bit{states}")
        return 0
