"""Environments of the verifiers v1 API, played against a policy that says what a test wants."""

import asyncio
import itertools
import sys
import time
import types
from importlib.metadata import version
from pathlib import Path

import pytest

from rl.envs import load as adapters
from rl.envs.environment import check_prompts
from rl.envs.load import is_v1
from rl.envs.v1.environment import EndlessTasks, V1Environment
from rl.envs.v1.harness import HARNESS_ID
from rl.models.chat import RendererError
from rl.system.errors import RunError
from rl.wire.inference_client import InferenceLostError
from rl.wire.worker_messages import Endpoint, EnvSpec
from tests.envs.openai_server import openai_server
from tests.envs.stub_policy import StubPolicy, call, order, text
from tests.raised import run_error

ENVIRONMENTS = str(Path("tests/environments").absolute())


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENTS)  # tool servers are processes


def load(env_id, policy=None, args=None, **spec):
    return V1Environment(
        EnvSpec(name="mine", id=env_id, args=args or {}, **spec), policy or StubPolicy()
    )


def play(env, *orders):
    """The episodes' rollouts, one list for each order; or the RolloutError."""

    async def main():
        await env.start()
        try:
            played = await asyncio.gather(
                *(env.play(one, 1) for one in orders or [order()]), return_exceptions=True
            )
        finally:
            await env.close()
        return [one if isinstance(one, BaseException) else one[0] for one in played]

    return asyncio.run(main())


def saying(text):
    return StubPolicy(lambda prompt: text)


def program(policy, **harness):
    return load("v1-program", policy, {"agent": {"harness": harness}})


def add_up(prompt):
    """Calls the tool with the number asked for, then repeats its result."""
    number = prompt.split("what is ")[1].split(" ")[0]
    result = prompt.split("tool: ")[1:]
    return result[0].partition("\3")[0] if result else call("calc_add", a=int(number), b=2)


def is_append_only(turns):
    return all(
        b.prompt_ids[: len(a.prompt_ids) + len(a.completion_ids)] == a.prompt_ids + a.completion_ids
        for a, b in itertools.pairwise(turns)
    )


def test_a_turn_is_recorded_exactly_as_it_was_sampled():
    policy = saying("I say 1")
    [[rollout]] = play(load("v1-echo", policy, {"system": "be"}), order(1, seed=5))
    [turn] = rollout.turns
    assert text(turn.prompt_ids) == "system: be\3user: say 1\3assistant: "
    assert turn.completion_ids == [*map(ord, "I say 1"), 3] and turn.logprobs == [-0.5] * 8
    assert turn.policy_versions[0].policy_version == 7 and turn.policy_versions[0].num_tokens == 8
    asked = policy.servers.asked[0]
    assert (asked["server"], asked["sampling"]) == (
        3,
        {"max_tokens": 64, "temperature": 1.0, "seed": 5, "stop_token_ids": [3]},
    )
    assert rollout.reward == 1.0 and rollout.metrics == {"right": 2.0, "length": 7.0}
    assert (rollout.agent, rollout.trainable, rollout.stop, rollout.error) == (
        "agent",
        True,
        "agent_completed",
        None,
    )
    assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant"]


def test_where_the_prompt_ends_is_recorded_with_worked_examples_in_it():
    [[rollout]] = play(load("v1-echo", saying("1"), {"system": "be", "shown": True}), order(1))
    assert [message["role"] for message in rollout.messages] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    assert rollout.num_prompt_messages == 4
    assert rollout.messages[4]["content"] == "1"
    assert len(rollout.turns) == 1


def test_a_user_in_the_environment_extends_the_same_ids():
    [[rollout]] = play(load("v1-guess", saying("seven"), {"asks": 3}))
    assert rollout.num_prompt_messages == 2
    assert len(rollout.turns) == 4 and is_append_only(rollout.turns)
    assert text(rollout.turns[3].prompt_ids).count("guess again") == 3
    assert rollout.reward == 4.0 and rollout.stop == "user_closed"


