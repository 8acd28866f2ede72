"""Every kind of classic environment, and every way in which one can fail, with a policy that
needs no model."""

import asyncio
import importlib.machinery
import itertools
import json
import signal
import sys
import types
from contextlib import suppress
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
from rl.wire.inference_client import InferenceLostError
from rl.wire.worker_messages import Endpoint, EnvSpec
from tests.envs.openai_server import openai_server
from tests.envs.stub_policy import StubPolicy, call, order, played, text
from tests.models.conversations import assistant, system, user
from tests.raised import run_error

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
        return [user(f"and again {len(state['trajectory'])}")]


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


def roles(rollout):
    return [message["role"] for message in rollout.messages]


def contents(rollout):
    return [message["content"] for message in rollout.messages]


def said(rollout):
    """The texts of its turns."""
    return [text(turn.completion_ids) for turn in rollout.turns]


def assert_failed(rollout, cause, *texts):
    assert rollout.cause == cause and not [part for part in texts if part not in rollout.error]


def test_single_turn_keeps_the_turn_exactly():
    policy = StubPolicy(lambda prompt: "2")
    env = made(single(system_prompt="digits"), policy=policy)
    first, second = played(env, task=2, num_episodes=2, temperature=0.7, seed=5)
    assert first.turns == second.turns and first.error is None
    turn = only(first.turns)
    assert text(turn.prompt_ids) == "system: digits\x03user: say 2\x03assistant: "
    assert said(first) == ["2\x03"] and turn.logprobs == [-0.5, -0.5]
    assert turn.finish_reason == "stop" and first.num_tokens == 2
    assert roles(first) == ["system", "user", "assistant"]
    assert contents(first) == ["digits", "say 2", "2"]
    assert (first.reward, first.metrics) == (1.0, {"exact": 1.0, "num_turns": 1.0})
    assert (first.stop, first.truncated, first.overlong) == ("max_turns_reached", False, False)
    sampling = {"max_tokens": 64, "temperature": 0.7, "seed": 5, "stop_token_ids": [3]}
    assert policy.servers.asked[0]["sampling"] == sampling


def test_where_the_prompt_ends_is_recorded_with_worked_examples_in_it():
    shown = [user("say 9"), assistant("9")]
    build = lambda **more: made(  # noqa: E731
        lambda: single(kind=Chatty, max_turns=2, few_shot=shown, **more)
    )
    rollout = only(played(build(system_prompt="digits")))
    assert roles(rollout) == ["system", *["user", "assistant"] * 3] and len(rollout.turns) == 2
    assert rollout.num_prompt_messages == rollout.as_record()["num_prompt_messages"] == 4
    assert only(played(build())).num_prompt_messages == 3
    assert rollout_of(single()).num_prompt_messages == 1


def test_multi_turn_is_append_only_and_reasoning_is_kept():
    env = made(single(kind=Chatty, max_turns=3), replies("hm</think>a", "b", "2"))
    rollout = only(played(env, task=2))
    assert rollout.reward == 1.0 and said(rollout) == ["hm</think>a\x03", "b\x03", "2\x03"]
    for before, after in itertools.pairwise(rollout.turns):
        assert after.prompt_ids[: len(before.token_ids)] == before.token_ids
    assert rollout.messages[1]["reasoning_content"] == "hm"
    assert contents(rollout) == ["say 2", "a", "and again 1", "b", "and again 2", "2"]


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
    """A malformed call stays in the text, and is counted."""

    def reply(prompt):
        if "tool: 5" in prompt:
            return "5"
        if "tool: flat" in prompt:
            return call("add", a=2, b=3)
        return call("fail", why="flat") + call("nothing") + "<call>{add</call>"

    rollout = only(played(made(calculator(), reply), max_tokens=200))
    assert (rollout.error, rollout.reward, rollout.stop) == (None, 1.0, "no_tools_called")
    assert text(rollout.turns[0].prompt_ids).startswith("[add][fail]user: say 0")
    answers = ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert roles(rollout) == ["user", *answers] and len(rollout.turns) == 3
    made_call = only(rollout.messages[4]["tool_calls"])
    assert made_call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert made_call["type"] == "function"
    assert rollout.messages[5] == {"role": "tool", "content": "5", "tool_call_id": made_call["id"]}
    _, malformed, flat, nothing, *_ = contents(rollout)
    assert (malformed, flat) == ("<call>{add</call>", "flat") and "nothing" in nothing
    calls = {"total_tool_calls": 3.0, "add_calls": 1.0, "fail_calls": 1.0, "bad_tool_calls": 1.0}
    assert rollout.metrics == {"exact": 1.0, "num_turns": 3.0} | calls


