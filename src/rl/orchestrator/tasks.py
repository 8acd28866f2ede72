"""Which task comes next: a function of the seed, counters and the solve rates of the last batch, so that its state is small."""

import random
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Literal

import msgspec

from rl.config.orchestrator import DifficultyConfig

SHORT = 10_000
"""Tasks whose order is made in a few milliseconds."""
MEMORY = 0.5
"""Weight of the earlier rewards in a task's solve rate, when a new group of it has finished."""


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """A group to be played: its number, and its task in the environment's training set."""

    group_id: int
    env: str
    task: int


class TaskState(msgspec.Struct, kw_only=True):
    """The state of a TaskSource, which is written with every batch."""

    next_group: int
    issued: dict[str, int]
    """Groups issued so far, by environment."""
    in_flight: list[TaskRef]
    """Issued and not finished; issued again, fresh, after a restart."""
    skipped: dict[str, int] = {}
    """Tasks whose turn passed because they are easy or hard, by environment."""
    rates: dict[str, dict[int, float]] = {}
    """Solve rate of each task that was played, of environments with difficulty pools."""


@dataclass(frozen=True)
class EnvTasks:
    """An environment, as the source needs it."""

    size: int | None
    """Tasks; None: endless, played in their own order."""
    weight: float = 1.0
    group_size: int = 1
    difficulty: DifficultyConfig | None = None


@dataclass
class Lost:
    """A group that was playing when a process died, with a number of its own `after` one and `before` another of its environment."""

    after: int
    before: int
    ref: TaskRef


def pool(rate: float, difficulty: DifficultyConfig) -> Literal["hard", "normal", "easy"]:
    """The difficulty pool of a task with this solve rate."""
    return "hard" if rate <= difficulty.hard_up_to else "easy" if rate > difficulty.easy_above else "normal"


