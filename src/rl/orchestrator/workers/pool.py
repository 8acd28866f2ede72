"""The pool of environment workers: starts them, hands out groups, and restarts dead ones with the
groups they had.

A group that kills its worker must not take others down with it. One death says little, since
machines fail too: the first worker that is up resumes the dead one's groups together. After
MAX_KILLS - 1 deaths a group is a suspect. A suspect is played alone, so that the next death has one
cause, and only that group is given up. Once no suspects are left, groups are played together again.
"""

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl.orchestrator.groups.group_credit import in_thread
from rl.orchestrator.workers.pool_worker import (
    ANSWERS,
    EnvLostError,
    PoolWorker,
    SentGroup,
    WorkerLauncher,
    kill_reason,
    likely_reason,
    validate_played,
    wait_ready,
)
from rl.orchestrator.workers.worker_sandbox import WorkerSandbox
from rl.system import faults, process_table
from rl.system.children import RestartPolicy
from rl.system.errors import RunError
from rl.system.linux import socket_base
from rl.system.sandbox import innermost
from rl.wire.rollouts import Rollout, Split
from rl.wire.transport import Rejected
from rl.wire.worker_messages import (
    Cancel,
    Close,
    Describe,
    Description,
    LoadFailed,
    MessageServer,
    Played,
    PlayOrder,
    Ready,
    ServerSet,
    ToWorker,
    WorkerSetup,
)

log = logging.getLogger(__name__)
ENCODER = msgspec.msgpack.Encoder()
BARREN_DEATHS = 6
"""An environment is lost after this many deaths per worker with nothing finished in between: two
tasks in a row were given up."""
SOCKET_ROOM = len("/rl-workers-12345678/inference")
RESTART_S, RESTART_LIMIT_S, CHECK_EVERY_S = 0.5, 10.0, 2.0
CLOSE_S = 5.0
"""Time for environments to shut down what they have started."""
PLAY_POLL_S = 0.2


