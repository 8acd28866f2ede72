"""Every kind of classic environment, and every way in which one can fail, with a policy that
needs no model."""

import asyncio
import importlib.machinery
import itertools
import json
import signal
import sys
import types
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import verifiers as vf
from aiohttp import web
from datasets import Dataset
from msgspec import structs

from rl.envs.classic.client import chat_message, completion_prompt
from rl.envs.classic.environment import ClassicEnvironment, error_text
from rl.envs.environment import check_prompts
from rl.envs.load import load
from rl.envs.worker import Worker
from rl.system.errors import RunError
from rl.wire.inference_client import InferenceLostError
from rl.wire.worker_messages import Endpoint, EnvSpec
from tests.envs.stub_policy import StubPolicy, call, order, played, text
from tests.web import WebServer

NAN = float("nan")


def exact(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def rows(count=3, **columns):
    return Dataset.from_list(
        [{"question": f"say {i}", "answer": str(i), **columns} for i in range(count)]
    )


def rubric(*funcs, weights=None):
    return vf.Rubric(funcs=list(funcs) or [exact], weights=weights)


def single(*funcs, weights=None, kind=vf.SingleTurnEnv, **options):
    return kind(**({"dataset": rows(), "rubric": rubric(*funcs, weights=weights)} | options))


class Chatty(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"and again {len(state['trajectory'])}"}]


def made(load_environment, reply=lambda prompt: "0", *, policy=None, **spec):
    """The environment that a package with this load_environment has. A ready one is returned as
    it is."""
    module = types.ModuleType("stub_env", "An installed environment.")
    module.__spec__, module.__file__ = importlib.machinery.ModuleSpec("stub_env", None), __file__
    module.load_environment = (
        load_environment if callable(load_environment) else lambda: load_environment
    )
    sys.modules["stub_env"] = module
    return ClassicEnvironment(
        EnvSpec(name="stub", **({"id": "stub-env"} | spec)), policy or StubPolicy(reply)
    )


def only(rollouts):
    assert len(rollouts) == 1
    return rollouts[0]


def rollout_of(*given, **options):
    """The only rollout of one play of `made(...)`."""
    return only(played(made(*given, **options)))


def test_single_turn_keeps_the_turn_exactly():
    policy = StubPolicy(lambda prompt: "2")
    env = made(single(system_prompt="digits"), policy=policy)
    first, second = played(env, task=2, num_episodes=2, temperature=0.7, seed=5)
    assert first.turns == second.turns and first.error is None
    turn = only(first.turns)
    assert (
        text(turn.prompt_ids) == "system: digits\x03user: say 2\x03assistant: "
        and text(turn.completion_ids) == "2\x03"
    )
    assert (turn.logprobs, turn.finish_reason) == ([-0.5, -0.5], "stop")
    assert first.messages == [
        {"role": "system", "content": "digits"},
        {"role": "user", "content": "say 2"},
        {"role": "assistant", "content": "2"},
    ]
    assert (first.reward, first.metrics, first.stop) == (
        1.0,
        {"exact": 1.0, "num_turns": 1.0},
        "max_turns_reached",
    )
    assert not first.truncated and not first.overlong and first.num_tokens == 2
    assert policy.servers.asked[0]["sampling"] == {
        "max_tokens": 64,
        "temperature": 0.7,
        "seed": 5,
        "stop_token_ids": [3],
    }


def test_where_the_prompt_ends_is_recorded_with_worked_examples_in_it():
    shown = [{"role": "user", "content": "say 9"}, {"role": "assistant", "content": "9"}]
    build = lambda **more: made(  # noqa: E731
        lambda: single(kind=Chatty, max_turns=2, few_shot=shown, **more)
    )
    rollout = only(played(build(system_prompt="digits")))
    assert [message["role"] for message in rollout.messages] == [
        "system",
        *["user", "assistant"] * 3,
    ]
    assert (
        rollout.num_prompt_messages == rollout.as_record()["num_prompt_messages"] == 4
        and len(rollout.turns) == 2
    )
    assert (
        only(played(build())).num_prompt_messages == 3
        and rollout_of(single()).num_prompt_messages == 1
    )


