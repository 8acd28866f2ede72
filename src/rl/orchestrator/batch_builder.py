"""From finished groups to committed batches: each group is made durable, counted once, and used or dropped by one batch."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from rl.config.run import RLConfig
from rl.orchestrator import batches
from rl.orchestrator.admission import Admission
from rl.orchestrator.batch_metrics import batch_metrics, own_name
from rl.orchestrator.batches import OrchestratorState
from rl.orchestrator.ending import RewardHistory, only_failures
from rl.orchestrator.judge import Rules, judge
from rl.orchestrator.old_files import OldFiles
from rl.orchestrator.pending import PendingLog, PendingRollouts, without_episodes
from rl.orchestrator.probe import Prompt, add_prompt
from rl.orchestrator.progress import Progress
from rl.orchestrator.step_clock import StepClock
from rl.orchestrator.tasks import TaskRef
from rl.run_dir import spans
from rl.run_dir.files import CorruptFileError
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import NEWEST_BYTES, MetricsLog, read_metrics
from rl.run_dir.status import RunWarning
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch, remove_rollouts, sound_batch
from rl.wire.rollouts import Group, Members, Rollout

MAX_FAILED = 3
"""So many batches' worth of rollouts in groups that leave nothing to train on, one after the other, end the run."""
MAX_WITHOUT_SIGNAL = 10
"""So many batches' worth of rollouts in groups without any signal end the run."""
WARN_EVERY_S = 60.0

log = logging.getLogger(__name__)


class GroupWarnings:
    """Warnings in the log, at most one of a kind for an environment every WARN_EVERY_S seconds; the first is for the run's user, too."""

    def __init__(self, warn: Callable[[RunWarning], None]) -> None:
        """warn: see Status.warn."""
        self.warn = warn
        self.last: dict[tuple[str, str], float] = {}

    def _due(self, kind: str, env: str) -> bool:
        now = time.monotonic()
        due = now - self.last.get((kind, env), -WARN_EVERY_S) >= WARN_EVERY_S
        if due:
            self.last[kind, env] = now
        return due

    def failed(self, group: Group) -> None:
        """Warns of a group with failed members."""
        errors = [rollout for rollout in group.rollouts if rollout.error]
        if errors and self._due("failed", group.env):
            first = (errors[0].error or "").splitlines()[0]
            count = f"{len(errors)} of {len(group.rollouts)}"
            text = f"environment {group.env}: {count} rollouts of a group failed for good ({errors[0].cause}): {first}"
            log.warning(text)
            self.warn(RunWarning("failed", group.env, text))

    def renamed(self, group: Group) -> None:
        """Warns of metrics of an environment that have the names of ours."""
        names = sorted({name for rollout in group.rollouts for name in rollout.metrics if own_name(name) != name})
        if names and self._due("renamed", group.env):
            renamed = ", ".join(f"{name} as {own_name(name)}" for name in names)
            text = f"metrics of environment {group.env} that are called like ours are reported under another name: {renamed}"
            log.warning(text)
            self.warn(RunWarning("renamed", group.env, text))

    def stale(self, stale: Counter[str], used: Counter[str], limit: int) -> None:
        """Warns of environments that lose as many groups to staleness as they give to a batch.

        stale, used: groups that were too old for a batch, and those that are in it, by environment.
        """
        for env, count in stale.items():
            if count >= max(1, used[env]) and self._due("stale", env):
                log.warning(
                    "environment %s: %d of its groups were stale for this batch, %d were used. Its rollouts take longer than "
                    "orchestrator.max_off_policy_steps = %d steps: raise that, lower its weight, or make it faster (workers, max_tokens)",
                    *(env, count, used[env], limit),
                )


