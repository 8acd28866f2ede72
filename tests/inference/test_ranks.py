"""Which engine of a server answers a session."""

import asyncio
from collections import Counter

from rl.inference.engine import engine_of
from rl.wire.inference_client import Balancer


def test_a_session_stays_with_its_engine_and_new_ones_go_where_least_is_open():
    """How requests are balanced is asserted in tests/wire/test_fleet.py, for servers."""
    engines, done = Balancer(), asyncio.Event()
    engines.update(map(str, range(4)))

    async def request(session: int | None) -> int | None:
        with engine_of(engines, session) as rank:
            await done.wait()
            return rank

    async def main() -> list[int | None]:
        asked = [asyncio.create_task(request(session)) for session in [*range(8), *range(8), None]]
        await asyncio.sleep(0)
        done.set()
        return await asyncio.gather(*asked)

    first, again = (found := asyncio.run(main()))[:8], found[8:16]
    assert first == again and Counter(first) == {0: 2, 1: 2, 2: 2, 3: 2} and found[16] is None
    with engine_of(Balancer(), 5) as only:
        assert only is None
