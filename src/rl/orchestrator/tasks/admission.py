"""Admission: how many groups may be in flight, and from which environments.

Batch N+1 makes version N+1 from N, so a token of version v in it lags N - v. Limiting the episodes
in flight therefore limits the lag. With `loaded` the version in inference and `newest` the last
batch, at most (loaded + 1 + max_lag - newest) batches' worth of episodes are playing or waiting. If
they finish in order, the last of them goes into batch loaded + 1 + max_lag. Its tokens, of version
>= loaded, lag at most max_lag there. Dropped groups make room for their replacements. With max_lag
= 0 no group can be overtaken, and lag is always 0.

With max_lag = 0, a batch would have to wait for each round of replacements while the servers are
nearly idle. To avoid that, the number of groups started is what the batch is expected to need,
given the share of recent groups that were trainable. The batch takes the trainable groups that
started first, not those that finished first, which would favor short ones. Groups started after
these are discarded, finished or not, and their tasks are played next.

With max_lag > 0 a batch does not wait for a slow minority: a group that has played for longer than
SLOW times the typical time gives up its place once a group that started later has finished; in an
outage, when none finishes, all keep theirs. It continues, is trained when it finishes, and may lag
by more than max_lag, up to max_off_policy_steps. So a slow environment plays as many groups at once
as its share requires, without holding up the others.
"""

import asyncio
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl.config.run import RLConfig
from rl.orchestrator.tasks.task_source import TaskRef, TaskSource
from rl.wire.rollouts import Group

SLOW = 2.0
"""A group that has played for longer than this multiple of the typical time no longer holds a
place once a later one has finished."""
PACE_GROUPS = 32
"""Number of an environment's newest groups over which its median time is taken."""

TRAINABLE_WINDOW, TRAINABLE_MIN = 24, 8
"""Number of an environment's newest groups from which its trainable share is estimated, and the
fewest that count: missing ones are taken to be trainable."""


class Pace:
    """Tracks how long groups take, in seconds."""

    def __init__(self, shares: dict[str, float]):
        self.shares = shares
        self.newest_start = -math.inf
        """Latest start of a group that has finished, in monotonic time: unfinished groups that
        started earlier were overtaken."""
        self.seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PACE_GROUPS))

    def add(self, env: str, seconds: float) -> None:
        """Notes a group that has just finished."""
        self.seconds[env].append(seconds)
        self.newest_start = max(self.newest_start, time.monotonic() - seconds)

    def typical_s(self) -> float:
        """Returns the weighted median of the environments' median times, seconds; inf until
        environments with half the weight have one."""
        medians = sorted(
            (statistics.median(self.seconds[env]), env) for env in self.shares if self.seconds[env]
        )
        reached = 0.0
        for seconds, env in medians:
            reached += self.shares[env]
            if reached >= 0.5:
                return seconds
        return float("inf")


@dataclass
class PlaceCounts:
    """Number of episodes in each state, by environment."""

    usable: Counter[str] = field(default_factory=Counter)
    """Finished, waiting for a batch."""
    playing: Counter[str] = field(default_factory=Counter)
    """In flight and holding a place."""
    slow: Counter[str] = field(default_factory=Counter)
    """In flight without a place."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Finished since the last batch, but not to be trained."""

    @property
    def held(self) -> int:
        return self.usable.total() + self.playing.total()


@dataclass
class InFlight:
    """A group in flight."""

    ref: TaskRef
    episodes: int
    start_version: int
    started: float
    """Monotonic time."""
    task: "asyncio.Task[None]"


