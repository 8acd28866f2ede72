"""What is wrong with a run, each with its remedy: processes that are stopped or silent, disks, files that cannot be whole."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rl.files import HEADER, MAGIC
from rl.run_dir import numbered
from rl.run_state import Process, RunState, newest_log, span

LOW_BYTES = 256 << 20
"""Free space below which a run is about to fail, however small its model."""


def problems_of(state: RunState, over: bool) -> list[str]:
    """The worst first. Of a run that is `over` only what it left counts."""
    if over:
        return damage(state)
    return [*disk_problems(state), *(process_problems(state) if state.alive else []), *damage(state)]


def process_problems(state: RunState) -> list[str]:
    """Processes that do nothing although they are there, or are gone with nobody to bring them back."""
    found = []
    stopped = dict.fromkeys(state.launcher.stopped if state.launcher else ())
    for process in state.processes.values():
        stopped |= dict.fromkeys(process.stopped)
    for who in stopped:
        name = owner(state, who)
        found.append(f"the {name} is stopped: SIGSTOP, or a debugger, holds process {who}; `kill -CONT {who.split()[0]}` lets it go on")
    for name, process in state.processes.items():
        log = newest_log(state.run_dir.logs, name) or state.run_dir.logs
        if not process.there and not (state.launcher and state.launcher.alive):
            found.append(
                f"the {name} died while it was {process.doing}, and no `rl` lives to start it again; see {log}, then `{state.resume}`"
            )
        elif process.there and process.silent_s > state.config.supervisor.silence_s / 2 and not process.stopped:
            found.append(
                f"no heartbeat of the {name} for {span(process.silent_s)}, it was {process.doing}: {silence(process, state)}; see {log}"
            )
    return found


def owner(state: RunState, who: str) -> str:
    """The role whose tree a process belongs to: the smallest one, for `rl` is above all."""
    return next((name for name, process in state.processes.items() if who in process.stopped), "rl")


def silence(process: Process, state: RunState) -> str:
    if process.blocked:
        return "it is stuck in the kernel, a disk or network file system does not answer"
    limit = state.config.supervisor.silence_s
    if process.alive is None:
        return f"its machine, {process.status.get('host')}, is gone or cut off"
    if state.launcher and state.launcher.alive:
        return f"it is stuck, and is started again after supervisor.silence_s = {limit:g}"
    return f"it is stuck, and no `rl` lives to start it again; kill it ({process.status.get('pid')}), then `{state.resume}`"


def disk_problems(state: RunState) -> list[str]:
    """Places of the run with less space than the next thing that is written there, or that cannot be written."""
    found = []
    needs = {state.run_dir.root: newest_size(state.run_dir.checkpoints), state.run_dir.weights_dir: newest_size(state.run_dir.weights_dir)}
    for place, need in needs.items():
        if not place.is_dir():
            continue
        free = shutil.disk_usage(place).free
        if not os.access(place, os.W_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
            found.append(f"{place} cannot be written: its file system is read-only, or not yours; mend that, then `{state.resume}`")
        elif free < max(LOW_BYTES, need):
            remedy = "free some, or lower trainer.checkpoint.keep_last and trainer.weights.keep_last"
            found.append(
                f"the disk of {place} is full: {gib(free)} free, the next thing there takes about {gib(max(LOW_BYTES, need))}; {remedy}"
            )
    return found


def newest_size(directory: Path) -> int:
    """Bytes of the newest entry."""
    entries = numbered(directory)
    return sum(file.stat().st_size for file in entries[max(entries)].rglob("*") if file.is_file()) if entries else 0


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def damage(state: RunState) -> list[str]:
    """Files that cannot be whole, by their sizes alone; `rl doctor RUN --verify` reads every byte."""
    remedy = f"`{state.resume}` moves it away and makes it again"
    return [f"{path} is damaged: {why}; {remedy}" for path, why in cheap_damage(state)]


def cheap_damage(state: RunState) -> Iterator[tuple[Path, str]]:
    """(file, what is wrong) among the newest things, which a resume starts from."""
    if state.newest_batch:
        path = state.run_dir.batch(state.newest_batch)
        if why := record_fault(path):
            yield path, why
    for step, folder in reversed(numbered(state.run_dir.checkpoints).items()):
        if step == state.newest_checkpoint:
            yield from checkpoint_faults(folder)
    for file in sorted(state.run_dir.weights(state.newest_version).glob("*.safetensors")) if state.newest_version else []:
        if why := safetensors_fault(file):
            yield file, why


def record_fault(path: Path) -> str:
    """What is wrong with the length or the beginning of a file that is one checksummed record."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    size = path.stat().st_size
    if len(head) < HEADER.size:
        return f"cut short, {size} bytes are left"
    magic, length, _ = HEADER.unpack(head)
    if magic != MAGIC:
        return "it does not begin as a batch does"
    return "" if size == HEADER.size + length else f"it has {size} bytes instead of {HEADER.size + length}"


def checkpoint_faults(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files of a checkpoint that are missing or have another size than its manifest says."""
    manifest = folder / "manifest.json"
    try:
        sizes = {name: int(entry["size"]) for name, entry in json.loads(manifest.read_text())["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield manifest, "missing or not readable"
        return
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            yield file, "missing"
        elif file.stat().st_size != size:
            yield file, f"it has {file.stat().st_size} bytes instead of {size}"


def safetensors_fault(path: Path) -> str:
    """What is wrong with the length or the header of a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            return "its header is not one"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "its header is not readable"
    return "" if size == 8 + length + end else f"it has {size} bytes instead of {8 + length + end}"