def test_multi_turn_is_append_only_and_reasoning_is_kept():
    replies = iter(["hm</think>a", "b", "2"])
    env = made(single(kind=Chatty, max_turns=3), lambda prompt: next(replies))
    rollout = only(played(env, task=2))
    assert rollout.reward == 1.0 and [text(turn.completion_ids) for turn in rollout.turns] == [
        "hm</think>a\x03",
        "b\x03",
        "2\x03",
    ]
    for before, after in itertools.pairwise(rollout.turns):
        kept = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(kept)] == kept
    assert rollout.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert [message["content"] for message in rollout.messages if message["role"] == "user"] == [
        "say 2",
        "and again 1",
        "and again 2",
    ]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number
        b: another
    """
    return a + b


def fail(why: str) -> str:
    """Fails.

    Args:
        why: the text of the error
    """
    raise ArithmeticError(why)


def calculator(**options):
    return vf.ToolEnv(
        tools=[add, fail], dataset=rows(answer="5"), rubric=rubric(), max_turns=4, **options
    )


def test_tools_over_several_turns():
    def reply(prompt):
        if "tool: 5" in prompt:
            return "5"
        return (
            call("add", a=2, b=3)
            if "tool: flat" in prompt
            else call("fail", why="flat") + call("nothing")
        )

    env = made(calculator(), reply)
    rollout = only(played(env, max_tokens=200))
    assert (
        rollout.error is None
        and rollout.reward == 1.0
        and rollout.stop == "no_tools_called"
        and len(rollout.turns) == 3
    )
    assert text(rollout.turns[0].prompt_ids).startswith("[add][fail]user: say 0")
    roles = [message["role"] for message in rollout.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    made_call = only(rollout.messages[4]["tool_calls"])
    assert (
        made_call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        and made_call["type"] == "function"
    )
    assert rollout.messages[5] == {"role": "tool", "content": "5", "tool_call_id": made_call["id"]}
    assert rollout.messages[2]["content"] == "flat" and "nothing" in rollout.messages[3]["content"]
    counts = {
        "total_tool_calls": 3.0,
        "add_calls": 1.0,
        "fail_calls": 1.0,
        "bad_tool_calls": 0.0,
        "num_turns": 3.0,
    }
    assert rollout.metrics == {"exact": 1.0, **counts}


def test_a_malformed_call_stays_in_the_text_and_is_counted():
    rollout = only(played(made(calculator(), lambda prompt: "<call>{add</call>")))
    assert (
        rollout.error is None and rollout.reward == 0.0 and rollout.metrics["bad_tool_calls"] == 1.0
    )
    assert rollout.messages[-1] == {"role": "assistant", "content": "<call>{add</call>"}


def test_a_prompt_may_show_tool_calls():
    shown = [
        {"role": "user", "content": "2 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "x", "name": "add", "arguments": '{"a": 2, "b": 1}'}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        {"role": "user", "content": "and now?"},
    ]
    env = made(
        vf.ToolEnv(
            tools=[add],
            dataset=Dataset.from_list([{"prompt": shown, "answer": "0"}]),
            rubric=rubric(),
        )
    )
    rollout = only(played(env))
    assert (
        'assistant: <call>{"name": "add", "arguments": {"a": 2, "b": 1}}</call>\x03tool: 3'
        in text(rollout.turns[0].prompt_ids)
    )
    assert rollout.reward == 1.0 and check_prompts(env, 1) is None
    assert env.task("train", 0)["prompt"][1]["tool_calls"][0]["function"]["name"] == "add"


def test_completion_style_continues_the_text():
    class Story(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [vf.TextMessage(content=" Then")]

    data = Dataset.from_list([{"prompt": "Once", "answer": ""}])
    build = lambda: Story(  # noqa: E731
        dataset=data, rubric=rubric(lambda completion: 1.0), max_turns=2, message_type="completion"
    )
    env = made(build, lambda prompt: " upon")
    env.policy.renderer.bos = "^"
    rollout = only(played(env))
    first, second = rollout.turns
    assert text(first.prompt_ids) == text(env.prompt_ids("train", 0)) == "^Once"
    assert text(second.prompt_ids) == "^Once upon\x03 Then"
    assert [message["content"] for message in rollout.messages] == [
        "Once",
        " upon",
        " Then",
        " upon",
    ]
    assert check_prompts(made(build, policy=StubPolicy(str, max_model_len=10)), 6) is None
    assert (
        completion_prompt([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        == "a\n\nb"
    )


def relative(completions) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def replies(*texts):
    given = iter(texts)
    return lambda prompt: next(given)


def test_group_rewards():
    env = made(single(relative, exact), replies("a", "bbb", "0"))
    assert env.scores_groups
    rollouts = played(env, num_episodes=3)
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 1.0]
    assert [rollout.metrics["relative"] for rollout in rollouts] == [0.0, 1.0, 0.0] and rollouts[
        2
    ].metrics["exact"] == 1.0


@pytest.mark.parametrize("bad", [[1.0], [1.0, NAN], [1.0, None], "ab", 1.0, None])
def test_a_group_reward_that_is_no_list_of_numbers_fails_the_group(bad):
    def broken(completions) -> list[float]:
        return bad

    rollouts = played(made(single(broken)), num_episodes=2)
    assert [rollout.cause for rollout in rollouts] == ["reward", "reward"]
    assert (
        "reward function broken returned" in rollouts[0].error
        and "a list of 2 finite numbers" in rollouts[0].error
    )


def test_one_failure_in_a_scored_group_is_all_of_its():
    class Flaky(vf.SingleTurnEnv):
        async def setup_state(self, state):
            if next(turn) == 1:
                raise vf.SandboxError("gone")

    turn = iter(range(9))
    rollouts = played(made(single(relative, kind=Flaky)), num_episodes=3)
    assert {rollout.cause for rollout in rollouts} == {"environment"} and [
        len(rollout.turns) for rollout in rollouts
    ] == [1, 0, 1]
    assert (
        rollouts[0].error
        == "not scored, because another rollout of its group failed: SandboxError: gone"
    )


def test_an_exit_in_a_scored_group_is_its_failure():
    """In a task of its own an exit() goes past every `except Exception` and would end the
    worker."""

    class Leaves(vf.SingleTurnEnv):
        async def setup_state(self, state):
            sys.exit(3)

    with pytest.raises(RuntimeError, match=r"called exit\(3\)"):
        played(made(single(relative, kind=Leaves)), num_episodes=3)

    def leaves(completions) -> list[float]:
        exit()

    rollouts = played(made(single(leaves, exact)), num_episodes=2)
    assert [rollout.cause for rollout in rollouts] == [
        "reward",
        "reward",
    ] and "leaves raised SystemExit" in rollouts[0].error


def test_groups_of_environments_even_nested():
    def zero(completion) -> float:
        return 0.25

    def build():  # of one depth, or their rows cannot be put together
        outer, inner = (
            vf.EnvGroup([single(relative)], ["group"]),
            vf.EnvGroup([single(zero), calculator()], ["quarter", "tools"]),
        )
        return vf.EnvGroup([outer, inner], ["outer", "inner"])

    env = made(build)
    assert env.scores_groups and env.num_tasks("train") == 9 and env.kind == "classic EnvGroup"
    first, quarter, tools = (played(env, task=task, num_episodes=2)[0] for task in (0, 3, 6))
    assert (first.reward, first.metrics) == (
        1.0,
        {f"outer/group/{name}": 1.0 for name in ("relative", "num_turns", "reward")},
    )
    assert quarter.metrics == {
        "inner/quarter/zero": 0.25,
        "inner/quarter/num_turns": 1.0,
        "inner/quarter/reward": 0.25,
    }
    assert tools.metrics["inner/tools/bad_tool_calls"] == 0.0 and text(
        tools.turns[0].prompt_ids
    ).startswith("[add][fail]")
    task = env.task("train", 6)
    assert task["member"] == "inner/tools" and len(task["tools"]) == 2 and task["answer"] == "5"
    assert list(env.describe()["members"]) == ["outer/group", "inner/quarter", "inner/tools"]
    plain = made(lambda: vf.EnvGroup([single(zero), single()], ["a", "b"]))
    assert not plain.scores_groups and [
        only(played(plain, task=task)).reward for task in (0, 3)
    ] == [0.25, 1.0]


def test_info_as_json_text_and_tools_of_a_row():
    tool = {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    }
    data = rows(1, info=json.dumps({"tool_defs": [tool], "n": 7}))
    rollout = only(played(env := made(single(lambda info: info["n"], dataset=data))))
    assert rollout.reward == 7.0 and rollout.metrics["bad_tool_calls"] == 0.0
    assert (
        env.task("train", 0)["info"]["n"] == 7
        and only(env.task("train", 0)["tools"])["function"]["name"] == "look"
    )


def broken_with(value):
    def broken(completion):
        if isinstance(value, Exception):
            raise value
        return value

    return broken


@pytest.mark.parametrize(
    "value",
    [
        ValueError("no\n"),
        NAN,
        None,
        float("inf"),
        "1.0",
        {"a": 1},
        10**400,
        vf.InfraError("x"),
        np.ones(2),
    ],
)
def test_a_reward_that_is_no_number_is_a_failure(value):
    rollout = rollout_of(single(exact, broken_with(value)))
    assert (
        rollout.cause == "reward"
        and rollout.error.startswith("reward function broken r")
        and rollout.reward == 0.0
    )
    assert len(rollout.turns) == 1 and not rollout.metrics


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.bool_(True), np.ones(())]
)
def test_what_is_a_number(value):
    rollout = rollout_of(single(broken_with(value)))
    assert (
        rollout.error is None and rollout.reward == 1.0 and type(rollout.metrics["broken"]) is float
    )


def test_a_rubric_of_ones_own_is_checked_too():
    class Own(vf.Rubric):
        async def score_rollout(self, state):
            state["reward"], state["metrics"] = next(given)

    given = iter([(NAN, {}), (1.0, {"odd": None}), (None, {}), (1, {"infinite": NAN, "good": 2})])
    env = made(single(rubric=Own()))
    assert "the rubric returned nan as the reward, not a finite number" in only(played(env)).error
    for _ in range(2):  # verifiers cannot add these up
        rollout = only(played(env))
        assert rollout.cause == "reward" and "the rubric raised TypeError" in rollout.error
    assert only(played(env)).metrics == {"good": 2.0, "num_turns": 1.0}


class Raises(vf.SingleTurnEnv):
    def __init__(self, error, **options):
        super().__init__(**{"dataset": rows(), "rubric": rubric()} | options)
        self.error = error

    async def setup_state(self, state):
        raise self.error


def test_errors_of_the_environment():
    rollout = rollout_of(lambda: Raises(vf.SandboxError("no room")))
    assert (rollout.cause, rollout.error, rollout.stop) == (
        "environment",
        "SandboxError: no room",
        "has_error",
    )
    with pytest.raises(ValueError, match="plain"):
        played(made(lambda: Raises(ValueError("plain"))))
    with pytest.raises(ValueError, match="plain"):  # and the others of its group end
        played(made(lambda: Raises(ValueError("plain"), rubric=rubric(relative))), num_episodes=3)


class Breaks(Chatty):
    async def env_response(self, messages, state, **kwargs):
        if len(state["trajectory"]) == 2:
            raise KeyError("a second answer")
        return await super().env_response(messages, state, **kwargs)


def test_what_was_said_before_the_environment_raised_is_kept():
    def rollouts(replies, num_episodes=1, **options):
        env = made(
            lambda: Breaks(dataset=rows(), max_turns=3, **options), lambda prompt: next(replies)
        )
        episodes = asyncio.run(
            Worker.play_once(SimpleNamespace(env=env), order(1, num_episodes), num_episodes)
        )
        return [only(episode) for episode in episodes]

    rollout = only(rollouts(iter(["1", "2"]), system_prompt="digits", rubric=rubric()))
    assert (
        rollout.cause == "environment"
        and rollout.error.startswith("KeyError: 'a second answer'")
        and rollout.reward == 0.0
    )
    assert [message["content"] for message in rollout.messages] == [
        "digits",
        "say 1",
        "1",
        "and again 1",
        "2",
    ]
    assert rollout.num_prompt_messages == 2 and len(rollout.turns) == 2
    each = rollouts(iter(["a", "b", "c", "d"]), 2, rubric=rubric(relative))
    assert (
        all(one.error.startswith("KeyError") for one in each)
        and len({one.messages[1]["content"] for one in each}) == 2
    )


def test_a_tool_that_stops_the_rollout():
    env = made(calculator(stop_errors=[ArithmeticError]), lambda prompt: call("fail", why="flat"))
    rollout = only(played(env))
    assert (rollout.cause, rollout.error) == (
        "environment",
        "ToolCallError <- ArithmeticError: flat",
    )
    assert rollout.turns and rollout.messages[-1]["tool_calls"]


def test_a_timeout_in_scoring():
    async def long(completion):
        await asyncio.sleep(9)

    cleaned = []

    class Cleans(vf.Rubric):
        @vf.cleanup
        async def note(self, state):
            cleaned.append(state["trajectory_id"])

    rollout = rollout_of(single(rubric=Cleans(funcs=[long])), timeout_s=0.3)
    assert (
        rollout.cause == "timeout"
        and "scoring" in rollout.error
        and len(rollout.turns) == 1
        and len(cleaned) == 1
    )


def test_the_environments_own_timeout_and_what_was_said_before():
    async def reply(prompt):
        await asyncio.sleep(9 if "again" in prompt else 0)
        return "a"

    build = lambda: single(kind=Chatty, max_turns=3, timeout_seconds=0.3)  # noqa: E731
    rollout = rollout_of(build, reply)
    assert (rollout.cause, rollout.stop) == (
        "timeout",
        "timeout_reached",
    ) and "timeout_seconds = 0.3" in rollout.error
    assert (
        len(rollout.turns) == 1
        and rollout.messages[-1]["content"] == "a"
        and rollout.num_prompt_messages == 1
    )
    rollout = rollout_of(single(kind=Chatty, max_turns=3), reply, timeout_s=0.3)
    assert "generating the rollout took longer than 0.3 s" in rollout.error
    assert (rollout.cause, rollout.stop) == ("timeout", "timeout") and len(rollout.turns) == 1
    assert rollout.messages[-1]["content"] == "a" and rollout.num_prompt_messages == 1


def test_overlong_is_no_error():
    def last(completion) -> float:
        return float(len(completion[-1]["content"]))

    rollout = rollout_of(single(last), policy=StubPolicy(lambda prompt: "x", max_model_len=10))
    assert (
        rollout.overlong and rollout.error is None and not rollout.turns and rollout.reward == 0.0
    )
    build = lambda: single(lambda completion: 0.5, kind=Chatty, max_turns=3)  # noqa: E731
    rollout = rollout_of(build, policy=StubPolicy(lambda prompt: "y" * 20, max_model_len=60))
    assert rollout.overlong and rollout.error is None and len(rollout.turns) == 1
    assert (rollout.reward, rollout.stop) == (0.5, "prompt_too_long")


def test_truncation():
    rollout = only(played(made(single(), lambda prompt: "0123456789"), max_tokens=4))
    assert (
        rollout.truncated
        and rollout.turns[0].finish_reason == "length"
        and rollout.messages[-1]["content"] == "0123"
    )


def test_policy_failures_have_their_causes():
    rollout = rollout_of(single(), lambda prompt: InferenceLostError("waited 9 s"))
    assert (rollout.cause, rollout.error) == ("inference", "waited 9 s")
    rollout = rollout_of(single(), lambda prompt: ValueError("top_p out of range"))
    assert (rollout.cause, rollout.error) == ("inference", "top_p out of range")

    class Forgets(Chatty):
        async def get_prompt_messages(self, state):
            return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]

    build = lambda: single(kind=Forgets, max_turns=2)  # noqa: E731
    assert len(rollout_of(build).turns.chains) == 2  # no failure, but a new sample
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    env = made(single(dataset=Dataset.from_list([{"prompt": image, "answer": ""}])))
    assert only(played(env)).cause == "environment" and "take the image out" in check_prompts(
        env, 1
    )


@pytest.mark.parametrize("error", [InferenceLostError("gone"), ValueError("refused")])
def test_a_swallowed_policy_failure_is_still_one(error):
    class Swallows(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            with suppress(vf.Error):
                await self.get_model_response(state, [vf.UserMessage(content="judge this")])
            return [vf.UserMessage(content="fine")]

    def reply(prompt):
        return error if "judge this" in prompt else "0"

    rollout = rollout_of(single(kind=Swallows, max_turns=2), reply)
    assert (rollout.cause, rollout.error) == ("inference", str(error))


def test_only_steps_of_the_trajectory_are_turns():
    asked = {"max_completion_tokens": None, "max_tokens": 3, "temperature": 0.2}

    class Asks(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            hint = await self.get_model_response(
                state, [vf.UserMessage(content="a hint?")], sampling_args=asked
            )
            return [vf.UserMessage(content=hint.message.content)]

    policy = StubPolicy(lambda prompt: "hinted" if "hint" in prompt else "0")
    rollout = rollout_of(single(kind=Asks, max_turns=2), policy=policy)
    assert len(policy.servers.asked) == 3 and policy.servers.asked[1]["sampling"]["max_tokens"] == 3
    assert (
        policy.servers.asked[1]["sampling"]["temperature"] == 1.0
        and rollout.metrics["forced_sampling"] == 1.0
    )
    assert [text(turn.completion_ids) for turn in rollout.turns] == [
        "0\x03",
        "0\x03",
    ] and "user: hin" in text(rollout.turns[1].prompt_ids)


def test_sampling_of_the_environment_fills_what_is_not_configured():
    policy = StubPolicy(lambda prompt: "0")
    env = made(
        single(sampling_args={"stop": ["x"], "temperature": 0.1, "max_tokens": 5}), policy=policy
    )
    played(env)
    assert policy.servers.asked[0]["sampling"] == {
        "max_tokens": 64,
        "temperature": 1.0,
        "stop": ["x"],
        "stop_token_ids": [3],
    }


@asynccontextmanager
async def openai_server(answer):
    """An OpenAI-like server: `answer(body)` is a text, a message, a whole response, or (status,
    message)."""

    async def handle(request):
        body = await request.json()
        said = answer(body)
        if isinstance(said, tuple):
            return web.json_response({"error": {"message": said[1]}}, status=said[0])
        if isinstance(said, web.Response):
            return said
        message = said if isinstance(said, dict) else {"content": said}
        kind = "chat.completion" if "messages" in body else "text_completion"
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant"} | message,
            "text": said,
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return web.json_response(
            {
                "id": "x",
                "created": 0,
                "model": body["model"],
                "object": kind,
                "choices": [choice],
                "usage": usage,
            }
        )

    async with WebServer(
        web.post("/v1/chat/completions", handle), web.post("/v1/completions", handle), path="/v1"
    ) as server:
        yield server.url


def at_endpoint(build, answer, **sampling):
    async def play():
        async with openai_server(lambda body: asked.append(body) or answer) as base_url:
            endpoint = Endpoint(base_url=base_url, model="m", api_key_var="NO_SUCH_KEY")
            env = made(build, policy=StubPolicy(str, endpoint=endpoint))
            assert check_prompts(env, 10**6) is None
            rollout = only((await env.play(order(0, **sampling), 1))[0])
            await env.close()
            return rollout

    asked = []
    return asyncio.run(play()), asked[0]


def test_endpoints():
    rollout, asked = at_endpoint(single(), "0", top_k=5)
    assert (rollout.reward, len(rollout.turns), rollout.completion_tokens, rollout.num_tokens) == (
        1.0,
        0,
        2,
        2,
    )
    assert {
        "model": "m",
        "max_completion_tokens": 64,
        "temperature": 1.0,
        "top_k": 5,
    }.items() <= asked.items()
    data = Dataset.from_list([{"prompt": "Once", "answer": "0"}])
    rollout, asked = at_endpoint(single(dataset=data, message_type="completion"), "0", min_p=0.1)
    assert rollout.reward == 1.0 and asked["prompt"] == "Once" and asked["min_p"] == 0.1
    for status, message in ((404, "no model m"), (401, "bad key")):
        rollout, _ = at_endpoint(single(), (status, message))
        assert rollout.cause == "inference" and message in rollout.error
    assert "NO_SUCH_KEY" in rollout.error
    rollout, _ = at_endpoint(single(), (400, "This model's maximum context length is 10 tokens"))
    assert rollout.overlong and rollout.error is None


@pytest.mark.parametrize(
    "said", ["", {"content": None, "reasoning_content": "hm"}, {"content": None, "tool_calls": []}]
)
def test_an_answer_of_an_endpoint_is_scored_like_one_of_the_own_policy(said):
    """Regression: an empty one failed, and one with reasoning alone reached the reward function
    as None."""

    def empty(completion):
        return float(completion[-1]["content"] == "")

    rollout, _ = at_endpoint(single(rubric=vf.Rubric(funcs=[empty])), said)
    assert (rollout.reward, rollout.error) == (1.0, None)


@pytest.mark.parametrize("style", ["chat", "completion"])
def test_an_endpoint_that_answers_something_else_is_quoted(style):
    """Regression: a ValidationError's text, or an AttributeError's."""
    data = Dataset.from_list(
        [
            {
                "prompt": "Once"
                if style == "completion"
                else [{"role": "user", "content": "Once"}],
                "answer": "",
            }
        ]
    )
    html = web.Response(text="<html>Sign in to Proxy</html>", content_type="text/html")
    for said in (html, web.json_response({"error": {"message": "Sign in to Proxy"}})):
        rollout, _ = at_endpoint(single(dataset=data, message_type=style), said)
        assert (
            rollout.cause == "inference"
            and "the endpoint answered no completion: " in rollout.error
        )
        assert "Sign in to Proxy" in rollout.error and "Error: 1 validation" not in rollout.error


def test_limits_bound_what_runs_at_once():
    async def reply(prompt):
        await asyncio.sleep(0.01)
        return "0"

    scoring = {"now": 0, "peak": 0}

    async def slow(completion):
        scoring["now"] += 1
        scoring["peak"] = max(scoring.values())
        await asyncio.sleep(0.01)
        scoring["now"] -= 1
        return 1.0

    policy = StubPolicy(reply)
    rollouts = played(
        made(single(slow), policy=policy, max_generating=3, max_scoring=2), num_episodes=12
    )
    assert (
        policy.servers.peak == 3
        and scoring["peak"] == 2
        and {rollout.reward for rollout in rollouts} == {1.0}
    )
    policy = StubPolicy(reply)
    played(made(single(relative), policy=policy, max_generating=3), num_episodes=7)
    assert policy.servers.peak == 3


def test_set_kwargs():
    env = made(single(), set_kwargs={"max_seq_len": 7, "timeout_seconds": 0.5})
    assert env.env.max_seq_len == 7 and env.env.timeout_seconds == 0.5
    build = lambda: vf.EnvGroup(  # noqa: E731
        [single(kind=Chatty, max_turns=5), single()], ["a", "b"]
    )
    assert len(rollout_of(build, set_kwargs={"max_total_completion_tokens": 3}).turns) == 2
    for name, hint in (("max_turn", "did you mean max_turns"), ("zzz", "there are")):
        with pytest.raises(RunError, match=f"SingleTurnEnv has no such attribute; {hint}"):
            made(single(), set_kwargs={name: 1})


def test_data_sets_may_be_lazy_or_missing():
    built = []
    lazy = lambda: built.append(1) or rows(5)  # noqa: E731
    env = made(single(dataset=lazy))
    assert (env.num_tasks("train"), env.num_tasks("eval"), built) == (5, 0, [1])
    env = made(single(dataset=None, eval_dataset=rows(2)))
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (0, 2)
    assert (
        only(asyncio.run(env.play(order(1, split="eval"), 1))[0]).messages[0]["content"] == "say 1"
    )
    assert "a prompt of 23 tokens and orchestrator.sampling.max_tokens = 5000" in check_prompts(
        env, 5000
    )
    spec = env.policy.spec
    lower = (
        f"raise model.max_model_len to 5023, lower max_tokens to {spec.max_model_len - 23}, or "
        "leave eval task 0 out"
    )
    assert lower in check_prompts(env, 5000)
    env.policy.spec = structs.replace(spec, max_model_len=20)
    assert check_prompts(env, 1).endswith(
        "; raise model.max_model_len to 24, or leave eval task 0 out"
    )
    env.policy.spec = structs.replace(spec, vocab_size=ord("u"))
    lacks = (
        f": eval task 0: 'y' is token {ord('y')}, the model's embedding has {ord('u')} rows; "
        "give it one (transformers: resize_token_"
    )
    assert lacks in check_prompts(env, 1)
    env.policy.spec = spec
    assert check_prompts(env, 100) is None

    def offline():
        raise ConnectionError("no network")

    with pytest.raises(
        RunError,
        match=r"its data set raised ConnectionError: no network \(at .*test_classic.py:\d+\); "
        r"check",
    ):
        made(single(dataset=offline))


def test_faults_at_load_name_place_and_remedy():
    def loads(size: int, fail: bool = False):
        raise KeyError("SOME_DATA_PATH")

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(
        RunError,
        match=r"load_environment raised KeyError: 'SOME_DATA_PATH' \(at .*test_classic.py:\d+\); "
        r"check",
    ):
        made(loads, args={"size": 1})
    with pytest.raises(
        RunError, match=r"unexpected keyword argument 'sizes'.*; its arguments are size, fail"
    ):
        made(loads, args={"sizes": 1})
    with pytest.raises(RunError, match=r"returned a int, not a vf.Environment"):
        made(lambda: 3)
    with pytest.raises(RunError, match=r"environment not-there is not installed"):
        load(EnvSpec(name="x", id="not-there"), StubPolicy(str))
    made(lambda: single())
    assert signal.getsignal(signal.SIGTERM) is handler


def test_description_and_tasks_are_plain():
    def load_environment(size: int = 3, note=None):
        return calculator(system_prompt="be brief", parser=vf.ThinkParser())

    env = made(load_environment, args={"size": 5})
    about = json.loads(json.dumps(env.describe()))
    assert env.kind == "classic ToolEnv" and about["arguments"] == {
        "size": "int = 5 (default: 3)",
        "note": "None",
    }
    assert about["reward functions"] == {"exact": 1.0} and about["metrics"][:2] == [
        "num_turns",
        "total_tool_calls",
    ]
    assert (
        [tool["name"] for tool in about["tools"]] == ["add", "fail"]
        and about["max turns"] == 4
        and about["parser"] == "ThinkParser"
    )
    assert (about["train tasks"], about["eval tasks"], about["system prompt"]) == (3, 0, "be brief")
    task = env.task("train", 1)
    assert (
        task["prompt"][-1] == {"role": "user", "content": "say 1"}
        and task["answer"] == "5"
        and len(task["tools"]) == 2
    )


def test_rows_are_not_changed_by_playing():
    class Greedy(vf.SingleTurnEnv):
        async def setup_state(self, state):
            state["info"]["seen"].append(1)

    data = rows(1, info={"seen": [0]})
    env = made(lambda: Greedy(dataset=data, rubric=rubric(lambda info: len(info["seen"]))))
    assert [rollout.reward for rollout in played(env, num_episodes=3)] == [2.0, 2.0, 2.0]


def test_close_tears_down():
    torn = []

    class Torn(vf.SingleTurnEnv):
        @vf.teardown
        async def note(self):
            torn.append(1)

    env = made(single(kind=Torn))
    asyncio.run(env.close())
    assert torn == [1]


def test_wire_form_of_every_kind_of_message():
    made_call = vf.ToolCall(id="1", name="f", arguments="{}")
    wired = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for said in (made_call, json.dumps({"id": "1", "name": "f", "arguments": "{}"}), wired):
        message = chat_message({"role": "assistant", "content": None, "tool_calls": [said]})
        assert message == {"role": "assistant", "content": "", "tool_calls": [wired]}
    assert chat_message(vf.TextMessage(content="t")) == {"role": "user", "content": "t"}
    assert error_text(vf.ModelError()) == "ModelError"


def test_a_version_without_what_the_adapter_needs_is_refused(monkeypatch):
    """Regression: the first task of a group of environments failed, or the end of the worker."""
    monkeypatch.delitem(sys.modules, "rl.envs.classic.environment")
    monkeypatch.delattr(vf.EnvGroup, "_route_child_input")
    with pytest.raises(
        RunError,
        match=r"is classic, which needs verifiers>=.*has no attribute '_route_child_input'",
    ):
        load(EnvSpec(name="x", id="sum-classic", kind="classic"), StubPolicy())