@pytest.fixture(scope="module")
def with_tools():
    """Rollouts with one tool server, which takes seconds to start: by what happens in them."""
    malformed = iter([call("nope"), call("calc_add", a=1), "5", "5"])
    policy = StubPolicy(add_up)

    async def main():
        await env.start()
        played = {}
        for name, task in (("good", 0), ("raises", 1), ("malformed", 0), ("dies", 2), ("later", 0)):
            policy.servers.reply = (
                (lambda prompt: next(malformed)) if name == "malformed" else add_up
            )
            since = time.monotonic()
            [[played[name]]] = await env.play(order(task, max_tokens=99), 1)
            assert time.monotonic() - since < 60, name
        await env.close()
        return played

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS)
        patch.setenv("PYTHONPATH", ENVIRONMENTS)
        # it would end this process, as it ends a worker
        patch.setattr("rl.envs.v1.environment.TOOL_SERVER_CHECK_S", 600.0)
        env = load("v1-calc", policy, {"env": {"id": "v1-guess", "asks": 1}})
        assert [tool["function"]["name"] for tool in env.tools] == ["calc_add"] and env.task(
            "train", 0
        )["tools"] == env.tools
        return asyncio.run(main())


def test_tools_are_called_and_a_user_goes_on_from_there(with_tools):
    good = with_tools["good"]
    assert len(good.turns) == 3
    assert is_append_only(good.turns)
    assert good.reward == 1.0
    assert good.stop == "user_closed"
    assert [message["role"] for message in good.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert good.messages[2]["content"] == "5" and text(good.turns[0].prompt_ids).startswith(
        "[calc_add]"
    )


def test_calls_that_fail_or_cannot_be_made_are_answered(with_tools):
    raises, malformed = with_tools["raises"], with_tools["malformed"]
    assert "unlucky" in raises.messages[2]["content"] and not raises.error
    assert len(malformed.turns) == 4 and is_append_only(malformed.turns) and malformed.reward == 1.0
    assert "no tool 'nope'" in malformed.messages[2]["content"]
    assert "Field required" in malformed.messages[4]["content"]


def test_a_tool_server_that_dies_fails_rollouts_at_once(with_tools):
    for rollout in (with_tools["dies"], with_tools["later"]):
        assert rollout.cause == "environment" and rollout.reward == 0.0
        assert "tool server 'calc' at http://127.0.0.1" in rollout.error
        assert "does not answer" in rollout.error


def test_agents_are_rollouts_of_their_own():
    policy = saying("yes")
    policy.spec.max_kept = 9
    [[solver, judge]] = play(load("v1-duel", policy))
    assert (solver.agent, solver.trainable, judge.agent, judge.trainable) == (
        "solver",
        True,
        "judge",
        False,
    )
    assert solver.num_prompt_messages == judge.num_prompt_messages == 1
    assert solver.reward == 3.0 + 10.0
    assert solver.metrics == {"length": 3.0, "verdict": 1.0}
    assert judge.reward == 0.0
    assert len(solver.turns) == len(judge.turns) == 1
    assert judge.turns[0].finish_reason == "length"
    assert judge.truncated
    assert [asked["sampling"]["temperature"] for asked in policy.servers.asked] == [1.0, 0.0], (
        "an agent that is not trained has its own sampling"
    )
    assert [asked["sampling"].get("max_kept") for asked in policy.servers.asked] == [9, None]


def test_an_agent_that_is_trained_keeps_the_run_s_temperature():
    policy = saying("yes")
    play(load("v1-duel", policy, {"solver": {"sampling": {"temperature": 0.2, "max_tokens": 9}}}))
    asked = policy.servers.asked[0]["sampling"]
    assert asked["temperature"] == 1.0 and asked["max_tokens"] == 9


@pytest.mark.parametrize(
    ("env_id", "args", "cause", "turns", "text"),
    [
        (
            "v1-echo",
            {"task": {"fail": "setup"}},
            "environment",
            [0],
            "ZeroDivisionError: broken setup",
        ),
        ("v1-echo", {"task": {"fail": "finalize"}}, "environment", [1], "KeyError"),
        ("v1-echo", {"task": {"fail": "reward"}}, "reward", [1], "the judge is down"),
        (
            "v1-echo",
            {"task": {"fail": "exit"}},
            "reward",
            [1],
            "the environment's code called exit('bye')",
        ),
        (
            "v1-echo",
            {"task": {"fail": "hang"}, "agent": {"timeout": {"setup": 0.1}}},
            "timeout",
            [0],
            "setup timed out",
        ),
        ("v1-duel", {"env": {"fail": "run"}}, "environment", [1], "nobody came"),
        ("v1-duel", {"fail": "finalize"}, "reward", [1, 1], "no verdict"),
    ],
)
def test_failures_say_whose_they_are(env_id, args, cause, turns, text):
    [rollouts] = play(load(env_id, args=args))
    assert [len(rollout.turns) for rollout in rollouts] == turns
    for rollout in rollouts:
        assert rollout.cause == cause
        assert text in rollout.error
        assert rollout.stop == "error"
        assert rollout.reward == 0.0


def test_a_policy_that_cannot_be_asked_is_not_the_environment_s_fault():
    [[rollout]] = play(
        load("v1-echo", StubPolicy(lambda prompt: InferenceLostError("no server answered")))
    )
    assert rollout.cause == "inference" and "no server answered" in rollout.error


def test_a_prompt_that_the_template_cannot_show_is_the_environment_s_fault():
    def refuse(messages, tools=None):
        raise RendererError("only text can be rendered")

    policy = StubPolicy()
    policy.renderer.prompt_ids = refuse
    [[rollout]] = play(load("v1-echo", policy))
    assert rollout.cause == "environment" and "only text can be rendered" in rollout.error


def test_a_prompt_without_room_ends_the_talk_and_is_no_error():
    [[at_once]] = play(load("v1-echo", StubPolicy(max_model_len=10)))
    assert at_once.overlong and at_once.truncated and not at_once.error and not at_once.turns
    assert at_once.messages == [{"role": "user", "content": "say 0"}]
    [[later]] = play(load("v1-guess", StubPolicy(lambda prompt: "x" * 20, max_model_len=100)))
    assert later.overlong
    assert len(later.turns) == 1
    assert not later.error
    assert later.stop == "context_length"


def test_a_task_with_an_object_that_json_does_not_have_is_shown_all_the_same():
    """`rl eval` and `rl env` ask for tasks: an error there would end the worker."""
    env = load("v1-echo", args={"num": 1})
    data = env.tasks["train"][0].data.model_copy(update={"answer": len})
    env.tasks["train"] = [types.SimpleNamespace(data=data)]
    assert env.task("train", 0)["answer"] == "<built-in function len>"


def test_splits():
    env = load("v1-echo", args={"num": 3})
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (3, 3)
    assert env.task("train", 0)["prompt"] == [{"role": "user", "content": "say 0"}]
    assert env.task("eval", 0)["answer"] == "100"
    assert load("v1-echo", args={"split": "test"}).task("train", 0)["answer"] == "100", (
        "a split that is set holds for both"
    )
    assert load("v1-echo", args={"eval": {"num": 2}}).num_tasks("eval") == 2
    assert load("v1-guess").num_tasks("eval") == 2, (
        "without splits evaluation has the tasks of training"
    )


def test_an_endless_taskset_is_drawn_in_order_and_forgets_the_oldest(monkeypatch):
    env = load("v1-numbers")
    assert env.num_tasks("train") is None and env.num_tasks("eval") is None
    assert env.task("train", 0) != env.task("eval", 0)
    again = load("v1-numbers")
    assert env.task("train", 70) == again.task("train", 70), (
        "the same after a restart, in whatever order"
    )
    monkeypatch.setattr("rl.envs.v1.environment.KEPT_TASKS", 8)
    stream = EndlessTasks(env.env.taskset)
    first = [stream[i].data.prompt for i in range(30)]
    assert len(stream.kept) == 8
    assert [stream[i].data.prompt for i in (29, 3, 29)] == [first[29], first[3], first[29]] and len(
        stream.kept
    ) == 8
    [[rollout]] = play(env, order(5))
    assert rollout.messages[0]["content"] == env.task("train", 5)["prompt"][0]["content"]
    assert rollout.reward == 1.0


def test_prompts_are_measured_against_the_context():
    env = load("v1-echo")
    assert check_prompts(env, 64) is None
    assert "a prompt of 23 tokens and orchestrator.sampling.max_tokens = 4090" in check_prompts(
        env, 4090
    )


def test_what_an_environment_says_of_itself():
    about = load("v1-duel", args={"judge": {"max_turns": 2}}).describe()
    assert about["class"] == "v1_duel.DuelSet" and about["environment"] == "v1_duel.DuelEnv"
    assert about["arguments"]["fail"] == {"value": "", "default": "", "about": ""}
    assert about["agents"]["judge"] == {
        "harness": HARNESS_ID,
        "runtime": "subprocess",
        "max_turns": 2,
    }
    assert about["rewards"] == {"length": 1.0}
    about = load("v1-echo", args={"num": 3}).describe()
    assert about["arguments"]["num"] == {
        "value": 3,
        "default": 4,
        "about": "How many tasks there are.",
    }
    assert about["rewards"] == {"right": 0.5}
    assert about["metrics"] == ["length"]
    assert about["train tasks"] == 3
    assert load("v1-numbers").describe()["train tasks"] == "endless"
    assert (load("v1-echo").kind, load("v1-duel").kind) == ("v1 taskset", "v1 environment")


def test_reusable_environments_of_verifiers_are_paired_with_a_taskset():
    [attempts] = play(load("v1-echo", saying("0"), {"env": {"id": "best-of-n", "n": 3}}))
    assert [rollout.reward for rollout in attempts] == [1.0] * 3 and attempts[0].metrics[
        "pass_at_n"
    ] == 1.0
    said = iter(["want 0", "0", "###DONE###"])
    [rollouts] = play(
        load("user-sim", StubPolicy(lambda prompt: next(said)), {"taskset": {"id": "v1-echo"}})
    )
    assert {rollout.agent: (len(rollout.turns), rollout.trainable) for rollout in rollouts} == {
        "user": (2, False),
        "assistant": (1, True),
    }


@pytest.mark.parametrize(
    ("env_id", "args", "text"),
    [
        ("v1-echo", {"nun": 3}, "has no argument nun; did you mean num?"),
        (
            "v1-echo",
            {"agent": {"max_turn": 3}},
            "args.agent.max_turn is not known; did you mean max_turns?",
        ),
        ("v1-echo", {"task": {"fial": "x"}}, "args.task.fial is not known; did you mean fail?"),
        ("v1-echo", {"num": "three"}, "args.num: Input should be a valid integer"),
        ("v1-echo", {"num": 0}, "has no train tasks"),
        ("v1-echo", {"agent": {"harness": {"id": "nope"}}}, "harness 'nope' not found"),
        ("v1-echo", {"agent": {"model": "gpt"}}, "asks for the model gpt"),
        ("v1-echo", {"eval": {"split": "dev"}}, "args.split: Input should be 'train' or 'test'"),
        ("user-sim", {}, "name it with args.taskset.id"),
    ],
)
def test_faulty_arguments_are_refused_with_what_is_right(env_id, args, text):
    with pytest.raises(RunError) as error:
        load(env_id, args=args)
    assert text in str(error.value)


def test_set_kwargs_are_for_classic_environments():
    with run_error("set_kwargs"):
        load("v1-echo", set_kwargs={"max_turns": 3})


def test_kinds_are_detected():
    for env_id in ("v1-echo", "someone/v1-duel", "user-sim", "textarena", "v1-both"):
        assert is_v1(env_id), env_id
    with run_error(r"raised KeyError: 'SOME_KEY' \(at .*raises_on_import.py:3\)"):
        is_v1("raises-on-import")
    with run_error("has no function load_environment"):
        is_v1("no-environment")
    with run_error("is not installed"):
        is_v1("not-there")


@pytest.mark.skipif(version("verifiers") >= "0.4", reason="verifiers 0.4 has no classic API")
def test_a_classic_package_is_told_from_its_exports():
    assert not is_v1("say-digit")


def test_a_harness_of_the_package_s_own_is_served_over_http_and_may_stream():
    policy = saying("on it")
    env = load("v1-program", policy)
    assert env.describe()["agents"]["agent"]["harness"] == "v1-program"
    [[rollout]] = play(env)
    assert rollout.reward == 1.0 and len(rollout.turns) == 1 and rollout.trainable
    asked = policy.servers.asked[0]["sampling"]
    assert (asked["max_tokens"], asked["stop"], asked["temperature"]) == (5, ["."], 1.0), (
        "the temperature is the run's"
    )
    assert rollout.metrics["forced_sampling"] == 1.0, "and that is counted"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"response_format": {"type": "json_object"}},
            "response_format = {'type': 'json_object'}: the policy gives each call one free answer",
        ),
        ({"tool_choice": "required", "temperature": 1.0}, "tool_choice = 'required': the policy"),
        (
            {
                "n": 1,
                "response_format": {"type": "text"},
                "tool_choice": "none",
                "temperature": 1,
                "top_p": 1.0,
                "top_k": 0,
            },
            None,
        ),
    ],
)
def test_what_a_call_asks_for_in_vain_is_refused(body, text):
    """Regression: a harness that wanted JSON got free text, in silence."""
    [[rollout]] = play(program(saying("on it"), body=body))
    assert rollout.cause == ("environment" if text else None) and (text or "") in (
        rollout.error or ""
    )
    assert "forced_sampling" not in rollout.metrics


