"""The pool of environment workers: starts them, hands out groups, and starts a dead one anew with its groups given back."""

import asyncio
import logging
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from rl.orchestrator.rollouts import Cancel, FromWorker, LoadFailed, Played, PlayGroup, Ready, Rollout, Split, ToWorker, WorkerSetup

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
ANSWERS = msgspec.msgpack.Decoder(FromWorker)
MAX_KILLS = 3
"""A group whose worker died this often is given up: it is what kills them."""


class WorkerError(Exception):
    """An environment cannot be played; the message names the remedy."""


@dataclass
class Play:
    """A group at a worker, and who waits for it."""

    order: PlayGroup
    env: str
    worker_id: str
    done: "asyncio.Future[list[Rollout]]"
    kills: int = 0


@dataclass
class Worker:
    """One process and what the pool knows of it."""

    setup: WorkerSetup
    process: asyncio.subprocess.Process
    ready: "asyncio.Future[Ready]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    """All workers of all environments. `play` waits for a group; a cancelled `play` is cancelled in the worker, too."""

    def __init__(self, log_path: Path):
        self.log_path = log_path
        self.directory = tempfile.TemporaryDirectory(prefix="rl-workers-")
        self.address = f"ipc://{self.directory.name}/pool"
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a revived worker has its predecessor's identity
        self.socket.bind(self.address)
        self.workers: dict[str, Worker] = {}
        self.plays: dict[int, Play] = {}
        self.next_play = 0
        self.watchers: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when a dead worker cannot be brought back."""

    async def start(self, setup: WorkerSetup) -> None:
        """Starts a worker process; it is ready when `sizes` says so."""
        with self.log_path.open("ab") as output:
            command = [sys.executable, "-m", "rl.orchestrator.worker", msgspec.json.encode(setup).decode()]
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output)
        self.workers[setup.worker_id] = Worker(setup, process)

    def watch(self, worker: Worker, timeout_s: float) -> None:
        """From now on a death of this worker starts a new one, which has `timeout_s` to load its environment."""
        task = asyncio.create_task(self._revive(worker, timeout_s))
        self.watchers.add(task)
        task.add_done_callback(self._unwatch)

    def _unwatch(self, task: asyncio.Task[None]) -> None:
        self.watchers.discard(task)
        if not task.cancelled() and task.exception() and not self.failed.done():
            self.failed.set_exception(task.exception())

    async def sizes(self, timeout_s: float) -> dict[str, Ready]:
        """Waits until every worker has loaded its environment. Raises WorkerError when one cannot."""
        result = {}
        for worker in list(self.workers.values()):
            result[worker.setup.env] = await self._wait_ready(worker, timeout_s)
            self.watch(worker, timeout_s)
        return result

    async def _wait_ready(self, worker: Worker, timeout_s: float) -> Ready:
        ended = asyncio.create_task(worker.process.wait())
        try:
            await asyncio.wait({worker.ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not worker.ready.done() and ended.done():
                await asyncio.wait({worker.ready}, timeout=1.0)  # its last words may still be on their way
            if worker.ready.done():
                return worker.ready.result()
        finally:
            ended.cancel()
        name, code = worker.setup.env, worker.process.returncode
        if code is not None:
            raise WorkerError(f"the worker of environment {name} ended with code {code} while loading it; see {self.log_path}")
        raise WorkerError(f"environment {name} did not load within orchestrator.worker_timeout_s = {timeout_s:.0f}; see {self.log_path}")

    async def _revive(self, worker: Worker, timeout_s: float) -> None:
        code = await worker.process.wait()
        worker_id = worker.setup.worker_id
        log.warning("worker %s ended with code %s; starting it anew (its output: %s)", worker_id, code, self.log_path)
        await asyncio.sleep(0.5)
        await self.start(worker.setup)
        revived = self.workers[worker_id]
        ready = await self._wait_ready(revived, timeout_s)
        log.info("worker %s is back with %d tasks", worker_id, ready.num_train)
        self.watch(revived, timeout_s)
        for play in [play for play in self.plays.values() if play.worker_id == worker_id]:
            play.kills += 1
            if play.kills >= MAX_KILLS:
                failed = Rollout(stop="error", error=f"worker died {play.kills} times while playing this group")
                play.done.set_result([failed] * play.order.num_rollouts)
            else:
                await self._send(worker_id, play.order)

    async def receive(self) -> None:
        """Loop. Consumes the workers' messages, produces results for `play`; unblocked by any worker."""
        while True:
            identity, data = await self.socket.recv_multipart()
            worker = self.workers[identity.decode()]
            match ANSWERS.decode(data):
                case Ready() as ready if not worker.ready.done():
                    worker.ready.set_result(ready)
                case LoadFailed(message) if not worker.ready.done():
                    worker.ready.set_exception(WorkerError(message))
                case Played(play_id, rollouts) if play_id in self.plays and not self.plays[play_id].done.done():
                    self.plays[play_id].done.set_result(rollouts)

    async def play(self, env: str, split: Split, task: int, num_rollouts: int, sampling: dict[str, Any], server: int) -> list[Rollout]:
        """Plays a group on the environment's least busy worker."""
        self.next_play += 1
        play_id = self.next_play
        busy = Counter(play.worker_id for play in self.plays.values())
        worker_id = min((wid for wid, worker in self.workers.items() if worker.setup.env == env), key=lambda wid: (busy[wid], wid))
        order = PlayGroup(play_id, split, task, num_rollouts, sampling, server)
        play = Play(order, env, worker_id, asyncio.get_running_loop().create_future())
        self.plays[play_id] = play
        try:
            await self._send(worker_id, order)
            return await play.done
        finally:
            del self.plays[play_id]
            if play.done.cancelled() or not play.done.done():
                await self._send(worker_id, Cancel(play_id))

    async def _send(self, worker_id: str, message: ToWorker) -> None:
        await self.socket.send_multipart([worker_id.encode(), ENCODER.encode(message)])

    async def close(self) -> None:
        for task in self.watchers:
            task.cancel()
        for worker in self.workers.values():
            if worker.process.returncode is None:
                worker.process.kill()  # it holds nothing that could be lost
        await asyncio.gather(*(worker.process.wait() for worker in self.workers.values()))
        self.socket.close(linger=0)
        self.directory.cleanup()
