"""Ray: one actor a machine, which runs `rl node` there. Ray starts the actor of a lost machine on
another one, with the same index.

The actors belong to this driver: Ray ends them with it, and the kernel ends `rl node` with its
actor. Without Ray's head, actors live on for minutes: both sides watch it, too.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl.config.base import Fault
from rl.config.plan import END_S, cluster_of
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.run import resume_command
from rl.run_dir.logs import last_lines, newest_log, next_log
from rl.run_dir.paths import RunDir
from rl.system.children import Stopped
from rl.system.errors import GIVE_UP, RESTART, WRONG_SETTINGS, RunError
from rl.system.linux import end_with_parent
from rl.system.terminal import say

POLL_S = 1.0
HEAD_S = 20.0
"""Seconds without a connection to Ray's head after which it is given up; Ray itself would kill
the driver after a minute."""
LONGEST_DELAY_S = 60.0
NODE = ("-P", "-m", "rl.main", "node")
"""Arguments of Python for `rl node`."""
OF_A_MACHINE = re.compile(
    r"RAY_|SLURM_|RL_NODE_|\w+_VISIBLE_DEVICES$|(HOST|LOG)NAME$|(LD_LIBRARY_)?PATH$"
    r"|(HOME|USER|TMPDIR|PWD|OLDPWD|XDG_RUNTIME_DIR|_)$"
)
"""Environment variables that describe a machine or a session on it."""
MISSING = (
    "needs Ray, which is not installed: install the extra (`pip install 'rl-triad[ray]'`) here "
    "and on every machine"
)


class RayHead:
    """Ray's head, as one machine sees it. Ray's own calls would wait for it."""

    def __init__(self, address: str):
        self.address, self.seen = address, time.monotonic()

    def is_lost(self) -> bool:
        """Returns whether it has not answered for HEAD_S."""
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), POLL_S).close()
            self.seen = time.monotonic()
        return time.monotonic() - self.seen >= HEAD_S


class NodeActor:
    """The actor on one machine. A thread of it that waits for `rl node` is its parent."""

    def __init__(self, arguments: list[str], logs: str, name: str, head: str, grace_s: float):
        self.arguments, self.logs, self.name, self.grace_s = arguments, Path(logs), name, grace_s
        self.head, self.stopping = RayHead(head), threading.Event()
        self.process: Any = None

    def run(self, delay_s: float, variables: dict[str, str]) -> int:
        """Runs `rl node` with further environment variables. Returns its exit code, or minus the
        signal that ended it."""
        if self.stopping.wait(delay_s):
            return -signal.SIGTERM
        self.logs.mkdir(parents=True, exist_ok=True)
        # Ray sets it to the CPUs of the actor, 1
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        with next_log(self.logs, self.name).open("ab") as log:
            self.process = process = subprocess.Popen(
                [sys.executable, *self.arguments],
                env=env | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        while True:
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if self.head.is_lost():
                    self.stop()

    def stop(self) -> None:
        """Ends `rl node`, by SIGKILL if it takes too long."""
        self.stopping.set()
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def faults(config: RLConfig) -> Iterator[Fault]:
    """Yields what can be seen to be wrong before Ray is asked."""
    if not importlib.util.find_spec("ray"):
        yield "cluster.engine", "ray", MISSING
    if (address := cluster_of(config).ray.address).startswith("ray://"):
        remedy = (
            "is that of Ray's client: give HOST:6379, or use `ray job submit` with the address auto"
        )
        yield "cluster.ray.address", address, remedy


def stays(config: RLConfig) -> bool:
    """Returns True: the run ends with this process."""
    return True


def render(config: RLConfig, run_dir: RunDir) -> str:
    """Returns the commands of the actors."""
    places = [place_of(run_dir, index) for index in range(cluster_of(config).nodes)]
    return "".join(f"rl node {shlex.join(words)}\n" for words in places)


def place_of(run_dir: RunDir, index: int) -> list[str]:
    """Returns the arguments of `rl node` on a machine."""
    return ["@", str(run_dir.config), "--cluster.index", str(index)]


def run(
    config: RLConfig, run_dir: RunDir, children: Children, program: Sequence[str] = NODE
) -> int:
    """Runs the whole run on machines of a Ray cluster, and returns the exit code. Raises
    RunError if it cannot be started."""
    address = cluster_of(config).ray.address
    # below `uv run` Ray would copy the current directory to all machines, and run that
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise RunError(f"cluster.engine = ray {MISSING}") from None
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        remedy = "start one (`ray start --head`), or give its address as cluster.ray.address"
        raise RunError(f"no Ray cluster at {address}: {error}\n{remedy}") from None
    finally:
        for signum, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(signum, handler)
    driver, text = Driver(ray, config, run_dir, program), ""
    try:
        driver.get_machines()
        code = driver.watch()
    except Stopped as stop:
        children.stop_caught()
        code, text = 128 + stop.signum, f"{stop}: stopping all machines (once more kills at once)"
    except RunError as error:
        code, text = error.exit_code, f"rl: {error}"
        if code == RESTART:
            text += f"\nresume with: {resume_command(['@', str(run_dir.config)])}"
    if text:
        say(text)
    driver.close()
    return code


def own_variables() -> dict[str, str]:
    """Returns the environment variables that machines get from here: those of the user's shell, but
    for what describes this machine.

    They travel as an argument of a call, which Ray neither stores nor shows, as it does with a
    runtime environment. In a job of Ray there is no such shell, and its actors have the job's
    runtime environment, apart from OMP_NUM_THREADS, which they remove.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "null")
    if job is None:
        return {key: value for key, value in os.environ.items() if not OF_A_MACHINE.match(key)}
    names = {"OMP_NUM_THREADS"} & job.get("runtime_env", {}).get("env_vars", {}).keys()
    return {key: os.environ[key] for key in names}


