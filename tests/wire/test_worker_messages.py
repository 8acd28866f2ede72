"""Derived seeds, and what a message may hold."""

import msgspec
import pytest

from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import MAX_ROLLOUTS, FromWorker, Played, PlayOrder, derived_seed


def test_a_seed_is_the_same_on_every_machine_and_another_one_for_each_part():
    assert derived_seed(0, "sums", 3) == 580659724968790828
    order = PlayOrder(1, "eval", 3, 2, {}, 0, seed=derived_seed(0, "sums", 3))
    parts = {
        order.seeded("episode", i).seeded("attempt", attempt).seed
        for i in range(4)
        for attempt in range(4)
    }
    assert len(parts) == 16 and all(0 <= part < 2**63 for part in parts)
    unseeded = PlayOrder(1, "train", 3, 2, {}, 0)
    assert unseeded.seeded("episode", 1) is unseeded


def test_a_message_of_many_empty_rollouts_is_refused_before_they_are_made():
    """Regression: each is one byte, and took 450 bytes: 30 GB for the largest message."""
    sent = msgspec.msgpack.encode(Played(1, [Rollout()]))
    before, _, after = sent.partition(b"\x91" + msgspec.msgpack.encode(Rollout()))
    array = (MAX_ROLLOUTS + 1).to_bytes(4)
    with pytest.raises(msgspec.ValidationError, match="Expected `array` of length <= 100000"):
        msgspec.msgpack.decode(
            before + b"\xdd" + array + b"\x80" * (MAX_ROLLOUTS + 1) + after, type=FromWorker
        )
