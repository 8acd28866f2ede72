"""One worker process: the pool's state of it, its groups, and the reasons to kill it."""

import asyncio
import re
import shlex
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil

from rl.homes.home import home_of, unmet
from rl.homes.needs import WORKER
from rl.system.children import Child
from rl.system.credentials import redact
from rl.system.errors import RESTART, RunError
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Description, FromWorker, Played, PlayGroup, Ready, WorkerSetup

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
class GroupPlay:
    """A group at a worker, and the future of its rollouts."""

    order: PlayGroup
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

    def order_left(self) -> PlayGroup:
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
    sent: dict[int, GroupPlay] = field(default_factory=dict)
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

    def fail_ready(self, message: str) -> None:
        """Fails `ready`: the environment could not be loaded."""
        self.ready.set_exception(RunError(message + likely_reason(self.setup.python, message)))

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
