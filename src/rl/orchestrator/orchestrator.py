"""The orchestrator's loops. A rollout's life: `generate` -> `play_group` -> `finish` -> `commit_batch` -> `answer_batch`.
admission.py says how lag is bounded and how environments share the places.
"""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from rl.batch_log import decode_batch
from rl.config import RLConfig
from rl.messages import Acknowledged, BatchBytes, GetBatch, GetProbe, NotReady, Probe, Published, RunEnded, WeightVersion
from rl.metrics import MetricsLog
from rl.orchestrator import batches
from rl.orchestrator.admission import MAX_REFILL, SLOW, InFlight, Pace, Places, count_places, eligible
from rl.orchestrator.batches import OrchestratorState
from rl.orchestrator.evaluation import Evaluator
from rl.orchestrator.inference_client import InferenceServers
from rl.orchestrator.pending import PendingLog
from rl.orchestrator.probe import probe
from rl.orchestrator.remarks import Remarks
from rl.orchestrator.rollouts import Group
from rl.orchestrator.signal import Signal, only_failures
from rl.orchestrator.tasks import TaskRef, TaskSource
from rl.orchestrator.teacher import Teacher
from rl.orchestrator.workers import WorkerPool
from rl.run_dir import RunDir, numbered
from rl.status import Status, read_status
from rl.transport import ANSWER_WITHIN_S, TrainerServer

log = logging.getLogger(__name__)

LAST_WORD_S = 120.0
"""How long the trainer may take to hear that the run ended early: it may still write its checkpoint."""
LOOK_FOR_SLOW_S = 0.5
STARTED_AT_ONCE = 16
"""Groups that are started before the other loops get their turn."""


class RunError(Exception):
    """The run cannot go on; the message says why and what to do."""


