"""Chooses the next task, as a function of the seed, counters and the solve rates at the last
batch, so that its state is small."""

import math
import random
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from rl.config.orchestrator import DifficultyConfig
from rl.wire.rollouts import Drawn, TaskRef

MEMORY = 0.5
"""Weight of the previous solve rate when a task's rate is updated with a new group."""
UNPLAYED = math.inf
"""Stands for the solve rate of a task of which no group has finished."""


class TaskState(msgspec.Struct, kw_only=True):
    """The state of a TaskSource, which is written with every batch."""

    next_group: int
    issued: dict[str, int]
    """Groups issued so far, by environment."""
    in_flight: list[TaskRef]
    """Groups issued but not finished; issued again after a restart."""
    skipped: dict[str, int] = {}
    """Number of tasks skipped because they are easy or hard, by environment."""
    rates: dict[str, bytes] = {}
    """Packed solve rates of the tasks, by environment with difficulty pools; see `packed`."""


@dataclass(frozen=True)
class EnvTasks:
    """The properties of an environment that the task source needs."""

    size: int | None
    """Number of tasks; None: endless, played in their own order."""
    weight: float = 1.0
    group_size: int = 1
    difficulty: DifficultyConfig | None = None


def pool(rate: float, difficulty: DifficultyConfig) -> Literal["hard", "normal", "easy"]:
    """Returns the difficulty pool of a task with this solve rate."""
    if rate <= difficulty.hard_up_to:
        return "hard"
    return "easy" if rate > difficulty.easy_above else "normal"


def packed(rates: "array[float]") -> bytes:
    """Returns the solve rates of an environment's tasks, 8 bytes each, in order, compressed: 1
    to 2 MB for a million tasks."""
    return zlib.compress(rates.tobytes(), 1)


def unpacked(data: bytes, size: int) -> "array[float]":
    """Returns the solve rates of `size` tasks; `data` may have more or fewer, as `max_samples`
    may change on resume."""
    rates = array("d", zlib.decompress(data))
    return rates[:size] + array("d", [UNPLAYED]) * (size - len(rates))