@pytest.mark.parametrize(
    ("also", "cause", "reward"), [("boom", "inference", 0.0), ("again", None, 1.0)]
)
def test_a_harness_that_swallows_a_failed_call_is_not_trained(also, cause, reward):
    """Inference was lost; verifiers 0.4 scores what the harness makes of it."""
    policy = StubPolicy(lambda prompt: InferenceLostError("gone") if "boom" in prompt else "on it")
    [[rollout]] = play(program(policy, also=[also]))
    assert (rollout.cause, rollout.reward) == (cause, reward) and (
        "gone" in rollout.error if cause else not rollout.error
    )


@pytest.mark.parametrize(
    ("then", "cause"),
    [(["fails once", "again"], "inference"), (["fails once", "again", "fails once"], None)],
)
def test_a_failed_call_that_is_not_asked_again_fails_the_rollout(then, cause):
    """Whatever is answered after it: the harness went on without its answer."""
    failures = iter([InferenceLostError("gone")])
    policy = StubPolicy(
        lambda prompt: next(failures, "on it") if "fails once" in prompt else "on it"
    )
    [[rollout]] = play(program(policy, then=then))
    assert (rollout.cause, rollout.error) == (cause, cause and "gone") and len(
        rollout.turns
    ) == len(then)


def test_an_answer_that_comes_after_the_end_of_its_trace_is_not_trained():
    """Verifiers refuses it, so the harness never saw it: here another call at the same time had
    no room."""

    async def reply(prompt):
        await asyncio.sleep(0.5 if "late" in prompt else 0.0)
        return "late" if "late" in prompt else "on it"

    policy = StubPolicy(reply, max_model_len=100)
    [[rollout]] = play(program(policy, also=["late", "x" * 100]))
    assert len(policy.servers.asked) == 2 and rollout.overlong and not rollout.error
    assert [text(turn.completion_ids) for turn in rollout.turns] == ["on it"]