class Orchestrator:
    """Keeps inference busy, forms batches, answers the trainer, follows the policy, evaluates."""

    def __init__(
        self,
        config: RLConfig,
        pool: WorkerPool,
        servers: InferenceServers,
        source: TaskSource,
        evaluator: Evaluator,
        status: Status,
        teachers: dict[str, Teacher],
    ):
        self.config = config
        self.run_dir: RunDir = config.run_dir
        self.pool = pool
        self.servers = servers
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
        self.newest = 0
        self.final = config.max_steps
        self.end_reason = ""
        self.loaded = 0
        self.versions: dict[int, WeightVersion] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.signal = Signal()
        self.remarks = Remarks()
        self.changed = asyncio.Condition()
        self.told_end = asyncio.Event()
        self.clock = evaluator.clock

    # Start and end ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continues from the newest batch and pending.log."""
        self.newest = self.run_dir.newest_batch()
        state, settled, counted = None, set[int](), set[int]()
        if self.newest:
            path = self.run_dir.batch(self.newest)
            content = decode_batch(path.read_bytes(), f"{path} (continue before it with --resume {self.newest - 1})")
            state = batches.decode_state(content.state)
            settled, counted = set(state.settled), set(state.pending)
            self.signal = state.signal
        for remark in self.pending.load(settled):
            log.warning(remark)
        self.source.restore(state.tasks if state else None, [TaskRef(g.group_id, g.env, g.task) for g in self.pending.groups])
        for group in self.pending.groups:
            if group.group_id not in counted:
                self.note(group)
        self.versions = {number: WeightVersion(number, str(path)) for number, path in numbered(self.run_dir.weights_dir).items()}
        if self.newest or self.pending.groups:
            log.info("resumed after batch %d with %d finished groups", self.newest, len(self.pending.groups))

    def note(self, group: Group) -> None:
        """Counts a finished group, once."""
        self.signal.note(group)
        self.source.note(group.env, group.task, group.rewards)

    async def run(self, server: TrainerServer) -> str:
        """Runs until the last version is made and evaluated. Returns why the run ended."""
        self.loaded = await self.servers.loaded_version()
        log.info("inference has version %d", self.loaded)
        self.clock.start()
        self._complete_batches()
        async with asyncio.TaskGroup() as group:
            self.group = group
            tasks = [group.create_task(loop) for loop in (self.serve_trainer(server), self.pool_failure(), self.take_in())]
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

    def places(self) -> Places:
        """What the rollouts of each environment are doing."""
        slow_s = SLOW * self.pace.typical_s() if self.config.max_lag else float("inf")
        return count_places(self.pending.groups, self.in_flight.values(), slow_s)

    def eligible(self, places: Places) -> list[str]:
        """The environments of which a group may be started: the lag bound, the run's end, the limit of refills, and their shares."""
        batch_size, max_steps = self.config.orchestrator.batch_size, self.config.orchestrator.max_off_policy_steps
        ahead = min(self.loaded + 1 + self.config.max_lag, self.final) - self.newest
        if self.source.again and ahead > 0:
            return list(self.envs)  # what was lost had its place already
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
                async with asyncio.timeout(LOOK_FOR_SLOW_S if self.config.max_lag and self.in_flight else None), self.changed:
                    await self.changed.wait_for(lambda: self.eligible(self.places()))

    async def play_group(self, ref: TaskRef, episodes: int) -> None:
        """Plays one group and hands it on."""
        with self.clock.busy():
            sampling = self.samplings[ref.env]
            rollouts = await self.pool.play(ref.env, "train", ref.task, episodes, sampling, ref.group_id)
        temperature = sampling["temperature"]
        group = Group(group_id=ref.group_id, env=ref.env, task=ref.task, rollouts=rollouts, temperature=temperature)
        rules = self.rules[ref.env]
        if rules.taught and batches.judge(group, rules).why is None:
            await self.teachers[ref.env].teach(group, rules.mask_truncated)
        self.pace.note(ref.env, time.monotonic() - self.in_flight[ref.group_id].started)
        self.arrived.append(group)
        await self.wake()

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
            async with self.changed:
                await self.changed.wait_for(lambda: self.arrived)
            arrived, self.arrived = self.arrived, []
            groups = [batches.judge(group, self.rules[group.env]) for group in arrived]
            self.pending.append(groups)
            for group in groups:
                self.in_flight.pop(group.group_id, None)
                self.source.finished(group.group_id)
                self.note(group)
                self.remarks.failed(group)
            self._complete_batches()
            self.show_progress()
            await self.wake()

    def _complete_batches(self) -> None:
        while self.newest < self.final and (used := self.full_batch()):
            self.commit_batch(used)
        self._check_progress()

    def full_batch(self) -> list[Group] | None:
        """The groups of the next batch. Those that turn out too old are dropped as stale, and replaced."""
        limit = self.newest - self.config.orchestrator.max_off_policy_steps
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
        step = self.newest + 1
        dropped = [group for group in self.pending.groups if group.why is not None]
        settled = {group.group_id for group in [*used, *dropped]}
        waiting = [group for group in self.pending.groups if group.group_id not in settled]
        pools = self.source.settle()
        unused = [group.group_id for group in waiting]
        state = OrchestratorState(tasks=self.source.state(), settled=sorted(settled), signal=self.signal, pending=unused)
        batch = batches.commit(self.run_dir, step, used, dropped, state, self.rules)
        self.newest = step
        self.pending.rewrite(waiting)
        metrics = batches.batch_metrics(batch, [*used, *dropped]) | pools
        tokens = sum(rollout.num_tokens for group in [*used, *dropped] for rollout in group.rollouts)
        self.remarks.stale(self.clock.stale, Counter(group.env for group in used), self.config.orchestrator.max_off_policy_steps)
        self.metrics.write(step, metrics | self.clock.lap(tokens))
        log.info("batch %d: %d samples, reward %.3f", step, len(batch.samples), metrics["reward/mean"])

    def _check_progress(self) -> None:
        """Ends a run that only fails, or that has nothing left to learn from."""
        batch_size, silent = self.config.orchestrator.batch_size, self.signal.silent
        if fault := only_failures(self.pending.groups, MAX_REFILL * batch_size):
            raise RunError(fault)
        if len(silent) >= batches.MAX_SILENT * batch_size and self.final > self.newest:
            if not self.signal.solved():
                raise RunError(self.signal.complaint())
            self.final = self.newest
            self.end_reason = f"solved: the last {len(silent)} rollouts all have the highest reward ({self.signal.histogram()})"
            log.info(self.end_reason)

    # Trainer ------------------------------------------------------------------------------------------------------------

    async def serve_trainer(self, server: TrainerServer) -> None:
        """Loop. Consumes the trainer's requests, produces answers; a request for a batch that is not there waits in a task of its own."""
        while True:
            peer, request = await server.receive()
            match request:
                case GetBatch(step):
                    self.group.create_task(self.answer_batch(server, peer, step))
                case GetProbe(version):
                    self.group.create_task(self.answer_probe(server, peer, version))
                case Published(version):
                    self.versions[version.policy_version] = version
                    await server.reply(peer, Acknowledged(self.oldest_needed(), self.best_versions()))
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

    async def answer_probe(self, server: TrainerServer, peer: bytes, version: int) -> None:
        """Answers with completions by a version once inference holds it, with none if it holds a later one, or that it does not yet."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self.changed:
                await self.changed.wait_for(lambda: self.loaded >= version)
        except TimeoutError:
            return await server.reply(peer, NotReady(self.status.fields["doing"]))
        content = decode_batch(self.run_dir.batch(self.newest).read_bytes(), f"batch {self.newest}")
        samples = await probe(self.servers, content.batch, self.config.model.max_model_len) if self.loaded == version else []
        return await server.reply(peer, Probe(samples))

    # Policy and evals ---------------------------------------------------------------------------------------------------

    def next_version(self) -> WeightVersion | None:
        """What inference should hold next: first every newer version that waits for an eval, in order, else the newest."""
        there = {number for number, version in self.versions.items() if Path(version.path).exists()}
        waiting = [number for number in sorted(there) if number > self.loaded and self.evaluator.due(number, self.final)]
        newest = max(there, default=0)
        number = waiting[0] if waiting else newest
        return self.versions[number] if number > self.loaded and number in there else None

    def oldest_needed(self) -> int:
        """The oldest version that is loaded, may be loaded again, or waits for its eval."""
        return min([self.loaded, *(number for number in self.versions if self.evaluator.due(number, self.final))])

    def best_versions(self) -> list[int]:
        """The versions that an evaluation found best: their weights are kept."""
        return sorted({version for _, version in self.evaluator.best.values()})

    async def follow_policy(self) -> None:
        """Loop. Consumes published versions, loads each into inference and evaluates it if it is due; waits for the trainer.

        Produces room for `generate`. Ends with the run: the last version is loaded and evaluated.
        """
        while True:
            await self.evaluate(self.loaded)
            self.show_progress()
            version = await self._await_version()
            if version is None and not self.evaluator.due(self.loaded, self.final):
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
            if self.evaluator.due(number, self.final):
                await self.load(self.versions[number])
                await self.evaluate(number)
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

    async def evaluate(self, version: int) -> None:
        """Plays what is due at the loaded version. A target that is reached ends the run."""
        for entry in self.evaluator.due(version, self.final):
            self.status.doing(f"evaluating {entry.label} at version {version}")
            reached = await self.evaluator.evaluate(entry, version)
            if reached and not self.end_reason:
                self.final, self.end_reason = self.newest, reached
                log.info(reached)
                await self.wake()

    # What others see ----------------------------------------------------------------------------------------------------

    async def wake(self) -> None:
        """Lets every loop look again whether what it waits for has come."""
        async with self.changed:
            self.changed.notify_all()

    def show_progress(self) -> None:
        size = self.config.orchestrator.batch_size
        done = sum(group.num_episodes for group in self.pending.groups if group.why is None)
        waits = self.newest >= min(self.loaded + 1 + self.config.max_lag, self.final)
        doing = f"waiting for the trainer's version {self.loaded + 1}" if waits else f"filling batch {self.newest + 1}"
        self.status.doing(doing, batch=self.newest + 1, batch_done=min(done, size), batch_size=size, policy_version=self.loaded)