class WorkerPool:
    """All workers of all environments. `play` waits for a group; cancelling `play` also cancels
    the group in the worker."""

    def __init__(
        self, log_dir: Path, *, memory_gib: float = float("inf"), silence_s: float = float("inf")
    ):
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self.memory_gib, self.silence_s = memory_gib, silence_s
        self.directory = tempfile.TemporaryDirectory(
            prefix="rl-workers-", dir=socket_base(SOCKET_ROOM)
        )
        self.address = f"{self.directory.name}/pool"
        self.workers: dict[str, PoolWorker] = {}
        self.waiting: dict[str, deque[SentGroup]] = defaultdict(deque)
        """Groups that no worker has, by environment; suspects first."""
        self.launcher = WorkerLauncher()
        self.sandbox = WorkerSandbox(Path(self.directory.name), log_dir.parent, self._watch)
        self.scores_groups: dict[str, bool] = {}
        """By environment."""
        self.next_play = self.num_started = 0
        self.rejected = Rejected("messages of environments' workers")
        self.deaths_without_result = Counter[str]()
        """Deaths of an environment's workers since it last finished anything."""
        self.lost: dict[str, str] = {}
        """Environment that is lost until the next start -> the reason."""
        self.on_lost: Callable[[str, str], None] | None = None
        """Called with a lost environment and the reason; its exceptions go to `failed`. If None,
        the loss itself goes there."""
        self.on_death: Callable[[str, str], None] = lambda _env, text: log.warning(text)
        """Called when a worker died, with its environment and a message."""
        self.add_metrics: Callable[[list[Rollout]], None] | None = None
        """Adds the user's metrics to every group that is played."""
        self.server_set: ServerSet | None = None
        """The inference servers last announced to the workers; a new worker gets them first."""
        self.watchers: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that ends the run."""
        self.server = MessageServer(
            self.address, self._watch, self.workers.__contains__, self._take, self._refuse
        )

    # Processes ------------------------------------------------------------------------------------

    async def start_all(self, setups: Sequence[WorkerSetup]) -> None:
        """Starts worker processes; `sizes` waits until they are ready. The first one per
        interpreter does the imports for the others."""
        first = {setup.python: setup for setup in reversed(setups) if not setup.sandbox}
        for setup in [*first.values(), *(setup for setup in setups if setup.sandbox)]:
            self.start(setup)
        for setup in setups:
            if setup.worker_id not in self.workers:
                await self.launcher.copy(setup.python)
                self.start(setup)

    def start(self, setup: WorkerSetup, warm: bool = True) -> PoolWorker:
        """Starts a worker process, if `warm` from a copy of another one where there is one."""
        self.num_started += 1
        marker = f"{os.getpid()}:pool:{setup.worker_id}:{self.num_started}"
        setup_path = Path(self.directory.name) / f"{setup.worker_id}.json"
        log = self.log_dir / f"worker-{setup.worker_id}.log"
        seen, sandbox = self.sandbox.enter(setup, setup_path)
        self.workers[setup.worker_id] = PoolWorker(
            setup, self.launcher.start(seen, setup_path, log, marker, warm, sandbox)
        )
        return self.workers[setup.worker_id]

    def _end(self, worker: PoolWorker) -> None:
        """Kills the processes that a dead worker left, and reaps it. Spares other workers: they
        may be its copies and have its marker."""
        others = {
            other.child.pid
            for other in self.workers.values()
            if other is not worker and not other.child.reaped
        }
        worker.child.kill_tree(others | self.launcher.waiting())
        worker.child.reap()
        process_table.reap_session(worker.child.pid)

    async def sizes(self, timeout_s: float) -> dict[str, Ready]:
        """Waits until every worker has loaded its environment. Raises RunError if one cannot."""
        sizes: dict[str, Ready] = {}
        self._watch(self._check_workers())
        for worker in [*self.workers.values()]:
            ready, env = await wait_ready(worker, timeout_s), worker.setup.env.name
            if ready.notice and env not in sizes:
                log.warning("environment %s: %s", env, ready.notice)
            sizes[env], self.scores_groups[env] = ready, ready.scores_groups
            self._watch(self._revive(worker, timeout_s))
        return sizes

    def _watch(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.watchers.add(task)
        task.add_done_callback(self._unwatch)

    def _unwatch(self, task: asyncio.Task[None]) -> None:
        self.watchers.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_exception(error)

    async def _revive(self, worker: PoolWorker, timeout_s: float) -> None:
        """Loop. Waits for a worker's death, kills the processes it left, gives its groups back,
        and starts a new one.

        If that does not come up, while another of the environment's workers is up, this does not
        count as a death of the environment.
        """
        env, num_failed = worker.setup.env.name, 0
        while True:
            code = await worker.child.wait_async()
            self._end(worker)
            reason = worker.kill_reason or f"it ended with code {code}"
            worker.fail_descriptions(reason)
            if env in self.lost:
                return
            workers = self._workers_of(env)
            if not (num_failed and any(other.is_up for other in workers)):
                self.deaths_without_result[env] += 1
            num_deaths = self.deaths_without_result[env]
            if num_deaths >= BARREN_DEATHS * len(workers):
                return self._lose(
                    env,
                    f"its workers died {num_deaths} times and finished nothing in between; the "
                    f"last time: {reason} (output: {worker.child.log})",
                )
            self.on_death(
                env,
                f"worker {worker.setup.worker_id} is restarted: {reason} (its output: "
                f"{worker.child.log})",
            )
            self._take_back(worker, reason)
            delay_s = RestartPolicy(RESTART_S, RESTART_LIMIT_S).delay_s(max(num_deaths, num_failed))
            await asyncio.sleep(delay_s or 0.0)
            is_first = num_deaths == 1 and not num_failed
            try:
                if is_first:
                    await self.launcher.copy(worker.setup.python)
                worker = self.start(worker.setup, warm=is_first)
            # its interpreter is gone, or the system refuses another process
            except RunError as error:
                worker.kill_reason = str(error)
                num_failed += 1
                continue
            num_failed = 0 if await self._join(worker, timeout_s) else num_failed + 1

    async def _join(self, worker: PoolWorker, timeout_s: float) -> bool:
        """Waits until a worker that was started later is ready, and sends it groups. If it does
        not come up, it is killed. Returns whether it came up."""
        try:
            ready = await wait_ready(worker, timeout_s)
            log.info("worker %s is up with %s tasks", worker.setup.worker_id, ready.num_train)
        except RunError as error:
            worker.kill_reason = worker.kill_reason or str(error)
        if worker.kill_reason or worker.setup.env.name in self.lost:
            worker.child.signal_group(signal.SIGKILL)
            return False
        worker.last_message = time.monotonic()
        self._pump(worker.setup.env.name)
        return True

    def _workers_of(self, env: str) -> list[PoolWorker]:
        return [worker for worker in self.workers.values() if worker.setup.env.name == env]

    def _take_back(self, worker: PoolWorker, reason: str) -> None:
        """Gives up a dead worker's groups that have now killed MAX_KILLS workers. The others wait
        for a worker, suspects first."""
        env = worker.setup.env.name
        for play in worker.sent.values():
            play.kills += 1
            if play.failed and not play.done.done():
                play.give_up(reason)
        left = [play for play in worker.sent.values() if not play.done.done()]
        worker.sent.clear()
        waiting = [*left, *self.waiting[env]]
        self.waiting[env] = deque(sorted(waiting, key=lambda play: not play.is_suspect))
        self._pump(env)

    def _lose(self, env: str, reason: str) -> None:
        """Counts an environment as lost: kills its workers, and fails their groups with
        EnvLostError."""
        self.lost[env] = reason
        plays = [*self.waiting.pop(env, ())]
        for worker in self._workers_of(env):
            worker.child.signal_group(signal.SIGKILL)
            plays += worker.sent.values()
            worker.sent.clear()
        for play in plays:
            if not play.done.done():
                play.done.set_exception(EnvLostError(f"environment {env}: {reason}"))
        if self.on_lost is None:
            raise EnvLostError(f"environment {env}: {reason}")
        self.on_lost(env, reason)

    async def _check_workers(self) -> None:
        """Loop. Kills workers whose environment blocks their event loop or uses too much memory."""
        checked = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            late_s, checked = time.monotonic() - checked - CHECK_EVERY_S, time.monotonic()
            boxed = [worker.child.pid for worker in self.workers.values() if worker.setup.sandbox]
            inner = await asyncio.to_thread(innermost, boxed) if boxed else {}
            for worker in self.workers.values():
                # this process was stopped or busy, and read no messages meanwhile
                worker.last_message += late_s
                if worker.child.exit_code is None and not worker.kill_reason:
                    pid = inner.get(worker.child.pid, worker.child.pid)
                    worker.kill_reason = kill_reason(worker, pid, self.memory_gib, self.silence_s)
                    if worker.kill_reason:
                        worker.child.signal_group(signal.SIGKILL)

    # Groups ---------------------------------------------------------------------------------------

    async def _take(self, worker_id: str, data: bytes) -> None:
        """Handles a worker's message. Raises the exceptions in UNREADABLE if it is invalid or
        impossible."""
        worker = self.workers[worker_id]
        worker.last_message = time.monotonic()
        message = ANSWERS.decode(data)
        if isinstance(message, Played) and (play := worker.sent.get(message.play_id)):
            validate_played(message, play.order_left(), worker.setup.policy, self.server_set)
        match message:
            case Played(play_id, _, unfinished) as played:
                self.deaths_without_result[worker.setup.env.name] = 0
                if (play := worker.sent.get(play_id)) and not play.done.done():
                    play.take(played)
                if not unfinished:
                    worker.sent.pop(play_id, None)
                    self._pump(worker.setup.env.name)
            case Ready() as ready if not worker.ready.done():
                if self.server_set:
                    self._send(worker, self.server_set)
                worker.ready.set_result(ready)
            case LoadFailed(message) if not worker.ready.done():
                reason = likely_reason(worker.setup.python, message)
                worker.ready.set_exception(RunError(message + reason))
            case Description() as description if worker.descriptions:
                if not (answer := worker.descriptions.popleft()).done():
                    answer.set_result(description)

    def _refuse(self, worker_id: str, error: Exception) -> None:
        """Kills a worker that sent an invalid message."""
        self.rejected.note(repr(worker_id[:100]), error)
        if worker := self.workers.get(worker_id):
            worker.kill_reason = worker.kill_reason or f"it sent an invalid message ({error})"
            worker.child.signal_group(signal.SIGKILL)

    async def play(
        self,
        env: str,
        split: Split,
        task: int,
        num_episodes: int,
        sampling: dict[str, Any],
        session: int,
        members: Sequence[Rollout] = (),
        on_members: Callable[[list[Rollout]], None] | None = None,
        keeps_last: bool = False,
        seed: int | None = None,
    ) -> list[Rollout]:
        """Plays a group on the environment's least busy worker.

        members: its finished rollouts, of whole episodes, which are not played again; if the
        environment scores groups together, they are ignored unless they are all. `on_members` is
        called with further ones as they finish, before the user's metrics are added to all at the
        end; with the last ones if `keeps_last`, as the group is not done then. Raises EnvLostError,
        and RunError if the user's metrics are faulty.
        """
        if env in self.lost:
            raise EnvLostError(f"environment {env}: {self.lost[env]}")
        self.next_play += 1
        order = PlayOrder(self.next_play, split, task, num_episodes, sampling, session, seed=seed)
        is_whole = len({rollout.episode for rollout in members}) == num_episodes
        kept = list(members) if is_whole or not self.scores_groups.get(env) else []
        play = SentGroup(
            order, asyncio.get_running_loop().create_future(), kept, on_members, keeps_last
        )
        if is_whole:
            play.done.set_result(kept)
        else:
            self.waiting[env].append(play)
            self._pump(env)
        try:
            # Copies, because metrics added to them must not get into the stored members.
            rollouts = [
                msgspec.structs.replace(rollout, metrics=dict(rollout.metrics))
                for rollout in await play.done
            ]
            if self.add_metrics:
                await in_thread(self.add_metrics, rollouts)
            return rollouts
        finally:
            if play.done.cancelled():  # the caller was cancelled
                self._withdraw(env, play)

    def _withdraw(self, env: str, play: SentGroup) -> None:
        """Takes a group away from its worker, if one has it."""
        if play in self.waiting[env]:
            self.waiting[env].remove(play)
        for worker in self._workers_of(env):
            if worker.sent.pop(play.order.play_id, None):
                self._send(worker, Cancel(play.order.play_id))
        self._pump(env)

    def _pump(self, env: str) -> None:
        """Sends waiting groups to the workers that have the fewest: suspects first, each to one
        that plays nothing else meanwhile, then all others at once."""
        waiting = self.waiting[env]
        while waiting:
            free = [
                worker
                for worker in self._workers_of(env)
                if worker.is_up and not any(play.is_suspect for play in worker.sent.values())
            ]
            worker = min(free, key=lambda worker: len(worker.sent), default=None)
            if worker is None or (waiting[0].is_suspect and worker.sent):
                return
            play = waiting.popleft()
            worker.sent[play.order.play_id] = play
            self._send(worker, play.order_left())

    async def tell(self, server_set: ServerSet) -> None:
        """Tells all workers which inference servers there are, before any group sent later."""
        self.server_set = server_set
        for worker in self.workers.values():
            if worker.ready.done():
                self._send(worker, server_set)

    async def describe(
        self, env: str, split: Split, num_tasks: int, timeout_s: float, first: int = 0
    ) -> Description:
        """Returns the description of an environment, with tasks of a split; see Describe. Raises
        RunError."""
        worker = next(worker for worker in self.workers.values() if worker.setup.env.name == env)
        answer: asyncio.Future[Description] = asyncio.get_running_loop().create_future()
        worker.descriptions.append(answer)
        self._send(worker, Describe(split, num_tasks, first))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RunError(
                f"environment {env} was not described within orchestrator.worker_timeout_s = "
                f"{timeout_s:g}; see {worker.child.log}"
            ) from None

    def _send(self, worker: PoolWorker, message: ToWorker) -> None:
        faults.point(f"pool.{type(message).__name__}")
        self.server.post(worker.setup.worker_id, ENCODER.encode(message))

    async def close(self) -> None:
        """Ends all workers. They have no state to lose, but their environments may have started
        servers."""
        for task in self.watchers:
            task.cancel()
        self.launcher.close()
        for worker in self.workers.values():
            if worker.child.exit_code is None and worker.ready.done():
                self._send(worker, Close())
            else:
                worker.child.signal_group(signal.SIGKILL)
        children = [worker.child for worker in self.workers.values()]
        await asyncio.gather(*(child.wait_async(CLOSE_S) for child in children))
        for child in children:
            child.kill_tree()
        await asyncio.gather(*(child.wait_async(CLOSE_S) for child in children))
        for child in children:
            child.reap()
        await self.sandbox.close()
        self.server.close()
        self.directory.cleanup()


@dataclass(frozen=True)
class PlayJob:
    """A task to play outside of training, and how often."""

    env: str
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]
    label: str = ""
    """The evaluation it is played for, where several share an environment."""
    seed: int | None = None
    """Seed of its random draws; see PlayOrder."""


async def play_all(
    pool: WorkerPool,
    jobs: Iterable[PlayJob],
    num_places: int,
    patience_s: float = float("inf"),
    check: Callable[[], None] = lambda: None,
) -> AsyncGenerator[tuple[PlayJob, list[Rollout]]]:
    """Plays jobs, at most `num_places` episodes at once, and yields each when it
    is finished. Close it with `contextlib.aclosing`, which cancels the others.

    `check` is called every PLAY_POLL_S seconds or more often, and may raise. Raises RunError if
    nothing finishes for `patience_s`, and what `pool.play` and `pool.failed` raise.
    """
    waiting, last = deque(jobs), time.monotonic()
    playing: dict[asyncio.Task[list[Rollout]], PlayJob] = {}
    try:
        while True:
            num_free = num_places - sum(job.num_episodes for job in playing.values())
            while waiting and (not playing or waiting[0].num_episodes <= num_free):
                job = waiting.popleft()
                num_free -= job.num_episodes
                play = pool.play(
                    job.env,
                    job.split,
                    job.task,
                    job.num_episodes,
                    job.sampling,
                    job.task,
                    seed=job.seed,
                )
                playing[asyncio.create_task(play)] = job
            if not playing:
                return
            done, _ = await asyncio.wait(
                playing, timeout=PLAY_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if pool.failed.done():
                pool.failed.result()
            for task in done:
                last = time.monotonic()
                yield playing.pop(task), task.result()
            check()
            if time.monotonic() - last > patience_s:
                envs = ", ".join(sorted({job.env for job in playing.values()}))
                raise RunError(
                    f"waited {patience_s:.0f} s for any of {len(playing)} tasks of {envs} to "
                    "finish, longer than their deadlines (orchestrator.rollout_timeout_s, "
                    f"timeout_s); see {pool.log_dir}"
                )
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
