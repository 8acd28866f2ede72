"""Scoring by verifiers' rubrics: whatever fails, and wherever, a reward that counts is the one
that a healthy rubric gives."""

import asyncio
import itertools
import os
import random
from functools import partial
from types import SimpleNamespace

import pytest
import verifiers as vf
from openai import AsyncOpenAI
from verifiers.rubrics.experimental.hybrid_math_rubric import HybridMathRubric
from verifiers.rubrics.math_rubric import MathRubric

from tests.envs import stub_policy
from tests.envs.stub_policy import StubPolicy
from tests.envs.test_classic import NAN, Chatty, assert_failed, exact, made, only, rubric, single
from tests.waiting import until

played = partial(stub_policy.played, run=asyncio.run)


def rollout_of(*given, **options):
    return only(played(made(*given, **options)))


class MuteError(Exception):
    """Its text cannot be had."""

    def __str__(self):
        return None


class Meta:
    """A number without a value, such as a tensor on the device `meta`, and without a text."""

    def __float__(self):
        raise NotImplementedError("no value")

    def __repr__(self):
        raise RuntimeError("no text")


def failing(value, name="broken"):
    def broken(completion):
        if isinstance(value, BaseException):
            raise value
        return value

    broken.__name__ = name
    return broken


def scored(own, reply="0", **options):
    return rollout_of(single(rubric=own, **options), lambda prompt: reply)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (MuteError(), "raised MuteError: <exception str() failed>"),
        (Meta(), "returned <Meta instance at "),
        (MuteError, "returned <class "),
    ],
)
def test_what_has_no_text_and_no_value_is_a_failure_like_others(value, fault):
    rollout = rollout_of(single(failing(value)))
    assert rollout.cause == "reward" and rollout.error.startswith(f"reward function broken {fault}")

    def both(completions) -> list[float]:
        return [1.0, failing(value)(None)]

    assert {
        (one.cause, one.error.split(" ")[3]) for one in played(made(single(both)), num_episodes=2)
    } == {("reward", fault.split(" ")[0])}


def test_what_an_environment_raises_needs_no_text_either():
    class Raises(vf.SingleTurnEnv):
        async def setup_state(self, state):
            raise vf.SandboxError from MuteError()

    rollout = rollout_of(single(kind=Raises))
    assert (rollout.cause, rollout.error) == (
        "environment",
        "SandboxError <- MuteError: <exception str() failed>",
    )


def test_a_judge_that_is_down_is_a_failure_although_its_function_has_no_weight():
    """HybridMathRubric asks it in a function of weight 0, and reads the answer in one of weight
    1, with 0.0 as the default."""
    nobody = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="x", max_retries=0)
    own = HybridMathRubric(use_judge_fallback=True, judge_client=nobody, judge_model="m")
    rollout = scored(own, r"\boxed{7}")
    assert_failed(
        rollout, "reward", "reward function judge_score raised RuntimeError: Judge model API error"
    )
    assert "put it last, as later functions may read what it leaves" in rollout.error
    assert scored(own, r"\boxed{0}").reward == 1.0  # found right without the judge
    asyncio.run(own.teardown())


def test_a_weight_counts_as_it_is_when_the_function_is_called_and_at_the_end():
    env = made(single(exact, failing(NAN), weights=[1.0, 0.0]))
    own = env.env.rubric.rubrics[0]
    assert only(played(env)).reward == 1.0
    own.weights[1] = 0.5
    assert "reward function broken returned nan" in only(played(env)).error
    own.weights[1] = 0.0
    own.add_metric(lambda completion: own.weights.__setitem__(1, 0.5) or 0.0)
    assert "reward function broken returned nan" in only(played(env)).error


def test_a_metric_is_missing_only_where_it_failed():
    def partly(completion) -> float:
        return 3.0 if completion[-1]["content"] == "0" else NAN

    def of_group(completions) -> list[float]:
        return [0.5] * len(completions)

    replies = iter(["0", "1", "0"])
    env = made(single(of_group, partly, weights=[1.0, 0.0]), lambda prompt: next(replies))
    assert [rollout.metrics.get("partly") for rollout in played(env, num_episodes=3)] == [
        3.0,
        None,
        3.0,
    ]


class Delegates(vf.Rubric):
    """A rubric that has another one score, in one of several ways."""

    def __init__(self, inner, how="directly"):
        super().__init__(funcs=[exact])
        self.inner, self.how = inner, how

    async def score_rollout(self, state):
        if self.how == "in a thread":
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: asyncio.run(self.inner.score_rollout(state))
            )
        else:
            await self.inner.score_rollout(state)
        if self.how == "by a metric":
            state["reward"] = state["metrics"]["broken"]


