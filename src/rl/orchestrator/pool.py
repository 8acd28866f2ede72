"""The pool of environment workers: starts them, hands out groups, and starts a dead one anew with its groups given back.

A group that kills its worker must not take the others along. One death tells nothing, machines kill: the worker's groups go on together.
Those that were being played at one death less than MAX_KILLS are suspects: each is played alone, so that the next death has one cause, and
that group alone is given up. When no suspect is left, all goes on together.
"""

import asyncio
import itertools
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from rl.orchestrator.elastic import Load
from rl.orchestrator.isolation import Isolation
from rl.orchestrator.nursery import Nursery
from rl.orchestrator.plausible import check
from rl.orchestrator.pool_worker import MAX_KILLS, EnvLostError, Play, Worker, inherit, read_answer, verdict, wait_ready
from rl.system import faults, process_table
from rl.system.children import RestartPolicy
from rl.system.errors import RunError
from rl.wire.messages import UNREADABLE
from rl.wire.rollouts import Rollout, Split
from rl.wire.transport import Rejected
from rl.wire.worker_messages import (
    Cancel,
    Close,
    Describe,
    Description,
    Fleet,
    Heartbeat,
    LoadFailed,
    Played,
    PlayGroup,
    Ready,
    ToWorker,
    WorkerSetup,
)

log = logging.getLogger(__name__)

ENCODER = msgspec.msgpack.Encoder()
BARREN_DEATHS = 6
"""An environment is lost when its workers died so often, each, and finished nothing in between: two tasks in a row were given up."""
RESTART_S, RESTART_LIMIT_S = 0.5, 10.0
CHECK_EVERY_S = 2.0
CLOSE_S = 5.0
"""How long environments may take to end what they have started."""


