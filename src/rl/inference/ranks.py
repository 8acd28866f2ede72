"""Which of a server's engines (`data_parallel_size`) answers a request: each has a prefix cache of its own, so a session stays with one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rl.wire.balance import BATCHED, MAX_SESSIONS, STAY


class Ranks:
    """The engines of a server by their rank, with their open requests."""

    def __init__(self, size: int):
        self.size = size
        self.num_open: Counter[int] = Counter()
        self.homes: dict[int, int] = {}
        """Session -> rank, the one that was last asked for at the end."""

    @contextmanager
    def use(self, session: int | None) -> Iterator[int | None]:
        """The rank for a request, which is open inside the block. None leaves the choice to vLLM: for one engine, or no session."""
        if self.size == 1 or session is None:
            yield None
            return
        least = min(range(self.size), key=lambda rank: self.num_open[rank])
        rank = self.homes.pop(session, least)
        if self.num_open[rank] > STAY * max(BATCHED, self.num_open[least]):
            rank = least
        self.homes[session] = rank
        if len(self.homes) > MAX_SESSIONS:
            del self.homes[next(iter(self.homes))]
        self.num_open[rank] += 1
        try:
            yield rank
        finally:
            self.num_open[rank] -= 1
