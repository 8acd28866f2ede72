"""One worker process: how it is started, what the pool knows of it, what it sends, and why it is ended."""

import asyncio
import shlex
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil

from rl.homes.home import home_of
from rl.homes.needs import WORKER
from rl.system.children import Child
from rl.system.credentials import redact
from rl.system.errors import RunError
from rl.system.sandbox import innermost
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Description, FromWorker, Played, PlayGroup, Ready, WorkerSetup

ANSWERS = msgspec.msgpack.Decoder(FromWorker)
MAX_ANSWER_BYTES = 1 << 32
"""A group of rollouts of millions of tokens has a tenth of it."""
STOPPED_S = 10.0
"""How long a worker may be stopped (SIGSTOP) before it is ended; a busy one may be silent for longer."""
GIB = 2**30
MAX_KILLS = 3
"""A group whose worker died so often, the last time while it played nothing else, is given up: it is the cause."""


class EnvLostError(RunError):
    """An environment cannot be played any more: its workers die whatever they play, or do not come back. Caught where the others go on."""


@dataclass(eq=False)
class Play:
    """A group at a worker, and the future of its rollouts."""

    order: PlayGroup
    done: "asyncio.Future[list[Rollout]]"
    rollouts: list[Rollout]
    """Those of the episodes that are finished."""
    on_members: Callable[[list[Rollout]], None] | None
    """Called with the rollouts of episodes that finish before the last of the group."""
    kills: int = 0
    """Workers that died while they played it."""

    def take(self, played: Played) -> None:
        """Takes in finished episodes, and is done with the last of them."""
        self.rollouts = sorted([*self.rollouts, *played.rollouts], key=lambda rollout: rollout.episode)
        if not played.unfinished:
            self.done.set_result(self.rollouts)
        elif self.on_members and played.rollouts:
            self.on_members(played.rollouts)

    def again(self) -> PlayGroup:
        """The order for what is left of it."""
        return msgspec.structs.replace(self.order, done=sorted({rollout.episode for rollout in self.rollouts}))

    def give_up(self, reason: str) -> None:
        """Fails the episodes that are left."""
        text = f"its worker died {self.kills} times while playing it; the last time: {reason}"
        left = [i for i in range(self.order.num_episodes) if i not in self.again().done]
        failed = [Rollout(episode=i, stop="error", cause="worker", error=text) for i in left]
        self.take(Played(self.order.play_id, failed))

    @property
    def suspect(self) -> bool:
        """Whether its worker's next death gives it up."""
        return self.kills >= MAX_KILLS - 1

    @property
    def guilty(self) -> bool:
        return self.kills >= MAX_KILLS


@dataclass
class Worker:
    """One process and what the pool knows of it."""

    setup: WorkerSetup
    child: Child
    ready: "asyncio.Future[Ready]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: dict[int, Play] = field(default_factory=dict)
    suspects: deque[Play] = field(default_factory=deque)
    """Plays that are to be sent alone, before those that wait: what kills the worker may be one of them."""
    waiting: deque[Play] = field(default_factory=deque)
    heard: float = field(default_factory=time.monotonic)
    """When it sent its last message, or was excused from that."""
    busy: float = 0.0
    """See Heartbeat."""
    retiring: bool = False
    """Whether it gets nothing more to play, and ends once it has played what it has."""
    verdict: str = ""
    """Why we ended it; empty: we did not."""
    descriptions: "deque[asyncio.Future[Description]]" = field(default_factory=deque)

    @property
    def plays(self) -> list[Play]:
        return [*self.sent.values(), *self.suspects, *self.waiting]

    @property
    def num_plays(self) -> int:
        return len(self.sent) + len(self.suspects) + len(self.waiting)

    @property
    def tries_a_suspect(self) -> bool:
        """Whether it plays a suspect, and so nothing else."""
        return len(self.sent) == 1 and next(iter(self.sent.values())).suspect


def read_answer(frames: list[bytes]) -> FromWorker:
    """A worker's message. Raises what UNREADABLE lists."""
    if len(frames) != 1 or len(frames[0]) > MAX_ANSWER_BYTES:
        raise msgspec.DecodeError(f"{len(frames)} frames of {sum(map(len, frames))} bytes")
    return ANSWERS.decode(frames[0])


def verdict(worker: Worker, memory_gib: float, silence_s: float) -> str:
    """Why a worker is to be ended: it is stopped, holds too much memory, or its environment blocks its event loop. Empty: it is not."""
    try:
        process = innermost(worker.child.pid) if worker.setup.sandbox else psutil.Process(worker.child.pid)
        memory, stopped = process.memory_info(), process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return ""
    own_gib = (memory.rss - memory.shared) / GIB
    if own_gib > memory_gib:
        return f"it held {own_gib:.1f} GiB (orchestrator.worker_memory_gib = {memory_gib:g})"
    silent_s = time.monotonic() - worker.heard
    if stopped and silent_s > STOPPED_S:
        return f"it was stopped (SIGSTOP) for {silent_s:.0f} s"
    if not worker.ready.done():
        return ""
    blocked = f"its environment blocked the event loop for {silent_s:.0f} s"
    return f"{blocked} (a call that does not return, or time.sleep; orchestrator.worker_silence_s)" if silent_s > silence_s else ""


async def wait_ready(worker: Worker, timeout_s: float) -> Ready:
    """Waits until a worker has loaded its environment. Raises RunError when it cannot."""
    ended = asyncio.create_task(worker.child.wait_async())
    try:
        await asyncio.wait({worker.ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not worker.ready.done() and ended.done():
            await asyncio.wait({worker.ready}, timeout=1.0)  # its last message may still be on its way
        if worker.ready.done():
            return worker.ready.result()
    finally:
        ended.cancel()
    name, code, path = worker.setup.env.name, worker.child.exit_code, worker.child.log
    log_end = redact("\n".join(path.read_text(errors="replace").splitlines()[-5:]))
    if code is not None:
        lacks = code == 1 and "ModuleNotFoundError" in log_end and worker.setup.python  # of an environment's own it would have said so
        remedy = f"; it lacks what workers need: {lacking_remedy(worker.setup.python)}" if lacks else ""
        raise RunError(f"the worker of environment {name} ended with code {code} while loading it{remedy}; {path} ends:\n{log_end}")
    limit = f"orchestrator.worker_timeout_s = {timeout_s:.0f}"
    raise RunError(f"environment {name} did not load within {limit}; {path} ends:\n{log_end}")


def lacking_remedy(python: str) -> str:
    """What brings the packages of workers into an interpreter that lacks some."""
    if home := home_of(python):
        return f"`rl env remove {home}`, and a start makes its home anew"
    command = shlex.join(["uv", "pip", "install", "--python", python, *WORKER])
    return f"`{command}`, the environment's own package, and verifiers (classic: <0.4)"


def inherit(dead: Worker, worker: Worker, reason: str) -> None:
    """Gives a dead worker's groups to its successor, but for those that it died of too often."""
    for play in dead.sent.values():
        play.kills += 1
        if play.guilty and not play.done.done():
            play.give_up(reason)
    for play in dead.plays:
        if not play.done.done():
            (worker.suspects if play.suspect else worker.waiting).append(play)
    for question in dead.descriptions:
        question.cancel()