def test_a_prompt_may_show_tool_calls():
    made_call = {"id": "x", "name": "add", "arguments": '{"a": 2, "b": 1}'}
    shown = [
        user("2 + 1?"),
        assistant("", tool_calls=[made_call]),
        {"role": "tool", "tool_call_id": "x", "content": "3"},
        user("and now?"),
    ]
    data = Dataset.from_list([{"prompt": shown, "answer": "0"}])
    env = made(vf.ToolEnv(tools=[add], dataset=data, rubric=rubric()))
    rollout = only(played(env))
    written = 'assistant: <call>{"name": "add", "arguments": {"a": 2, "b": 1}}</call>\x03tool: 3'
    assert written in text(rollout.turns[0].prompt_ids)
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
    assert contents(rollout) == ["Once", " upon", " Then", " upon"]
    assert check_prompts(made(build, policy=StubPolicy(str, max_model_len=10)), 6) is None
    chat = [system("a"), user("b")]
    assert completion_prompt(chat) == "a\n\nb"


def relative(completions) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def replies(*texts):
    given = iter(texts)
    return lambda prompt: next(given)


@pytest.mark.parametrize("bad", [[1.0], [1.0, NAN], [1.0, None], "ab", 1.0, None])
def test_a_group_reward_that_is_no_list_of_numbers_fails_the_group(bad):
    def broken(completions) -> list[float]:
        return bad

    for rollout in played(made(single(broken)), num_episodes=2):
        assert_failed(
            rollout, "reward", "reward function broken returned", "a list of 2 finite numbers"
        )


def test_one_failure_in_a_scored_group_is_all_of_its():
    class Flaky(vf.SingleTurnEnv):
        async def setup_state(self, state):
            if next(turn) == 1:
                raise vf.SandboxError("gone")

    turn = iter(range(9))
    rollouts = played(made(single(relative, kind=Flaky)), num_episodes=3)
    assert {rollout.cause for rollout in rollouts} == {"environment"}
    assert [len(rollout.turns) for rollout in rollouts] == [1, 0, 1]
    why = "not scored, because another rollout of its group failed: SandboxError: gone"
    assert rollouts[0].error == why


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

    for rollout in played(made(single(leaves, exact)), num_episodes=2):
        assert_failed(rollout, "reward", "leaves raised SystemExit")


def test_groups_of_environments_even_nested():
    def zero(completion) -> float:
        return 0.25

    def build():  # of one depth, or their rows cannot be put together
        outer = vf.EnvGroup([single(relative)], ["group"])
        inner = vf.EnvGroup([single(zero), calculator()], ["quarter", "tools"])
        return vf.EnvGroup([outer, inner], ["outer", "inner"])

    env = made(build)
    assert env.scores_groups and env.num_tasks("train") == 9 and env.kind == "classic EnvGroup"
    first, quarter, tools = (played(env, task=task, num_episodes=2)[0] for task in (0, 3, 6))
    names = ("relative", "num_turns", "reward")
    assert first.reward == 1.0 and first.metrics == {f"outer/group/{name}": 1.0 for name in names}
    values = {"zero": 0.25, "num_turns": 1.0, "reward": 0.25}
    assert quarter.metrics == {f"inner/quarter/{name}": value for name, value in values.items()}
    assert tools.metrics["inner/tools/bad_tool_calls"] == 0.0
    assert text(tools.turns[0].prompt_ids).startswith("[add][fail]")
    task = env.task("train", 6)
    assert (task["member"], len(task["tools"]), task["answer"]) == ("inner/tools", 2, "5")
    assert list(env.describe()["members"]) == ["outer/group", "inner/quarter", "inner/tools"]
    plain = made(lambda: vf.EnvGroup([single(zero), single()], ["a", "b"]))
    assert not plain.scores_groups
    assert [only(played(plain, task=task)).reward for task in (0, 3)] == [0.25, 1.0]


def test_info_as_json_text_and_tools_of_a_row():
    tool = {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    }
    data = rows(1, info=json.dumps({"tool_defs": [tool], "n": 7}))
    rollout = only(played(env := made(single(lambda info: info["n"], dataset=data))))
    assert rollout.reward == 7.0 and rollout.metrics["bad_tool_calls"] == 0.0
    assert env.task("train", 0)["info"]["n"] == 7
    assert only(env.task("train", 0)["tools"])["function"]["name"] == "look"