class TaskSource:
    """Picks the next task: the environment furthest behind its share, then the next task of the
    environment's seeded order, which changes every epoch.

    With difficulty pools, tasks may be skipped when their turn comes. This is decided by the rates
    at the last batch (`update_solve_rates`), never by newer ones, so the draws between two batches
    do not depend on when groups finish, and a restarted process draws the same ones.
    """

    def __init__(self, envs: dict[str, EnvTasks], seed: int):
        self.envs = envs
        self.seed = seed
        self.next_group = 0
        self.issued = dict.fromkeys(envs, 0)
        self.skipped = dict.fromkeys(envs, 0)
        self.skipped_before = dict.fromkeys(envs, 0)
        self.pooled = {
            name: env.difficulty
            for name, env in envs.items()
            if env.difficulty and env.size is not None
        }
        self.rates = {env: array("d", [UNPLAYED]) * (envs[env].size or 0) for env in self.pooled}
        self.sizes = {env: Counter[str]() for env in self.pooled}
        """Number of played tasks in each pool, by environment."""
        self.noted: list[tuple[str, int, float]] = []
        self.drawn: list[TaskRef] = []
        """What `newly_drawn` will return."""
        self.retry: deque[TaskRef] = deque()
        """Groups that were cancelled or lost, to be played next."""
        self.requeued: deque[TaskRef] = deque()
        """Groups that a batch did without; their tasks are played before new ones are drawn."""
        self.suspended: list[TaskRef] = []
        """Groups of environments that are excluded until the next start."""
        self.orders: dict[str, tuple[int, array[int]]] = {}
        """By environment: the epoch of its next task, and the order of its tasks in it."""
        total = sum(env.weight for env in envs.values())
        self.shares = {name: env.weight / total for name, env in envs.items()}

    def next(self, eligible: Collection[str]) -> TaskRef:
        """Returns the next group to play: a cancelled or lost one, a returned one, else a new
        one of the eligible environment furthest behind its share."""
        if self.retry:
            return self.retry.popleft()
        if ref := next((ref for ref in self.requeued if ref.env in eligible), None):
            self.requeued.remove(ref)
            return ref
        rollouts = {name: self.issued[name] * self.envs[name].group_size for name in self.shares}
        total = sum(rollouts.values())
        return self._draw(
            max(eligible, key=lambda name: self.shares[name] * (total + 1) - rollouts[name])
        )

    def _draw(self, env: str) -> TaskRef:
        """Draws the environment's next task that is not skipped; after skipping as many as there
        are, it takes the next one anyway."""
        skips_left = self.envs[env].size or 0
        while skips_left > 0 and self._skips(env):
            self.skipped[env] += 1
            skips_left -= 1
        task = self._task(env)
        self.issued[env] += 1
        ref = TaskRef(self.next_group, env, task)
        self.next_group += 1
        self.drawn.append(ref)
        return ref

    def _task(self, env: str) -> int:
        """Returns the next task in the environment's order."""
        turn, size = self.issued[env] + self.skipped[env], self.envs[env].size
        return turn if size is None else self._order(env, size, turn // size)[turn % size]

    def _skips(self, env: str) -> bool:
        """Whether the next task is skipped: by its pool's weight, with a fixed random draw for
        each turn."""
        difficulty = self.pooled.get(env)
        if difficulty is None or (rate := self.rates[env][self._task(env)]) == UNPLAYED:
            return False
        weights = {"hard": difficulty.hard_weight, "easy": difficulty.easy_weight, "normal": 1.0}
        turn = self.issued[env] + self.skipped[env]
        chance = random.Random(f"{self.seed}/{env}/{turn}/pool").random()
        return chance >= weights[pool(rate, difficulty)]

    def _order(self, env: str, size: int, epoch: int) -> "array[int]":
        """Returns the order of an epoch. Making one takes a second for two million tasks, once
        an epoch."""
        known, order = self.orders.get(env, (-1, array("i")))
        if known != epoch:
            order = array("i", range(size))
            random.Random(f"{self.seed}/{env}/{epoch}").shuffle(order)
            self.orders[env] = epoch, order
        return order

    def give_back(self, begun: Iterable[TaskRef]) -> None:
        """Requeues the tasks of groups that a batch did without as the next ones, in starting
        order, under new group ids."""
        refs = [*sorted([*begun, *self.retry], key=lambda ref: ref.group_id), *self.requeued]
        renumbered = [TaskRef(self.next_group + i, ref.env, ref.task) for i, ref in enumerate(refs)]
        self.next_group += len(refs)
        self.retry.clear()
        self.requeued = deque(ref for ref in renumbered if ref.env in self.shares)
        self.suspended += [ref for ref in renumbered if ref.env not in self.shares]

    def note(self, env: str, task: int, rewards: Sequence[float]) -> None:
        """Keeps the rewards of a finished group for the next `update_solve_rates`."""
        # max_samples may have been lowered
        if env in self.pooled and rewards and task < len(self.rates[env]):
            self.noted.append((env, task, sum(rewards) / len(rewards)))

    def update_solve_rates(self) -> dict[str, float]:
        """Updates the solve rates with the rewards since the last batch; call it before `state`.
        Returns metrics of the pools."""
        for env, task, reward in self.noted:
            rates, sizes, difficulty = self.rates[env], self.sizes[env], self.pooled[env]
            before = rates[task]
            if before != UNPLAYED:
                sizes[pool(before, difficulty)] -= 1
            rates[task] = MEMORY * before + (1 - MEMORY) * reward if before != UNPLAYED else reward
            sizes[pool(rates[task], difficulty)] += 1
        self.noted.clear()
        metrics: dict[str, float] = {}
        for env, sizes in self.sizes.items():
            metrics |= {f"tasks/{env}/{name}": sizes[name] for name in ("easy", "normal", "hard")}
            metrics[f"tasks/{env}/skipped"] = self.skipped[env] - self.skipped_before[env]
        self.skipped_before = dict(self.skipped)
        return metrics

    def lose_env(self, env: str, in_flight: Iterable[TaskRef]) -> None:
        """Excludes an environment: its share goes to the others, its groups `in_flight` are
        issued again at the next start."""
        del self.shares[env]
        total = sum(self.shares.values())
        self.shares |= {name: share / total for name, share in self.shares.items()}
        waiting = [*self.retry, *self.requeued]
        self.suspended += [ref for ref in [*in_flight, *waiting] if ref.env == env]
        self.retry = deque(ref for ref in self.retry if ref.env != env)
        self.requeued = deque(ref for ref in self.requeued if ref.env != env)

    def state(self, in_flight: Iterable[TaskRef]) -> TaskState:
        """Returns the state to write with a batch, after `update_solve_rates`, without the
        rates. `in_flight`: the groups being played."""
        self.drawn = []
        return TaskState(
            next_group=self.next_group,
            issued=dict(self.issued),
            in_flight=[*in_flight, *self.retry, *self.requeued, *self.suspended],
            skipped={env: count for env, count in self.skipped.items() if env in self.pooled},
        )

    def packed_rates(self) -> dict[str, bytes]:
        """Returns the state's `rates`. Safe in a thread, because only `update_solve_rates`
        changes them."""
        return {env: packed(rates) for env, rates in self.rates.items()}

    def newly_drawn(self) -> list[Drawn]:
        """Returns what was drawn since the last call, and since the last `state`, to be kept
        until there is another state."""
        if not self.drawn:
            return []
        tasks, self.drawn = self.drawn, []
        return [Drawn(self.next_group, dict(self.issued), dict(self.skipped), tasks)]

    def restore(
        self,
        state: TaskState | None,
        done: Iterable[TaskRef],
        begun: Iterable[TaskRef] = (),
        drawn: Iterable[Drawn] = (),
    ) -> None:
        """Continues from a state, or from the beginning, with what was `drawn` since. Groups in
        `done` are finished and not played again; those in `begun` have finished episodes."""
        done, begun = ([ref for ref in refs if ref.env in self.envs] for refs in (done, begun))
        in_flight = list[TaskRef]()
        if state is not None:
            self._count(state.next_group, state.issued, state.skipped)
            in_flight += state.in_flight
            for env, data in state.rates.items():
                if difficulty := self.pooled.get(env):
                    self.rates[env] = unpacked(data, self.envs[env].size or 0)
                    self.sizes[env] = Counter(
                        pool(rate, difficulty) for rate in self.rates[env] if rate != UNPLAYED
                    )
        self.skipped_before = dict(self.skipped)
        # the others are in the state, or a batch has given them back under new ids
        begun = [ref for ref in begun if ref.group_id >= self.next_group]
        for record in drawn:
            if record.next_group > self.next_group:
                self._count(record.next_group, record.issued, record.skipped)
                in_flight += record.tasks
        # Groups whose draw is not recorded: another version of rl wrote the log, or the disk
        # lost it.
        for ref in sorted([*done, *begun], key=lambda ref: ref.group_id):
            if ref.group_id >= self.next_group:
                self.next_group = ref.group_id + 1
                self.issued[ref.env] += 1
        finished = {ref.group_id for ref in done}
        issued_again = {ref.group_id: ref for ref in [*in_flight, *begun] if ref.env in self.envs}
        self.retry.extend(ref for group_id, ref in issued_again.items() if group_id not in finished)

    def _count(self, next_group: int, issued: dict[str, int], skipped: dict[str, int]) -> None:
        self.next_group = next_group
        self.issued |= {env: count for env, count in issued.items() if env in self.envs}
        self.skipped |= {env: count for env, count in skipped.items() if env in self.envs}
