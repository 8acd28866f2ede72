"""One worker process: its start, the pool's state of it, the check of what it sends, and the
reasons to kill it.

The first worker of a home is started cold, and forks a copy of itself once its imports are done.
All others in that home, whatever their environment, and replacements for dead workers are forked
from the copy. Sandboxed workers are started cold (worker_sandbox.py says why), as is any worker for
which there is no copy. A copy has imported the adapter and the library of environments, but no
environment: these may start threads.

The pool trusts no worker: any code in its sandbox can impersonate it. Rewards are not verified
(docs/security.md), but nothing that a worker sends may reach a batch or the run's files unless it
could have come from the served model (`validate_played`).
"""

import asyncio
import errno
import math
import os
import re
import shlex
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from msgspec import ValidationError

from rl.homes.home import home_of, unmet
from rl.homes.needs import WORKER
from rl.orchestrator.workers.worker_sandbox import variables_of
from rl.run_dir.files import UNREADABLE
from rl.system import process_table
from rl.system.children import PYTHON, Child, add_marker, inherited, start
from rl.system.credentials import redact
from rl.system.errors import RESTART, RunError
from rl.system.linux import adopt_orphans
from rl.system.prefork import PreforkedProcess
from rl.system.sandbox import Sandbox
from rl.wire.rollouts import Rollout, unfit
from rl.wire.turns import AnswerSpan, Turns
from rl.wire.worker_messages import (
    Description,
    FromWorker,
    Played,
    PlayOrder,
    PolicySpec,
    Ready,
    ServerSet,
    WorkerSetup,
)

ANSWERS = msgspec.msgpack.Decoder(FromWorker)
STOPPED_S = 10.0
"""How long a worker may be stopped (SIGSTOP) before it is killed; a busy one may be silent for
longer."""
GIB = 2**30
MAX_KILLS = 3
"""A group is given up as the cause after this many deaths of its worker, at the last of which it
was played alone."""
OTHER_API = re.compile(r"\b(AttributeError|ImportError|ModuleNotFoundError|NameError|TypeError)\b")
"""What code raises that is written for another version of a package."""


class EnvLostError(RunError):
    """An environment cannot be played any more: its workers keep dying or do not come back.
    Caught where other environments continue."""


@dataclass(eq=False)
class SentGroup:
    """A group at a worker, and the future of its rollouts."""

    order: PlayOrder
    done: "asyncio.Future[list[Rollout]]"
    rollouts: list[Rollout]
    """The rollouts of finished episodes."""
    on_members: Callable[[list[Rollout]], None] | None
    """Called with the rollouts of episodes that finish before the last of the group, with
    `keeps_last` also with those of the last."""
    keeps_last: bool = False
    kills: int = 0
    """Number of workers that died while playing it."""

    def take(self, played: Played) -> None:
        """Adds finished episodes; the last of them resolve `done`."""
        self.rollouts = sorted(
            [*self.rollouts, *played.rollouts], key=lambda rollout: rollout.episode
        )
        if self.on_members and played.rollouts and (played.unfinished or self.keeps_last):
            self.on_members(played.rollouts)
        if not played.unfinished:
            self.done.set_result(self.rollouts)

    def order_left(self) -> PlayOrder:
        """Returns the order for the unfinished rest of the group."""
        return msgspec.structs.replace(
            self.order, done=sorted({rollout.episode for rollout in self.rollouts})
        )

    def give_up(self, reason: str) -> None:
        """Fails the unfinished episodes."""
        text = f"its worker died {self.kills} times while playing it; the last time: {reason}"
        left = [i for i in range(self.order.num_episodes) if i not in self.order_left().done]
        failed = [Rollout(episode=i, stop="error", cause="worker", error=text) for i in left]
        self.take(Played(self.order.play_id, failed))

    @property
    def is_suspect(self) -> bool:
        """Whether the group is given up at its worker's next death, so that it is played alone."""
        return self.kills >= MAX_KILLS - 1

    @property
    def failed(self) -> bool:
        return self.kills >= MAX_KILLS


