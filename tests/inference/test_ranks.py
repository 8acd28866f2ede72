"""Which engine of a server answers a session."""

import asyncio
from collections import Counter

from rl.inference.ranks import Ranks


def test_a_session_stays_with_its_engine_and_new_ones_go_where_least_is_open():
    ranks, done = Ranks(4), asyncio.Event()

    async def request(session: int, held: bool, seen: list[int]) -> None:
        with ranks.use(session) as rank:
            seen.append(rank)
            if held:
                await done.wait()

    async def ask(sessions, held=False) -> list[int]:
        seen: list[int] = []
        tasks.extend(asyncio.create_task(request(session, held, seen)) for session in sessions)
        while len(seen) < len(sessions):
            await asyncio.sleep(0)
        return seen

    async def main() -> None:
        first = await ask(range(8))
        assert await ask([*range(8)] * 2) == first * 2
        assert Counter(await ask(range(100, 108), held=True)) == {0: 2, 1: 2, 2: 2, 3: 2}
        crowd = await ask([200] * 40, held=True)
        assert crowd[:29] == [crowd[0]] * 29 and len(set(crowd)) == 2  # too much for one: another takes the rest
        with ranks.use(None) as rank, Ranks(1).use(5) as only:
            assert rank is None and only is None
        done.set()
        await asyncio.gather(*tasks)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