def test_a_version_that_makes_its_clients_elsewhere_is_refused(monkeypatch):
    """Regression: the name was set beside what verifiers uses, and every rollout failed."""
    for module in ("client", "environment"):
        monkeypatch.delitem(sys.modules, f"rl.envs.v1.{module}")
    monkeypatch.delattr("verifiers.v1.interception.server.resolve_client")
    with run_error(r"which needs verifiers>=.*has no attribute 'resolve_client'"):
        adapters.load(EnvSpec(name="x", id="v1-echo", kind="v1"), StubPolicy())


def test_tasks_without_a_reward_are_told(monkeypatch):
    told = "every reward is 0, as its tasks have no @vf.reward and no judge with a weight"
    assert load("v1-echo", args={"task": {"rewards": {"right": {"weight": 0.0}}}}).notice == told
    # its finalize records one
    assert (
        load("v1-duel", args={"taskset": {"task": {"rewards": {"length": {"weight": 0.0}}}}}).notice
        == ""
    )
    assert load("v1-echo").notice == load("v1-duel").notice == ""
    monkeypatch.delattr("v1_echo.EchoTask.right")
    env = load("v1-echo")
    assert (env.notice, play(env)[0][0].reward) == (told, 0.0)


def test_other_dialects_are_refused():
    [[rollout]] = play(
        load("v1-program", args={"agent": {"harness": {"route": "/messages", "stream": False}}})
    )
    assert rollout.cause == "environment"
    assert "the policy answers chat completions only" in rollout.error


def test_any_endpoint_can_be_evaluated():
    asked, endpoint = [], Endpoint(base_url="", model="m", api_key_var="NO_SUCH_KEY")
    env = load("v1-echo", StubPolicy(endpoint=endpoint))

    async def play_there():
        async with openai_server(lambda body: asked.append(body) or "it is 1") as url:
            endpoint.base_url = url
            await env.start()
            [[rollout]] = await env.play(order(1), 1)
            await env.close()
        return rollout

    rollout = asyncio.run(play_there())
    assert (len(rollout.turns), rollout.reward) == (0, 1.0)
    assert rollout.completion_tokens == rollout.num_tokens == 2
    assert asked[0].items() >= {"temperature": 1.0, "max_tokens": 64, "model": "m"}.items()
