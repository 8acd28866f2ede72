"""The run that `chaos.py` kills: how it is started, started again, looked at and ended."""

import getpass
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from rl.config.command_line import load_config_or_exit
from rl.run_dir.status import TRAINER_STEPS, Phase, RoleStatus, read_status

FRESH_S = 6.0
"""A heartbeat comes every 2 s; one that is older than this is not there."""
UP_S = 900.0
"""The first start (vLLM's cold one) and any recovery may take this long at most."""
END_S = 90.0
"""A run may take this long to end after SIGTERM."""


class EndedError(Exception):
    """The run ended by itself; None: it does not come up again."""

    def __init__(self, code: int | None):
        self.code = code
        super().__init__(str(code))


class Run:
    """The command `rl`, started anew with --resume when it is killed, everything below it, and
    `num_servers` inference servers beside it, which are started anew, too."""

    def __init__(self, args: list[str], folder: Path, num_servers: int = 0):
        self.args, self.folder, self.num_servers = args, folder, num_servers
        self.servers: list[subprocess.Popen[bytes]] = []
        self.config, _ = load_config_or_exit(args, "rl")
        self.run_dir = self.config.run_dir
        self.word = f"chaos-{os.getpid()}-{time.time_ns()}"
        self.temporary = Path(tempfile.mkdtemp(prefix="rlc-"))
        self.attempt, self.output = 0, folder / "rl.log"
        self.rl: subprocess.Popen[bytes] | None = None
        self.doomed: list[tuple[float, str]] = []
        """(when by time.monotonic, word of a killed attempt): nothing of it may be alive a while
        later."""
        self.not_before: dict[str, float] = {}
        """When a role was last killed, by the clock of its status."""

    def environment(self) -> dict[str, str]:
        compiled = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        )
        return os.environ | {
            "RL_CHAOS": f"{self.word}:{self.attempt}.",
            "TMPDIR": str(self.temporary),
            # what vLLM compiled for itself before: half a minute of a first step
            "TORCHINDUCTOR_CACHE_DIR": compiled,
            "PYTHONUNBUFFERED": "1",  # what was said before a SIGKILL is in the log
        }

    def start(self) -> None:
        self.attempt += 1
        command = [
            str(Path(sys.executable).parent / "rl"),
            *self.args,
            *(["--resume"] if self.run_dir.config.exists() else []),
        ]
        with self.output.open("ab") as output:
            self.rl = subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def revive(self) -> None:
        """Starts again what nobody else does: a dead `rl`, and further servers. Raises
        EndedError when `rl` ended by itself."""
        assert self.rl
        self.keep_servers()
        if (code := self.rl.poll()) is not None:
            if code not in (-signal.SIGKILL, -signal.SIGSEGV):
                raise EndedError(code)
            self.doomed.append((time.monotonic(), f"{self.word}:{self.attempt}."))
            self.start()

    def end(self) -> int | None:
        """Ends everything. Returns the exit code of `rl`, None before its start. Raises
        TimeoutError."""
        self.end_servers()
        if self.rl is None:
            return None
        if self.rl.poll() is None:
            self.rl.send_signal(signal.SIGCONT)
            self.rl.terminate()
        try:
            return self.rl.wait(END_S)
        except subprocess.TimeoutExpired:
            self.rl.kill()
            raise TimeoutError(f"`rl` does not end on SIGTERM within {END_S:.0f} s") from None

    def note_kill(self, target: str) -> None:
        """Remembers which roles do not outlive the death of a target."""
        if target == "rl":
            self.not_before = dict.fromkeys(self.roles(), time.time())
        elif target not in ("worker", "guard", "server"):
            self.not_before[{"engine": "inference", "rank": "trainer"}.get(target, target)] = (
                time.time()
            )

    def start_server(self) -> subprocess.Popen[bytes]:
        """A further inference server, as by hand."""
        environment = self.environment() | {"RL_CHAOS": f"{self.word}:servers."}
        environment.pop("TMPDIR")
        command = [str(Path(sys.executable).parent / "inference"), "@", str(self.run_dir.config)]
        with (self.folder / "servers.log").open("ab") as output:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def keep_servers(self) -> None:
        """Starts those that are not there."""
        self.servers = [
            server if server.poll() is None else self.start_server() for server in self.servers
        ]
        while len(self.servers) < self.num_servers and self.run_dir.config.exists():
            self.servers.append(self.start_server())

    def end_servers(self) -> None:
        """Lets those that are stopped go on, and ends all."""
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
            server.terminate()
        for server in self.servers:
            server.wait(60)
        self.servers = []

    def servers_up(self) -> list[RoleStatus]:
        """The further servers that answer."""
        statuses = {
            status.pid: status
            for path in self.run_dir.status_dir.glob("inference-*.json")
            if (status := read_status(path))
        }
        found = [statuses[server.pid] for server in self.servers if server.pid in statuses]
        return [
            status
            for status in found
            if status.address and time.time() - (status.heartbeat or 0) < FRESH_S
        ]

    def status(self, role: str) -> RoleStatus:
        return read_status(self.run_dir.status(role)) or RoleStatus()

    def up(self, role: str) -> bool:
        """The process lives, is younger than the last kill that it does not outlive, shows its
        heartbeat, and is past its start."""
        status = self.status(role)
        if (status.started or 0) < self.not_before.get(role, 0):
            return False
        fresh = time.time() - (status.heartbeat or 0) < FRESH_S and self.lives(role, status)
        if role == "trainer":
            return fresh and status.phase in TRAINER_STEPS
        return (
            fresh and status.address is not None and status.phase is not Phase.LOADING_ENVIRONMENTS
        )

    def lives(self, role: str, status: RoleStatus) -> bool:
        """Whether the process of a status is there."""
        return psutil.pid_exists(status.pid or 0)

    def roles(self) -> list[str]:
        if self.config.sft:
            return ["trainer"]
        return [
            "trainer",
            "orchestrator",
            *([] if self.config.orchestrator.inference_urls else ["inference"]),
        ]

    def all_up(self) -> bool:
        return all(map(self.up, self.roles())) and len(self.servers_up()) == self.num_servers

    def find(self, target: str) -> tuple[int, str] | None:
        """(pid, phase) of a target, if it is there now."""
        assert self.rl
        role = {"rank": "trainer-1", "engine": "inference", "worker": "orchestrator"}.get(
            target, target
        )
        status = self.status(role)
        pid, phase = status.pid, status.phase or "?"
        if target == "server":
            pid, phase = next(
                ((status.pid, status.phase or "?") for status in self.servers_up()), (None, "?")
            )
        if target in ("rl", "guard"):
            pid = self.rl.pid
            phase = self.status("trainer").phase or Phase.STARTING
        if not pid or not psutil.pid_exists(pid):
            return None
        if target in ("engine", "worker", "guard"):
            word = {
                "engine": "EngineCore",
                "worker": "rl.envs.worker",
                "guard": "process_table.py",
            }[target]
            found = [process.pid for process in below(pid) if word in title(process)]
            return (min(found), phase) if found else None
        return pid, phase


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return ""