@pytest.mark.parametrize("how", ["directly", "in a thread", "by a metric"])
def test_a_rubric_that_has_another_one_score(how):
    for weights in ([1.0, 1.0], [1.0, 0.0]):  # who scores in a way of its own may read a metric
        rollout = scored(Delegates(rubric(exact, failing(NAN), weights=weights), how))
        assert_failed(rollout, "reward", "reward function broken returned nan, not a finite number")
    assert scored(Delegates(rubric(exact, failing(1.0), weights=[1.0, 0.0]), how)).reward == 1.0


def test_a_function_that_is_added_while_the_environment_plays():
    class Adds(vf.SingleTurnEnv):
        async def setup_state(self, state):
            self.rubric.add_reward_func(failing(ConnectionError("no judge")))

    assert (
        "reward function broken raised ConnectionError: no judge (at "
        in rollout_of(single(kind=Adds)).error
    )


def test_a_function_that_fails_while_the_environment_plays_fails_the_rollout():
    class Peeks(vf.SingleTurnEnv):
        async def setup_state(self, state):
            state["completion"] = []
            await self.rubric.score_rollout(state)

    rollout = rollout_of(single(kind=Peeks))
    assert_failed(
        rollout, "reward", "reward function exact raised IndexError: list index out of range"
    )


def answered(content, finish_reason):
    choice = SimpleNamespace(message=SimpleNamespace(content=content), finish_reason=finish_reason)

    async def create(**request):
        return SimpleNamespace(choices=[choice])

    own = vf.JudgeRubric(
        judge_client=SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=create))
        )
    )

    async def approved(judge, prompt, completion, answer, state):
        return float("no" not in (await judge(prompt, completion, answer, state)).lower())

    own.add_reward_func(approved)
    return scored(own)


@pytest.mark.parametrize(
    ("content", "finish_reason"),
    [(None, "stop"), ("", "stop"), (None, "length"), ("Let me see: the", "length")],
)
def test_a_verdict_that_is_empty_or_cut_is_none(content, finish_reason):
    assert (answered("yes", "stop").reward, answered("no", "stop").reward) == (1.0, 0.0)
    rollout = answered(content, finish_reason)
    assert_failed(
        rollout, "reward", "its verdict is empty or cut; raise max_tokens in judge_sampling_args"
    )


@pytest.fixture
def math():
    own = MathRubric(max_workers=1)
    yield made(single(rubric=own), lambda prompt: r"\boxed{0}"), own
    asyncio.run(own.teardown())


def test_a_pool_of_processes_that_breaks_fails_what_asked_it_and_is_started_again(math):
    env, own = math
    assert only(played(env)).reward == 1.0
    next(iter(own.executor._processes.values())).kill()
    until(lambda: own.executor._broken)
    rollout = only(played(env))
    assert_failed(rollout, "reward", "a process pool of verifiers broke, and was started again")
    assert only(played(env)).reward == 1.0

    async def kills(completion):
        try:
            await asyncio.get_running_loop().run_in_executor(own.executor, os._exit, 1)
        except Exception:
            return 0.0

    own.add_metric(kills)
    assert [rollout.cause for rollout in played(env, num_episodes=2)] == ["reward", "reward"]


def test_an_answer_that_waits_for_the_pool_is_not_wrong(monkeypatch):
    monkeypatch.setattr(MathRubric, "HARD_TIMEOUT_SECONDS", 0)
    own = MathRubric(max_workers=1)
    assert scored(own, r"\boxed{0}").reward == 1.0
    asyncio.run(own.teardown())


def test_rubrics_of_a_group_of_environments_are_added_to_its_members():
    def five(completion) -> float:
        return 5.0

    def seven(completion) -> float:
        return 7.0

    def build():
        shared = single()
        inner, outer = vf.EnvGroup([shared, single()], ["a", "b"]), vf.EnvGroup([single()], ["c"])
        inner.add_rubric(rubric(five))
        both = vf.EnvGroup([inner, outer], ["inner", "outer"])
        both.add_rubric(rubric(seven, weights=[2.0]))
        return both

    env = made(build)
    rollouts = [only(played(env, task=task)) for task in (0, 3, 6)]
    assert [rollout.reward for rollout in rollouts] == [20.0, 20.0, 15.0]
    assert rollouts[0].metrics["inner/a/five"] == 5.0
    assert rollouts[2].metrics["outer/c/seven"] == 7.0
    assert env.describe()["members"]["outer/c"]["reward functions"] == {"exact": 1.0, "seven": 2.0}


def test_an_environment_without_rewards_says_so():
    why = "every reward of stub is 0, as no function has a weight or score_rollouts is false. "
    assert made(single()).notice == made(single(rubric=Delegates(rubric()))).notice == ""
    assert made(single(exact, weights=[0.0])).notice == why
    env = made(single(rubric=None), set_kwargs={"score_rollouts": False})
    rollout = only(played(env))
    assert env.notice == why and (rollout.error, rollout.reward) == (None, 0.0) and rollout.turns
    group = made(lambda: vf.EnvGroup([single(), single(exact, weights=[0.0])], ["good", "zero"]))
    assert group.notice == why.replace("stub", "zero/")