def broken_with(value):
    def broken(completion):
        if isinstance(value, Exception):
            raise value
        return value

    return broken


@pytest.mark.parametrize(
    "value",
    [
        *(ValueError("no\n"), NAN, None, float("inf"), "1.0"),
        *({"a": 1}, 10**400, vf.InfraError("x"), np.ones(2)),
    ],
)
def test_a_reward_that_is_no_number_is_a_failure(value):
    rollout = rollout_of(single(exact, broken_with(value)))
    assert_failed(rollout, "reward", "reward function broken r")
    assert rollout.reward == 0.0 and len(rollout.turns) == 1 and not rollout.metrics


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.bool_(True), np.ones(())]
)
def test_what_is_a_number(value):
    rollout = rollout_of(single(broken_with(value)))
    assert rollout.error is None
    assert rollout.reward == 1.0
    assert type(rollout.metrics["broken"]) is float


def test_a_rubric_of_ones_own_is_checked_too():
    class Own(vf.Rubric):
        async def score_rollout(self, state):
            state["reward"], state["metrics"] = next(given)

    given = iter([(NAN, {}), (1.0, {"odd": None}), (None, {}), (1, {"infinite": NAN, "good": 2})])
    env = made(single(rubric=Own()))
    assert "the rubric returned nan as the reward, not a finite number" in only(played(env)).error
    for _ in range(2):  # verifiers cannot add these up
        assert_failed(only(played(env)), "reward", "the rubric raised TypeError")
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
    def rollouts(*said, num_episodes=1, **options):
        env = made(lambda: Breaks(dataset=rows(), max_turns=3, **options), replies(*said))
        worker = SimpleNamespace(env=env)
        playing = Worker.play_once(worker, order(1, num_episodes), num_episodes)
        return [only(episode) for episode in asyncio.run(playing)]

    rollout = only(rollouts("1", "2", system_prompt="digits", rubric=rubric()))
    assert_failed(rollout, "environment", "KeyError: 'a second answer'")
    assert contents(rollout) == ["digits", "say 1", "1", "and again 1", "2"]
    assert (rollout.reward, rollout.num_prompt_messages, len(rollout.turns)) == (0.0, 2, 2)
    each = rollouts("a", "b", "c", "d", num_episodes=2, rubric=rubric(relative))
    assert all(one.error.startswith("KeyError") for one in each)
    assert len({contents(one)[1] for one in each}) == 2


def test_a_timeout_in_scoring():
    async def long(completion):
        await asyncio.sleep(9)

    cleaned = []

    class Cleans(vf.Rubric):
        @vf.cleanup
        async def note(self, state):
            cleaned.append(state["trajectory_id"])

    rollout = rollout_of(single(rubric=Cleans(funcs=[long])), timeout_s=0.3)
    assert_failed(rollout, "timeout", "scoring")
    assert len(rollout.turns) == len(cleaned) == 1


@pytest.mark.parametrize(
    ("options", "spec", "stop", "why"),
    [
        ({"timeout_seconds": 0.3}, {}, "timeout_reached", "timeout_seconds = 0.3"),
        ({}, {"timeout_s": 0.3}, "timeout", "generating the rollout took longer than 0.3 s"),
    ],
)
def test_a_timeout_of_either_kind_and_what_was_said_before(options, spec, stop, why):
    async def reply(prompt):
        await asyncio.sleep(9 if "again" in prompt else 0)
        return "a"

    rollout = rollout_of(lambda: single(kind=Chatty, max_turns=3, **options), reply, **spec)
    assert_failed(rollout, "timeout", why)
    assert (rollout.stop, len(rollout.turns), contents(rollout)[-1]) == (stop, 1, "a")
    assert rollout.num_prompt_messages == 1


def test_overlong_and_cut_off_are_no_errors():
    def last(completion) -> float:
        return float(len(completion[-1]["content"]))

    rollout = rollout_of(single(last), policy=StubPolicy(lambda prompt: "x", max_model_len=10))
    assert rollout.overlong and rollout.error is None and not rollout.turns
    assert rollout.reward == 0.0
    build = lambda: single(lambda completion: 0.5, kind=Chatty, max_turns=3)  # noqa: E731
    rollout = rollout_of(build, policy=StubPolicy(lambda prompt: "y" * 20, max_model_len=60))
    assert rollout.overlong and rollout.error is None and len(rollout.turns) == 1
    assert (rollout.reward, rollout.stop) == (0.5, "prompt_too_long")
    rollout = only(played(made(single(), lambda prompt: "0123456789"), max_tokens=4))
    assert rollout.truncated and rollout.turns[0].finish_reason == "length"
    assert contents(rollout)[-1] == "0123"


