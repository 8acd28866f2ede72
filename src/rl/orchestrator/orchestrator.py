"""The orchestrator's loops. A rollout's life: `generate` -> `play_group` -> `finish` -> `commit_batch` -> `answer_batch`.

Lag is bounded by construction: batch N+1 makes version N+1 from N, so a token of version v in it lags N - v. With `loaded` the version
in inference and `newest` the last batch, at most (loaded + 1 + max_lag - newest) batches' worth of groups are playing or waiting; if
they finish in order, the last of them goes into batch loaded + 1 + max_lag, where its tokens, of version >= loaded, lag at most
max_lag. Groups that are dropped make room for their replacements. With max_lag = 0 nothing can be overtaken, and lag is always 0. Else a
slow group may be overtaken by newer ones and end in a later batch; `max_off_policy_steps` bounds those.
"""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl.batch_log import decode_batch
from rl.config import RLConfig
from rl.messages import Acknowledged, BatchBytes, GetBatch, NotReady, Published, RunEnded, WeightVersion
from rl.metrics import MetricsLog
from rl.orchestrator import batches
from rl.orchestrator.batches import OrchestratorState
from rl.orchestrator.clock import StepClock
from rl.orchestrator.config import EvalConfig
from rl.orchestrator.inference_client import InferenceServers
from rl.orchestrator.pending import PendingLog
from rl.orchestrator.rollouts import Group, Rollout
from rl.orchestrator.tasks import TaskRef, TaskSource
from rl.orchestrator.workers import WorkerPool
from rl.run_dir import RunDir, numbered
from rl.status import Status, read_status
from rl.transport import ANSWER_WITHIN_S, TrainerServer

log = logging.getLogger(__name__)

LAST_WORD_S = 120.0
"""How long the trainer may take to hear that the run ended early: it may still write its checkpoint."""


class RunError(Exception):
    """The run cannot go on; the message says why and what to do."""


@dataclass
class InFlight:
    """A group that is being played."""

    ref: TaskRef
    start_version: int
    task: "asyncio.Task[None]"


@dataclass(frozen=True)
class EvalEnv:
    """Where the pool plays an evaluation: a training environment's workers if they hold the same environment, else its own."""

    worker_env: str
    size: int


