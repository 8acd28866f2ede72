"""How many groups may play, and of which environment.

Lag is bounded by construction: batch N+1 makes version N+1 from N, so a token of version v in it lags N - v. With `loaded` the version
in inference and `newest` the last batch, at most (loaded + 1 + max_lag - newest) batches' worth of rollouts are playing or waiting; if
they finish in order, the last of them goes into batch loaded + 1 + max_lag, where its tokens, of version >= loaded, lag at most
max_lag. Groups that are dropped make room for their replacements. With max_lag = 0 nothing can be overtaken, and lag is always 0.

With max_lag = 0 a batch would wait for each round of replacements alone, while the servers have little to do. So as many groups are
started as the batch will need, by the share of the newest ones that could be trained. Of those that can be trained it takes the first
that were begun, and not the first that finish, which would be the short ones. What was begun behind these is left behind, finished or
not, and its tasks come next.

With max_lag > 0 a batch does not wait for a slow minority: a group that has played for longer than SLOW times the typical time gives
its place to another. It goes on playing, is trained when it finishes, and may lag by more than max_lag, up to max_off_policy_steps. So
a slow environment plays as many groups at once as its share needs, and the others go on meanwhile.
"""

import asyncio
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl.config.run import RLConfig
from rl.orchestrator.tasks import TaskRef, TaskSource
from rl.wire.rollouts import Group

SLOW = 2.0
"""Times the typical time that a group takes: one that has played for longer holds no place."""
PACE_GROUPS = 32
"""Newest groups of an environment whose times make its median."""

KEPT_GROUPS, KEPT_AT_LEAST = 24, 8
"""Newest groups of an environment whose outcomes say which share can be trained, and the number below which those that are missing count
as trained."""


class Pace:
    """How long groups take, seconds."""

    def __init__(self, shares: dict[str, float]):
        self.shares = shares
        self.seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PACE_GROUPS))

    def add(self, env: str, seconds: float) -> None:
        self.seconds[env].append(seconds)

    def typical_s(self) -> float:
        """The weighted median of the environments' median times, seconds; infinite until environments with half of the weight have one."""
        medians = sorted((statistics.median(self.seconds[env]), env) for env in self.shares if self.seconds[env])
        reached = 0.0
        for seconds, env in medians:
            reached += self.shares[env]
            if reached >= 0.5:
                return seconds
        return float("inf")


@dataclass
class Places:
    """Rollouts of each environment by what they are doing."""

    usable: Counter[str] = field(default_factory=Counter)
    """Finished, waiting for a batch."""
    playing: Counter[str] = field(default_factory=Counter)
    """Played, and holding a place."""
    slow: Counter[str] = field(default_factory=Counter)
    """Played, but without a place."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Finished since the last batch, and not to be trained."""

    @property
    def held(self) -> int:
        return self.usable.total() + self.playing.total()


@dataclass
class InFlight:
    """A group that is being played."""

    ref: TaskRef
    episodes: int
    start_version: int
    started: float
    """By the monotonic clock."""
    task: "asyncio.Task[None]"


def eligible(
    shares: dict[str, float],
    places: Places,
    batch_size: int,
    batches_ahead: int,
    max_in_flight: int,
    max_refill: int,
    kept: Mapping[str, float],
) -> list[str]:
    """The environments of which a group may be started now; none if there is no room.

    batches_ahead: how many batches may still be sampled. max_in_flight: rollouts that may play at once in all, slow ones included; each
    environment has its share of them. An environment that is slow and has used it up leaves the places to the others.

    Shares are of the rollouts that are played: what replaces dropped groups is shared like the rest, so that an environment that is
    solved, or fails, does not take all of it. They end at `max_refill` batches' worth for each batch that may be sampled; if all of these
    were dropped, others are played until there is something to train on. `kept`: the share of those playing that is likely to be trained,
    by environment, else all; up to that end the others are replaced from the start.
    """
    window, most = batch_size * batches_ahead, max_refill * batch_size * batches_ahead
    all_dropped = places.dropped.total() >= most and not places.usable
    if places.dropped.total() + places.held >= most and not all_dropped:
        return []
    lost = sum((1.0 - max(kept.get(env, 1.0), 1.0 / max_refill)) * count for env, count in places.playing.items() if not all_dropped)
    if places.held - lost >= window:
        return []
    dropped = places.dropped.total() + lost
    below_cap = [env for env, share in shares.items() if places.playing[env] + places.slow[env] < max(1.0, share * max_in_flight)]
    played = places.usable + places.playing + places.dropped
    return [env for env in below_cap if played[env] < shares[env] * (window + dropped)] or below_cap


