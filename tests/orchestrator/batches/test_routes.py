"""The routes of turns: only those of new tokens are asked for, and a sample has those of all its
tokens."""

import random
from zlib import crc32

import msgspec
import pytest

from rl.orchestrator.batches.batch_metrics import batch_metrics
from rl.orchestrator.batches.samples import group_samples
from rl.wire.inference_client import Generation
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turn, Turns
from tests.orchestrator.made import turn

WIDTH = 3


def routes(ids: list[int], since: int = 0, salt: int = 0) -> bytes:
    """Three bytes for each token but the last, which tell the token and its place."""
    return b"".join(
        bytes([token, place, salt]) for place, token in enumerate(ids[:-1]) if place >= since
    )


def asked(turns: Turns, prompt: list[int], answer: list[int], salt: int = 0) -> Turn:
    """What a server answers that is asked for the routes that are not known."""
    since = turns.routed(prompt)
    return turn(prompt, answer, routes=routes(prompt + answer, since, salt), routes_from=since)


def samples_of(turns: Turns) -> list:
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(Rollout(turns=turns)), type=Rollout)
    return [*group_samples(Group(group_id=0, env="e", task=0, rollouts=[stored], advantages=[1.0]))]


def test_turns_that_continue_each_other_send_the_routes_of_new_tokens():
    turns = Turns([], [])
    turns.add(asked(turns, [1, 2], [3, 4]))
    assert turns.routed([1, 2, 3, 4, 5]) == 3 and turns.routed([1, 2, 9]) == 0
    turns.add(asked(turns, [1, 2, 3, 4, 5, 6], [7], salt=1))
    turns.add(asked(turns, [1, 2, 9], [8, 8], salt=2))
    assert [len(answer.routes) for answer in turns.answers] == [3 * WIDTH, 3 * WIDTH, 4 * WIDTH]
    first, second = samples_of(turns)
    assert first.routes == routes([1, 2, 3, 4]) + routes([1, 2, 3, 4, 5, 6, 7], 3, salt=1)
    assert second.routes == routes([1, 2, 9, 8, 8], salt=2)
    again = Turns.of(list(turns))  # with the whole routes of each
    assert again == turns


def test_a_turn_whose_chain_was_extended_meanwhile_keeps_its_routes():
    turns = Turns([], [])
    turns.add(asked(turns, [1, 2], [3, 4]))
    late = asked(turns, [1, 2, 3, 4, 6], [6], salt=2)
    turns.add(asked(turns, [1, 2, 3, 4, 5], [5], salt=1))
    turns.add(late)
    first, second = samples_of(turns)
    before = routes([1, 2, 3, 4])
    assert first.routes == before + routes([1, 2, 3, 4, 5, 5], 3, salt=1)
    assert second.routes == before + routes([1, 2, 3, 4, 6, 6], 3, salt=2)


def experts(ids: list[int], since: int = 0) -> bytes:
    """Four bytes for each token but the last, which tell all tokens up to it."""
    return b"".join(
        crc32(bytes(ids[: place + 1])).to_bytes(4) for place in range(since, len(ids) - 1)
    )


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
            answer, since = (
                [draw.randint(1, 2) for _ in range(draw.randint(1, 3))],
                turns.routed(prompt),
            )
            given = experts(prompt + answer, since) if draw.random() < 0.9 else None
            under_way.append(turn(prompt, answer, routes=given, routes_from=since if given else 0))
        for given, stored in zip(kept, turns, strict=True):
            assert stored.token_ids == given.token_ids
            assert stored.routes == experts(given.token_ids) or (
                stored.routes is None and given.routes is None
            )


def test_a_turn_that_leaves_out_routes_that_nobody_has_has_none():
    turns = Turns.of([turn([1, 2, 3], [4], routes=routes([1, 2, 3, 4], 2), routes_from=2)])
    assert turns[0].routes is None


def test_an_answer_without_tokens_and_a_chain_with_unknown_routes():
    turns = Turns([], [])
    turns.add(asked(turns, [1, 2], [3]))
    turns.add(asked(turns, [1, 2, 3, 4, 5], []))
    (sample,) = samples_of(turns)
    assert sample.routes == routes([1, 2, 3])
    turns.add(turn([1, 2, 3, 4, 5, 6], [7]))
    assert [sample.routes for sample in samples_of(turns)] == [None]
    with pytest.raises(ValueError, match="the routes of 2 tokens have 7 bytes"):
        turn([1, 2], [3], routes=b"1234567")


def test_their_size_is_reported_and_json_has_them():
    turns = Turns.of([turn([1, 2], [3, 4], routes=routes([1, 2, 3, 4]))])
    group = Group(group_id=0, env="e", task=0, rollouts=[Rollout(turns=turns)], advantages=[1.0])
    assert batch_metrics(1, [group])["rollouts/route_bytes"] == WIDTH
    answer = Generation([3], [-1.0], [VersionSpan(0, 1)], "stop", bytes(range(256)))
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Generation).routes == bytes(
        range(256)
    )