class Driver:
    """The machines of a run on Ray."""

    def __init__(self, ray: Any, config: RLConfig, run_dir: RunDir, program: Sequence[str]):
        self.ray, self.cluster = ray, cluster_of(config)
        self.run_dir, self.program = run_dir, program
        self.head = RayHead(ray.get_runtime_context().gcs_address)
        self.group: Any = None
        self.actors: list[Any] = []
        self.waiting: dict[Any, int] = {}
        """The calls of `run` that have not returned, and the index of their machine."""
        self.starts = Counter[int]()
        self.variables = own_variables()

    def get_machines(self) -> None:
        """Gets the machines, and an actor on each. Raises RunError if Ray does not have them
        within cluster.join_timeout_s."""
        settings, count, util = self.cluster.ray, self.cluster.nodes, self.ray.util
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        offered = sorted((int(machine.get("GPU", 0)) for machine in machines), reverse=True)
        gpus = min(offered[:count], default=0) if settings.gpus is None else settings.gpus
        bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {}), **settings.resources}
        self.group = util.placement_group([bundle] * count, strategy="STRICT_SPREAD")
        deadline = time.monotonic() + self.cluster.join_timeout_s
        while util.placement_group_table(self.group)["state"] != "CREATED":
            time.sleep(POLL_S)
            if time.monotonic() >= deadline:
                resources = ", ".join(f"{key}: {value:g}" for key, value in bundle.items())
                raise RunError(
                    f"Ray did not give {count} machines with {resources} within "
                    f"cluster.join_timeout_s = {self.cluster.join_timeout_s:g}: it has "
                    f"{len(offered)}, with {', '.join(map(str, offered))} GPUs, some of which may "
                    "be taken; add machines, or lower cluster.nodes or cluster.ray.gpus"
                )
            self.check_head()
        grace_s = self.cluster.grace_s + END_S / 2
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index in range(count):
            remote = self.ray.remote(NodeActor).options(
                num_cpus=1,
                num_gpus=gpus,
                resources=settings.resources,
                scheduling_strategy=strategy(self.group, index),
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=2,
            )
            words, logs = [*self.program, *place_of(self.run_dir, index)], str(self.run_dir.logs)
            self.actors.append(
                remote.remote(words, logs, f"node-{index}", self.head.address, grace_s)
            )
            self.start(index, 0.0)

    def start(self, index: int, delay_s: float) -> None:
        self.starts[index] += 1
        self.waiting[self.actors[index].run.remote(delay_s, self.variables)] = index

    def watch(self) -> int:
        """Starts machines again until the run is over. Raises RunError."""
        deadline = math.inf
        while self.waiting and time.monotonic() < deadline:
            # Stopped may be raised here, but not inside Ray, which would make a SystemError of it
            time.sleep(POLL_S)
            ended, _ = self.ray.wait([*self.waiting], num_returns=len(self.waiting), timeout=0)
            for call in ended:
                index, code = self.waiting.pop(call), self.exit_code(call)
                if code == 0:  # the run is over; the others know that, too
                    deadline = min(deadline, time.monotonic() + self.cluster.grace_s + END_S)
                elif deadline == math.inf:
                    self.start_again(index, code)
            self.check_head()
        return 0

    def exit_code(self, call: Any) -> int:
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            raise RunError(
                "an actor cannot run `rl node` (is rl installed on that machine, and the "
                f"run directory there?): {error}"
            ) from None

    def start_again(self, index: int, code: int) -> None:
        """Starts `rl node` again. Raises RunError if that is useless."""
        log, starts = newest_log(self.run_dir.logs, f"node-{index}"), self.starts[index]
        lines = [f"machine {index} ended with exit code {code} ({log}):", *last_lines(log)]
        if code in (WRONG_SETTINGS, GIVE_UP):
            raise RunError("\n".join(lines), code)
        if starts > self.cluster.max_requeues:
            lines.append(f"It was started {starts} times, as cluster.max_requeues allows")
            raise RunError("\n".join(lines), RESTART)
        self.start(index, min(LONGEST_DELAY_S, 2.0 ** (starts - 1)))

    def check_head(self) -> None:
        """Raises RunError if Ray's head is lost."""
        if self.head.is_lost():
            raise RunError(
                f"Ray's head at {self.head.address} has not answered for {HEAD_S:g} s, and the "
                "machines end; start Ray again, then continue this run",
                RESTART,
            )

    def close(self) -> None:
        """Ends all machines, within their grace, and gives them back. Without a head they end by
        themselves."""
        if not self.head.is_lost():
            calls = [actor.stop.remote() for actor in self.actors] + [*self.waiting]
            if calls:
                self.ray.wait(calls, num_returns=len(calls), timeout=self.cluster.grace_s + END_S)
            if self.group:
                self.ray.util.remove_placement_group(self.group)
            self.ray.shutdown()
