"""The orchestrator's loops: coroutines that wake each other through `Progress.notify`, and share
the files of the run directory.

                tasks             groups              batches/N
    TaskSource -------> generate --------> take_in --------------> serve <---------> trainer
                           ^                                         |                  |
                           | room for                    "version V  |                  | weights/V
                           | new groups                 is complete" v                  |
                       inference <------ loads V ------ follow_policy <-----------------+
                           ^                            (and evaluates it)
                           +---- still holds V? ---- monitor_inference

`serve` is `TrainerRequests.serve`; the other loops are methods of `Orchestrator`. Everything that
may unblock a loop calls `Progress.notify`. tasks/admission.py explains how lag is bounded and how
environments share places.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from rl.config.run import RLConfig
from rl.orchestrator.evals.evaluator import Evaluator
from rl.orchestrator.groups.group_credit import credit_group, in_thread, rules_of
from rl.orchestrator.groups.teacher import Teacher
from rl.orchestrator.pipeline import Pipeline
from rl.orchestrator.policy.served_policy import ServedPolicy
from rl.orchestrator.policy.trainer_requests import TrainerRequests
from rl.orchestrator.progress import Progress
from rl.orchestrator.tasks.admission import Admission, InFlight
from rl.orchestrator.tasks.task_source import TaskRef, TaskSource
from rl.orchestrator.workers.pool import EnvLostError, WorkerPool
from rl.run_dir import spans
from rl.run_dir.status import Phase, RunWarning, Status
from rl.system.errors import RunError
from rl.wire.http import RefusedError
from rl.wire.messages import WeightVersion
from rl.wire.rollouts import Group, Rollout
from rl.wire.transport import TrainerServer

log = logging.getLogger(__name__)

SLOW_CHECK_S = 0.5
"""Interval at which `generate` checks whether a group in flight has become slow and so freed its
place."""
RECONCILE_EVERY_S = 1.0
"""Interval at which inference is asked which version it holds."""


@dataclass(eq=False)
class Orchestrator:
    """Keeps inference busy, forms batches, answers the trainer, follows the policy, evaluates."""

    config: RLConfig
    pool: WorkerPool
    policy: ServedPolicy
    source: TaskSource
    evaluator: Evaluator
    status: Status
    teachers: dict[str, Teacher]

    def __post_init__(self) -> None:
        config, self.clock = self.config, self.evaluator.clock
        self.envs = {env.label: env for env in config.orchestrator.environment}
        self.samplings = {label: config.sampling_of(env) for label, env in self.envs.items()}
        self.rules = {
            label: rules_of(config.orchestrator, env, label in self.teachers)
            for label, env in self.envs.items()
        }
        self.progress = Progress(config.max_steps)
        self.admission = Admission(config, self.source)
        self.pipeline = Pipeline(
            config,
            self.admission,
            self.rules,
            self.progress,
            self.clock,
            self.pool.lost,
            self.status.warn,
        )
        self.requests = TrainerRequests(
            config.run_dir, self.progress, self.policy, self.status, config.model.max_model_len
        )
        self.played: list[Group] = []
        """Groups, and finished episodes of others, for `take_in`, which removes them once they
        are durable."""
        self.env_lost = False
        """Whether an environment was lost since `take_in` last checked for full batches."""
        self.pool.on_lost, self.pool.on_death = self.lose_env, self.tell_of_death

    async def run(self, server: TrainerServer) -> str:
        """Runs until the last version is published and evaluated. Returns why the run ended."""
        self.clock.start()
        await self.policy.start()
        log.info("inference has version %d", self.policy.loaded)
        await self.pipeline.commit_full_batches()
        self._check_target()
        async with asyncio.TaskGroup() as group:
            self.group = group
            loops = [self.requests.serve(server, group), self.fail_with_pool(), self.take_in()]
            tasks = [group.create_task(loop) for loop in loops]
            await self.evaluate_missed()
            tasks += [group.create_task(self.generate())]
            tasks += [group.create_task(self.monitor_inference())]
            await self.follow_policy()
            await self.requests.wait_for_trainer_end(self.config.orchestrator.trainer_timeout_s)
            for task in [*tasks, *(play.task for play in self.admission.in_flight.values())]:
                task.cancel()
        return self.progress.end_reason or f"{self.progress.final} steps done"

    # Generation -----------------------------------------------------------------------------------

    async def generate(self) -> None:
        """Loop. Consumes tasks. Produces groups in flight. Waits for room; unblocked by a loaded
        version, a finished group, or a timer."""
        while True:
            if envs := self.eligible():
                ref = self.source.next(envs)
                env = self.envs[ref.env]
                self.start_group(ref, env.group_size or self.config.orchestrator.group_size)
                await asyncio.sleep(0)  # the other loops' turn
                continue
            may_slow = self.config.max_lag and self.admission.in_flight
            await self.progress.wait_until(self.eligible, SLOW_CHECK_S if may_slow else None)

    def batches_ahead(self) -> int:
        """Returns how many batches after the newest one may be sampled with the loaded version."""
        last = min(self.policy.loaded + 1 + self.config.max_lag, self.progress.final)
        return last - self.progress.newest

    def eligible(self) -> list[str]:
        """Returns the environments from which a group may be started now."""
        if not self.config.max_lag and self.target_is_due():
            return []
        places = self.admission.places(self.pipeline.pending.groups)
        return self.admission.eligible(places, self.batches_ahead())

    def start_group(self, ref: TaskRef, num_episodes: int) -> None:
        """Starts a group, reusing members that an earlier process, or a cancelled attempt, has
        finished."""
        loaded = self.policy.loaded
        # Only half the window: with older members the group would be cancelled as stale before it
        # finishes, again and again.
        window = self.config.orchestrator.max_off_policy_steps // 2 if self.config.max_lag else 0
        members = self.pipeline.finished_of(ref.group_id, loaded - window)
        versions = [version for rollout in members for version in rollout.versions]
        task = self.group.create_task(self.play_group(ref, num_episodes, members))
        self.admission.in_flight[ref.group_id] = InFlight(
            ref, num_episodes, min([loaded, *versions]), time.monotonic(), task
        )

    async def play_group(self, ref: TaskRef, num_episodes: int, members: list[Rollout]) -> None:
        """Plays the rest of one group, has its teacher score it, and passes it to `take_in`.
        Members are passed on as they finish."""
        sampling, rules = self.samplings[ref.env], self.rules[ref.env]

        def group_of(rollouts: list[Rollout], finished: bool) -> Group:
            return Group(
                group_id=ref.group_id,
                env=ref.env,
                task=ref.task,
                rollouts=rollouts,
                temperature=sampling["temperature"],
                finished=finished,
            )

        def keep(rollouts: list[Rollout]) -> None:
            self.played.append(group_of(rollouts, finished=False))
            self.group.create_task(self.progress.notify())

        try:
            with self.clock.busy():
                order = ref.env, "train", ref.task, num_episodes, sampling, ref.group_id
                # A teacher may take minutes to score what has been played.
                rollouts = await self.pool.play(*order, members, keep, keeps_last=rules.has_teacher)
        except EnvLostError:
            return await self.progress.notify()
        group = group_of(rollouts, finished=True)
        if rules.has_teacher and (await in_thread(credit_group, group, rules)).why is None:
            await self.teachers[ref.env].score_group(group, rules.mask_truncated)
        if (play := self.admission.in_flight.get(ref.group_id)) is None:
            return  # its environment was lost; its task is kept for the next start
        self.admission.pace.add(ref.env, time.monotonic() - play.started)
        self.played.append(group)
        await self.progress.notify()

    def finished_ids(self) -> set[int]:
        """Returns the groups in flight that are finished, just not durable yet."""
        return {group.group_id for group in self.played if group.finished}

    def cancel_stale(self) -> None:
        """Cancels groups whose oldest token would be too far behind, and requeues their tasks."""
        for play in self.admission.cancel_stale(self.policy.loaded, self.finished_ids()):
            self.clock.stale[play.ref.env] += 1
            log.warning(
                "a group of %s ran across %d versions: cancelled as stale",
                play.ref.env,
                self.policy.loaded - play.start_version,
            )

    def lose_env(self, env: str, why: str) -> None:
        """Continues without an environment whose workers cannot be kept alive. Raises RunError
        if no other is left to train on."""
        if self.source.shares.keys() == {env}:
            raise RunError(f"environment {env} cannot be played: {why}")
        is_trained = env in self.source.shares
        share = ", its share goes to the others" if is_trained else ""
        text = f"environment {env} is lost until the next start{share}: {why}"
        log.error(text)
        self.status.warn(RunWarning("lost", env, text))
        if is_trained:
            self.admission.lose_env(env, self.finished_ids())
            self.env_lost = True

    def tell_of_death(self, env: str, text: str) -> None:
        """Has `rl` report the first death of an environment's workers; the log has every one."""
        log.warning(text)
        text += f"; further deaths of workers of {env} are reported only in the orchestrator's log"
        self.status.warn(RunWarning("died", env, text))

    async def fail_with_pool(self) -> None:
        """Loop. Consumes fatal failures of the pool. Produces the end of the run. Unblocked by
        the pool."""
        await self.pool.failed

    # Batches --------------------------------------------------------------------------------------

    async def take_in(self) -> None:
        """Loop. Consumes played groups, all that are there at once. Produces pending.log, then
        batches. Unblocked by `play_group`."""
        while True:
            await self.progress.wait_until(lambda: self.played or self.env_lost)
            played, checks_batches, self.env_lost = list(self.played), self.env_lost, False
            await self.pipeline.add(played)
            del self.played[: len(played)]
            for group in played:
                if group.finished:
                    self.status.advance(len(group.rollouts))
                    checks_batches = True
            # groups that waited for those of a lost environment may form a batch now
            if checks_batches:
                await self.pipeline.commit_full_batches()
            self.show_progress()
            await self.progress.notify()

    # Policy and evals -----------------------------------------------------------------------------

    async def follow_policy(self) -> None:
        """Loop. Consumes published versions. Produces a loaded version, and with it room for
        `generate`; plays the evaluations due.

        Waits for the trainer; unblocked by `serve`. Ends with the run: the last version is loaded
        and evaluated.
        """
        while True:
            if not self.batch_goes_first():
                await self.evaluate(self.policy.loaded)
            self.show_progress()
            if version := await self._next_version():
                await self.load(version)
                self.cancel_stale()
                await self.progress.notify()
            elif self.policy.loaded >= self.progress.final and not self.evaluator.due(
                self.policy.loaded, self.progress.final
            ):
                return

    async def monitor_inference(self) -> None:
        """Loop. Consumes the servers' versions. Produces a correct `loaded`: servers may die and
        come back with another version."""
        while True:
            await asyncio.sleep(RECONCILE_EVERY_S)
            if await self.policy.reconcile():
                self.cancel_stale()
                await self.progress.notify()

    async def evaluate_missed(self) -> None:
        """Evaluates versions that an earlier process left unevaluated. Runs before any rollout:
        inference loads older ones for it."""
        newest, final = self.policy.loaded, self.progress.final
        self.policy.forget(final)
        for number in self.policy.available():
            if number >= newest or not self.evaluator.due(number, final):
                continue
            try:
                await self.load(self.policy.versions[number])
            except RefusedError as error:
                if number:
                    raise
                # it cannot be loaded while adapters are hot-loaded
                log.warning("version 0 is not evaluated: %s", error)
                self.evaluator.skipped.add(number)
            await self.evaluate(number)
        if self.policy.loaded != newest:
            await self.load(self.policy.versions[newest])

    async def load(self, version: WeightVersion) -> None:
        """Loads a version into inference."""
        self.status.enter(Phase.LOADING_VERSION, version.policy_version)
        with spans.span("load_version", "weights", version.policy_version):
            self.clock.pause_s += await self.policy.load(version)

    async def _next_version(self) -> WeightVersion | None:
        """Waits for a version to load. Returns None if there will be none, inference came back
        with another one, or an evaluation is due. Raises RunError."""
        held, progress = self.policy.loaded, self.progress

        def may_evaluate() -> bool:
            """Whether an evaluation of the loaded version that had to wait for the batch may
            start now."""
            return not self.batch_goes_first() and bool(self.evaluator.due(held, progress.final))

        def is_over() -> bool:
            return (
                self.policy.loaded != held
                or held >= progress.final
                or may_evaluate()
                or self.policy.next_version(progress.final) is not None
            )

        await self.requests.wait_for_trainer(
            is_over,
            f"the trainer's version after {held} or a new batch",
            self.config.orchestrator.trainer_timeout_s,
        )
        return None if may_evaluate() else self.policy.next_version(progress.final)

    def target_is_due(self) -> bool:
        """Returns whether an evaluation that may end the run is due at the loaded version."""
        due = self.evaluator.due(self.policy.loaded, self.progress.final)
        return any(math.isfinite(entry.target) for entry in due)

    def batch_goes_first(self) -> bool:
        """Returns whether evaluations of the loaded version wait until it has sampled its batch.
        With `max_lag = 0` the servers are idle while that batch trains, so evaluations run then.
        If one has a target they go first: it is checked before another batch is sampled."""
        return (
            not self.config.max_lag
            and not self.target_is_due()
            and self.progress.newest <= self.policy.loaded < self.progress.final
        )

    async def evaluate(self, version: int) -> None:
        """Plays the evaluations due at the loaded version. Reaching a target ends the run."""
        for entry in self.evaluator.due(version, self.progress.final):
            self.status.enter(Phase.EVALUATING, version, entry.label)
            async with self.policy.pin():
                with spans.span("eval", "evals", version, eval=entry.label):
                    await self.evaluator.evaluate(entry, version, self.policy.reconcile)
            self._check_target()
            await self.progress.notify()

    def _check_target(self) -> None:
        """Ends the run if an evaluation has reached its target."""
        reached = self.evaluator.reached_target()
        if reached and not self.progress.end_reason:
            self.progress.end(reached)
            log.info(reached)

    # Status ---------------------------------------------------------------------------------------

    def show_progress(self) -> None:
        size, batch = self.config.orchestrator.batch_size, self.progress.newest + 1
        # on-policy, groups are used in starting order
        before = math.inf if self.config.max_lag else self.admission.first()
        usable = [group for group in self.pipeline.pending.groups if group.why is None]
        num_done = sum(group.num_episodes for group in usable if group.group_id < before)
        first = self.admission.in_flight.get(int(before)) if before < math.inf else None
        detail = ""
        if first and num_done < size <= sum(group.num_episodes for group in usable):
            detail = (
                f"enough later groups have finished; waiting for group {first.ref.group_id} of "
                f"{first.ref.env} (task {first.ref.task})"
            )
        is_filling = self.batches_ahead() > 0
        self.status.enter(
            Phase.FILLING_BATCH if is_filling else Phase.WAITING_FOR_VERSION,
            batch if is_filling else self.policy.loaded + 1,
            detail,
            batch=batch,
            batch_done=min(num_done, size),
            batch_size=size,
            policy_version=self.policy.loaded,
            quarantined=sorted(self.pool.lost),
        )
