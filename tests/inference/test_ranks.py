"""Which engine of a server answers a session."""

import asyncio
from collections import Counter

from rl.inference.ranks import Ranks


def test_a_session_stays_with_its_engine_and_new_ones_go_where_least_is_open():
    """How requests are balanced is asserted in tests/wire/test_fleet.py, for servers."""
    ranks, done = Ranks(4), asyncio.Event()

    async def request(session: int | None) -> int | None:
        with ranks.use(session) as rank:
            await done.wait()
            return rank

    async def main() -> list[int | None]:
        asked = [asyncio.create_task(request(session)) for session in [*range(8), *range(8), None]]
        await asyncio.sleep(0)
        done.set()
        return await asyncio.gather(*asked)

    first, again = (found := asyncio.run(main()))[:8], found[8:16]
    assert first == again and Counter(first) == {0: 2, 1: 2, 2: 2, 3: 2} and found[16] is None
    with Ranks(1).use(5) as only:
        assert only is None