def test_policy_failures_have_their_causes():
    for error in (InferenceLostError("waited 9 s"), ValueError("top_p out of range")):
        rollout = rollout_of(single(), lambda prompt, error=error: error)
        assert (rollout.cause, rollout.error) == ("inference", str(error))

    class Forgets(Chatty):
        async def get_prompt_messages(self, state):
            return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]

    build = lambda: single(kind=Forgets, max_turns=2)  # noqa: E731
    assert len(rollout_of(build).turns.chains) == 2  # no failure, but a new sample
    image = [user([{"type": "image_url", "image_url": {"url": "data:"}}])]
    env = made(single(dataset=Dataset.from_list([{"prompt": image, "answer": ""}])))
    assert only(played(env)).cause == "environment"
    assert "take the image out" in check_prompts(env, 1)


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
    _, hint, _ = (request["sampling"] for request in policy.servers.asked)
    assert (hint["max_tokens"], hint["temperature"]) == (3, 1.0)
    assert rollout.metrics["forced_sampling"] == 1.0
    assert said(rollout) == ["0\x03", "0\x03"]
    assert "user: hin" in text(rollout.turns[1].prompt_ids)


def test_sampling_of_the_environment_fills_what_is_not_configured():
    policy, given = StubPolicy(), {"stop": ["x"], "temperature": 0.1, "max_tokens": 5}
    rollout_of(single(sampling_args=given), policy=policy)
    configured = {"max_tokens": 64, "temperature": 1.0, "stop_token_ids": [3]}
    assert policy.servers.asked[0]["sampling"] == configured | {"stop": ["x"]}


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
    assert (rollout.reward, len(rollout.turns)) == (1.0, 0)
    assert rollout.completion_tokens == rollout.num_tokens == 2
    sampling = {"max_completion_tokens": 64, "temperature": 1.0, "top_k": 5}
    assert asked.items() >= {"model": "m", **sampling}.items()
    data = Dataset.from_list([{"prompt": "Once", "answer": "0"}])
    rollout, asked = at_endpoint(single(dataset=data, message_type="completion"), "0", min_p=0.1)
    assert (rollout.reward, asked["prompt"], asked["min_p"]) == (1.0, "Once", 0.1)
    for status, message in ((404, "no model m"), (401, "bad key")):
        rollout, _ = at_endpoint(single(), (status, message))
        assert_failed(rollout, "inference", message)
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
    prompt = "Once" if style == "completion" else [user("Once")]
    data = Dataset.from_list([{"prompt": prompt, "answer": ""}])
    html = web.Response(text="<html>Sign in to Proxy</html>", content_type="text/html")
    for said in (html, web.json_response({"error": {"message": "Sign in to Proxy"}})):
        rollout, _ = at_endpoint(single(dataset=data, message_type=style), said)
        told = ("the endpoint answered no completion: ", "Sign in to Proxy")
        assert_failed(rollout, "inference", *told)
        assert "Error: 1 validation" not in rollout.error


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

    for function, num_episodes in ((slow, 12), (relative, 7)):
        env = made(single(function), reply, max_generating=3, max_scoring=2)
        rollouts = played(env, num_episodes=num_episodes)
        assert {rollout.reward for rollout in rollouts} == {1.0}
        assert env.policy.servers.peak == 3 and scoring["peak"] == 2


def test_set_kwargs():
    env = made(single(), set_kwargs={"max_seq_len": 7, "timeout_seconds": 0.5})
    assert env.env.max_seq_len == 7 and env.env.timeout_seconds == 0.5
    build = lambda: vf.EnvGroup(  # noqa: E731
        [single(kind=Chatty, max_turns=5), single()], ["a", "b"]
    )
    assert len(rollout_of(build, set_kwargs={"max_total_completion_tokens": 3}).turns) == 2
    for name, hint in (("max_turn", "did you mean max_turns"), ("zzz", "there are")):
        with run_error(f"SingleTurnEnv has no such attribute; {hint}"):
            made(single(), set_kwargs={name: 1})