def test_an_environment_that_clears_its_trajectory_is_scored():
    class Clears(Chatty):
        async def get_prompt_messages(self, state):
            if not state["trajectory"]:
                return await super().get_prompt_messages(state)
            state["trajectory"].clear()
            return [vf.UserMessage(content="x" * 500)]

    env = made(
        single(failing(0.5), kind=Clears),
        policy=StubPolicy(lambda prompt: "y", max_model_len=200),
    )
    rollout = only(played(env))
    assert rollout.overlong
    assert len(rollout.turns) == 1
    assert (rollout.reward, rollout.metrics["broken"]) == (0.5, 0.5)


FAILURES = (ValueError("x"), MuteError(), Meta(), NAN, None, "1", SystemExit(3), [1.0])


class Numbered(vf.SingleTurnEnv):
    async def setup_state(self, state):
        state["number"] = next(self.numbers) % 2


class Function:
    """A random function of a rubric: it may leave something in the state, read what others leave
    there, and fail."""

    def __init__(self, draw, number, of_groups):
        self.of_group, self.number = of_groups and draw.random() < 0.4, number
        self.reads = draw.choice([*range(number), None])
        self.weight = draw.choice([0.0, 0.0, 1.0, 0.5, -2.0])
        self.value, self.failure = draw.randint(1, 9), draw.choice(FAILURES)
        self.fails_for = draw.sample(range(2), draw.randint(1, 2)) if draw.random() < 0.3 else []
        self.waits = draw.random() < 0.3

    def of(self, state, may_fail):
        if may_fail and state["number"] in self.fails_for:
            failures.append(self.number)
            if isinstance(self.failure, BaseException):
                raise self.failure
            return self.failure
        state[f"left_{self.number}"] = result = self.value + state.get(f"left_{self.reads}", 0)
        return result

    def made(self, may_fail):
        async def one(state):
            await asyncio.sleep(0.001 * self.waits)
            return self.of(state, may_fail)

        async def every(states) -> list[float]:
            return [self.of(state, may_fail) for state in states]

        function = every if self.of_group else one
        function.__name__ = f"function_{self.number}"
        return function


failures = []


def a_rubric(functions, how, may_fail):
    """The functions in a rubric of some form."""
    made_ones = [(function.made(may_fail), function.weight) for function in functions]
    if how == "a group":
        half = len(made_ones) // 2
        return vf.RubricGroup(
            [rubric_of(made_ones[:half] or [(failing(0.0), 0.0)]), rubric_of(made_ones[half:])]
        )
    plain = rubric_of(made_ones)
    if how == "raised":  # after load
        plain.weights = [0.0] * len(made_ones)
        plain.add_score_object_provider(
            lambda state: setattr(plain, "weights", [weight for _, weight in made_ones]) or {}
        )
    return plain if how in ("plain", "raised") else Delegates(plain, how)


def play_all(env, own):
    failures.clear()
    env.env.rubric, env.env.numbers = own, itertools.count()
    return played(env, num_episodes=2 if env.scores_groups else 1)


def rubric_of(weighted):
    funcs, weights = zip(*weighted, strict=True)
    return vf.Rubric(funcs=list(funcs), weights=list(weights))


@pytest.mark.parametrize("of_groups", [False, True])
def test_a_reward_that_counts_is_that_of_a_healthy_rubric(of_groups):
    """Rubrics of up to four functions, in every form, with random weights, readers and failures."""
    draw = random.Random(7)
    env = made(single(*([failing_group] if of_groups else [exact]), kind=Numbered))
    seen = {"counts": 0, "failed": 0, "metric": 0}
    for _ in range(300):
        functions = [Function(draw, number, of_groups) for number in range(draw.randint(1, 4))]
        how = draw.choice(
            ["plain", "a group", *([] if of_groups else ["raised", "directly", "in a thread"])]
        )
        right, rollouts = (
            play_all(env, a_rubric(functions, how, may_fail)) for may_fail in (False, True)
        )
        for rollout, healthy in zip(rollouts, right, strict=True):
            assert (
                rollout.cause == "reward" if rollout.error else rollout.reward == healthy.reward
            ), (how, [*map(vars, functions)])
            assert not rollout.error or failures
            seen["failed" if rollout.error else "metric" if failures else "counts"] += 1
        heavy = [
            function for function in functions if function.number in failures and function.weight
        ]
        assert not heavy or all(rollout.error for rollout in rollouts)
        assert (
            not failures
            or how not in ("directly", "in a thread")
            or all(rollout.error for rollout in rollouts)
        )
    assert min(seen.values()) > 10, seen


def failing_group(completions) -> list[float]:
    return [NAN] * len(completions)
