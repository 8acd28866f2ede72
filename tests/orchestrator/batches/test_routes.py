"""The routes of turns: a server gives those of all tokens, a chain keeps each once, and a sample
has those of all its tokens."""

import random
from zlib import crc32

import msgspec
import pytest

from rl.orchestrator.batches.contents import batch_metrics, group_samples
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turns
from tests.orchestrator.made import turn

WIDTH = 4


def routes(ids, salt=0):
    """Four bytes for each token but the last, which tell all tokens up to it."""
    return b"".join(
        crc32(bytes(ids[: place + 1]), salt).to_bytes(4) for place in range(len(ids) - 1)
    )


def samples_of(turns):
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(Rollout(turns=turns)), type=Rollout)
    return [*group_samples(Group(group_id=0, env="e", task=0, rollouts=[stored], advantages=[1.0]))]


def test_turns_that_continue_each_other_keep_the_routes_that_were_first():
    turns = Turns([], [])
    turns.add(turn([1, 2], [3, 4], routes=routes([1, 2, 3, 4])))
    later = [1, 2, 3, 4, 5, 6, 7]
    turns.add(turn(later[:-1], later[-1:], routes=routes(later, salt=1)))
    turns.add(turn([1, 2, 9], [8, 8], routes=routes([1, 2, 9, 8, 8])))
    first, second = samples_of(turns)
    assert first.routes == routes(later[:4]) + routes(later, salt=1)[3 * WIDTH :]
    assert second.routes == routes([1, 2, 9, 8, 8])
    assert Turns.of(list(turns)) == turns
    group = Group(group_id=0, env="e", task=0, rollouts=[Rollout(turns=turns)], advantages=[1.0])
    assert batch_metrics(1, [group])["rollouts/route_bytes"] == WIDTH


@pytest.mark.parametrize("seed", range(8))
def test_parallel_calls_of_one_conversation_keep_the_routes_of_their_own_tokens(seed):
    """Up to four calls are under way at once; some servers give no routes."""
    draw = random.Random(seed)
    for _ in range(400):
        turns, under_way, kept = Turns([], []), [], []
        for _ in range(draw.randint(2, 12)):
            if (under_way and draw.random() < 0.5) or len(under_way) == 4:
                kept.append(under_way.pop(draw.randrange(len(under_way))))
                turns.add(kept[-1])
                continue
            known = draw.choice(kept).token_ids if kept and draw.random() < 0.8 else []
            prompt = known[: draw.randint(0, len(known))] if draw.random() < 0.3 else known
            prompt = prompt + [draw.randint(1, 2) for _ in range(draw.randint(not prompt, 3))]
            answer = [draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
            given = routes(prompt + answer) if draw.random() < 0.9 else b""
            under_way.append(turn(prompt, answer, routes=given))
        for asked, stored in zip(kept, turns, strict=True):
            assert stored.token_ids == asked.token_ids
            assert stored.routes in (b"", routes(asked.token_ids))
            assert stored.routes or any(not other.routes for other in kept)


def test_an_answer_without_tokens_and_a_chain_with_unknown_routes():
    turns = Turns([], [])
    turns.add(turn([1, 2], [3], routes=routes([1, 2, 3])))
    turns.add(turn([1, 2, 3, 4, 5], [], routes=routes([1, 2, 3, 4, 5])))
    (sample,) = samples_of(turns)
    assert sample.routes == routes([1, 2, 3])
    turns.add(turn([1, 2, 3, 4, 5, 6], [7]))
    assert [sample.routes for sample in samples_of(turns)] == [None]
    with pytest.raises(ValueError, match="the routes of 2 tokens have 7 bytes"):
        turn([1, 2], [3], routes=b"1234567")
