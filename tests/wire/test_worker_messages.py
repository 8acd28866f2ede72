"""Derived seeds."""

from rl.wire.worker_messages import PlayGroup, derived_seed


def test_a_seed_is_the_same_on_every_machine_and_another_one_for_each_part():
    assert derived_seed(0, "sums", 3) == 580659724968790828
    order = PlayGroup(1, "eval", 3, 2, {}, 0, seed=derived_seed(0, "sums", 3))
    parts = {order.seeded("episode", i).seeded("attempt", attempt).seed for i in range(4) for attempt in range(4)}
    assert len(parts) == 16 and all(0 <= part < 2**63 for part in parts)
    unseeded = PlayGroup(1, "train", 3, 2, {}, 0)
    assert unseeded.seeded("episode", 1) is unseeded
