import asyncio
import math
import os
from types import SimpleNamespace

import msgspec
import pytest

from rl.envs import worker
from rl.envs.worker import MAX_ERROR, Worker, encode_result
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.system.errors import RunError
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Group, Rollout, Turn, rollout_line
from rl.wire.worker_messages import MAX_MESSAGE_BYTES, FromWorker, MessageServer, PlayOrder
from tests.envs.stub_policy import worker_of

ORDER = PlayOrder(play_id=7, split="train", task=0, num_episodes=2, sampling={}, session=0)


def sent(rollouts, unfinished=0):
    """What the pool reads of a worker's answer to ORDER."""
    return [
        msgspec.msgpack.decode(message, type=FromWorker)
        for message in encode_result(ORDER, rollouts, unfinished)
    ]


DEEP: list = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize("content", ["\ud800", object(), {("a", "b"): 1}, DEEP])
def test_what_cannot_be_written_is_a_failed_rollout(content):
    """Not a lost answer: the orchestrator would wait for it for ever."""
    rollouts = [Rollout(text=[{"role": "user", "content": content}]), Rollout(episode=1)]
    (played,) = sent(rollouts, 3)
    assert (played.play_id, played.unfinished) == (7, 3)
    broken, whole = played.rollouts
    assert (broken.episode, whole.episode) == (0, 1)
    assert (
        broken.cause == "environment"
        and "cannot be written" in broken.error
        and whole == rollouts[1]
    )


def test_messages_that_would_fill_the_disk_are_a_failed_rollout():
    sizes = (17 << 20, 15 << 20)
    rollouts = [
        Rollout(text=[{"role": "user", "content": "x" * size}], reward=1.0, episode=i)
        for i, size in enumerate(sizes)
    ]
    long, kept = (rollout for played in sent(rollouts) for rollout in played.rollouts)
    assert (long.cause, long.error) == (
        "environment",
        "its messages or metrics cannot be written: ValueError: the messages have 17 MiB, 16 "
        "are allowed",
    )
    assert kept.error is None and len(kept.messages[0]["content"]) == 15 << 20


def test_what_is_too_much_for_one_message_goes_in_several_and_too_long_a_rollout_has_failed():
    """Of four rollouts of 16 MiB and one whose metrics alone have 67 MiB the four arrive, and
    the fifth says why it does not."""
    text = "x" * ((16 << 20) - 100)
    rollouts = [Rollout(text=[{"role": "user", "content": text}], episode=i) for i in range(4)]
    rollouts.append(Rollout(metrics={f"{i:0190}": 0.5 for i in range(350_000)}, episode=4))
    messages = encode_result(ORDER, rollouts, 2)
    assert max(map(len, messages)) <= MAX_MESSAGE_BYTES == 64 << 20
    played = [msgspec.msgpack.decode(message, type=FromWorker) for message in messages]
    assert [(reply.unfinished, len(reply.rollouts)) for reply in played] == [(3, 4), (2, 1)]
    *whole, long = [rollout for reply in played for rollout in reply.rollouts]
    assert [rollout.error for rollout in whole] == [None] * 4
    assert [rollout.episode for rollout in whole] == [0, 1, 2, 3]
    assert (long.episode, long.cause) == (4, "environment")
    assert long.error.endswith("ValueError: 67 MiB of tokens and messages, 64 are allowed")


