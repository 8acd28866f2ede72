"""Finds what is wrong with a run, with remedies: stopped or silent processes, full disks,
damaged files."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl.diagnosis.disk import on_disk
from rl.diagnosis.state import Process, RunState
from rl.run_dir.checksums import MANIFEST, read_manifest
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metrics import MOST_NAMES
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


def problems_of(state: RunState, over: bool) -> list[Problem]:
    """Returns all problems, worst first. For a run that is `over`, only its files are checked."""
    if over:
        return damage(state)
    return [
        *disk_problems(state),
        *(process_problems(state) if state.alive else []),
        *damage(state),
    ]


def process_problems(state: RunState) -> list[Problem]:
    """Returns processes that are stopped, silent, or dead without an `rl` to restart them."""
    found = []
    for name, process in (
        state.processes | ({"rl": state.launcher} if state.launcher else {})
    ).items():
        for pid, title in process.stopped.items():
            text = (
                f"the {name} is stopped: SIGSTOP or a debugger holds process {pid} ({title}); "
                f"`kill -CONT {pid}` continues it"
            )
            found.append(Problem(text, files=log_of(state, name)))
    for name, process in state.processes.items():
        log = state.log(name) or state.rl_dir.logs
        if not process.there and not state.is_led:
            text = (
                f"the {name} died while it was {process.doing}, and no `rl` is running to "
                f"restart it; see {log}, then `{state.resume}`"
            )
        elif (
            process.there
            and process.silent_s > state.config.supervisor.silence_s / 2
            and not process.stopped
        ):
            text = (
                f"no heartbeat of the {name} for {span(process.silent_s)}, it was "
                f"{process.doing}: {silence(process, state)}; see {log}"
            )
        else:
            continue
        found.append(Problem(text, files=log_of(state, name)))
    return found


def log_of(state: RunState, name: str) -> tuple[Path, ...]:
    """Returns the newest log of a process, if it has one."""
    log = state.log(name)
    return (log,) if log else ()


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


def disk_problems(state: RunState) -> list[Problem]:
    """Returns the run's directories that are not writable, or have less free space than the next
    file needs."""
    found = []
    newest = {
        state.run_dir.root: state.run_dir.checkpoint(state.newest_checkpoint),
        state.run_dir.weights_dir: state.run_dir.weights(state.newest_version),
    }
    for place, like in newest.items():
        if not place.is_dir():
            continue
        need = max(LOW_BYTES, on_disk(like))
        free = shutil.disk_usage(place).free
        if not os.access(place, os.W_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
            text = (
                f"{place} is not writable: its file system is read-only, or owned by another "
                f"user; fix that, then `{state.resume}`"
            )
        elif free < need:
            remedy = (
                "free some space, or lower trainer.checkpoint.keep_last and "
                "trainer.weights.keep_last"
            )
            text = (
                f"the disk of {place} is full: {size(free)} free, but the next file there needs "
                f"about {size(need)}; {remedy}"
            )
        else:
            continue
        found.append(Problem(text))
    return found


def damage(state: RunState) -> list[Problem]:
    """Returns damaged files, judged only by size and header; `rl doctor RUN --verify` reads
    every byte."""
    remedy = f"`{state.resume}` moves it away and recreates it"
    return [
        Problem(f"{path} is damaged: {why}; {remedy}", files=(path,) if path.is_file() else ())
        for path, why in faults(state)
    ]


def metrics_left_out(state: RunState) -> list[Problem]:
    """Returns that some metrics are not shown, if a source has too many."""
    path = state.run_dir.metrics
    return [
        Problem(
            f"{path}: has more than {MOST_NAMES:,} metrics of the {source}; the others are "
            "shown nowhere",
            serious=False,
            files=(path,),
        )
        for source, table in state.numbers.tables.items()
        if table.left_out
    ]


def parity_missed(state: RunState) -> list[Problem]:
    """Returns that trainer and inference were not compared before a checkpoint, nor since."""
    name = "parity/unjudged"
    (steps, counts), (judged, _) = (
        state.numbers.points("trainer", metric, last=1) for metric in (name, "parity/agrees")
    )
    return (
        [Problem(f"{unjudged(int(counts[0]))} ({name})", serious=False, metrics=(name,))]
        if steps > judged
        else []
    )


def faults(state: RunState) -> Iterator[tuple[Path, str]]:
    """Yields (file, fault) for the newest batch, checkpoint and version, which a resume starts
    from."""
    batch, weights = (
        state.run_dir.batch(state.newest_batch),
        state.run_dir.weights(state.newest_version),
    )
    checks = [(read_header, file) for file in sorted(weights.glob("*.safetensors"))]
    for check, path in [(batch_head, batch), *checks] if state.newest_batch else checks:
        try:
            if not path.is_file():
                raise CorruptFileError("it is not a file")  # to open a pipe would wait
            check(path)
        except CorruptFileError as error:
            yield path, str(error).removeprefix(f"{path}: ")
    if state.newest_checkpoint:
        yield from checkpoint_faults(state.run_dir.checkpoint(state.newest_checkpoint))


def checkpoint_faults(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields (file, fault) for files of a checkpoint that are missing or whose size differs from
    the manifest."""
    try:
        files = read_manifest(folder)["files"]
    except CorruptFileError:
        yield folder / MANIFEST, "missing or unreadable"
        return
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            yield file, "missing"
        elif file.stat().st_size != entry.get("size"):
            yield file, f"it has {file.stat().st_size} bytes instead of {entry.get('size')}"