@dataclass
class PoolWorker:
    """One worker process and the pool's state of it."""

    setup: WorkerSetup
    child: Child
    ready: "asyncio.Future[Ready]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    sent: dict[int, SentGroup] = field(default_factory=dict)
    last_message: float = field(default_factory=time.monotonic)
    """Monotonic time of its last message, moved forward by the time in which the pool could not
    read any."""
    kill_reason: str = ""
    """Why the pool killed it; empty if it did not."""
    descriptions: "deque[asyncio.Future[Description]]" = field(default_factory=deque)

    @property
    def is_up(self) -> bool:
        """Whether it has loaded its environment, and is neither dead nor to be killed."""
        return (
            self.ready.done()
            and not self.ready.exception()
            and self.child.exit_code is None
            and not self.kill_reason
        )

    def fail_descriptions(self, reason: str) -> None:
        """Fails pending descriptions with RunError: the worker is dead."""
        text = (
            f"environment {self.setup.env.name}: its worker died while describing it: {reason}; "
            f"see {self.child.log}"
        )
        for answer in self.descriptions:
            if not answer.done():
                answer.set_exception(RunError(text))


def kill_reason(worker: PoolWorker, pid: int, memory_gib: float, silence_s: float) -> str:
    """Returns why a worker, whose own process is `pid`, is to be killed: it is stopped, uses too
    much memory, or its environment blocks its event loop. Empty if there is no reason."""
    try:
        process = psutil.Process(pid)
        memory, stopped = process.memory_info(), process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return ""
    own_gib = (memory.rss - memory.shared) / GIB
    if own_gib > memory_gib:
        return f"it used {own_gib:.1f} GiB (orchestrator.worker_memory_gib = {memory_gib:g})"
    silent_s = time.monotonic() - worker.last_message
    if stopped and silent_s > STOPPED_S:
        return f"it was stopped (SIGSTOP) for {silent_s:.0f} s"
    if not worker.ready.done():
        return ""
    blocked = f"its environment blocked the event loop for {silent_s:.0f} s"
    return (
        f"{blocked} (a call that does not return, or time.sleep; orchestrator.worker_silence_s)"
        if silent_s > silence_s
        else ""
    )


