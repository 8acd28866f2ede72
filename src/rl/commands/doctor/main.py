"""`rl doctor`: checks a machine, a configuration or a run, and that trainer and inference agree
on a model; `rl doctor RUN --verify` checks files against their stored checksums.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.commands.doctor.machine import Check, machine_checks
from rl.commands.options import load, named_run, open_run, usage
from rl.config.command_line import fail, load_config_or_exit, options, take
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.run_dir.checksums import Mirror, check_record, check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import RunEnd, read_json
from rl.system.errors import RunError
from rl.wire.batch_file import batch_head, check_rollouts, sound_batch


def damaged_files(run_dir: RunDir) -> list[str]:
    """Returns one sentence per damaged file, with what a resume does about it.

    A version without checksums is not checked. The record of a deleted version is only checked for
    being readable.
    """
    from rl.trainer.sft.tokens import verify_data  # pyarrow, which nothing else of doctor needs

    moves, mirror = "`--resume` moves damaged files away", Mirror()
    weights, digests = numbered(run_dir.weights_dir), numbered(run_dir.digests_dir, ".json")
    records = (
        "a resume rewrites the records of steps that it repeats; only `rl replay` needs the "
        "others, and shows which file is right"
    )
    kinds: dict[str, tuple[Iterable[Path], Callable[[Path], Any]]] = {
        f"{moves} and continues before it if needed": (
            numbered(run_dir.batches, ".batch").values(),
            lambda path: batch_head(path) and sound_batch(path),
        ),
        f"{moves} and starts from an older checkpoint": (
            numbered(run_dir.checkpoints).values(),
            verify_checkpoint,
        ),
        f"{moves} and remakes versions newer than its checkpoint": (
            weights.values(),
            lambda path: check_version(path, run_dir.digests(int(path.name)), mirror),
        ),
        records: (
            digests.values(),
            lambda path: check_record(path, run_dir.weights(int(path.stem))),
        ),
        "only readers of rollouts need it": (run_dir.rollout_files().values(), check_rollouts),
        "a resume refuses damaged examples": (
            [run_dir.data] if run_dir.data.exists() else [],
            verify_data,
        ),
    }
    faults = []
    for remedy, (paths, check) in kinds.items():
        for path in paths:
            try:
                check(path)
            except (CorruptFileError, OSError) as error:
                faults.append(f"{error}; {remedy}")
            except RunError as error:  # written by a newer rl; a resume does not move it away
                faults.append(str(error))
    return list(dict.fromkeys(faults))


OPTIONS = options("""
no-smoke: skip the two real processes: a vLLM server and a training step on a tiny random model
json: print the result as JSON
verify: with RUN: verify every byte of its batches, checkpoints, weights and examples
parity MODEL: compare trainer and inference on this model (a folder, or an id on the hub)
tokens N: with --parity: tokens of each sample; default: 64
dtype float32|bfloat16: with --parity: check only this dtype; default: both
""")
HELP = usage(
    """\
usage: rl doctor [RUN] [@ FILE] [--parity MODEL] [--KEY VALUE] ...

  rl doctor                   checks this machine before a run: versions, cores, memory, disk,
                              ports, locks, GPUs, and a five-second
                              vLLM server and training step (with their start: a minute)
  rl doctor @ run.toml        the same, and this configuration: model, environments, engine
                              arguments, devices, disk
  rl doctor RUN               diagnoses a run, alive or dead: what each process waits for, and why
                              its reward does not rise;
                              RUN is its directory, or its name under outputs/
  rl doctor --parity MODEL    samples from the model through inference, at two temperatures, scores
                              the same tokens with the
                              trainer's code, prints how much they differ, and the likely cause

Exit code 0: no problems; 1: a problem was found, and the output has the remedy.""",
    OPTIONS,
)
NOT_PLAYED = ("orchestrator.environment", "orchestrator.sampling.max_tokens")
"""Keys that may be missing or conflict with others if there is no configuration, as nothing is
played then."""


def main(args: list[str], children: Children) -> int:
    values, rest = take("rl doctor", args, OPTIONS)
    if {"-h", "--help", "--schema"} & set(rest):
        load_config_or_exit(rest, "rl doctor", usage=HELP)
    if values["parity"]:
        return parity(args, children)
    if rest and not rest[0].startswith(("-", "@")):
        if len(rest) > 1:
            fail(
                "rl doctor",
                f"{rest[1]}: a run has its own configuration; give only RUN, --json and --verify",
            )
        if rest[0].endswith(".toml"):
            fail("rl doctor", f"{rest[0]}: write files as `@ FILE`: rl doctor @ {rest[0]}")
        root = named_run(rest[0]).absolute()
        return diagnosis(root, verify=bool(values["verify"]), as_json=bool(values["json"]))
    config, _ = load_config_or_exit(
        rest, "rl doctor", variables=os.environ, usage=HELP, optional=() if rest else NOT_PLAYED
    )
    checks = checks_of(config, children, with_config=bool(rest), smoke=not values["no_smoke"])
    return examine(checks, as_json=bool(values["json"]))


def parity(args: list[str], children: Children) -> int:
    config, _, values = load("rl doctor", args, OPTIONS, HELP, optional=NOT_PLAYED)
    from rl.commands.doctor.parity import examine
    from rl.commands.play_session import run

    return run("rl doctor", children, examine(config, values, children))


def diagnosis(root: Path, *, verify: bool, as_json: bool) -> int:
    """Prints what a run waits for and what is wrong with it. Returns 1 if anything is."""
    from rl.diagnosis.waits import diagnose

    run_dir, config = open_run(root)
    report = diagnose(run_dir, config, reads_tokens=True)
    problems = [problem.text for problem in report.problems if problem.serious]
    if verify:
        problems += [fault for fault in damaged_files(run_dir) if fault not in problems]
    if as_json:
        summary = {"fine": not problems, "bottleneck": report.bottleneck, "problems": problems}
        print(json.dumps(summary | {"lines": report.all_lines}, indent=1))
        return 1 if problems else 0
    end = read_json(run_dir.run_end, RunEnd)
    is_doubtful = report.state == "ended" and end and end.kind == "doubtful"
    level = "warn" if is_doubtful else "note" if report.state == "stopped" else "ok"
    print("\n".join([f"run {root}", *(f"  {line}" for line in report.all_lines)]))
    print("\n".join(f"FAIL  {fault}" for fault in problems) or f"{level:<5} {report.bottleneck}")
    if verify and not problems:
        print("ok    all files match their checksums")
    return 1 if problems else 0


def checks_of(
    config: RLConfig, children: Children, *, with_config: bool, smoke: bool
) -> Iterator[Check]:
    from rl.commands.doctor.configuration import config_checks
    from rl.commands.doctor.smoke import smoke_checks

    yield from machine_checks(config, with_config)
    if with_config:
        yield from config_checks(config, children)
    if smoke and not config.is_remote:
        yield from smoke_checks(config, children)


def examine(checks: Iterable[Check], *, as_json: bool) -> int:
    """Makes all checks and prints each result at once. Returns 1 if any check failed."""
    results = []
    for check in checks:
        results.append(check)
        if not as_json:
            print(check)
    failed = [check.name for check in results if check.level == "FAIL"]
    if as_json:
        summary = {"fine": not failed, "checks": [asdict(check) for check in results]}
        print(json.dumps(summary, indent=1))
    elif failed:
        print(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
    return 1 if failed else 0
