"""Which task comes next: a deterministic function of seed and counters, so that its state is a few numbers."""

import random
from collections import deque
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

    size: int
    weight: float


class TaskSource:
    """Draws environments by weight and walks each one's tasks in an order that is shuffled anew every epoch."""

    def __init__(self, envs: dict[str, EnvTasks], seed: int):
        self.envs = envs
        self.seed = seed
        self.next_group = 0
        self.issued = dict.fromkeys(envs, 0)
        self.in_flight: dict[int, TaskRef] = {}
        self.again: deque[TaskRef] = deque()
        self.orders: dict[tuple[str, int], list[int]] = {}

    def next(self) -> TaskRef:
        """The next group to play; it is in flight until `finished` or `reissue`."""
        task = self.again.popleft() if self.again else self._draw()
        self.in_flight[task.group_id] = task
        return task

    def _draw(self) -> TaskRef:
        group_id = self.next_group
        names = list(self.envs)
        weights = [self.envs[name].weight for name in names]
        env = random.Random(f"{self.seed}/{group_id}").choices(names, weights)[0]
        epoch, place = divmod(self.issued[env], self.envs[env].size)
        self.next_group += 1
        self.issued[env] += 1
        return TaskRef(group_id, env, self._order(env, epoch)[place])

    def _order(self, env: str, epoch: int) -> list[int]:
        if (env, epoch) not in self.orders:
            order = list(range(self.envs[env].size))
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

    def restore(self, state: TaskState | None, done: set[int]) -> None:
        """Continues from a state, or from the beginning; groups in `done` are finished already and not played again."""
        if state is not None:
            self.next_group = state.next_group
            self.issued = dict.fromkeys(self.envs, 0) | {env: n for env, n in state.issued.items() if env in self.envs}
            self.again.extend(task for task in state.in_flight if task.env in self.envs and task.group_id not in done)
        # Groups issued after the state was written: drawn again in the same way, then played unless they are done.
        while any(group_id >= self.next_group for group_id in done):
            task = self._draw()
            if task.group_id not in done:
                self.again.append(task)
