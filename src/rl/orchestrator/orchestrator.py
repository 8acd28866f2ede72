"""The orchestrator's loops. A rollout's life: `generate` -> `play_group` -> `finish` -> `commit_batch` -> `answer_batch`.
admission.py says how lag is bounded and how environments share the places.
"""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rl.batch_log import decode_batch, remove_rollouts, sound_batch
from rl.config import RLConfig
from rl.diagnosis import peer
from rl.files import CorruptFileError
from rl.messages import WeightVersion
from rl.metrics import MetricsLog, read_metrics
from rl.orchestrator import batches
from rl.orchestrator.admission import MAX_REFILL, SLOW, InFlight, Pace, Places, count_places, eligible
from rl.orchestrator.batches import OrchestratorState
from rl.orchestrator.desk import TrainerDesk
from rl.orchestrator.errors import RunError
from rl.orchestrator.evaluation import Evaluator
from rl.orchestrator.pending import PendingLog
from rl.orchestrator.progress import Progress
from rl.orchestrator.remarks import Remarks
from rl.orchestrator.retention import delete_old
from rl.orchestrator.rollouts import Group
from rl.orchestrator.served import LOOK_S, ServedPolicy
from rl.orchestrator.signal import Signal, only_failures
from rl.orchestrator.tasks import TaskRef, TaskSource
from rl.orchestrator.teacher import Teacher
from rl.orchestrator.workers import EnvLostError, WorkerPool
from rl.run_dir import RunDir
from rl.status import Status
from rl.transport import TrainerServer

log = logging.getLogger(__name__)

LOOK_FOR_SLOW_S = 0.5
STARTED_AT_ONCE = 16
"""Groups that are started before the other loops get their turn."""


