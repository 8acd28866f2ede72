"""What ranks that publish together send each other."""

import json

import pytest

from rl.trainer.store.ranks import Ranks


class StubWorld:
    """One of 64 ranks, as seen from it; counts the bytes that all of them send."""

    size = 64

    def __init__(self, rank, value):
        self.rank, self.value, self.gathered, self.broadcast = rank, value, 0, 0

    def new_group(self, timeout_s):
        return None

    def gather_bytes(self, data, group):
        self.gathered += self.size * len(data)
        return [data] * self.size

    def broadcast_bytes(self, data, group):
        data = data if self.rank == 0 else json.dumps([self.value]).encode()
        self.broadcast += len(data)
        return data


@pytest.mark.parametrize("rank", [0, 1])
def test_a_large_answer_of_the_first_rank_is_sent_once(rank):
    """All ranks sent as many bytes as the digests of a large model have."""
    value = {"tensors": {str(number): "0" * 64 for number in range(10_000)}}
    world = StubWorld(rank, value)
    ranks = Ranks(world)
    world.gathered = 0
    assert ranks.of_main(lambda: value) == value
    assert world.gathered == 64 * len('{"result": null}') and 750_000 < world.broadcast < 850_000
