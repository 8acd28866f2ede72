"""The pool of environment workers: starts them, hands out groups, and starts a dead one anew with its groups given back.

A group that kills its worker must not take the others along: after a death the worker's groups are played one by one, so that only
the one that was being played when it dies again is blamed, and given up after MAX_KILLS deaths.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio

from rl.orchestrator.rollouts import (
    Cancel,
    Close,
    Describe,
    Description,
    FromWorker,
    Heartbeat,
    LoadFailed,
    Played,
    PlayGroup,
    Ready,
    Rollout,
    Split,
    ToWorker,
    WorkerSetup,
)

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
ANSWERS = msgspec.msgpack.Decoder(FromWorker)
MAX_KILLS = 3
"""A group whose worker died this often is given up: it is what kills them."""
LOOK_EVERY_S = 2.0
CLOSE_S = 5.0
"""How long environments may take to end what they have started."""
GIB = 2**30
BOOTSTRAP = """
import importlib.util, runpy, sys
folder, setup = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rl", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["rl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rl"])
sys.argv = ["worker", setup]
runpy.run_module("rl.orchestrator.worker", run_name="__main__")
"""
"""Runs the worker in another virtual environment: of ours it sees this package alone, nothing that is installed beside it."""


class WorkerError(Exception):
    """An environment cannot be played; the message names the remedy."""


@dataclass
class Play:
    """A group at a worker, and who waits for it."""

    order: PlayGroup
    done: "asyncio.Future[list[Rollout]]"
    kills: int = 0


@dataclass
class Worker:
    """One process and what the pool knows of it."""

    setup: WorkerSetup
    process: asyncio.subprocess.Process
    log_path: Path
    ready: "asyncio.Future[Ready]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: dict[int, Play] = field(default_factory=dict)
    waiting: deque[Play] = field(default_factory=deque)
    one_by_one: bool = False
    heard: float = field(default_factory=time.monotonic)
    verdict: str = ""
    """Why we ended it."""
    descriptions: "deque[asyncio.Future[Description]]" = field(default_factory=deque)

    @property
    def load(self) -> int:
        return len(self.sent) + len(self.waiting)


def end_group(process: asyncio.subprocess.Process) -> None:
    """Ends a worker and what its environment started: tool servers, sandboxes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """All workers of all environments. `play` waits for a group; a cancelled `play` is cancelled in the worker, too."""

    def __init__(self, log_dir: Path, *, memory_gib: float = float("inf"), silence_s: float = float("inf")):
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self.memory_gib = memory_gib
        self.silence_s = silence_s
        self.directory = tempfile.TemporaryDirectory(prefix="rl-workers-")
        self.address = f"ipc://{self.directory.name}/pool"
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a revived worker has its predecessor's identity
        self.socket.setsockopt(zmq.SNDHWM, 0)  # at its limit a ROUTER drops in silence
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(self.address)
        self.workers: dict[str, Worker] = {}
        self.next_play = 0
        self.deaths = 0
        self.watchers: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when a dead worker cannot be brought back."""

    # Processes ----------------------------------------------------------------------------------------------------------

    async def start(self, setup: WorkerSetup) -> Worker:
        """Starts a worker process; it is ready when `sizes` says so."""
        log_path = self.log_dir / f"worker-{setup.worker_id}.log"
        encoded = msgspec.json.encode(setup).decode()
        command = [sys.executable, "-m", "rl.orchestrator.worker", encoded]
        if setup.python:
            command = [setup.python, "-c", BOOTSTRAP, str(Path(__file__).parents[1]), encoded]
        with log_path.open("ab") as output:
            try:
                streams: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": output, "stderr": output}
                process = await asyncio.create_subprocess_exec(*command, **streams, process_group=0)
            except OSError as error:
                raise WorkerError(f"environment {setup.env.name}: {setup.python} does not start: {error.strerror}") from None
        self.workers[setup.worker_id] = Worker(setup, process, log_path)
        return self.workers[setup.worker_id]

    async def sizes(self, timeout_s: float) -> dict[str, Ready]:
        """Waits until every worker has loaded its environment. Raises WorkerError when one cannot."""
        result = {}
        for worker in list(self.workers.values()):
            result[worker.setup.env.name] = await self._wait_ready(worker, timeout_s)
            self._watch(self._revive(worker, timeout_s))
        self._watch(self._look())
        return result

    def _watch(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.watchers.add(task)
        task.add_done_callback(self._unwatch)

    def _unwatch(self, task: asyncio.Task[None]) -> None:
        self.watchers.discard(task)
        if not task.cancelled() and task.exception() and not self.failed.done():
            self.failed.set_exception(task.exception())

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
        name, code = worker.setup.env.name, worker.process.returncode
        said = "\n".join(worker.log_path.read_text(errors="replace").splitlines()[-5:])
        if code is not None:
            raise WorkerError(f"the worker of environment {name} ended with code {code} while loading it; {worker.log_path} ends:\n{said}")
        limit = f"orchestrator.worker_timeout_s = {timeout_s:.0f}"
        raise WorkerError(f"environment {name} did not load within {limit}; {worker.log_path} ends:\n{said}")

    async def _revive(self, worker: Worker, timeout_s: float) -> None:
        """Waits for a worker's death, and starts a new one with its groups."""
        while True:
            code = await worker.process.wait()
            end_group(worker.process)
            self.deaths += 1
            why = worker.verdict or f"it ended with code {code}"
            log.warning("worker %s is started anew: %s (its output: %s)", worker.setup.worker_id, why, worker.log_path)
            await asyncio.sleep(0.5)
            dead, worker = worker, await self.start(worker.setup)
            self._inherit(dead, worker, why)
            ready = await self._wait_ready(worker, timeout_s)
            log.info("worker %s is back with %s tasks", worker.setup.worker_id, ready.num_train)
            worker.heard = time.monotonic()
            await self._pump(worker)

    def _inherit(self, dead: Worker, worker: Worker, why: str) -> None:
        """Gives a dead worker's groups to its successor, but for those that it died of too often."""
        for play in dead.sent.values():
            play.kills += 1
            if play.kills >= MAX_KILLS and not play.done.done():
                text = f"its worker died {play.kills} times while playing it; the last time: {why}"
                failed = [Rollout(episode=i, stop="error", cause="worker", error=text) for i in range(play.order.num_episodes)]
                play.done.set_result(failed)
        worker.waiting.extend(play for play in [*dead.sent.values(), *dead.waiting] if not play.done.done())
        worker.one_by_one = True
        for question in dead.descriptions:
            question.cancel()

    async def _look(self) -> None:
        """Loop. Ends workers whose environment blocks their event loop or eats the machine's memory."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for worker in self.workers.values():
                if worker.process.returncode is None and worker.ready.done() and not worker.verdict:
                    worker.verdict = self._verdict(worker)
                    if worker.verdict:
                        end_group(worker.process)

    def _verdict(self, worker: Worker) -> str:
        try:
            memory = psutil.Process(worker.process.pid).memory_info()
        except psutil.NoSuchProcess:
            return ""
        own_gib = (memory.rss - memory.shared) / GIB
        if own_gib > self.memory_gib:
            return f"it held {own_gib:.1f} GiB (orchestrator.worker_memory_gib = {self.memory_gib:g})"
        silent_s = time.monotonic() - worker.heard
        blocked = f"its environment blocked the event loop for {silent_s:.0f} s"
        return f"{blocked} (a call that does not return, or time.sleep; orchestrator.worker_silence_s)" if silent_s > self.silence_s else ""

    # Groups -------------------------------------------------------------------------------------------------------------

    async def receive(self) -> None:
        """Loop. Consumes the workers' messages, produces results for `play`; unblocked by any worker."""
        while True:
            identity, data = await self.socket.recv_multipart()
            worker = self.workers[identity.decode()]
            worker.heard = time.monotonic()
            match ANSWERS.decode(data):
                case Played(play_id, rollouts):
                    if (play := worker.sent.pop(play_id, None)) and not play.done.done():
                        play.done.set_result(rollouts)
                    await self._pump(worker)
                case Ready() as ready if not worker.ready.done():
                    worker.ready.set_result(ready)
                case LoadFailed(message) if not worker.ready.done():
                    worker.ready.set_exception(WorkerError(message))
                case Description() as description if worker.descriptions:
                    worker.descriptions.popleft().set_result(description)
                case Heartbeat():
                    pass

    async def play(self, env: str, split: Split, task: int, num_episodes: int, sampling: dict[str, Any], server: int) -> list[Rollout]:
        """Plays a group on the environment's least busy worker."""
        self.next_play += 1
        order = PlayGroup(self.next_play, split, task, num_episodes, sampling, server)
        play = Play(order, asyncio.get_running_loop().create_future())
        worker = min((worker for worker in self.workers.values() if worker.setup.env.name == env), key=lambda worker: worker.load)
        worker_id = worker.setup.worker_id
        worker.waiting.append(play)
        await self._pump(worker)
        try:
            return await play.done
        finally:
            if play.done.cancelled():
                await self._forget(self.workers[worker_id], play)

    async def _pump(self, worker: Worker) -> None:
        """Sends what waits; to one that died before, a group at a time until those it inherited are played."""
        while worker.waiting and worker.ready.done() and not (worker.one_by_one and worker.sent):
            play = worker.waiting.popleft()
            worker.sent[play.order.play_id] = play
            await self._send(worker, play.order)
        if not worker.waiting and not worker.sent:
            worker.one_by_one = False

    async def _forget(self, worker: Worker, play: Play) -> None:
        if worker.sent.pop(play.order.play_id, None):
            await self._send(worker, Cancel(play.order.play_id))
        elif play in worker.waiting:
            worker.waiting.remove(play)
        await self._pump(worker)

    async def describe(self, env: str, split: Split, num_tasks: int, timeout_s: float) -> Description:
        """What an environment is, with tasks of a split (-1: all). Raises TimeoutError."""
        worker = next(worker for worker in self.workers.values() if worker.setup.env.name == env)
        answer: asyncio.Future[Description] = asyncio.get_running_loop().create_future()
        worker.descriptions.append(answer)
        await self._send(worker, Describe(split, num_tasks))
        async with asyncio.timeout(timeout_s):
            return await answer

    async def _send(self, worker: Worker, message: ToWorker) -> None:
        await self.socket.send_multipart([worker.setup.worker_id.encode(), ENCODER.encode(message)])

    async def close(self) -> None:
        """Ends all workers. They hold nothing that could be lost, but their environments may have started servers."""
        for task in self.watchers:
            task.cancel()
        for worker in self.workers.values():
            if worker.process.returncode is None and worker.ready.done():
                await self._send(worker, Close())
            else:
                end_group(worker.process)
        ends = [asyncio.create_task(worker.process.wait()) for worker in self.workers.values()]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)
        for worker in self.workers.values():
            end_group(worker.process)
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)
        self.socket.close(linger=0)
        self.directory.cleanup()