@dataclass(eq=False)
class BatchBuilder:
    """Keeps finished groups, and commits a batch as soon as there are enough of them."""

    config: RLConfig
    admission: Admission
    rules: Mapping[str, Rules]
    """How each environment's groups are judged."""
    progress: Progress
    clock: StepClock
    lost_envs: Mapping[str, str]
    """The environments that are given up, and why; the pool adds to it."""
    warn: Callable[[RunWarning], None]
    """See Status.warn."""

    def __post_init__(self) -> None:
        self.run_dir, self.source = self.config.run_dir, self.admission.source
        self.pending = PendingLog(self.run_dir.pending)
        self.readable = PendingRollouts(self.run_dir.pending_rollouts, self.rules)
        self.old_files = OldFiles(self.run_dir, self.config.orchestrator)
        self.history = RewardHistory()
        self.restored = set[int]()
        """Groups that an earlier process played: what they failed of may be mended by now."""
        self.warnings = GroupWarnings(self.warn)
        self.fence = partial(check_fence, self.run_dir.lock("orchestrator"))
        self.metrics = MetricsLog(self.run_dir.metrics, "orchestrator", self.fence)

    async def restore(self) -> None:
        """Continues from the newest batch and pending.log. What was written for a batch that was never committed is made again."""
        newest = self.progress.newest = self.run_dir.newest_batch()
        remove_rollouts(self.run_dir, after=newest)
        state, settled, counted = None, set[int](), set[int]()
        if newest:
            state = self._state_of(newest)
            settled, counted = set(state.settled), {ref.group_id for ref in state.pending}
            in_flight = [*state.tasks.in_flight, *state.pending]  # of which those in pending.log are done
            state.tasks.in_flight = [ref for ref in in_flight if ref.group_id not in settled]
            self.history = state.history
            if (newest, "orchestrator") not in read_metrics(self.run_dir.metrics, last_bytes=NEWEST_BYTES):
                self.metrics.write(newest, state.metrics)
        for warning in await asyncio.to_thread(self.pending.load, settled, newest):
            log.warning(warning)
        self._judge(self.pending.groups)
        self.restored = {group.group_id for group in self.pending.groups}
        done, begun = refs(self.pending.groups), refs(self.pending.members.values())
        await asyncio.to_thread(self.source.restore, state.tasks if state else None, done, begun)
        played = {ref.group_id for ref in self.source.again}
        self.pending.members = {group_id: record for group_id, record in self.pending.members.items() if group_id in played}
        for group in self.pending.groups:
            if group.group_id not in counted:
                self._count(group)
        if state and not self.config.max_lag:
            wanted = {ref.group_id for ref in state.tasks.in_flight}
            mark_surplus(one for one in self.pending.groups if one.group_id < state.tasks.next_group and one.group_id not in wanted)
        self.readable.rewrite(self.pending.groups)
        if newest or self.pending.groups:
            log.info("resumed after batch %d with %d finished groups", newest, len(self.pending.groups))

    def _state_of(self, step: int) -> OrchestratorState:
        """The state after a batch; its prompts are noted. Raises CorruptFileError for a damaged batch file, RunError for a sound one that
        another version of rl wrote."""
        data = sound_batch(path := self.run_dir.batch(step))
        try:
            content = decode_batch(data, str(path))
            for sample in content.batch.samples:
                add_prompt(self.progress.prompts, sample)
            return batches.decode_state(content.state)
        except CorruptFileError as error:
            raise RunError(f"{error}. Go on with the version of rl that wrote it, or start another run") from None

    async def add(self, finished: list[Group | Members]) -> None:
        """Makes finished groups, and members of others, durable with one write, then judges and counts the groups.

        Raises RunError when another process is the orchestrator now, and for what a user's function does wrong. That costs no group:
        `restore` judges them again, once it is mended.
        """
        if not self.config.max_lag:  # of groups that a batch did without, which are played anew
            finished = [one for one in finished if isinstance(one, Group) or one.group_id in self.admission.in_flight]
        await asyncio.to_thread(self._keep, finished)
        groups = [group for group in finished if isinstance(group, Group)]
        if not groups:
            return
        try:
            self._judge(groups)
            for group in groups:
                self.admission.outcomes[group.env].append(group.why is None)
                self._count(group)
            if not self.config.max_lag:
                mark_surplus(group for group in groups if group.group_id not in self.admission.in_flight)
        finally:
            await asyncio.to_thread(self.readable.append, groups)
        for group in groups:
            self.admission.in_flight.pop(group.group_id, None)
            self.warnings.failed(group)
            self.warnings.renamed(group)

    def _keep(self, finished: list[Group | Members]) -> None:
        self.fence()
        self.pending.append(finished)

    def members(self, group_id: int, oldest: int) -> list[Rollout]:
        """The finished rollouts of a group that is not finished, of episodes that have not failed and of which no version before `oldest`
        sampled a token."""
        found = self.pending.members.get(group_id)
        if found is None:
            return []
        return without_episodes(found, lambda rollout: rollout.error is not None or min(rollout.versions, default=oldest) < oldest).members

    def _judge(self, groups: list[Group]) -> None:
        for group in groups:
            judge(group, self.rules[group.env])

    def _count(self, group: Group) -> None:
        self.history.add(group)
        self.source.note(group.env, group.task, group.rewards)

    async def commit_full_batches(self) -> None:
        """Commits every batch that has enough groups. Raises RunError when the groups only fail, or have long had no signal."""
        while self.progress.newest < self.progress.final and (used := await self._next_groups()):
            await self._commit(used)
        self._check_learning()

    async def _next_groups(self) -> list[Group] | None:
        """The groups of the next batch. Those that turn out too old are dropped as stale, and replaced.

        On-policy that is every older one: a server that came back may have sampled by an older version before that was noticed. And there
        a batch is of the groups that were begun first: nothing that is still played is left out for being slow.
        """
        settings = self.config.orchestrator
        limit = self.progress.newest - (settings.max_off_policy_steps if self.config.max_lag else 0)
        num_playing = self.admission.places(self.pending.groups).playing.total()
        before = math.inf if self.config.max_lag else self.admission.first()
        while True:
            used = batches.choose(self.pending.groups, settings.batch_size, num_playing, settings.max_refill, before)
            old = [group for group in used or [] if min(group.versions, default=limit) < limit]
            if not old:
                return used
            for group in old:
                group.why = "stale"
                self.clock.stale[group.env] += 1
            await asyncio.to_thread(self.readable.rewrite, self.pending.groups)

    async def _commit(self, used: list[Group]) -> None:
        """Makes the next batch of `used`; groups that were dropped until now are settled with it, and on-policy all others."""
        step = self.progress.newest + 1
        cancelled = 0 if self.config.max_lag else self._give_back(used)
        dropped = [group for group in self.pending.groups if group.why is not None]
        settled = [*used, *dropped]
        settled_ids = {group.group_id for group in settled}
        waiting = [group for group in self.pending.groups if group.group_id not in settled_ids]
        counts = self.source.settle()
        counts |= {"rollouts/missing": max(0, self.config.orchestrator.batch_size - sum(group.num_episodes for group in used))}
        counts |= {"rollouts/surplus_groups": sum(group.why == "surplus" for group in dropped), "rollouts/cancelled_groups": cancelled}
        counts |= {f"env/{env}/quarantined": 1 for env in self.lost_envs}
        self.warnings.stale(self.clock.stale, Counter(group.env for group in used), self.config.orchestrator.max_off_policy_steps)
        counts |= self.clock.lap(sum(rollout.num_tokens for group in settled for rollout in group.rollouts))
        state = OrchestratorState(
            tasks=self.source.state(play.ref for play in self.admission.in_flight.values()),
            settled=sorted(settled_ids),
            history=self.history,
            pending=refs(waiting),
        )
        prompts = await asyncio.to_thread(self._write_batch, step, used, dropped, state, counts)
        self.progress.newest, self.progress.prompts, self.pending.groups = step, prompts, waiting
        await self.progress.notify()  # the trainer waits for nothing but the batch
        await asyncio.to_thread(self._write_after_batch, step, state.metrics)
        log.info("batch %d: %d rollouts trained, reward %.3f", step, state.metrics["rollouts/trained"], state.metrics["reward/mean"])

    def _give_back(self, used: list[Group]) -> int:
        """On-policy: the tasks of all groups that were begun behind a full batch's last one come again, whenever and however these finish.

        So what is trained is what would have been if no more had been begun than were needed. Returns how many were still played.
        """
        full = sum(group.num_episodes for group in used) >= self.config.orchestrator.batch_size
        behind = [group for group in self.pending.groups if full and group.group_id > used[-1].group_id]
        mark_surplus(behind)
        self.pending.members.clear()
        return self.admission.give_back(refs(behind))

    def _write_batch(
        self, step: int, used: list[Group], dropped: list[Group], state: OrchestratorState, counts: dict[str, float]
    ) -> dict[int, Prompt]:
        """Writes a batch, with its metrics in its state, and returns its prompts. In a thread: of a large batch it takes seconds."""
        with spans.span("commit", "batches", step):
            batch = batches.form(step, used, dropped, self.rules)
            state.metrics = batch_metrics(batch.counts, [*used, *dropped], self.rules) | counts
            batches.commit(self.run_dir, batch, state)
        return batch.prompts

    def _write_after_batch(self, step: int, metrics: dict[str, float]) -> None:
        """Writes what follows from a batch and a start would make again."""
        self.pending.rewrite()
        self.readable.rewrite(self.pending.groups)
        self.metrics.write(step, metrics)
        self.old_files.put_away(step)

    def _check_learning(self) -> None:
        """Ends a run that only fails, or that has nothing left to learn from."""
        batch_size, num_without_signal = self.config.orchestrator.batch_size, len(self.history.without_signal)
        played_here = [group for group in self.pending.groups if group.group_id not in self.restored]
        if problem := only_failures(played_here, MAX_FAILED * batch_size):
            raise RunError(f"{problem}\n`rl show {self.run_dir.root}` shows them")
        if num_without_signal >= MAX_WITHOUT_SIGNAL * batch_size and self.progress.final > self.progress.newest:
            if not self.history.is_solved():
                raise RunError(f"{self.history.diagnosis()}. `rl show {self.run_dir.root}` shows them")
            self.progress.end(*self.history.success())
            log.info(self.progress.end_reason)


def mark_surplus(groups: Iterable[Group]) -> None:
    """Groups that were begun for a batch that is made of others, and are played anew."""
    for group in groups:
        group.why = "surplus"


def refs(groups: Iterable[Group | Members]) -> list[TaskRef]:
    return [TaskRef(group.group_id, group.env, group.task) for group in groups]