class Admission:
    """The groups in flight, and the environments of which another may be started."""

    def __init__(self, config: RLConfig, source: TaskSource):
        self.config = config
        self.source = source
        self.pace = Pace(source.shares)
        self.in_flight: dict[int, InFlight] = {}
        """By group id."""
        self.outcomes: dict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=KEPT_GROUPS))
        """Whether each of the newest groups of an environment can be trained."""

    def kept(self) -> Mapping[str, float]:
        """The share of each environment's groups that is likely to be trained; all with max_lag > 0, where none waits for another."""
        if self.config.max_lag:
            return {}
        lacking = {env: max(0, KEPT_AT_LEAST - len(newest)) for env, newest in self.outcomes.items()}
        return {env: (sum(newest) + lacking[env]) / (len(newest) + lacking[env]) for env, newest in self.outcomes.items()}

    def places(self, finished: Iterable[Group]) -> Places:
        """What the rollouts of each environment are doing; `finished` are the groups that no batch has used yet."""
        places, now = Places(), time.monotonic()
        for group in finished:
            if group.why != "surplus":  # which belongs to the batch before
                kind = places.usable if group.why is None else places.dropped
                kind[group.env] += group.num_episodes
        slow_s = SLOW * self.pace.typical_s() if self.config.max_lag else float("inf")
        for play in self.in_flight.values():
            kind = places.slow if now - play.started > slow_s else places.playing
            kind[play.ref.env] += play.episodes
        return places

    def eligible(self, places: Places, batches_ahead: int) -> list[str]:
        """The environments of which a group may be started: by the lag bound, the run's end, the limit of refills, and their shares."""
        if self.source.again and batches_ahead > 0:
            return list(self.source.shares)  # what was lost had its place already
        settings = self.config.orchestrator
        limits = (settings.max_in_flight, settings.max_refill)
        return eligible(self.source.shares, places, settings.batch_size, batches_ahead, *limits, self.kept())

    def first(self) -> float:
        """The number of the first group that is played or was lost; infinite if there is none."""
        return min([*self.in_flight, *(ref.group_id for ref in self.source.again)], default=math.inf)

    def give_back(self, finished: Iterable[TaskRef]) -> int:
        """Cancels all that is played, and has its tasks, and those of `finished` groups, come next. Returns how many it cancelled."""
        playing = list(self.in_flight.values())
        for play in playing:
            play.task.cancel()
        self.source.give_back([*finished, *(play.ref for play in playing)])
        self.in_flight.clear()
        return len(playing)

    def cancel_stale(self, loaded: int, arrived: Iterable[Group]) -> list[InFlight]:
        """Cancels groups whose oldest token would be too far behind the version `loaded`, and issues their tasks again.

        Not those that have `arrived`: they are played, and only not durable yet. Returns what was cancelled.
        """
        oldest, kept = loaded - self.config.orchestrator.max_off_policy_steps, {group.group_id for group in arrived}
        stale = [play for play in self.in_flight.values() if play.start_version < oldest and play.ref.group_id not in kept]
        for play in stale:
            play.task.cancel()
            self.source.again.append(self.in_flight.pop(play.ref.group_id).ref)
        return stale

    def quarantine(self, env: str, arrived: Iterable[Group]) -> None:
        """Leaves an environment out until the next start, and its groups that have not `arrived`; its share goes to the others."""
        played = {group.group_id for group in arrived}
        lost = [group_id for group_id, play in self.in_flight.items() if play.ref.env == env and group_id not in played]
        self.source.quarantine(env, [self.in_flight.pop(group_id).ref for group_id in lost])