def test_a_message_has_no_more_rollouts_than_the_pool_takes(monkeypatch):
    """The pool stops a worker that sends more: the group would be played again, to no end."""
    monkeypatch.setattr(worker, "MAX_ROLLOUTS", 3)
    played = sent([Rollout(episode=i // 2) for i in range(4)])
    assert [(reply.unfinished, len(reply.rollouts)) for reply in played] == [(1, 2), (0, 2)]


def test_the_error_of_an_environment_that_does_not_load_has_a_bound(tmp_path):
    async def main():
        heard = asyncio.Queue()

        async def take(name, message):
            await heard.put((name, msgspec.msgpack.decode(message, type=FromWorker)))

        tasks = []
        server = MessageServer(
            f"{tmp_path}/pool",
            lambda work: tasks.append(asyncio.create_task(work)),
            bool,
            take,
            None,
        )
        with pytest.raises(SystemExit):
            setup = SimpleNamespace(worker_id="e-0", orchestrator=f"{tmp_path}/pool")
            await worker.serve(setup, None, "no: " + "x" * 5_000_000)
        async with asyncio.timeout(10):
            name, answer = await heard.get()
        server.close()
        return name, answer

    name, answer = asyncio.run(main())
    assert (
        name == "e-0" and len(answer.message) == MAX_ERROR and answer.message.startswith("no: xxx")
    )


def test_no_secret_leaves_with_a_rollout(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key-123")
    rollout = Rollout(
        text=[{"content": "key: not-a-real-key-123", 1: ("x",)}],
        error="401 for not-a-real-key-123",
        cause="environment",
    )
    (said,) = sent([rollout])[0].rollouts
    assert (
        said.messages == [{"content": "key: [$JUDGE_API_KEY]", "1": ["x"]}]
        and said.error == "401 for [$JUDGE_API_KEY]"
    )


def test_a_secret_at_the_end_of_a_long_error_is_not_cut_in_half(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "not-a-real-key-123")
    rollout = Rollout(error="x" * (MAX_ERROR - 5) + "not-a-real-key-123", cause="environment")
    (said,) = sent([rollout])[0].rollouts
    assert len(said.error) == MAX_ERROR and "not-a" not in said.error


@pytest.mark.parametrize(
    ("variable", "key"),
    [("", "the-own-token-of-the-run"), ("a-token-from-the-shell", "a-token-from-the-shell")],
)
def test_a_judge_that_the_run_serves_gets_its_token(tmp_path, monkeypatch, variable, key):
    (tmp_path / "token").write_text("the-own-token-of-the-run")
    monkeypatch.setenv("RL_TOKEN", variable)
    env = SimpleNamespace(name="e", args={"judge": {"key": "env:RL_TOKEN"}}, set_kwargs={"n": 1})
    setup = SimpleNamespace(
        env=env, policy=SimpleNamespace(inference_status=str(tmp_path / "inference.json"))
    )
    assert (
        worker.given_arguments(setup, "set_kwargs") == {"n": 1}
        and os.environ.get("RL_TOKEN") == variable
    )
    assert worker.given_arguments(setup, "args") == {"judge": {"key": key}}


def test_a_sandbox_does_not_have_the_runs_token(monkeypatch):
    monkeypatch.delenv("RL_TOKEN", raising=False)
    env = SimpleNamespace(name="e", args={"key": "env:RL_TOKEN"}, set_kwargs={})
    with pytest.raises(
        RunError, match="the environment variable RL_TOKEN is not set in this process"
    ):
        worker.given_arguments(
            SimpleNamespace(env=env, policy=SimpleNamespace(inference_status="")), "args"
        )


class SometimesNan:
    """An environment whose second rollout has such a log-probability in its second turn, in the
    first `faults` plays."""

    def __init__(self, value, faults):
        self.value, self.faults = value, faults

    async def play(self, order, num_episodes):
        self.faults -= 1
        values = [-1.0, self.value if self.faults >= 0 else -2.0]
        spans = [VersionSpan(0, 2)]

        def turn(logprobs):
            return Turn.of([1], [2, 3], logprobs, spans)

        return [
            [Rollout(turns=[turn([-1.0, -1.0])], reward=1.0)],
            [Rollout(turns=[turn([-1.0, -1.0]), turn(values)])],
        ]


def test_the_tokens_of_failed_attempts_are_told_once(monkeypatch):
    """Each attempt has 3 prompts of 1 token and 6 sampled tokens."""
    monkeypatch.setattr(worker, "RETRY_PAUSE_S", 0.0)
    for faults, attempts in ((0, 0), (1, 1), (2, 2), (9, 2)):
        playing = worker_of(SometimesNan(math.nan, faults), retries=2)
        (first,), (second,) = asyncio.run(playing.play_with_retries(ORDER, 2))
        used = {"prefilled": 3 * attempts, "cached": 0, "sampled": 6 * attempts}
        assert first.retried == (used if attempts else {})
        assert second.retried == {} and second.retries == attempts


@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
def test_a_log_probability_that_is_not_finite_fails_its_rollout(value, monkeypatch):
    """It is played again; if that does not help, its line in rollouts/ says why it is not
    trained. An evaluation does not mind."""
    monkeypatch.setattr(worker, "RETRY_PAUSE_S", 0.0)

    def play(faults, order=ORDER):
        playing = worker_of(SometimesNan(value, faults), retries=1)
        (sound,), (broken,) = asyncio.run(playing.play_with_retries(order, 2))
        return sound, broken

    assert [rollout.error for rollout in play(1)] == [None, None] and play(1)[1].retries == 1
    sound, broken = play(2)
    assert (sound.error, broken.cause, broken.retries) == (None, "logprobs", 1)
    group = credit_group(Group(group_id=1, env="e", task=0, rollouts=[sound, broken]), Rules())
    lines = [rollout_line(group, i, 1) for i in range(2)]
    assert [line["why"] for line in lines] == ["error", "logprobs"] and not any(
        line["trained"] for line in lines
    )
    said = math.nan if value is None else value
    assert (
        lines[1]["error"]
        == f"inference gave token 2 of turn 2 the log-probability {said}, which cannot be trained"
    )
    assert play(2, msgspec.structs.replace(ORDER, split="eval"))[1].error is None


class OutcomeError(BaseException):
    """As pytest's outcomes, which a reward function that calls pytest.fail() raises."""


class Odd:
    """An environment whose play does what `do` does."""

    def __init__(self, do, scores_groups):
        self.do, self.scores_groups = do, scores_groups

    async def play(self, order, num_episodes):
        return [await self.do() for _ in range(num_episodes)]


async def number_as_name():
    return [Rollout(metrics={1: 2.0})]


async def text_as_value():
    return [Rollout(metrics={"g": "B"})]


async def huge_integer():
    return [Rollout(reward=10**5000)]


async def number_as_agent():
    return [Rollout(agent=3)]


async def no_metrics():
    return [Rollout(metrics=None)]


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def awaits_what_was_cancelled():
    mine = asyncio.create_task(asyncio.sleep(9))
    mine.cancel()
    await mine


async def outcome():
    raise OutcomeError("not so")


@pytest.mark.parametrize("scores_groups", [False, True])
@pytest.mark.parametrize(
    ("do", "cause", "text"),
    [
        (number_as_name, "reward", "the name of a metric or agent is of type int, not str"),
        (text_as_value, "reward", "metric 'g' is of type str, not int or float"),
        (
            huge_integer,
            "reward",
            "the reward is an integer of 16610 bits, not a number of at most 1e+18",
        ),
        (number_as_agent, "reward", "the name of a metric or agent is of type int, not str"),
        (no_metrics, "environment", "TypeError: "),
        (cancels_itself, "environment", "it cancelled its own task"),
        (awaits_what_was_cancelled, "environment", "or awaits "),
        (outcome, "environment", "OutcomeError: not so"),
    ],
)
def test_whatever_an_environment_does_every_episode_is_answered(
    do, cause, text, scores_groups, monkeypatch
):
    """The orchestrator would wait for the group for ever."""
    monkeypatch.setattr(worker, "RETRY_PAUSE_S", 0.0)
    messages = []

    async def send(message):
        messages.append(msgspec.msgpack.decode(message, type=FromWorker))

    async def main():
        playing = worker_of(Odd(do, scores_groups), retries=1)
        playing.plays[ORDER.play_id] = None
        async with asyncio.timeout(10):
            await asyncio.gather(
                asyncio.create_task(Worker.play(playing, ORDER, SimpleNamespace(send=send))),
                return_exceptions=True,
            )
        return playing.plays

    assert asyncio.run(main()) == {}
    rollouts = [rollout for played in messages for rollout in played.rollouts]
    assert [rollout.episode for rollout in rollouts] == [0, 1] and messages[-1].unfinished == 0
    for rollout in rollouts:
        assert (rollout.cause, rollout.stop, rollout.reward) == (
            cause,
            "error",
            0.0,
        ) and text in rollout.error
