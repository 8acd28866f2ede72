import msgspec
import pytest

from rl.envs.worker import MAX_ERROR, encode_result
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import FromWorker, PlayGroup

ORDER = PlayGroup(play_id=7, split="train", task=0, num_episodes=2, sampling={}, server=0)


DEEP: list = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize("content", ["\ud800", object(), 2**70, {("a", "b"): 1}, DEEP])
def test_what_cannot_be_written_is_a_failed_rollout(content):
    """Not a lost answer: the orchestrator would wait for it for ever."""
    rollouts = [Rollout(messages=[{"role": "user", "content": content}]), Rollout(episode=1)]
    played = msgspec.msgpack.decode(encode_result(ORDER, rollouts), type=FromWorker)
    assert played.play_id == 7 and [rollout.episode for rollout in played.rollouts] == [0, 1]
    assert {rollout.cause for rollout in played.rollouts} == {"environment"} and "cannot be written" in played.rollouts[0].error


def test_metrics_that_the_orchestrator_could_not_read_are_a_failed_rollout():
    played = msgspec.msgpack.decode(encode_result(ORDER, [Rollout(metrics={1: 2.0})]), type=FromWorker)
    assert "cannot be written" in played.rollouts[0].error


def test_no_secret_leaves_with_a_rollout(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key-123")
    rollout = Rollout(messages=[{"content": "key: not-a-real-key-123", 1: ("x",)}], error="401 for not-a-real-key-123", cause="environment")
    (said,) = msgspec.msgpack.decode(encode_result(ORDER, [rollout]), type=FromWorker).rollouts
    assert said.messages == [{"content": "key: [$JUDGE_API_KEY]", "1": ["x"]}] and said.error == "401 for [$JUDGE_API_KEY]"


def test_a_secret_at_the_end_of_a_long_error_is_not_cut_in_half(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key-123")
    rollout = Rollout(error="x" * (MAX_ERROR - 5) + "not-a-real-key-123", cause="environment")
    (sent,) = msgspec.msgpack.decode(encode_result(ORDER, [rollout]), type=FromWorker).rollouts
    assert len(sent.error) == MAX_ERROR and "not-a" not in sent.error


def test_what_can_be_written_comes_through():
    assert msgspec.msgpack.decode(encode_result(ORDER, [Rollout(reward=0.5)]), type=FromWorker).rollouts[0].reward == 0.5
