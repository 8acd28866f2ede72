"""Which task comes next: a function of seed and counters, so that its state is a few numbers."""

import random
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """A group to be played: its number, and the task of the environment's training set."""

    group_id: int
    env: str
    task: int


class TaskState(msgspec.Struct, kw_only=True):
    """Where the source stands."""

    next_group: int
    issued: dict[str, int]
    """Groups issued so far, by environment."""
    in_flight: list[TaskRef]
    """Issued and not finished; issued again, fresh, after a restart."""


@dataclass(frozen=True)
class EnvTasks:
    """What the source knows of an environment."""

    size: int | None
    """Tasks; None: endless, played in their own order."""
    weight: float = 1.0
    group_size: int = 1


class TaskSource:
    """Gives each environment its share of the rollouts, and walks its tasks in an order that is shuffled anew every epoch."""

    def __init__(self, envs: dict[str, EnvTasks], seed: int):
        self.envs = envs
        self.seed = seed
        self.next_group = 0
        self.issued = dict.fromkeys(envs, 0)
        self.in_flight: dict[int, TaskRef] = {}
        self.again: deque[TaskRef] = deque()
        self.orders: dict[tuple[str, int], list[int]] = {}
        total = sum(env.weight for env in envs.values())
        self.shares = {name: env.weight / total for name, env in envs.items()}

    def next(self, eligible: Collection[str]) -> TaskRef:
        """The next group to play: one that was lost, else one of the eligible environment that is furthest behind its share.

        It is in flight until `finished` or `reissue`.
        """
        if self.again:
            task = self.again.popleft()
        else:
            rollouts = {name: self.issued[name] * env.group_size for name, env in self.envs.items()}
            total = sum(rollouts.values())
            task = self._draw(max(eligible, key=lambda name: self.shares[name] * (total + 1) - rollouts[name]))
        self.in_flight[task.group_id] = task
        return task

    def _draw(self, env: str) -> TaskRef:
        place, size = self.issued[env], self.envs[env].size
        self.issued[env] += 1
        self.next_group += 1
        task = place if size is None else self._order(env, place // size)[place % size]
        return TaskRef(self.next_group - 1, env, task)

    def _order(self, env: str, epoch: int) -> list[int]:
        if (env, epoch) not in self.orders:
            order = list(range(self.envs[env].size or 0))
            random.Random(f"{self.seed}/{env}/{epoch}").shuffle(order)
            self.orders = {key: value for key, value in self.orders.items() if key[0] != env} | {(env, epoch): order}
        return self.orders[env, epoch]

    def finished(self, group_id: int) -> None:
        self.in_flight.pop(group_id, None)

    def reissue(self, group_id: int) -> None:
        """Puts a group that was cancelled or lost back, first in line."""
        self.again.append(self.in_flight.pop(group_id))

    def state(self) -> TaskState:
        in_flight = [*self.in_flight.values(), *self.again]
        return TaskState(next_group=self.next_group, issued=dict(self.issued), in_flight=in_flight)

    def restore(self, state: TaskState | None, done: Iterable[TaskRef]) -> None:
        """Continues from a state, or from the beginning; what is in `done` is finished already and not played again."""
        done = [ref for ref in done if ref.env in self.envs]
        finished = {ref.group_id for ref in done}
        if state is not None:
            self.next_group = state.next_group
            self.issued = dict.fromkeys(self.envs, 0) | {env: n for env, n in state.issued.items() if env in self.envs}
            self.again.extend(task for task in state.in_flight if task.env in self.envs and task.group_id not in finished)
        later = [ref for ref in done if ref.group_id >= self.next_group]
        self.next_group = max([self.next_group, *(ref.group_id + 1 for ref in later)])
        # Finished after the state was written: the tasks between them were playing when the process died, and are played now.
        for env in self.envs:
            tasks = Counter(ref.task for ref in later if ref.env == env)
            limit = (self.envs[env].size or 2**30) + tasks.total()
            while tasks.total() > 0 and limit > 0:
                limit -= 1
                ref = self._draw(env)
                if tasks[ref.task] > 0:
                    tasks[ref.task] -= 1
                else:
                    self.again.append(ref)
