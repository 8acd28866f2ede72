import msgspec
import pytest

from rl.orchestrator.rollouts import FromWorker, PlayGroup, Rollout
from rl.orchestrator.worker import encoded

ORDER = PlayGroup(play_id=7, split="train", task=0, num_episodes=2, sampling={}, server=0)


@pytest.mark.parametrize("content", ["\ud800", object(), 2**70])
def test_what_cannot_be_written_is_a_failed_rollout(content):
    """Not a lost answer: the orchestrator would wait for it for ever."""
    rollouts = [Rollout(messages=[{"role": "user", "content": content}]), Rollout(episode=1)]
    played = msgspec.msgpack.decode(encoded(ORDER, rollouts), type=FromWorker)
    assert played.play_id == 7 and [rollout.episode for rollout in played.rollouts] == [0, 1]
    assert {rollout.cause for rollout in played.rollouts} == {"environment"} and "cannot be written" in played.rollouts[0].error


def test_what_can_be_written_comes_through():
    assert msgspec.msgpack.decode(encoded(ORDER, [Rollout(reward=0.5)]), type=FromWorker).rollouts[0].reward == 0.5