class Orchestrator:
    """Keeps inference busy, forms batches, answers the trainer, follows the policy, evaluates."""

    def __init__(
        self,
        config: RLConfig,
        pool: WorkerPool,
        policy: ServedPolicy,
        source: TaskSource,
        evaluator: Evaluator,
        status: Status,
        teachers: dict[str, Teacher],
    ):
        self.config = config
        self.run_dir: RunDir = config.run_dir
        self.pool = pool
        self.policy = policy
        self.source = source
        self.evaluator = evaluator
        self.status = status
        self.teachers = teachers
        self.metrics = MetricsLog(self.run_dir.metrics, "orchestrator")
        self.envs = {env.label: env for env in config.orchestrator.environment}
        self.samplings = {label: config.sampling_of(env) for label, env in self.envs.items()}
        self.rules = {label: batches.rules_of(config.orchestrator, env, label in teachers) for label, env in self.envs.items()}
        self.pace = Pace(source.shares)
        self.arrived: list[Group] = []
        self.pending = PendingLog(self.run_dir.pending)
        self.progress = Progress(config.max_steps)
        self.desk = TrainerDesk(self.run_dir, self.progress, policy, status, config.model.max_model_len)
        self.in_flight: dict[int, InFlight] = {}
        self.signal = Signal()
        self.remarks = Remarks()
        self.clock = evaluator.clock
        pool.on_lost = self.quarantine

    @property
    def loaded(self) -> int:
        """The version that inference holds."""
        return self.policy.loaded

    # Start and end ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continues from the newest batch and pending.log. What was written for a batch that was never committed is made again."""
        self.progress.newest = self.run_dir.newest_batch()
        remove_rollouts(self.run_dir, after=self.progress.newest)
        state, settled, counted = None, set[int](), set[int]()
        if self.progress.newest:
            state = self._newest_state(self.run_dir.batch(self.progress.newest))
            settled, counted = set(state.settled), {ref.group_id for ref in state.pending}
            state.tasks.in_flight += state.pending  # of which those in pending.log are done
            self.signal = state.signal
            if (self.progress.newest, "orchestrator") not in read_metrics(self.run_dir.metrics):
                self.metrics.write(self.progress.newest, state.metrics)
        for remark in self.pending.load(settled, self.progress.newest):
            log.warning(remark)
        self.source.restore(state.tasks if state else None, [TaskRef(g.group_id, g.env, g.task) for g in self.pending.groups])
        for group in self.pending.groups:
            if group.group_id not in counted:
                self.note(group)
        if self.progress.newest or self.pending.groups:
            log.info("resumed after batch %d with %d finished groups", self.progress.newest, len(self.pending.groups))

    def _newest_state(self, path: Path) -> batches.OrchestratorState:
        """Raises CorruptFileError for a damaged file, RunError for a sound one that another version of rl wrote."""
        data = sound_batch(path)
        try:
            return batches.decode_state(decode_batch(data, str(path)).state)
        except CorruptFileError as error:
            raise RunError(f"{error}. Go on with the version of rl that wrote it, or start another run") from None

    def note(self, group: Group) -> None:
        """Counts a finished group, once."""
        self.signal.note(group)
        self.source.note(group.env, group.task, group.rewards)

    async def run(self, server: TrainerServer) -> str:
        """Runs until the last version is made and evaluated. Returns why the run ended."""
        self.clock.start()
        await self.policy.start()
        log.info("inference has version %d", self.loaded)
        self._complete_batches()
        self._check_target()
        async with asyncio.TaskGroup() as group:
            self.group = group
            tasks = [group.create_task(loop) for loop in (self.desk.serve(server, group), self.pool_failure(), self.take_in())]
            await self.catch_up()
            tasks += [group.create_task(loop) for loop in (self.generate(), self.keep_in_step())]
            await self.follow_policy()
            await self.desk.see_off(self.config.orchestrator.trainer_timeout_s)
            for task in [*tasks, *(play.task for play in self.in_flight.values())]:
                task.cancel()
        return self.progress.end_reason or f"{self.progress.final} steps done"

    async def pool_failure(self) -> None:
        """Loop. Waits for the loss of what the run cannot go on without, and ends it."""
        await self.pool.failed

    def quarantine(self, env: str, why: str) -> None:
        """Goes on without an environment whose workers cannot be kept alive. Raises RunError when nothing is left to train on."""
        if env not in self.source.shares:
            return  # of an evaluation alone, which is left out
        if len(self.source.shares) == 1:
            raise RunError(f"environment {env} cannot be played: {why}")
        log.error("environment %s is left out until the next start, its share goes to the others: %s", env, why)
        self.source.quarantine(env)
        for group_id, play in list(self.in_flight.items()):
            if play.ref.env == env:
                del self.in_flight[group_id]

    # Generation ---------------------------------------------------------------------------------------------------------

    def places(self) -> Places:
        """What the rollouts of each environment are doing."""
        slow_s = SLOW * self.pace.typical_s() if self.config.max_lag else float("inf")
        return count_places(self.pending.groups, self.in_flight.values(), slow_s)

    def eligible(self, places: Places) -> list[str]:
        """The environments of which a group may be started: the lag bound, the run's end, the limit of refills, and their shares."""
        batch_size, max_steps = self.config.orchestrator.batch_size, self.config.orchestrator.max_off_policy_steps
        ahead = min(self.loaded + 1 + self.config.max_lag, self.progress.final) - self.progress.newest
        if self.source.again and ahead > 0:
            return list(self.source.shares)  # what was lost had its place already
        return eligible(self.source.shares, places, batch_size, ahead, batch_size * (1 + max_steps))

    async def generate(self) -> None:
        """Loop. Consumes tasks, produces groups in flight; waits for room, unblocked by a loaded version, a finished group, or time."""
        while True:
            places = self.places()
            for _ in range(STARTED_AT_ONCE):
                if not (envs := self.eligible(places)):
                    break
                ref = self.source.next(envs)
                episodes = self.envs[ref.env].group_size or self.config.orchestrator.group_size
                places.playing[ref.env] += episodes
                task = self.group.create_task(self.play_group(ref, episodes))
                self.in_flight[ref.group_id] = InFlight(ref, episodes, self.loaded, time.monotonic(), task)
            else:
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_FOR_SLOW_S if self.config.max_lag and self.in_flight else None), self.progress.changed:
                    await self.progress.changed.wait_for(lambda: self.eligible(self.places()))

    async def play_group(self, ref: TaskRef, episodes: int) -> None:
        """Plays one group and hands it on."""
        sampling = self.samplings[ref.env]
        try:
            with self.clock.busy():
                rollouts = await self.pool.play(ref.env, "train", ref.task, episodes, sampling, ref.group_id)
        except EnvLostError:
            return await self.progress.wake()
        temperature = sampling["temperature"]
        group = Group(group_id=ref.group_id, env=ref.env, task=ref.task, rollouts=rollouts, temperature=temperature)
        rules = self.rules[ref.env]
        if rules.taught and batches.judge(group, rules).why is None:
            await self.teachers[ref.env].teach(group, rules.mask_truncated)
        if (play := self.in_flight.get(ref.group_id)) is None:
            return  # its environment was lost, and its task is kept for the next start
        self.pace.note(ref.env, time.monotonic() - play.started)
        self.arrived.append(group)
        await self.progress.wake()

    def cancel_stale(self) -> None:
        """Cancels groups whose oldest token would be too far behind, and issues their tasks again."""
        arrived = {group.group_id for group in self.arrived}
        for play in list(self.in_flight.values()):
            behind = self.loaded - play.start_version
            if behind > self.config.orchestrator.max_off_policy_steps and play.ref.group_id not in arrived:
                play.task.cancel()
                del self.in_flight[play.ref.group_id]
                self.source.reissue(play.ref.group_id)
                self.clock.stale[play.ref.env] += 1
                log.warning("a group of %s ran across %d versions: cancelled as stale", play.ref.env, behind)

    # Batches ------------------------------------------------------------------------------------------------------------

    async def take_in(self) -> None:
        """Loop. Consumes finished groups: durable first, all that came meanwhile with one write, then counted, then perhaps a batch."""
        while True:
            async with self.progress.changed:
                await self.progress.changed.wait_for(lambda: self.arrived)
            arrived, self.arrived = self.arrived, []
            self.keep(arrived)
            self.show_progress()
            await self.progress.wake()

    def keep(self, arrived: list[Group]) -> None:
        """Makes finished groups durable, counts them, and completes the batches that they complete."""
        groups = [batches.judge(group, self.rules[group.env]) for group in arrived]
        self.pending.append(groups)
        for group in groups:
            self.in_flight.pop(group.group_id, None)
            self.source.finished(group.group_id)
            self.note(group)
            self.remarks.failed(group)
            self.status.advance(len(group.rollouts))
        self._complete_batches()

    def _complete_batches(self) -> None:
        while self.progress.newest < self.progress.final and (used := self.full_batch()):
            self.commit_batch(used)
        self._check_progress()

    def full_batch(self) -> list[Group] | None:
        """The groups of the next batch. Those that turn out too old are dropped as stale, and replaced.

        On-policy that is every older one: a server that came back may have sampled by an older version before that was noticed.
        """
        limit = self.progress.newest - (self.config.orchestrator.max_off_policy_steps if self.config.max_lag else 0)
        num_playing = self.places().playing.total()
        while True:
            used = batches.choose(self.pending.groups, self.config.orchestrator.batch_size, num_playing)
            old = [group for group in used or [] if (version := group.oldest_version) is not None and version < limit]
            if not old:
                return used
            for group in old:
                group.why = "stale"
                self.clock.stale[group.env] += 1

    def commit_batch(self, used: list[Group]) -> None:
        """Makes the next batch of `used`; groups dropped until now are settled with it."""
        step = self.progress.newest + 1
        dropped = [group for group in self.pending.groups if group.why is not None]
        settled = {group.group_id for group in [*used, *dropped]}
        waiting = [group for group in self.pending.groups if group.group_id not in settled]
        pools = self.source.settle()
        unused = [TaskRef(group.group_id, group.env, group.task) for group in waiting]
        batch, rollouts = batches.form(step, used, dropped, self.rules)
        metrics = batches.batch_metrics(batch, [*used, *dropped]) | pools | {f"env/{env}/quarantined": 1 for env in self.pool.lost}
        tokens = sum(rollout.num_tokens for group in [*used, *dropped] for rollout in group.rollouts)
        self.remarks.stale(self.clock.stale, Counter(group.env for group in used), self.config.orchestrator.max_off_policy_steps)
        metrics |= self.clock.lap(tokens)
        state = OrchestratorState(tasks=self.source.state(), settled=sorted(settled), signal=self.signal, pending=unused, metrics=metrics)
        batches.commit(self.run_dir, batch, rollouts, state)
        self.progress.newest = step
        self.pending.rewrite(waiting)
        self.metrics.write(step, metrics)
        delete_old(self.run_dir, self.config.orchestrator)
        log.info("batch %d: %d samples, reward %.3f", step, len(batch.samples), metrics["reward/mean"])

    def _check_progress(self) -> None:
        """Ends a run that only fails, or that has nothing left to learn from."""
        batch_size, silent = self.config.orchestrator.batch_size, self.signal.silent
        if fault := only_failures(self.pending.groups, MAX_REFILL * batch_size):
            raise RunError(fault)
        if len(silent) >= batches.MAX_SILENT * batch_size and self.progress.final > self.progress.newest:
            if not self.signal.solved():
                raise RunError(self.signal.complaint())
            self.progress.end(f"solved: the last {len(silent)} rollouts all have the highest reward ({self.signal.histogram()})")
            log.info(self.progress.end_reason)

    # Policy and evals ---------------------------------------------------------------------------------------------------

    async def follow_policy(self) -> None:
        """Loop. Consumes published versions, loads each into inference and evaluates it if it is due; waits for the trainer.

        Produces room for `generate`. Ends with the run: the last version is loaded and evaluated.
        """
        while True:
            await self.evaluate(self.loaded)
            self.show_progress()
            if version := await self._await_version():
                await self.load(version)
                self.cancel_stale()
                await self.progress.wake()
            elif self.loaded >= self.progress.final and not self.evaluator.due(self.loaded, self.progress.final):
                return

    async def keep_in_step(self) -> None:
        """Loop. Looks now and then whether inference still holds what it should, for servers die and come back with another version."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await self.policy.settle():
                self.cancel_stale()
                await self.progress.wake()

    async def catch_up(self) -> None:
        """Evaluates versions that an earlier process left unevaluated. Before any rollout: inference goes back to older versions for it."""
        newest, final = self.loaded, self.progress.final
        for number in sorted(number for number in self.policy.there() if number < newest and self.evaluator.due(number, final)):
            try:
                await self.load(self.policy.versions[number])
            except RunError as error:
                if number:
                    raise
                log.warning("version 0 is not evaluated: %s", error)  # beside hot adapters it cannot be loaded
                self.evaluator.passed_over.add(number)
            await self.evaluate(number)
        if self.loaded != newest:
            await self.load(self.policy.versions[newest])

    async def load(self, version: WeightVersion) -> None:
        """Has inference hold a version."""
        self.status.doing(f"loading version {version.policy_version} into inference")
        self.clock.pause_s += await self.policy.load(version)

    async def _await_version(self) -> WeightVersion | None:
        """Waits for a version to load; None once there will be no other, or inference came back with one. The deadline starts anew
        with every batch, for past the next one only a living trainer gets, and with every step that a trainer trains again."""
        deadline_s, held = self.config.orchestrator.trainer_timeout_s, self.loaded
        while (version := self.policy.next_version(self.progress.final)) is None and held == self.loaded < self.progress.final:
            seen = self.progress.newest, self.desk.heard

            def news(seen: tuple[int, int] = seen) -> bool:
                gone_on = seen != (self.progress.newest, self.desk.heard) or self.loaded != held
                return gone_on or self.loaded >= self.progress.final or self.policy.next_version(self.progress.final) is not None

            try:
                async with asyncio.timeout(deadline_s), self.progress.changed:
                    await self.progress.changed.wait_for(news)
            except TimeoutError:
                raise RunError(
                    f"waited {deadline_s:.0f} s for the trainer's version after {held} or a new batch; "
                    f"if a step just takes long, raise orchestrator.trainer_timeout_s. Trainer: {peer(self.run_dir, 'trainer')}"
                ) from None
        return version

    async def evaluate(self, version: int) -> None:
        """Plays what is due at the loaded version. A target that is reached ends the run."""
        for entry in self.evaluator.due(version, self.progress.final):
            self.status.doing(f"evaluating {entry.label} at version {version}")
            async with self.policy.pin():
                await self.evaluator.evaluate(entry, version, self.policy.settle)
            self._check_target()
            await self.progress.wake()

    def _check_target(self) -> None:
        """Ends a run in which an evaluation has reached its target."""
        reached = self.evaluator.reached()
        if reached and not self.progress.end_reason:
            self.progress.end(reached)
            log.info(reached)

    # What others see ----------------------------------------------------------------------------------------------------

    def show_progress(self) -> None:
        size = self.config.orchestrator.batch_size
        done = sum(group.num_episodes for group in self.pending.groups if group.why is None)
        waits = self.progress.newest >= min(self.loaded + 1 + self.config.max_lag, self.progress.final)
        doing = f"waiting for the trainer's version {self.loaded + 1}" if waits else f"filling batch {self.progress.newest + 1}"
        more = {"batch": self.progress.newest + 1, "batch_done": min(done, size), "batch_size": size, "policy_version": self.loaded}
        self.status.doing(doing, **more, quarantined=sorted(self.pool.lost))