class Admission:
    """Keeps the groups in flight, and decides from which environments another may be started."""

    def __init__(self, config: RLConfig, source: TaskSource):
        self.config = config
        self.source = source
        self.pace = Pace(source.shares)
        self.in_flight: dict[int, InFlight] = {}
        """By group id."""
        self.outcomes: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=TRAINABLE_WINDOW))
        """Whether each of the newest groups of an environment can be trained."""

    def trainable_share(self) -> Mapping[str, float]:
        """Returns the share of each environment's groups likely to be trained; empty with
        max_lag > 0, where no group waits for another."""
        shares: dict[str, float] = {}
        for env, newest in {} if self.config.max_lag else self.outcomes.items():
            lacking = max(0, TRAINABLE_MIN - len(newest))
            shares[env] = (sum(newest) + lacking) / (len(newest) + lacking)
        return shares

    def places(self, finished: Iterable[Group]) -> PlaceCounts:
        """Counts the episodes of each environment by state; `finished` are the groups that no
        batch has used yet."""
        places, now = PlaceCounts(), time.monotonic()
        for group in finished:
            if group.why != "surplus":  # surplus groups belong to the previous batch
                kind = places.usable if group.why is None else places.dropped
                kind[group.env] += group.num_episodes
        slow_s = SLOW * self.pace.typical_s() if self.config.max_lag else float("inf")
        for play in self.in_flight.values():
            is_slow = now - play.started > slow_s and play.started < self.pace.newest_start
            kind = places.slow if is_slow else places.playing
            kind[play.ref.env] += play.episodes
        return places

    def eligible(self, places: PlaceCounts, batches_ahead: int) -> list[str]:
        """Returns the environments from which a group may be started now; empty if there is no
        room. `batches_ahead`: how many batches may still be sampled.

        Shares are of the episodes played: replacements for dropped groups are shared like the
        rest, so that an environment that is solved, or that fails, does not take all of them. At
        most `max_refill` batches' worth are played for each batch that may be sampled; if all of
        these were dropped, more are played until there is something to train on. Episodes in
        flight that are likely to be dropped are replaced in advance, within the same limit.

        Each environment has its share of `max_in_flight`, slow episodes included. One that has
        used up its share leaves the places to the others.
        """
        settings, shares = self.config.orchestrator, self.source.shares
        if self.source.retry and batches_ahead > 0:
            return list(shares)  # lost groups were already given a place
        window = settings.batch_size * batches_ahead
        most = settings.max_refill * window
        all_dropped = places.dropped.total() >= most and not places.usable
        if places.dropped.total() + places.held >= most and not all_dropped:
            return []
        trainable = self.trainable_share()
        lost = sum(
            (1.0 - max(trainable.get(env, 1.0), 1.0 / settings.max_refill)) * count
            for env, count in places.playing.items()
            if not all_dropped
        )
        if places.held - lost >= window:
            return []
        dropped = places.dropped.total() + lost
        below_cap = [
            env
            for env, share in shares.items()
            if places.playing[env] + places.slow[env] < max(1.0, share * settings.max_in_flight)
        ]
        played = places.usable + places.playing + places.dropped
        needed = [env for env in below_cap if played[env] < shares[env] * (window + dropped)]
        return needed or below_cap

    def first(self) -> float:
        """Returns the lowest id of a group in flight or lost; infinity if there is none."""
        return min(
            [*self.in_flight, *(ref.group_id for ref in self.source.retry)], default=math.inf
        )

    def give_back(self, finished: Iterable[TaskRef]) -> int:
        """Cancels all groups in flight and queues their tasks, and those of `finished` groups,
        next. Returns the number cancelled."""
        playing = list(self.in_flight.values())
        for play in playing:
            play.task.cancel()
        self.source.give_back([*finished, *(play.ref for play in playing)])
        self.in_flight.clear()
        return len(playing)

    def cancel_stale(self, loaded: int, finished: set[int]) -> list[InFlight]:
        """Cancels groups whose oldest token would be too far behind the version `loaded`, and
        issues their tasks again. Keeps those that are `finished`, just not durable yet. Returns
        the cancelled groups."""
        oldest = loaded - self.config.orchestrator.max_off_policy_steps
        stale = [
            play
            for group_id, play in self.in_flight.items()
            if play.start_version < oldest and group_id not in finished
        ]
        for play in stale:
            play.task.cancel()
            self.source.retry.append(self.in_flight.pop(play.ref.group_id).ref)
        return stale

    def lose_env(self, env: str, finished: set[int]) -> None:
        """Excludes an environment until the next start, with its groups that are not `finished`;
        its share goes to the others."""
        lost = [
            group_id
            for group_id, play in self.in_flight.items()
            if play.ref.env == env and group_id not in finished
        ]
        self.source.lose_env(env, [self.in_flight.pop(group_id).ref for group_id in lost])
