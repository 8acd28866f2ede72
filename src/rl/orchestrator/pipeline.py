"""Takes finished rollouts to committed batches.

    finished -> judge (credit, filter) -> pending.log -> choose -> normalise -> samples -> commit

Every finished group is written to pending.log, counted once, and settled by one batch, which uses
or drops it.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rl.config.run import RLConfig
from rl.orchestrator.batches.batch_files import (
    BatchFiles,
    OrchestratorState,
    PendingLog,
    episodes_where,
)
from rl.orchestrator.batches.contents import own_name, token_metrics
from rl.orchestrator.batches.early_stop import RewardHistory, only_failures
from rl.orchestrator.groups.group_credit import Rules, credit_group, in_thread, is_judged
from rl.orchestrator.progress import Progress, StepClock
from rl.orchestrator.tasks.admission import Admission
from rl.run_dir.status import RunWarning
from rl.system.errors import RunError
from rl.wire.rollouts import Drawn, Group, Rollout, TaskRef

MAX_FAILED = 3
"""The run ends after this many batches' worth of consecutive episodes in groups that leave
nothing to train on."""
MAX_WITHOUT_SIGNAL = 10
"""The run ends after this many batches' worth of consecutive episodes in groups without any
signal."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Pipeline:
    """Keeps finished groups, and commits a batch as soon as there are enough of them."""

    config: RLConfig
    admission: Admission
    rules: Mapping[str, Rules]
    """By environment."""
    progress: Progress
    clock: StepClock
    lost_envs: Mapping[str, str]
    """Lost environment -> the reason; the pool adds to it."""
    warn: Callable[[RunWarning], None]
    """See Status.warn, which drops repetitions."""

    def __post_init__(self) -> None:
        self.run_dir, self.source = self.config.run_dir, self.admission.source
        self.pending = PendingLog(self.run_dir.pending)
        self.files = BatchFiles(self.run_dir, self.config.orchestrator, self.rules)
        self.history = RewardHistory()
        self.restored = set[int]()
        """Ids of groups that an earlier process played. Their failures do not count toward ending
        the run, since the cause may be fixed."""
        self.num_played = 0
        """Number of episodes that this process has taken in."""

    async def restore(self) -> None:
        """Continues from the newest batch and pending.log."""
        newest, state = self.files.newest()
        self.progress.newest = newest
        settled, counted = set[int](), set[int]()
        if state:
            settled, counted = set(state.settled), {ref.group_id for ref in state.pending}
            # some may have finished: they are in pending.log
            in_flight = [*state.tasks.in_flight, *state.pending]
            state.tasks.in_flight = [ref for ref in in_flight if ref.group_id not in settled]
            self.history = state.history
        for warning in await asyncio.to_thread(self.pending.load, settled, newest):
            log.warning(warning)
        groups = self.pending.groups
        await in_thread(self._judge, groups)
        self.restored = {group.group_id for group in groups}
        await asyncio.to_thread(
            self.source.restore,
            state.tasks if state else None,
            refs(groups),
            refs(self.pending.unfinished.values()),
            self.pending.drawn,
        )
        played = {ref.group_id for ref in self.source.retry}
        self.pending.unfinished = {
            group_id: group
            for group_id, group in self.pending.unfinished.items()
            if group_id in played
        }
        for group in groups:
            if group.group_id not in counted:
                self._count(group)
        if state and not self.config.max_lag:
            wanted = {ref.group_id for ref in state.tasks.in_flight}
            first_new = state.tasks.next_group
            mark_surplus(
                group
                for group in groups
                if group.group_id < first_new and group.group_id not in wanted
            )
        if newest or groups:
            log.info("resumed after batch %d with %d finished groups", newest, len(groups))

    # Finished -------------------------------------------------------------------------------------

    async def add(self, played: list[Group]) -> None:
        """Judges finished groups, makes them and finished episodes of others durable with one
        write, and counts the groups.

        Raises RunError if another process has become the orchestrator, or if a user function is
        faulty. The latter loses no group: `restore` judges them again once the function is fixed.
        """
        in_flight = self.admission.in_flight
        # Episodes of surplus groups are dropped: their tasks are played again.
        if not self.config.max_lag:
            played = [group for group in played if group.finished or group.group_id in in_flight]
        groups = [group for group in played if group.finished]
        unjudged = [group for group in groups if not is_judged(group)]
        records = [*self.source.newly_drawn(), *played]
        # A user's functions may take minutes, in which this process may die. What is judged first
        # is readable as it was judged.
        is_slow = any(self.rules[group.env].asks_user for group in unjudged)
        if is_slow:
            await asyncio.to_thread(self._keep, records)
        try:
            await in_thread(self._judge, unjudged)
        finally:
            if not is_slow:
                await asyncio.to_thread(self._keep, records)
        for group in groups:
            self.admission.outcomes[group.env].append(group.why is None)
            self._count(group)
            self.num_played += group.num_episodes
        if not self.config.max_lag:
            mark_surplus(group for group in groups if group.group_id not in in_flight)
        for group in groups:
            in_flight.pop(group.group_id, None)
            for warning in warnings_about(group):
                self.warn(warning)

    def _judge(self, groups: list[Group]) -> None:
        for group in groups:
            credit_group(group, self.rules[group.env])

    def _keep(self, records: list[Group | Drawn]) -> None:
        self.files.fence()
        self.pending.append(records)

    def _count(self, group: Group) -> None:
        self.history.add(group)
        self.source.note(group.env, group.task, group.rewards)

    def finished_of(self, group_id: int, oldest: int) -> list[Rollout]:
        """Returns the finished rollouts of an unfinished group, without episodes that failed or
        that have tokens sampled by a version before `oldest`."""
        group = self.pending.unfinished.get(group_id)
        return episodes_where(
            group.rollouts if group else [],
            lambda rollout: (
                rollout.error is None and min(rollout.versions, default=oldest) >= oldest
            ),
        )

    # Batches --------------------------------------------------------------------------------------

    async def commit_full_batches(self) -> None:
        """Commits every batch that has enough groups. Raises RunError if all groups fail, or
        none has had a signal for long."""
        while self.progress.newest < self.progress.final and (used := self._next_groups()):
            await self._commit(used)
        self._check_learning()

    def _next_groups(self) -> list[Group] | None:
        """Returns the groups of the next batch, or None if there are not enough. Groups that are
        too old are dropped as stale and replaced.

        On-policy, every older group is too old: a server that came back may have sampled with an
        older version before this was noticed. In addition, an on-policy batch consists of the
        groups that started first, so that no group is left out for being slow.
        """
        settings = self.config.orchestrator
        oldest = self.progress.newest - self.config.max_behind
        num_playing = self.admission.places(self.pending.groups).playing.total()
        before = math.inf if self.config.max_lag else self.admission.first()
        while True:
            used = choose(
                self.pending.groups, settings.batch_size, num_playing, settings.max_refill, before
            )
            old = [group for group in used or [] if min(group.versions, default=oldest) < oldest]
            if not old:
                return used
            for group in old:
                group.why = "stale"
                self.clock.stale[group.env] += 1

    async def _commit(self, used: list[Group]) -> None:
        """Makes the next batch from `used`. It also settles the groups dropped so far and,
        on-policy, all others."""
        step, batch_size = self.progress.newest + 1, self.config.orchestrator.batch_size
        num_episodes = sum(group.num_episodes for group in used)
        num_cancelled = 0
        if not self.config.max_lag:
            # A full batch gives back the tasks of every later group, finished or not. The order of
            # tasks is then the same as in a run without extra groups.
            is_full = num_episodes >= batch_size
            behind = [
                group
                for group in self.pending.groups
                if is_full and group.group_id > used[-1].group_id
            ]
            mark_surplus(behind)
            self.pending.unfinished.clear()
            num_cancelled = self.admission.give_back(refs(behind))
        dropped = [group for group in self.pending.groups if group.why is not None]
        settled = [*used, *dropped]
        settled_ids = {group.group_id for group in settled}
        waiting = [group for group in self.pending.groups if group.group_id not in settled_ids]
        tokens = token_metrics(settled, self.config.orchestrator.mask_truncated)
        counts = {
            **self.source.update_solve_rates(),
            "rollouts/missing": max(0, batch_size - num_episodes),
            "rollouts/surplus_groups": sum(group.why == "surplus" for group in dropped),
            "rollouts/cancelled_groups": num_cancelled,
            **{f"env/{env}/quarantined": 1 for env in self.lost_envs},
            **tokens,
            **self.clock.lap(tokens["tokens/sampled"]),
        }
        state = OrchestratorState(
            tasks=self.source.state(play.ref for play in self.admission.in_flight.values()),
            history=self.history,
            pending=refs(waiting),
        )
        self.pending.drawn = []  # they are in the state
        state.tasks.rates = await asyncio.to_thread(self.source.packed_rates)
        await asyncio.to_thread(self.files.commit, step, settled, state, counts)
        self.progress.newest, self.pending.groups = step, waiting
        # the trainer needs only the batch, not the files written below, which follow from it
        await self.progress.notify()
        await asyncio.to_thread(self._write_rest, step, state.metrics)
        log.info(
            "batch %d: %d rollouts trained, reward %.3f",
            step,
            state.metrics["rollouts/trained"],
            state.metrics["reward/mean"],
        )

    def _write_rest(self, step: int, metrics: dict[str, float]) -> None:
        """Writes what follows from a batch. All of it in one thread: the end of a run, which may
        come meanwhile, stops the loops between two."""
        self.pending.rewrite()
        self.files.metrics.write(step, metrics)
        self.files.put_away(step)

    def _check_learning(self) -> None:
        """Ends a run in which everything fails, or that has nothing left to learn from."""
        batch_size, history = self.config.orchestrator.batch_size, self.history
        played_here = [
            group for group in self.pending.groups if group.group_id not in self.restored
        ]
        shows = f"`rl show {self.run_dir.root}` shows them"
        if problem := only_failures(played_here, MAX_FAILED * batch_size):
            raise RunError(f"{problem}\n{shows}")
        is_over = self.progress.final <= self.progress.newest
        if is_over or history.episodes < MAX_WITHOUT_SIGNAL * batch_size:
            return
        if history.is_solved():
            self.progress.end(*history.success())
            log.info(self.progress.end_reason)
        # a resumed run first plays a batch: the cause may have been fixed since
        elif self.num_played >= batch_size:
            raise RunError(f"{history.diagnosis(self.config)}. {shows}")