class WorkerPool:
    """All workers of all environments. `play` waits for a group; a cancelled `play` is cancelled in the worker, too."""

    def __init__(self, log_dir: Path, *, memory_gib: float = float("inf"), silence_s: float = float("inf")):
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self.memory_gib, self.silence_s = memory_gib, silence_s
        self.loads: dict[str, Load] = {}
        """Of the environments whose number of workers follows the load."""
        self.directory = tempfile.TemporaryDirectory(prefix="rl-workers-")
        self.address = f"ipc://{self.directory.name}/pool"
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a revived worker has its predecessor's identity
        self.socket.setsockopt(zmq.SNDHWM, 0)  # at its limit a ROUTER drops in silence
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(self.address)
        self.workers: dict[str, Worker] = {}
        self.nursery = Nursery()
        self.isolation = Isolation(Path(self.directory.name), log_dir.parent)
        self.scores_groups: dict[str, bool] = {}
        """By environment."""
        self.next_play = self.num_started = 0
        self.rejected = Rejected("messages of environments' workers")
        self.barren = Counter[str]()
        """Deaths of an environment's workers since it finished a group."""
        self.lost: dict[str, str] = {}
        """Environments that are given up until the next start -> the reason."""
        self.on_lost: Callable[[str, str], None] | None = None
        """Called with an environment that is lost and the reason; what it raises goes to `failed`. Without it the loss itself does."""
        self.on_death: Callable[[str, str], None] = lambda _env, text: log.warning(text)
        """Called with an environment of which a worker died, and a sentence about it."""
        self.add_metrics: Callable[[list[Rollout]], None] | None = None
        """The user's metrics, added to every group that is played."""
        self.fleet: Fleet | None = None
        """What the workers were told last about the inference servers; a new one is told so first."""
        self.watchers: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that ends the run when an environment is lost."""
        self._watch(self._receive())

    # Processes ----------------------------------------------------------------------------------------------------------

    async def start_all(self, setups: Sequence[WorkerSetup]) -> None:
        """Starts worker processes; `sizes` waits until they are ready. The first of an interpreter makes its imports for the others."""
        first = {setup.python: setup for setup in reversed(setups) if not setup.sandbox}
        for setup in [*first.values(), *(setup for setup in setups if setup.sandbox)]:
            self.start(setup)
        for setup in setups:
            if setup.worker_id not in self.workers:
                await self.nursery.copy(setup.python)
                self.start(setup)

    def start(self, setup: WorkerSetup, warm: bool = True) -> Worker:
        """Starts a worker process, from a copy of another one if it may be `warm`."""
        self.num_started += 1
        if setup.most:
            self.loads.setdefault(setup.env.name, Load(setup.most))
        marker = f"{os.getpid()}:pool:{setup.worker_id}:{self.num_started}"
        setup_path = Path(self.directory.name) / f"{setup.worker_id}.json"
        log = self.log_dir / f"worker-{setup.worker_id}.log"
        given, sandbox = self.isolation.enter(setup, setup_path)
        self.workers[setup.worker_id] = Worker(setup, self.nursery.start(given, setup_path, log, marker, warm, sandbox))
        return self.workers[setup.worker_id]

    def _end(self, worker: Worker) -> None:
        """Kills what a dead worker has left, and lets go of it. The other workers may be copies of it, and bear its marker."""
        others = {other.child.pid for other in self.workers.values() if other is not worker and not other.child.reaped}
        worker.child.kill_tree(others | self.nursery.waiting())
        worker.child.reap()
        process_table.reap_session(worker.child.pid)

    async def sizes(self, timeout_s: float) -> dict[str, Ready]:
        """Waits until every worker has loaded its environment. Raises RunError when one cannot."""
        result = {}
        self._watch(self._check_workers(timeout_s))
        for worker_id in list(self.workers):
            ready = await self._first_ready(worker_id, timeout_s)
            env = self.workers[worker_id].setup.env.name
            if ready.notice and env not in result:
                log.warning("environment %s: %s", env, ready.notice)
            result[env], self.scores_groups[env] = ready, ready.scores_groups
            self._watch(self._revive(self.workers[worker_id], timeout_s))
        return result

    async def _first_ready(self, worker_id: str, timeout_s: float) -> Ready:
        """Waits for a worker; one that a signal ended is started again, as it would be later on."""
        for attempt in range(1, MAX_KILLS + 1):
            worker = self.workers[worker_id]
            try:
                return await wait_ready(worker, timeout_s)
            except RunError as error:
                if attempt == MAX_KILLS or (worker.child.exit_code or 0) >= 0:
                    raise
                log.warning("%s: it is started again", error)
                self._end(worker)
                self.start(worker.setup, warm=False)
        raise AssertionError

    def _watch(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.watchers.add(task)
        task.add_done_callback(self._unwatch)

    def _unwatch(self, task: asyncio.Task[None]) -> None:
        self.watchers.discard(task)
        if not task.cancelled() and task.exception() and not self.failed.done():
            self.failed.set_exception(task.exception())

    async def _revive(self, worker: Worker, timeout_s: float) -> None:
        """Loop. Waits for a worker's death, ends what it has left, and starts a new one with its groups."""
        while True:
            code, env = await worker.child.wait_async(), worker.setup.env.name
            self._end(worker)
            if env in self.lost:
                return
            if worker.retiring and not worker.num_plays:
                del self.workers[worker.setup.worker_id]
                return
            self.barren[env] += 1
            reason = worker.verdict or f"it ended with code {code}"
            num_workers = sum(other.setup.env.name == env for other in self.workers.values())
            delay_s = RestartPolicy(RESTART_S, RESTART_LIMIT_S, barren_limit=BARREN_DEATHS * num_workers).delay_s(self.barren[env])
            if delay_s is None:
                deaths = f"its workers died {self.barren[env]} times and finished nothing in between; the last time: {reason}"
                return self._lose(env, f"{deaths} (output: {worker.child.log})")
            self.on_death(env, f"worker {worker.setup.worker_id} is started anew: {reason} (its output: {worker.child.log})")
            await asyncio.sleep(delay_s)
            try:
                if warm := self.barren[env] == 1:
                    await self.nursery.copy(worker.setup.python)
                dead, worker = worker, self.start(worker.setup, warm=warm)
                inherit(dead, worker, reason)
                ready = await wait_ready(worker, timeout_s)
            except RunError as error:
                worker.verdict = str(error)
            if env in self.lost or worker.verdict:
                worker.child.signal_group(signal.SIGKILL)
                continue
            log.info("worker %s is back with %s tasks", worker.setup.worker_id, ready.num_train)
            worker.heard = time.monotonic()
            await self._pump(worker)

    def _lose(self, env: str, reason: str) -> None:
        """Gives an environment up: ends its workers, and fails what waits for them with EnvLostError."""
        self.lost[env] = reason
        for worker in self.workers.values():
            if worker.setup.env.name == env:
                worker.child.signal_group(signal.SIGKILL)
                for play in worker.plays:
                    if not play.done.done():
                        play.done.set_exception(EnvLostError(f"environment {env}: {reason}"))
                for plays in (worker.sent, worker.suspects, worker.waiting):
                    plays.clear()
        if self.on_lost is None:
            raise EnvLostError(f"environment {env}: {reason}")
        self.on_lost(env, reason)

    async def _check_workers(self, timeout_s: float) -> None:
        """Loop. Ends workers whose environment blocks their event loop or takes too much memory; has as many as their load demands."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            late_s, checked = time.monotonic() - checked - CHECK_EVERY_S, time.monotonic()
            for worker in self.workers.values():
                worker.heard += late_s  # this process was stopped or busy, and read no messages meanwhile
                if worker.child.exit_code is None and not worker.verdict:
                    worker.verdict = verdict(worker, self.memory_gib, self.silence_s)
                    if worker.verdict:
                        worker.child.signal_group(signal.SIGKILL)
            for env, load in self.loads.items():
                await self._follow(env, load, timeout_s)

    def workers_of(self, env: str) -> list[Worker]:
        """The workers of an environment that get groups."""
        return [worker for worker in self.workers.values() if worker.setup.env.name == env and not worker.retiring]

    async def _follow(self, env: str, load: Load, timeout_s: float) -> None:
        """Starts another worker of an environment, or lets one go, as their load demands."""
        workers = self.workers_of(env)
        if env in self.lost or not all(worker.ready.done() for worker in workers):
            return
        change = load.change([worker.busy for worker in workers])
        if change > 0:
            free = next(i for i in itertools.count() if f"{env}-{i}" not in self.workers)
            worker = self.start(msgspec.structs.replace(workers[0].setup, worker_id=f"{env}-{free}"))
            log.info("environment %s: its %d workers are busy, there is another one", env, len(workers))
            self._watch(self._add(worker, timeout_s))
        elif change < 0:
            worker = min(workers, key=lambda worker: worker.num_plays)
            log.info("environment %s: %d workers are enough", env, len(workers) - 1)
            worker.retiring = True
            await self._pump(worker)

    async def _add(self, worker: Worker, timeout_s: float) -> None:
        """Waits until a worker that was added is ready, and keeps it alive like the others. One that does not come up counts as dead."""
        try:
            await wait_ready(worker, timeout_s)
        except RunError as error:
            worker.verdict = str(error)
            worker.child.signal_group(signal.SIGKILL)
        await self._pump(worker)
        await self._revive(worker, timeout_s)

    # Groups -------------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Loop. Consumes the workers' messages, produces results for `play`; unblocked by any worker."""
        while True:
            identity, *frames = await self.socket.recv_multipart()
            worker = self.workers.get(identity.decode(errors="replace"))
            if worker is None:
                self.rejected.note(repr(identity[:100]), "no worker of this pool")
                continue
            worker.heard = time.monotonic()
            try:
                message = read_answer(frames)
                if isinstance(message, Played) and (play := worker.sent.get(message.play_id)):
                    check(message, play.again(), worker.setup.policy, self.fleet)
            except UNREADABLE as error:
                self.rejected.note(worker.setup.worker_id, error)
                worker.verdict = worker.verdict or f"it sent what cannot be taken ({error})"
                worker.child.signal_group(signal.SIGKILL)
                continue
            match message:
                case Played(play_id, _, unfinished) as played:
                    self.barren[worker.setup.env.name] = 0
                    if (play := worker.sent.get(play_id)) and not play.done.done():
                        play.take(played)
                    if not unfinished:
                        worker.sent.pop(play_id, None)
                        await self._pump(worker)
                case Heartbeat(busy):
                    worker.busy = busy
                case Ready() as ready if not worker.ready.done():
                    if self.fleet:
                        await self._send(worker, self.fleet)
                    worker.ready.set_result(ready)
                case LoadFailed(message) if not worker.ready.done():
                    worker.ready.set_exception(RunError(message))
                case Description() as description if worker.descriptions:
                    if not (answer := worker.descriptions.popleft()).done():
                        answer.set_result(description)

    async def play(
        self,
        env: str,
        split: Split,
        task: int,
        num_episodes: int,
        sampling: dict[str, Any],
        server: int,
        members: Sequence[Rollout] = (),
        on_members: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Plays a group on the environment's least busy worker.

        members: rollouts of it that are finished, of whole episodes, which are not played again; they are not used where groups are scored
        together. `on_members` is called with others as they finish, before the user's metrics are added to all at the end.
        Raises EnvLostError, and RunError for a fault of the user's metrics.
        """
        if env in self.lost:
            raise EnvLostError(f"environment {env}: {self.lost[env]}")
        self.next_play += 1
        order = PlayGroup(self.next_play, split, task, num_episodes, sampling, server)
        kept = [] if self.scores_groups.get(env) else list(members)
        play = Play(order, asyncio.get_running_loop().create_future(), kept, on_members)
        workers = self.workers_of(env)
        worker = min([worker for worker in workers if worker.ready.done()] or workers, key=lambda worker: worker.num_plays)
        worker.waiting.append(play)
        await self._pump(worker)
        try:
            # Copies: what is added to them must not get into the members that are kept.
            rollouts = [msgspec.structs.replace(rollout, metrics=dict(rollout.metrics)) for rollout in await play.done]
            if self.add_metrics:
                self.add_metrics(rollouts)
            return rollouts
        finally:
            if play.done.cancelled():  # nobody waits for it any more
                worker = self.workers[worker.setup.worker_id]
                if worker.sent.pop(order.play_id, None):
                    await self._send(worker, Cancel(order.play_id))
                for queue in (worker.suspects, worker.waiting):
                    if play in queue:
                        queue.remove(play)
                await self._pump(worker)

    async def _pump(self, worker: Worker) -> None:
        """Sends what waits: suspects first, each while nothing else is played, then the others at once."""
        while worker.ready.done():
            if worker.suspects and not worker.sent:
                play = worker.suspects.popleft()
            elif worker.waiting and not worker.suspects and not worker.tries_a_suspect:
                play = worker.waiting.popleft()
            else:
                if worker.retiring and not worker.num_plays:
                    await self._send(worker, Close())
                return
            worker.sent[play.order.play_id] = play
            await self._send(worker, play.again())

    async def tell(self, fleet: Fleet) -> None:
        """Tells all workers which inference servers there are, before any group that is sent after that."""
        self.fleet = fleet
        for worker in self.workers.values():
            if worker.ready.done():
                await self._send(worker, fleet)

    async def describe(self, env: str, split: Split, num_tasks: int, timeout_s: float) -> Description:
        """What an environment is, with tasks of a split (-1: all). Raises TimeoutError."""
        worker = next(worker for worker in self.workers.values() if worker.setup.env.name == env)
        answer: asyncio.Future[Description] = asyncio.get_running_loop().create_future()
        worker.descriptions.append(answer)
        await self._send(worker, Describe(split, num_tasks))
        async with asyncio.timeout(timeout_s):
            return await answer

    async def _send(self, worker: Worker, message: ToWorker) -> None:
        faults.point(f"pool.{type(message).__name__}")
        await self.socket.send_multipart([worker.setup.worker_id.encode(), ENCODER.encode(message)])

    async def close(self) -> None:
        """Ends all workers. They hold nothing that could be lost, but their environments may have started servers."""
        for task in self.watchers:
            task.cancel()
        self.nursery.close()
        for worker in self.workers.values():
            if worker.child.exit_code is None and worker.ready.done():
                await self._send(worker, Close())
            else:
                worker.child.signal_group(signal.SIGKILL)
        children = [worker.child for worker in self.workers.values()]
        await asyncio.gather(*(child.wait_async(CLOSE_S) for child in children))
        for child in children:
            child.kill_tree()
        await asyncio.gather(*(child.wait_async(CLOSE_S) for child in children))
        for child in children:
            child.reap()
        self.isolation.close()
        self.socket.close(linger=0)
        self.directory.cleanup()