async def wait_ready(worker: PoolWorker, timeout_s: float) -> Ready:
    """Waits until a worker has loaded its environment. Raises RunError if it cannot."""
    ended = asyncio.create_task(worker.child.wait_async())
    try:
        await asyncio.wait(
            {worker.ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not worker.ready.done() and ended.done():
            # its last message may still be in transit
            await asyncio.wait({worker.ready}, timeout=1.0)
        if worker.ready.done():
            return worker.ready.result()
    finally:
        ended.cancel()
    name, code, path = worker.setup.env.name, worker.child.exit_code, worker.child.log
    log_end = redact("\n".join(path.read_text(errors="replace").splitlines()[-5:]))
    if code is None:
        limit = f"orchestrator.worker_timeout_s = {timeout_s:.0f}"
        raise RunError(f"environment {name} did not load within {limit}; {path} ends:\n{log_end}")
    remedy = ""
    # for the environment's own module: LoadFailed
    if code == 1 and "ModuleNotFoundError" in log_end and worker.setup.python:
        remedy = (
            "; its interpreter lacks packages that workers need: "
            f"{lacking_remedy(worker.setup.python)}"
        )
    raise RunError(
        f"the worker of environment {name} ended with code {code} while loading it{remedy}; "
        f"{path} ends:\n{log_end}",
        RESTART if code < 0 else None,  # a signal: the machine's trouble, which may pass
    )


def likely_reason(python: str, message: str) -> str:
    """Returns a line for the error of an environment that does not load, if its home has another
    verifiers than it requires; else empty."""
    home = home_of(python)
    if not home or not home.is_dir() or not (reason := unmet(home)):
        return ""
    kind = "The likely" if OTHER_API.search(message) else "If it is not that, a possible"
    return f"\n{kind} reason: {reason}; use a version of the package that was written for it"


def lacking_remedy(python: str) -> str:
    """Returns how to install the packages that workers need into an interpreter that lacks some."""
    if home := home_of(python):
        return f"run `rl env remove {home.name}`; the next start makes its home again"
    install = shlex.join(["uv", "pip", "install", "--python", python, *WORKER])
    return f"`{install}`, the environment's own package, and verifiers (classic: <0.4)"


# Its start ----------------------------------------------------------------------------------------


BOOTSTRAP = """
import importlib.util, runpy, sys
folder, setup_file = sys.argv[1:]
file, where = folder + "/__init__.py", [folder]
spec = importlib.util.spec_from_file_location("rl", file, submodule_search_locations=where)
sys.modules["rl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rl"])
sys.argv = ["worker", setup_file]
runpy.run_module("rl.envs.worker", run_name="__main__")
"""
"""Runs the worker in another virtual environment: from ours it sees only this package, nothing
installed next to it."""
POLL_S = 0.01
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Errors of an interpreter that is not there or cannot be run; all others may pass."""
COPY_S = 60.0
"""Longest wait for a copy; after that a worker is started cold."""


def command_of(setup: WorkerSetup, setup_path: Path) -> list[str]:
    """Returns the command that starts a worker with this setup cold."""
    if not setup.python:
        return [*PYTHON, "-m", "rl.envs.worker", str(setup_path)]
    return [setup.python, "-P", "-c", BOOTSTRAP, str(Path(__file__).parents[2]), str(setup_path)]


class WorkerLauncher:
    """Starts worker processes. At most one copy per interpreter is waiting."""

    def __init__(self) -> None:
        self.preforked: dict[str, PreforkedProcess] = {}
        """By interpreter."""
        adopt_orphans()

    def start(
        self,
        setup: WorkerSetup,
        setup_path: Path,
        log_path: Path,
        marker: str,
        warm: bool,
        sandbox: Sandbox | None = None,
    ) -> Child:
        """Starts a process, from a waiting copy if there is one and `warm` is set; `marker` is in
        its environment and is inherited by its children. Raises RunError if its interpreter does
        not exist, or if the system refuses another process, which may pass.

        The setup is passed in a file: arguments are limited to 128 KiB, and visible to everyone on
        the machine.
        """
        setup_path.write_bytes(msgspec.json.encode(setup))
        preforked = self.preforked.get(setup.python) if not sandbox else None
        if (
            warm
            and preforked
            and (
                pid := preforked.call(
                    log_path, {process_table.MARKER: add_marker(marker)}, [str(setup_path)]
                )
            )
        ):
            return Child(setup.worker_id, pid, log_path, marker)
        command, env = command_of(setup, setup_path), inherited()
        # programs that the environment calls by name come from its own virtual environment
        if setup.python:
            env["PATH"] = f"{Path(setup.python).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        try:
            if not os.path.exists(command[0]):  # bubblewrap would not report it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if sandbox:
                return start(
                    setup.worker_id,
                    sandbox.wrap(command),
                    variables_of(setup, env),
                    log_path,
                    new_session=False,
                    marker=marker,
                )
            if preforked:
                preforked.close()
            preforked = self.preforked[setup.python] = PreforkedProcess(marker)
            try:
                env |= preforked.environment
                return start(
                    setup.worker_id,
                    command,
                    env,
                    log_path,
                    inherited=preforked.inherited,
                    new_session=False,
                    marker=marker,
                )
            finally:
                preforked.started()
        except OSError as error:
            if error.errno not in MISSING:
                text = (
                    f"{command[0]} cannot be started now: {error.strerror}; make room for its "
                    "files or processes"
                )
                raise RunError(f"environment {setup.env.name}: {text}", RESTART) from None
            remedy = "set orchestrator.environment.python to an existing interpreter"
            if home_of(setup.python):
                remedy = "its home was deleted: --resume makes it again, as any start does"
            raise RunError(
                f"environment {setup.env.name}: {command[0]} does not start: "
                f"{error.strerror}; {remedy}"
            ) from None

    async def copy(self, python: str) -> None:
        """Waits until a copy with this interpreter is available, or none will come: the worker
        ended, or continues without forking one, or takes longer than COPY_S for its imports."""
        preforked, deadline = self.preforked.get(python), time.monotonic() + COPY_S
        while (
            preforked
            and not preforked.poll()
            and not preforked.over
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(POLL_S)

    def waiting(self) -> set[int]:
        """Returns the pids of the waiting copies."""
        return {preforked.poll() for preforked in self.preforked.values()} - {0}

    def close(self) -> None:
        """Ends the waiting copies."""
        while self.preforked:
            self.preforked.popitem()[1].close()


# What it sends ------------------------------------------------------------------------------------


MOST_LIKELY = 1e-3
"""Nats. A log-probability above 0 by more than rounding is invalid."""


def validate_played(
    played: Played, order: PlayOrder, policy: PolicySpec, server_set: ServerSet | None
) -> None:
    """Raises msgspec.ValidationError if a worker cannot have played this. `order`: the order for
    the unfinished rest of the group."""
    episodes, finished = {rollout.episode for rollout in played.rollouts}, set(order.done)
    if wrong := episodes & finished or episodes - set(range(order.num_episodes)):
        raise ValidationError(
            f"episode {min(wrong)} of a group of {order.num_episodes}, of which "
            f"{len(finished)} were finished"
        )
    left = order.num_episodes - len(finished) - len(episodes)
    if played.unfinished != left:
        raise ValidationError(
            f"{played.unfinished} unfinished episodes of a group of {order.num_episodes}, of "
            f"which {left} are left"
        )
    for i, rollout in enumerate(played.rollouts):
        if why := next(
            faults_of(
                rollout, policy, server_set.newest if server_set else None, order.split == "train"
            ),
            "",
        ):
            raise ValidationError(f"rollout {i}: {why}")


def faults_of(
    rollout: Rollout, policy: PolicySpec, newest: int | None, trains: bool
) -> Iterator[str]:
    """Yields what is impossible in one rollout. `newest`: the newest policy version; None if
    unknown. `trains`: see faults_of_answer."""
    if why := unfit(rollout):
        yield why
    if isinstance(rollout.text, bytes):
        yield from faults_of_text(rollout.text)
    if not rollout.error:
        yield from faults_of_turns(rollout.turns, policy, newest, trains)


def faults_of_text(text: bytes) -> Iterator[str]:
    """Yields why a text is not the messages of a line: it is copied into files of JSON lines
    without being written again."""
    if b"\n" in text or b"\r" in text:
        yield "messages with the end of a line"
    try:
        text.decode()
        msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
    except UNREADABLE as error:
        yield f"messages that are not JSON ({error})"


def faults_of_turns(
    turns: Turns, policy: PolicySpec, newest: int | None, trains: bool = True
) -> Iterator[str]:
    """Yields what the served model cannot have sampled, or been asked."""
    for chain in turns.chains:
        # not numpy: its import starts a thread, and only a single-threaded process can be forked as
        # a copy
        ids = array("i", chain.tail)
        if ids and (min(ids) < 0 or 0 < policy.vocab_size <= max(ids)):
            yield (
                f"token ids {min(ids)} to {max(ids)}; the model's are 0 to {policy.vocab_size - 1}"
            )
    for answer in turns.answers:
        if answer.end > policy.max_model_len:
            yield f"{answer.end} tokens; model.max_model_len = {policy.max_model_len}"
        yield from faults_of_answer(answer, newest, trains)


def faults_of_answer(answer: AnswerSpan, newest: int | None, trains: bool) -> Iterator[str]:
    """`trains`: whether the log-probabilities are trained. In an evaluation nobody reads them,
    and workers let any through."""
    logprobs = array("f", answer.logprobs) if trains else array("f")
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > MOST_LIKELY:
        yield (
            "the log-probability "
            f"{next((p for p in logprobs if not -math.inf < p <= MOST_LIKELY), -math.inf)}"
        )
    versions = [span.policy_version for span in answer.policy_versions]
    if newest is not None and max(versions, default=0) > newest:
        yield f"tokens of version {max(versions)}; the newest is {newest}"
