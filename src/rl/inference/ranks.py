"""Chooses which of a server's engines (`data_parallel_size`) answers a request. Each has its own
prefix cache, so a session stays with one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rl.wire.balance import Balancer


class Ranks:
    """The engines of a server by rank; requests are balanced among them as they are among
    servers."""

    def __init__(self, size: int):
        self.size, self.balancer = size, Balancer()
        self.balancer.update(map(str, range(size)))

    @contextmanager
    def use(self, session: int | None) -> Iterator[int | None]:
        """Yields the rank for this task's request, which counts as in flight inside the block.
        None (one engine, or no session) leaves the choice to vLLM."""
        engine = self.balancer.choose(session) if self.size > 1 and session is not None else None
        if engine is None:
            yield None
            return
        flight = asyncio.current_task()
        engine.flights.add(flight)
        try:
            yield int(engine.url)
        finally:
            engine.flights.remove(flight)