class Orchestrator:
    """Keeps inference busy, forms batches, answers the trainer, follows the policy, evaluates."""

    def __init__(
        self,
        config: RLConfig,
        pool: WorkerPool,
        servers: InferenceServers,
        source: TaskSource,
        eval_envs: dict[str, EvalEnv],
        status: Status,
    ):
        self.config = config
        self.run_dir: RunDir = config.run_dir
        self.pool = pool
        self.servers = servers
        self.source = source
        self.eval_envs = eval_envs
        self.status = status
        self.metrics = MetricsLog(self.run_dir.metrics, "orchestrator")
        self.eval_metrics = MetricsLog(self.run_dir.metrics, "eval")
        self.pending = PendingLog(self.run_dir.pending)
        self.newest = 0
        self.final = config.max_steps
        self.end_reason = ""
        self.loaded = 0
        self.versions: dict[int, WeightVersion] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.silent_rewards: list[float] = []
        self.reward_range: tuple[float, float] | None = None
        self.changed = asyncio.Condition()
        self.told_end = asyncio.Event()
        self.clock = StepClock()

    # Start and end ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continues from the newest batch and pending.log."""
        self.newest = self.run_dir.newest_batch()
        state, settled = None, set[int]()
        if self.newest:
            path = self.run_dir.batch(self.newest)
            content = decode_batch(path.read_bytes(), f"{path} (continue before it with --resume {self.newest - 1})")
            state = batches.decode_state(content.state)
            settled = set(state.settled)
            self.silent_rewards, self.reward_range = list(state.silent_rewards), state.reward_range
        for remark in self.pending.load(settled):
            log.warning(remark)
        self.source.restore(state.tasks if state else None, {group.group_id for group in self.pending.groups})
        for group in self.pending.groups:
            self._note_rewards(group)
        self.versions = {number: WeightVersion(number, str(path)) for number, path in numbered(self.run_dir.weights_dir).items()}
        if self.newest or self.pending.groups:
            log.info("resumed after batch %d with %d finished groups", self.newest, len(self.pending.groups))

    async def run(self, server: TrainerServer) -> str:
        """Runs until the last version is made and evaluated. Returns why the run ended."""
        self.loaded = await self.servers.loaded_version()
        log.info("inference has version %d", self.loaded)
        self.clock.start()
        self._complete_batches()
        async with asyncio.TaskGroup() as group:
            self.group = group
            tasks = [group.create_task(loop) for loop in (self.serve_trainer(server), self.pool_failure())]
            await self.catch_up()
            tasks.append(group.create_task(self.generate()))
            await self.follow_policy()
            await self._tell_trainer()
            for task in [*tasks, *(play.task for play in self.in_flight.values())]:
                task.cancel()
        return self.end_reason or f"{self.final} steps done"

    async def _tell_trainer(self) -> None:
        """After an early end the trainer still has to hear of it: it asks for one batch more."""
        if self.end_reason:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self.told_end.wait()
        await asyncio.sleep(0.5)  # lets the answer leave

    async def pool_failure(self) -> None:
        """Loop. Waits for a worker that cannot be brought back, and ends the run."""
        await self.pool.failed

    # Generation ---------------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """How many groups may be started now: the lag bound at the head of this file, the run's end, and the limit of refills."""
        ahead = min(self.loaded + 1 + self.config.max_lag, self.final) - self.newest
        return batches.room(self.pending.groups, self.config.groups_per_batch, len(self.in_flight), ahead)

    def full_batch(self) -> list[Group] | None:
        return batches.choose(self.pending.groups, self.config.groups_per_batch, len(self.in_flight))

    async def generate(self) -> None:
        """Loop. Consumes tasks, produces groups in flight; waits for room, unblocked by a loaded version or a finished group."""
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.room() > 0)
            for _ in range(self.room()):
                ref = self.source.next()
                self.in_flight[ref.group_id] = InFlight(ref, self.loaded, self.group.create_task(self.play_group(ref)))

    async def play_group(self, ref: TaskRef) -> None:
        """Plays one group and hands it on."""
        sampling = self.config.orchestrator.sampling.model_dump(exclude_none=True)
        with self.clock.busy():
            rollouts = await self.pool.play(ref.env, "train", ref.task, self.config.orchestrator.group_size, sampling, ref.group_id)
        del self.in_flight[ref.group_id]
        await self.finish(Group(group_id=ref.group_id, env=ref.env, task=ref.task, rollouts=rollouts))

    def cancel_stale(self) -> None:
        """Cancels groups whose oldest token would be too far behind, and issues their tasks again."""
        for play in list(self.in_flight.values()):
            if self.loaded - play.start_version > self.config.orchestrator.max_off_policy_steps:
                play.task.cancel()
                del self.in_flight[play.ref.group_id]
                self.source.reissue(play.ref.group_id)
                self.clock.stale += 1
                log.warning("a group of %s ran across %d versions: cancelled as stale", play.ref.env, self.loaded - play.start_version)

    # Batches ------------------------------------------------------------------------------------------------------------

    async def finish(self, group: Group) -> None:
        """Takes in a finished group: durable first, then counted, then perhaps a batch."""
        group = batches.judge(group)
        self.pending.append(group)
        self.source.finished(group.group_id)
        self._note_rewards(group)
        self._complete_batches()
        self.show_progress()
        await self.wake()

    def _note_rewards(self, group: Group) -> None:
        rewards = [rollout.reward for rollout in group.rollouts if rollout.error is None]
        if rewards:
            low, high = self.reward_range or (rewards[0], rewards[0])
            self.reward_range = (min(low, *rewards), max(high, *rewards))
        self.silent_rewards = [] if group.why is None else self.silent_rewards + rewards

    def _complete_batches(self) -> None:
        while self.newest < self.final and (used := self._fresh(self.full_batch())):
            self.commit_batch(used)
        self._check_progress()

    def _fresh(self, used: list[Group] | None) -> list[Group] | None:
        """The chosen groups, or None if some turned out too old: those are dropped as stale and replaced."""
        limit = self.newest - self.config.orchestrator.max_off_policy_steps
        old = [group for group in used or [] if (group.oldest_version or 0) < limit]
        for group in old:
            group.why = "stale"
        return used if not old else self._fresh(self.full_batch())

    def commit_batch(self, used: list[Group]) -> None:
        """Makes the next batch of `used`; groups dropped until now are settled with it."""
        step = self.newest + 1
        dropped = [group for group in self.pending.groups if group.why is not None]
        settled = {group.group_id for group in [*used, *dropped]}
        state = OrchestratorState(
            tasks=self.source.state(), settled=sorted(settled), silent_rewards=self.silent_rewards, reward_range=self.reward_range
        )
        temperature = self.config.orchestrator.sampling.temperature
        batch = batches.commit(self.run_dir, step, used, dropped, state, temperature)
        self.newest = step
        self.pending.rewrite([group for group in self.pending.groups if group.group_id not in settled])
        metrics = batches.batch_metrics(batch, [*used, *dropped], self.config.orchestrator.group_size)
        tokens = sum(rollout.num_tokens for group in [*used, *dropped] for rollout in group.rollouts)
        self.metrics.write(step, metrics | self.clock.lap(tokens))
        log.info("batch %d: %d samples, reward %.3f", step, len(batch.samples), metrics["reward/mean"])

    def _check_progress(self) -> None:
        """Ends a run that only fails, or that has nothing left to learn from."""
        per_batch = self.config.groups_per_batch
        recent = self.pending.groups[-batches.MAX_REFILL * per_batch :]
        if len(recent) == batches.MAX_REFILL * per_batch and all(group.why == "error" for group in recent):
            last = next(rollout.error for rollout in reversed(recent[-1].rollouts) if rollout.error)
            raise RunError(f"the last {len(recent)} groups all failed; the newest error:\n{last}")
        silent = self.silent_rewards
        if len(silent) >= batches.MAX_SILENT * self.config.orchestrator.batch_size and self.final > self.newest:
            low, high = self.reward_range or (0.0, 0.0)
            histogram = ", ".join(f"{reward:g}: {count}" for reward, count in sorted(Counter(silent).items()))
            if min(silent) >= high and (high > low or high >= 1.0):
                self.final = self.newest
                self.end_reason = f"solved: the last {len(silent)} rollouts all have the highest reward, {high:g}"
                log.info(self.end_reason)
            else:
                raise RunError(
                    f"{len(silent)} rollouts in a row without any signal: in each group all rewards are equal (reward: count {histogram}). "
                    "Is the task too hard or the reward function wrong? Look at rollouts/ and at pending rollouts, raise group_size or "
                    "temperature, or start from easier tasks"
                )

    # Trainer ------------------------------------------------------------------------------------------------------------

    async def serve_trainer(self, server: TrainerServer) -> None:
        """Loop. Consumes the trainer's requests, produces answers; a request for a batch that is not there waits in a task of its own."""
        while True:
            peer, request = await server.receive()
            match request:
                case GetBatch(step):
                    self.group.create_task(self.answer_batch(server, peer, step))
                case Published(version):
                    self.versions[version.policy_version] = version
                    await server.reply(peer, Acknowledged(self.oldest_needed()))
                    await self.wake()

    async def answer_batch(self, server: TrainerServer, peer: bytes, step: int) -> None:
        """Answers with the batch, or that there will be none, or within a few seconds that it is not ready."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self.changed:
                await self.changed.wait_for(lambda: step <= self.newest or step > self.final)
        except TimeoutError:
            return await server.reply(peer, NotReady(self.status.fields["doing"]))
        if step > self.final:
            self.told_end.set()
            return await server.reply(peer, RunEnded(self.end_reason or f"max_steps = {self.final} reached"))
        return await server.reply(peer, BatchBytes(self.run_dir.batch(step).read_bytes()))

    # Policy and evals ---------------------------------------------------------------------------------------------------

    def eval_due(self, config: EvalConfig, version: int) -> bool:
        """Evals run at version 0, every `interval` versions, and at the last one; a finished one is not run again."""
        due = version % config.interval == 0 or version == self.final
        return due and not self.run_dir.eval(version, config.label).exists()

    def evals_of(self, version: int) -> list[EvalConfig]:
        return [config for config in self.config.orchestrator.eval if self.eval_due(config, version)]

    def next_version(self) -> WeightVersion | None:
        """What inference should hold next: first every newer version that waits for an eval, in order, else the newest."""
        there = {number for number, version in self.versions.items() if Path(version.path).exists()}
        waiting = [number for number in sorted(there) if number > self.loaded and self.evals_of(number)]
        newest = max(there, default=0)
        number = waiting[0] if waiting else newest
        return self.versions[number] if number > self.loaded and number in there else None

    def oldest_needed(self) -> int:
        """The oldest version that is loaded, may be loaded again, or waits for its eval."""
        return min([self.loaded, *(number for number in self.versions if self.evals_of(number))])

    async def follow_policy(self) -> None:
        """Loop. Consumes published versions, loads each into inference and evaluates it if it is due; waits for the trainer.

        Produces room for `generate`. Ends with the run: the last version is loaded and evaluated.
        """
        while True:
            for config in self.evals_of(self.loaded):
                await self.evaluate(config, self.loaded)
            self.show_progress()
            version = await self._await_version()
            if version is None and not self.evals_of(self.loaded):
                return
            if version is None:
                continue
            await self.load(version)
            self.cancel_stale()
            await self.wake()

    async def catch_up(self) -> None:
        """Evaluates versions that an earlier process left unevaluated. Before any rollout: inference goes back to older versions for it."""
        newest = self.loaded
        for number in sorted(number for number, version in self.versions.items() if number < newest and Path(version.path).exists()):
            if self.evals_of(number):
                await self.load(self.versions[number])
                for config in self.evals_of(number):
                    await self.evaluate(config, number)
        if self.loaded != newest:
            await self.load(self.versions[newest])

    async def load(self, version: WeightVersion) -> None:
        """Has inference hold a version."""
        self.status.doing(f"loading version {version.policy_version} into inference")
        self.clock.pause_s += await self.servers.load(version)
        self.loaded = version.policy_version

    async def _await_version(self) -> WeightVersion | None:
        """Waits for a version to load; None once there will be no other. The deadline starts anew with every batch: past the next one
        only a living trainer gets."""
        deadline_s = self.config.orchestrator.trainer_timeout_s
        while (version := self.next_version()) is None and self.loaded < self.final:
            newest = self.newest
            try:
                async with asyncio.timeout(deadline_s), self.changed:
                    await self.changed.wait_for(lambda seen=newest: self.next_version() or self.newest > seen or self.loaded >= self.final)
            except TimeoutError:
                seen = read_status(self.run_dir.status("trainer"))
                last = f"{time.time() - seen['heartbeat']:.0f} s ago: {seen['doing']}" if seen else "never"
                raise RunError(
                    f"waited {deadline_s:.0f} s for the trainer's version after {self.loaded} or a new batch; last heartbeat of the "
                    f"trainer: {last}. See logs/trainer*.log; if a step just takes long, raise orchestrator.trainer_timeout_s"
                ) from None
        return version

    async def evaluate(self, config: EvalConfig, version: int) -> None:
        """Plays an evaluation at the loaded version and writes its result; training goes on beside it."""
        training = self.config.orchestrator.sampling.model_dump(exclude_none=True)
        sampling = training | config.sampling.model_dump(exclude_none=True)
        env = self.eval_envs[config.label]
        tasks = range(env.size if config.num_examples < 0 else min(env.size, config.num_examples))
        self.status.doing(f"evaluating {config.label} at version {version}")
        began = time.monotonic()

        async def one(task: int) -> tuple[int, list[Rollout]]:
            return task, await self.pool.play(env.worker_env, "eval", task, config.samples, sampling, task)

        with self.clock.busy():
            results = await asyncio.gather(*(one(task) for task in tasks))
        metrics = batches.write_eval(self.run_dir.eval(version, config.label), version, config.label, results)
        self.eval_metrics.write(version, metrics | {"time/eval": time.monotonic() - began})
        log.info("eval %s at version %d: %.3f", config.label, version, metrics[f"eval/{config.label}/reward_mean"])

    # What others see ----------------------------------------------------------------------------------------------------

    async def wake(self) -> None:
        """Lets every loop look again whether what it waits for has come."""
        async with self.changed:
            self.changed.notify_all()

    def show_progress(self) -> None:
        size = self.config.orchestrator.batch_size
        done = sum(len(group.rollouts) for group in self.pending.groups if group.why is None)
        waits = self.newest >= min(self.loaded + 1 + self.config.max_lag, self.final)
        doing = f"waiting for the trainer's version {self.loaded + 1}" if waits else f"filling batch {self.newest + 1}"
        self.status.doing(doing, batch=self.newest + 1, batch_done=min(done, size), batch_size=size, policy_version=self.loaded)