class TaskSource:
    """Gives each environment its share of the rollouts, and walks its tasks in an order that is shuffled anew every epoch.

    With difficulty pools, a task whose turn comes may be skipped. What decides are the rates as of the last batch (`settle`), never newer
    ones: so the draws between two batches do not depend on when groups finish, and `restore` can repeat them.
    """

    def __init__(self, envs: dict[str, EnvTasks], seed: int):
        self.envs = envs
        self.seed = seed
        self.next_group = 0
        self.issued = dict.fromkeys(envs, 0)
        self.skipped = dict.fromkeys(envs, 0)
        self.skipped_before = dict.fromkeys(envs, 0)
        self.pooled = {name: env.difficulty for name, env in envs.items() if env.difficulty and env.size is not None}
        self.rates: dict[str, dict[int, float]] = {env: {} for env in self.pooled}
        self.noted: list[tuple[str, int, float]] = []
        self.again: deque[TaskRef] = deque()
        """Groups that were cancelled or lost, to be played next."""
        self.returned: deque[TaskRef] = deque()
        """Groups whose tasks a batch did without, to be played before others are drawn."""
        self.parked: list[TaskRef] = []
        """Groups of environments that are left out until the next start."""
        self.orders: dict[tuple[str, int], array[int]] = {}
        """By environment and epoch, the newest two."""
        self.threads: dict[tuple[str, int], Thread] = {}
        """That make orders, or have made ones that nothing has looked at yet."""
        total = sum(env.weight for env in envs.values())
        self.shares = {name: env.weight / total for name, env in envs.items()}

    def next(self, eligible: Collection[str]) -> TaskRef:
        """The next group to play: one that was lost, one that was returned, else one of the eligible environment that is furthest behind
        its share."""
        if self.again:
            return self.again.popleft()
        if ref := next((ref for ref in self.returned if ref.env in eligible), None):
            self.returned.remove(ref)
            return ref
        rollouts = {name: self.issued[name] * self.envs[name].group_size for name in self.shares}
        total = sum(rollouts.values())
        return self._draw(max(eligible, key=lambda name: self.shares[name] * (total + 1) - rollouts[name]))

    def _draw(self, env: str) -> TaskRef:
        """The environment's next task that is not skipped; after as many skipped as there are tasks the next one is played anyway."""
        skips_left = self.envs[env].size or 0
        while skips_left > 0 and self._skips(env):
            self.skipped[env] += 1
            skips_left -= 1
        task = self._task(env)
        self.issued[env] += 1
        self.next_group += 1
        return TaskRef(self.next_group - 1, env, task)

    def _task(self, env: str) -> int:
        """The next task of the environment's order."""
        place, size = self.issued[env] + self.skipped[env], self.envs[env].size
        return place if size is None else self._order(env, place // size, place % size)[place % size]

    def _skips(self, env: str) -> bool:
        """Whether the next task is skipped: by its pool's weight, with a fixed random draw for each turn."""
        difficulty = self.pooled.get(env)
        rate = self.rates[env].get(self._task(env)) if difficulty else None
        if difficulty is None or rate is None:
            return False
        weight = {"hard": difficulty.hard_weight, "normal": 1.0, "easy": difficulty.easy_weight}[pool(rate, difficulty)]
        turn = self.issued[env] + self.skipped[env]
        return random.Random(f"{self.seed}/{env}/{turn}/pool").random() >= weight

    def _order(self, env: str, epoch: int, place: int) -> "array[int]":
        """The order of an epoch, of which `place` is wanted. In its second half the next one is made, in a thread if it is long."""
        size = self.envs[env].size or 0
        following = env, epoch + 1
        if place >= size // 2 and size > SHORT and following not in self.threads and following not in self.orders:
            self.threads[following] = Thread(target=self._make_order, args=following, daemon=True)
            self.threads[following].start()
        if thread := self.threads.pop((env, epoch), None):
            thread.join()
        if (env, epoch) not in self.orders:
            self._make_order(env, epoch)
        return self.orders[env, epoch]

    def _make_order(self, env: str, epoch: int) -> None:
        """Shuffles an environment's tasks. In small steps, none of which holds the interpreter for long."""
        order, size = array("i"), self.envs[env].size or 0
        for start in range(0, size, SHORT):
            order.extend(range(start, min(size, start + SHORT)))
        random.Random(f"{self.seed}/{env}/{epoch}").shuffle(order)
        for past in list(self.orders):
            if past[0] == env and past[1] < epoch - 1:
                del self.orders[past]
        self.orders[env, epoch] = order

    def _redraw(self, later: list[TaskRef], env: str) -> list[Lost]:
        """Draws an environment's groups up to those that are `later` than the state, in the order of their numbers. Returns those between
        them, which were playing when the process died."""
        numbers: dict[int, deque[int]] = {}
        for ref in later:
            numbers.setdefault(ref.task, deque()).append(ref.group_id)
        between, lost, last, left = list[TaskRef](), list[Lost](), -1, len(later)
        limit = (self.envs[env].size or 2**30) + len(later)
        while left and limit:
            limit -= 1
            ref = self._draw(env)
            if numbers.get(ref.task):
                before, last, left = last, numbers[ref.task].popleft(), left - 1
                lost += [Lost(before, last, one) for one in between]
                between.clear()
            else:
                between.append(ref)
        return lost + [Lost(last, self.next_group, one) for one in between]

    def give_back(self, begun: Iterable[TaskRef]) -> None:
        """Has the tasks of groups that a batch did without played next, in the order in which they were begun, under new numbers."""
        refs = [*sorted([*begun, *self.again], key=lambda ref: ref.group_id), *self.returned]
        renumbered = [TaskRef(self.next_group + i, ref.env, ref.task) for i, ref in enumerate(refs)]
        self.next_group += len(refs)
        self.again.clear()
        self.returned = deque(ref for ref in renumbered if ref.env in self.shares)
        self.parked += [ref for ref in renumbered if ref.env not in self.shares]

    def note(self, env: str, task: int, rewards: Sequence[float]) -> None:
        """Keeps the rewards of a finished group for the next `settle`."""
        if env in self.pooled and rewards:
            self.noted.append((env, task, sum(rewards) / len(rewards)))

    def settle(self) -> dict[str, float]:
        """Updates the solve rates with the rewards since the last batch; called before `state`. Returns metrics of the pools."""
        for env, task, reward in self.noted:
            before = self.rates[env].get(task, reward)
            self.rates[env][task] = MEMORY * before + (1 - MEMORY) * reward
        self.noted.clear()
        metrics: dict[str, float] = {}
        for env, difficulty in self.pooled.items():
            sizes = Counter(pool(rate, difficulty) for rate in self.rates[env].values())
            metrics |= {f"tasks/{env}/{name}": sizes[name] for name in ("easy", "normal", "hard")}
            metrics[f"tasks/{env}/skipped"] = self.skipped[env] - self.skipped_before[env]
        self.skipped_before = dict(self.skipped)
        return metrics

    def quarantine(self, env: str, in_flight: Iterable[TaskRef]) -> None:
        """Leaves an environment out: its share goes to the others, its tasks `in_flight` are issued again by the next start."""
        del self.shares[env]
        total = sum(self.shares.values())
        self.shares |= {name: share / total for name, share in self.shares.items()}
        self.parked += [ref for ref in [*in_flight, *self.again, *self.returned] if ref.env == env]
        self.again = deque(ref for ref in self.again if ref.env != env)
        self.returned = deque(ref for ref in self.returned if ref.env != env)

    def state(self, in_flight: Iterable[TaskRef]) -> TaskState:
        """The state to be written with a batch, after `settle`. `in_flight`: the groups that are being played."""
        return TaskState(
            next_group=self.next_group,
            issued=dict(self.issued),
            in_flight=[*in_flight, *self.again, *self.returned, *self.parked],
            skipped={env: count for env, count in self.skipped.items() if env in self.pooled},
            rates=self.rates,
        )

    def restore(self, state: TaskState | None, done: Iterable[TaskRef], begun: Iterable[TaskRef] = ()) -> None:
        """Continues from a state, or from the beginning. The groups in `done` are finished already and not played again; those in `begun`
        have finished members, and are played under their own number."""
        done, begun = ([ref for ref in refs if ref.env in self.envs] for refs in (done, begun))
        finished = {ref.group_id for ref in done}
        if state is not None:
            self.next_group = state.next_group
            self.issued |= {env: count for env, count in state.issued.items() if env in self.envs}
            self.skipped |= {env: count for env, count in state.skipped.items() if env in self.envs}
            self.skipped_before = dict(self.skipped)
            self.rates |= {env: dict(rates) for env, rates in state.rates.items() if env in self.pooled}
            self.again.extend(task for task in state.in_flight if task.env in self.envs and task.group_id not in finished)
        begun = [ref for ref in begun if ref.group_id >= self.next_group]  # of the others the state tells
        self.again.extend(begun)
        later = sorted([*begun, *(ref for ref in done if ref.group_id >= self.next_group)], key=lambda ref: ref.group_id)
        first, end = self.next_group, max([self.next_group, *(ref.group_id + 1 for ref in later)])
        self.next_group = end
        lost = [one for env in self.envs for one in self._redraw([ref for ref in later if ref.env == env], env)]
        for number in sorted({*range(first, end)} - {ref.group_id for ref in later}):
            if fitting := [one for one in lost if one.after < number]:
                one = min(fitting, key=lambda one: one.before)
                lost.remove(one)
                self.again.append(TaskRef(number, one.ref.env, one.ref.task))
        self.again.extend(one.ref for one in lost)  # of environments that have changed
        for env in self.envs:
            self._task(env)  # so that the order of many tasks is made here, where nothing waits for it
