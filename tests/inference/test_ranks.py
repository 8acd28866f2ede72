"""Which engine of a server answers a session."""

from collections import Counter

from rl.inference.ranks import Ranks


def test_a_session_stays_with_its_engine_and_new_ones_go_where_least_is_open():
    ranks = Ranks(4)
    seen = []
    for session in range(8):
        for _ in range(3):
            with ranks.use(session) as rank:
                seen.append(rank)
    assert all(seen[3 * i] == seen[3 * i + 1] == seen[3 * i + 2] for i in range(8))
    held = [ranks.use(session) for session in range(100, 108)]
    assert Counter(use.__enter__() for use in held) == {0: 2, 1: 2, 2: 2, 3: 2}
    crowd = [ranks.use(200) for _ in range(40)]
    found = [use.__enter__() for use in crowd]
    assert found[:30] == [found[0]] * 30 and len(set(found)) == 2  # too much for one: another takes the rest
    with ranks.use(None) as rank, Ranks(1).use(5) as only:
        assert rank is None and only is None