def choose(
    finished: list[Group],
    batch_size: int,
    num_playing: int,
    max_refill: int,
    before: float = math.inf,
) -> list[Group] | None:
    """Returns the groups of the next batch, oldest first: `batch_size` episodes, rounded up to
    whole groups; None if there are not enough.

    A short batch is returned once `max_refill` batches' worth were played for it, but only when no
    group is still playing: a later batch would use that group at a higher lag. `before`: only
    groups with a lower id are used.
    """
    usable = sorted(
        (group for group in finished if group.why is None and group.group_id < before),
        key=lambda group: group.group_id,
    )
    count = 0
    for i, group in enumerate(usable):
        count += group.num_episodes
        if count >= batch_size:
            return usable[: i + 1]
    played = sum(group.num_episodes for group in finished if group.why != "surplus")
    return usable if usable and not num_playing and played >= max_refill * batch_size else None


def mark_surplus(groups: Iterable[Group]) -> None:
    """Marks groups that were started for a batch made of others; their tasks are played again."""
    for group in groups:
        group.why = "surplus"


def refs(groups: Iterable[Group]) -> list[TaskRef]:
    return [TaskRef(group.group_id, group.env, group.task) for group in groups]


def warnings_about(group: Group) -> Iterator[RunWarning]:
    """Yields warnings of a group with failed rollouts, and of metrics whose names collide with
    built-in ones."""
    env = group.env
    if errors := [rollout for rollout in group.rollouts if rollout.error]:
        first = (errors[0].error or "").splitlines()[0]
        text = (
            f"environment {env}: {len(errors)} of {len(group.rollouts)} rollouts of a group "
            f"failed for good ({errors[0].cause}): {first}"
        )
        log.warning(text)
        yield RunWarning("failed", env, text)
    names = {name for rollout in group.rollouts for name in rollout.metrics}
    renamed = [f"{name} as {own_name(name)}" for name in sorted(names) if own_name(name) != name]
    if renamed:
        yield RunWarning(
            "renamed",
            env,
            f"metrics of environment {env} with the names of built-in metrics are reported under "
            f"other names: {', '.join(renamed)}",
        )