def test_data_sets_may_be_lazy_or_missing():
    built = []
    env = made(single(dataset=lambda: built.append(1) or rows(5)))
    assert (env.num_tasks("train"), env.num_tasks("eval"), built) == (5, 0, [1])
    env = made(single(dataset=None, eval_dataset=rows(2)))
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (0, 2)
    rollout = only(asyncio.run(env.play(order(1, split="eval"), 1))[0])
    assert contents(rollout)[0] == "say 1"

    def offline():
        raise ConnectionError("no network")

    place = r"its data set raised ConnectionError: no network \(at .*test_classic.py:\d+\); check"
    with run_error(place):
        made(single(dataset=offline))


@pytest.mark.parametrize(
    ("spec", "max_tokens", "said"),
    [
        (
            {},
            5000,
            "a prompt of 23 tokens and orchestrator.sampling.max_tokens = 5000 exceed "
            "model.max_model_len = 4096; raise model.max_model_len to 5023, lower max_tokens to "
            "4073, or leave eval task 0 out",
        ),
        (
            {"max_model_len": 20},
            1,
            "; raise model.max_model_len to 24, or leave eval task 0 out",
        ),
        (
            {"vocab_size": ord("u")},
            1,
            f": eval task 0: 'y' is token {ord('y')}, the model's embedding has {ord('u')} rows; "
            "give it one (transformers: resize_token_",
        ),
        ({}, 100, None),
    ],
)
def test_prompts_are_measured_before_they_are_played(spec, max_tokens, said):
    env = made(single(dataset=None, eval_dataset=rows(2)))
    env.policy.spec = structs.replace(env.policy.spec, **spec)
    found = check_prompts(env, max_tokens)
    assert found is said or said in found


def test_faults_at_load_name_place_and_remedy():
    def loads(size: int, fail: bool = False):
        raise KeyError("SOME_DATA_PATH")

    handler = signal.getsignal(signal.SIGTERM)
    place = r"KeyError: 'SOME_DATA_PATH' \(at .*test_classic.py:\d+\); check"
    for load_environment, args, said in (
        (loads, {"size": 1}, f"load_environment raised {place}"),
        (
            loads,
            {"sizes": 1},
            "unexpected keyword argument 'sizes'.*; its arguments are size, fail",
        ),
        (lambda: 3, {}, "returned a int, not a vf.Environment"),
    ):
        with run_error(said):
            made(load_environment, args=args)
    with run_error(r"environment not-there is not installed"):
        load(EnvSpec(name="x", id="not-there"), StubPolicy(str))
    made(lambda: single())
    assert signal.getsignal(signal.SIGTERM) is handler


def test_description_and_tasks_are_plain():
    def load_environment(size: int = 3, note=None):
        return calculator(system_prompt="be brief", parser=vf.ThinkParser())

    env = made(load_environment, args={"size": 5})
    about = json.loads(json.dumps(env.describe()))
    expected = {
        "arguments": {"size": "int = 5 (default: 3)", "note": "None"},
        "reward functions": {"exact": 1.0},
        "max turns": 4,
        "parser": "ThinkParser",
        "train tasks": 3,
        "eval tasks": 0,
        "system prompt": "be brief",
    }
    assert about.items() >= expected.items() and env.kind == "classic ToolEnv"
    assert about["metrics"][:2] == ["num_turns", "total_tool_calls"]
    assert [tool["name"] for tool in about["tools"]] == ["add", "fail"]
    task = env.task("train", 1)
    assert task["prompt"][-1] == user("say 1")
    assert task["answer"] == "5" and len(task["tools"]) == 2


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
    plain = {"id": "1", "name": "f", "arguments": "{}"}
    wired = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for said in (vf.ToolCall(**plain), json.dumps(plain), wired):
        message = chat_message(assistant(None, tool_calls=[said]))
        assert message == assistant("", tool_calls=[wired])
    assert chat_message(vf.TextMessage(content="t")) == user("t")
    assert error_text(vf.ModelError()) == "ModelError"


def test_a_version_without_what_the_adapter_needs_is_refused(monkeypatch):
    """Regression: the first task of a group of environments failed, or the end of the worker."""
    monkeypatch.delitem(sys.modules, "rl.envs.classic.environment")
    monkeypatch.delattr(vf.EnvGroup, "_route_child_input")
    with run_error(r"is classic, which needs verifiers>=.*has no attribute '_route_child_input'"):
        load(EnvSpec(name="x", id="sum-classic", kind="classic"), StubPolicy())
