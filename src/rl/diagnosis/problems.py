"""Finds what is wrong with a run, with remedies: stopped or silent processes, full disks,
damaged files."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl.diagnosis.disk import on_disk
from rl.diagnosis.state import Process, RunState
from rl.run_dir.checksums import MANIFEST, read_manifest
from rl.run_dir.files import CorruptFileError
from rl.run_dir.safetensors import read_header
from rl.system.terminal import size, span
from rl.wire.batch_file import batch_head
from rl.wire.parity import unjudged

LOW_BYTES = 256 << 20
"""Free space below which a run is about to fail, however small its model."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a run, and where to see it."""

    text: str
    """The problem and its remedy, as printed by `rl doctor RUN`."""
    serious: bool = True
    """Whether something is broken. If false, the run was stopped, or this may keep the reward
    down."""
    metrics: tuple[str, ...] = ()
    """Metrics whose curves show the problem."""
    why: str | None = None
    """The `why` of the rollouts that show the problem: the reason they were not trained on."""
    files: tuple[Path, ...] = ()
    """Files that show the problem."""


class MismatchRow(msgspec.Struct, frozen=True):
    """Mismatch KL at the tokens of a range of places, over the newest steps."""

    kind: str
    first: int
    last: int
    tokens: int
    samples: int
    kl: float
    """Mean of k3, nats."""
    error: float
    """Standard error of `kl` over samples; 0 for one sample."""

    def __str__(self) -> str:
        return (
            f"mismatch KL by {self.kind}, {self.first:,} to {self.last:,}: {self.kl:.2g} ± "
            f"{self.error:.1g}, {self.tokens:,} tokens of {self.samples:,} samples"
        )


def problems_of(state: RunState, over: bool) -> list[Problem]:
    """Returns all problems, worst first. For a run that is `over`, only its files are checked."""
    before = [] if over else [*disk_problems(state), *process_problems(state)]
    return [*before, *damage(state)]


def process_problems(state: RunState) -> Iterator[Problem]:
    """Yields processes that are stopped, silent, or dead without an `rl` to restart them."""
    if not state.alive:
        return
    launcher = {"rl": state.launcher} if state.launcher else {}
    for name, process in (state.processes | launcher).items():
        for pid, title in process.stopped.items():
            yield Problem(
                f"the {name} is stopped: SIGSTOP or a debugger holds process {pid} ({title}); "
                f"`kill -CONT {pid}` continues it",
                files=state.logs(name),
            )
    for name, process in state.processes.items():
        if not process.may_live and not state.is_led:
            yield Problem(
                f"the {name} died while it was {process.doing}, and no `rl` is running to "
                f"restart it; see {state.log_name(name)}, then `{state.resume}`",
                files=state.logs(name),
            )
        late = process.silent_s > state.config.supervisor.silence_s / 2
        if process.may_live and late and not process.stopped:
            yield Problem(
                f"no heartbeat of the {name} for {span(process.silent_s)}, it was "
                f"{process.doing}: {silence(process, state)}; see {state.log_name(name)}",
                files=state.logs(name),
            )


def silence(process: Process, state: RunState) -> str:
    """Returns why a process has no heartbeat, and what will happen or what to do."""
    if process.blocked:
        return "it is stuck in the kernel because a disk or network file system does not respond"
    if process.alive is None:
        return f"its machine, {process.status.host}, is down or unreachable"
    if state.is_led:
        return (
            "it is stuck, and will be restarted after supervisor.silence_s = "
            f"{state.config.supervisor.silence_s:g}"
        )
    return (
        f"it is stuck, and no `rl` is running to restart it; kill it ({process.status.pid}), "
        f"then `{state.resume}`"
    )


def disk_problems(state: RunState) -> Iterator[Problem]:
    """Yields the run's directories that are not writable, or have less free space than the next
    file needs."""
    newest = {
        state.run_dir.root: state.run_dir.checkpoint(state.newest_checkpoint),
        state.run_dir.weights_dir: state.run_dir.weights(state.newest_version),
    }
    for folder, like in newest.items():
        if not folder.is_dir():
            continue
        need, free = max(LOW_BYTES, on_disk(like)), shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
            yield Problem(
                f"{folder} is not writable: its file system is read-only, or owned by another "
                f"user; fix that, then `{state.resume}`"
            )
        elif free < need:
            yield Problem(
                f"the disk of {folder} is full: {size(free)} free, but the next file there needs "
                f"about {size(need)}; free some space, or lower trainer.checkpoint.keep_last and "
                "trainer.weights.keep_last"
            )


def damage(state: RunState) -> Iterator[Problem]:
    """Yields the damaged ones of the newest batch, version and checkpoint, which a resume starts
    from. They are judged only by size and header; `rl doctor RUN --verify` reads every byte."""
    for path, fault in faults(state):
        yield Problem(
            f"{fault}; `{state.resume}` moves it away and recreates it",
            files=(path,) if path.is_file() else (),
        )


def faults(state: RunState) -> Iterator[tuple[Path, str]]:
    """Yields each damaged file with its fault."""
    run_dir = state.run_dir
    weights = sorted(run_dir.weights(state.newest_version).glob("*.safetensors"))
    # fine-tuning has no batches
    batches = [run_dir.batch(state.newest_batch)] if state.newest_batch else []
    for check, path in [*((batch_head, p) for p in batches), *((read_header, p) for p in weights)]:
        try:
            check(path)
        except CorruptFileError as error:
            yield path, str(error)
    if not state.newest_checkpoint:
        return
    folder = run_dir.checkpoint(state.newest_checkpoint)
    try:
        entries = read_manifest(folder)["files"]
    except CorruptFileError:
        yield folder / MANIFEST, f"{folder / MANIFEST}: is missing or unreadable"
        return
    for path, expected in ((folder / name, entry.get("size")) for name, entry in entries.items()):
        if not path.is_file():
            yield path, f"{path}: is missing"
        elif (num_bytes := path.stat().st_size) != expected:
            yield path, f"{path}: has {num_bytes} bytes instead of {expected}"


def doubts(state: RunState) -> Iterator[Problem]:
    """Yields that trainer and inference were not compared before a checkpoint, nor since."""
    name = "parity/unjudged"
    steps, counts = state.numbers.points("trainer", name, last=1)
    if steps > state.numbers.points("trainer", "parity/agrees", last=1)[0]:
        yield Problem(f"{unjudged(int(counts[0]))} ({name})", serious=False, metrics=(name,))
