"""A real Slurm on this machine, in a folder: munged, slurmctld and slurmds n1 to n4. Needs root,
and `apt-get install slurm-wlm munge`.

Partition `main` is the default; jobs in `high` preempt those of `main`, which are told, have 20 s
and are queued again. A node that is lost counts as down after 15 s. Nothing outside the folder is
written or read, and any number of folders can be up at once.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rl.system import process_table

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
START_S, STOP_S = 200.0, 10.0
"""Deadlines, in seconds, for nodes to become idle and for a daemon to end."""
LONGEST_FOLDER = 70  # bytes: daemons put Unix sockets into it, whose names have at most 107
PR_SET_CHILD_SUBREAPER = 36
# A requeued job waits until older credentials have expired (cred_expire). Nodes have what is
# written, not what this machine has.
CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=15
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[4]}] CPUs=2 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmHere:
    """The Slurm in a folder; as a context manager it is up as long as the `with` block lasts."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            key: value for key, value in os.environ.items() if not key.startswith("SLURM")
        } | {"SLURM_CONF": str(self.conf)}

    def __enter__(self) -> "SlurmHere":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Starts everything and waits until all nodes are idle."""
        if missing := unable():
            sys.exit(f"slurm_here: {missing}")
        if len(os.fsencode(self.folder)) > LONGEST_FOLDER:
            sys.exit(
                f"slurm_here: {self.folder} is too long for the sockets in it; give a path "
                f"of at most {LONGEST_FOLDER} bytes"
            )
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)  # munged trusts no folder that others may write
        self.conf.write_text(
            CONF.format(
                folder=self.folder, host=socket.gethostname().partition(".")[0], ports=free_ports(5)
            )
        )
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-4] Name=gpu File={self.folder}/gpu[0-1]\n"
        )
        (self.folder / "gpu0").touch()
        (self.folder / "gpu1").touch()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        try:
            files = {
                "key-file": key,
                "socket": "munge.sock",
                "pid-file": "munge.pid",
                "seed-file": "munge.seed",
            }
            self._start(
                "munged",
                "munged",
                "--foreground",
                "--force",
                *(f"--{name}={self.folder / file}" for name, file in files.items()),
            )
            self._await("munged's socket", (self.folder / "munge.sock").is_socket, STOP_S)
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
            for node in NODES:
                self.start(node)
            self._await(
                "four idle nodes",
                lambda: self.ask("sinfo", "-h", "-p", "main", "-o", "%D %t") == "4 idle",
                START_S,
            )
        except BaseException:
            self.down()
            raise

    def start(self, node: str) -> None:
        """Starts the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill(self, node: str) -> None:
        """Kills the slurmd of a node with all processes of its jobs. It is their subreaper, so
        all are below it."""
        kill_below(self.daemons[node].pid)
        self._stop(node, signal.SIGKILL)

    def preempt(self, node: str) -> None:
        """Submits a short job of high priority to a node."""
        command = f"sbatch -p high -w {node} --exclusive -o /dev/null --wrap".split()
        self.ask(*command, "sleep 2")

    def down(self) -> None:
        """Ends everything. Files stay."""
        for node in {*NODES} & {*self.daemons}:
            self.kill(node)
        self._stop("slurmctld", signal.SIGTERM)
        self._stop("munged", signal.SIGTERM)

    def ask(self, *command: str, timeout_s: float = 30.0) -> str:
        """Returns what a command of Slurm prints, and its error messages if it fails."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )
        return (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()

    def _start(self, name: str, *command: str) -> None:
        prctl = ctypes.CDLL(None).prctl
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0),
            )

    def _stop(self, name: str, signum: int) -> None:
        if daemon := self.daemons.pop(name, None):
            daemon.send_signal(signum)
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _await(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Waits until a condition holds. Raises TimeoutError, or RuntimeError with the end of
        its log when a daemon has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"{name} has ended: {log[-1000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"slurm_here waited {timeout_s:.0f} s for {what}; see the logs in {self.folder}"
                )
            time.sleep(0.1)


def kill_below(root: int) -> None:
    """Stops a process and kills all below it, as a power cut would."""
    os.kill(root, signal.SIGSTOP)

    def below() -> process_table.Table:
        table = process_table.table()
        below = process_table.trees(table, [root]) - {root}
        return {pid: table[pid] for pid in below if table[pid].state != "Z"}

    process_table.kill(below, 0.02)


def unable() -> str:
    """Returns why Slurm cannot be brought up on this machine; empty if it can."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return (
        f"there is no {missing[0]}: apt-get install slurm-wlm munge"
        if missing
        else ""
        if os.geteuid() == 0
        else "needs root"
    )


def free_ports(number: int) -> list[int]:
    """Returns neighbouring ports on which nobody listens: those of slurmctld and of the slurmds."""
    for _ in range(100):
        # below those that the kernel gives to clients
        ports = range(first := 10_000 + secrets.randbelow(20_000), first + number)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
            return list(ports)
    raise OSError(
        "slurm_here found no five free ports between 10000 and 30000; end what listens there"
    )
