"""An environment of ours as an agent of NeMo Gym: its policy, its rows and its results."""

import asyncio
import json

import pytest

from rl.envs.classic.environment import ClassicEnvironment
from rl.envs.nemo_gym.serving import GymPolicy, aggregate, sampling_of, task_row, to_result
from rl.envs.nemo_gym.wire import chat_prompt, decode_reply, to_rollout
from rl.envs.policy import RolloutError
from rl.envs.v1.environment import V1Environment
from rl.system.errors import RunError
from rl.wire.inference_client import PromptTooLongError
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Rollout, Turn
from rl.wire.worker_messages import EnvSpec, PolicySpec
from tests.envs.model_server import ModelServer
from tests.envs.stub_policy import order
from tests.models.conversations import assistant, user

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
}
USER = user("1 + 2?")


async def chatting(server, *added, tools=None):
    """Asks for an answer after each of the further messages; the turns, and the answers."""
    async with server:
        policy = GymPolicy(PolicySpec(head_server=server.url, max_model_len=1 << 31), "env")
        chat, messages, answers = (
            policy.chat(policy, 0, {"temperature": 0.5, "metadata": {"x": "y"}}),
            [],
            [],
        )
        for more in added:
            messages += more
            _, answer = await chat.answer(messages, tools, {"max_tokens": 9, "temperature": 2.0})
            answers.append(answer)
        await policy.head.close()
    return list(chat.turns), answers


def test_earlier_answers_go_back_as_they_came():
    said = iter([{"content": "<think>hm</think>", "tool_calls": [CALL]}, {"content": "3"}])
    server = ModelServer(lambda body: next(said))
    # environments drop the reasoning
    called = assistant("", tool_calls=[CALL])
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns, answers = asyncio.run(chatting(server, [USER], [called, result], tools=tools))
    assert [(turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in turns] == [
        ([1], [2], [-0.5]),
        ([1, 2], [3], [-0.5]),
    ]
    assert (
        answers[0].reasoning,
        answers[0].content,
        answers[0].tool_calls[0].name,
        answers[1].content,
    ) == ("hm", "", "add", "3")
    first, second = server.asked
    assert first == {
        "messages": [USER],
        "tools": tools,
        "temperature": 0.5,
        "metadata": {"x": "y"},
        "max_tokens": 9,
    }
    sent = second["messages"]
    assert (
        sent[1]["content"] == "<think>hm</think>"
        and sent[1]["generation_token_ids"] == [2]
        and sent[2] == result
    )
    assert "routed_experts" not in sent[1]  # with null there NeMo Gym drops the tokens
    assert server.cookies == [None, "s1"]


def test_a_chat_that_is_no_continuation_is_sent_as_it_is():
    server = ModelServer(lambda body: {"content": "a"})
    other = [assistant("b", reasoning_content="so"), USER]
    asyncio.run(chatting(server, [USER], other))
    assert server.asked[1]["messages"] == [
        USER,
        assistant("<think>so</think>b"),
        USER,
    ]


def test_what_a_model_server_cannot_do():
    with pytest.raises(PromptTooLongError):
        asyncio.run(chatting(ModelServer(lambda body: None), [USER]))
    with pytest.raises(
        RolloutError, match=r"has no agent env: start ng_run with the entry"
    ) as caught:
        asyncio.run(chatting(ModelServer(lambda body: {"content": "a"}, agent="other"), [USER]))
    assert caught.value.cause == "inference"
    turns, _ = asyncio.run(
        chatting(ModelServer(lambda body: {"content": "a"}, tokens=False), [USER])
    )
    assert (turns[0].prompt_ids, turns[0].completion_ids) == ([], [])
    with pytest.raises(RolloutError, match="completion style"):
        GymPolicy(PolicySpec(head_server="http://127.0.0.1:9"), "env").renderer.encode("a")


@pytest.mark.parametrize("kind", ["classic", "v1"])
def test_several_turns_of_either_api_become_a_result(kind, monkeypatch):
    monkeypatch.syspath_prepend("tests/environments")
    if kind == "classic":
        spec, cls, said = (
            EnvSpec(name="env", id="say-digit", args={"turns": 2}),
            ClassicEnvironment,
            ["0", "again"],
        )
    else:
        spec, cls, said = (
            EnvSpec(name="env", id="v1-guess"),
            V1Environment,
            ["<think>small</think>1", "2", "3", "4", "5"],
        )
    answers = iter(said)
    server = ModelServer(lambda body: {"content": next(answers)})

    async def run():
        async with server:
            await env.start()
            env.policy.head.url = server.url
            [[rollout]] = await env.play(order(0, temperature=0.7), 1)
            await env.close()
            await env.policy.head.close()
            return rollout

    env = cls(
        spec, GymPolicy(PolicySpec(head_server="http://unknown", max_model_len=1 << 31), "env")
    )
    row = json.loads(json.dumps(task_row("env", "train", 0, env.task("train", 0))))
    rollout = asyncio.run(run())
    assert rollout.error is None, rollout.error
    assert [body["temperature"] for body in server.asked] == [0.7] * len(server.asked) and len(
        server.asked
    ) > 1
    result = json.loads(json.dumps(to_result(row, rollout)))
    answered = [item for item in result["response"]["output"] if "generation_token_ids" in item]
    assert [item["generation_token_ids"] for item in answered] == [
        [n + 2] for n in range(len(server.asked))
    ]
    # What it becomes in a run of ours on the other side of NeMo Gym:
    again = to_rollout(
        decode_reply(json.dumps(result)),
        {"responses_create_params": row["responses_create_params"] | {"temperature": None}},
        3,
        {},
    )
    assert (again.reward, again.messages, again.num_prompt_messages) == (
        rollout.reward,
        rollout.messages,
        rollout.num_prompt_messages,
    )
    assert [turn.token_ids for turn in again.turns] == [turn.token_ids for turn in rollout.turns]
    assert len(again.turns.chains) == 1
    metrics = {"num_turns": 2.0, "metrics/reward": 1.0} if kind == "classic" else {"said": 3.0}
    assert again.metrics.items() >= metrics.items() and len(again.metrics) == len(rollout.metrics)


def turn(prompt, completion, finish="stop"):
    spans = [VersionSpan(0, len(completion))]
    return Turn.of(prompt, completion, [-0.5] * len(completion), spans, finish)


def test_a_row_shows_prompt_and_tools():
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
    messages = [
        USER,
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    row = task_row("env", "eval", 4, {"prompt": messages, "tools": [tool], "answer": "3"})
    assert chat_prompt(row["responses_create_params"]) == (messages, [tool])
    assert (row["rl_task"], row["agent_ref"]["name"]) == (
        {"split": "eval", "index": 4},
        "env",
    ) and "answer" not in row
    assert (
        task_row("env", "train", 0, {"prompt": "Once"})["responses_create_params"]["input"][0][
            "content"
        ]
        == "Once"
    )
    with pytest.raises(RunError, match="not text"):
        task_row(
            "env",
            "train",
            0,
            {"prompt": [user([{"type": "image_url", "image_url": {}}])]},
        )


def test_the_sampling_of_a_row():
    params = {
        "input": [],
        "tools": [],
        "temperature": 0.5,
        "max_output_tokens": 7,
        "top_p": None,
        "parallel_tool_calls": True,
    }
    assert sampling_of(params) == {"temperature": 0.5, "max_tokens": 7}
    assert sampling_of({"input": "", "tool_choice": "none", "metadata": {"extra_body": "{}"}}) == {
        "tool_choice": "none",
        "metadata": {"extra_body": "{}"},
    }
    with pytest.raises(
        ValueError, match=r"responses_create_params\.instructions cannot be passed on"
    ):
        sampling_of({"input": [], "instructions": "be kind"})


def test_results_of_what_ended_badly():
    row = {"responses_create_params": {"input": [USER]}, "accuracy": "of the row"}
    said = [USER, assistant("3")]

    def result_of(**fields):
        return to_result(row, Rollout(text=said, num_prompt_messages=1, **fields))

    result = result_of(turns=[turn([1], [2])], reward=0.5, metrics={"accuracy": 1.0})
    assert (result["reward"], result["accuracy"], result["metrics/accuracy"]) == (
        0.5,
        "of the row",
        1.0,
    )
    assert (
        result["response"]["incomplete_details"] is None
        and result["response"]["usage"]["total_tokens"] == 2
    )
    cut = result_of(turns=[turn([1], [2], "length")], truncated=True)
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    full = result_of(turns=[turn([1], [2])], truncated=True, overlong=True)
    assert [bool(item.get("generation_token_ids")) for item in full["response"]["output"]] == [
        True,
        False,
    ]
    hidden = result_of(turns=[turn([1], [2]), turn([5], [6])], reward=1.0)
    assert "reward" not in hidden and "shows 1 answers of 2" in hidden["error"]
    failed = result_of(error="KeyError: 'gold'", cause="reward")
    assert "reward" not in failed
    with pytest.raises(RolloutError, match="KeyError: 'gold'") as caught:
        decode_reply(json.dumps(failed))
    assert caught.value.cause == "reward"


def test_statistics_leave_failed_rollouts_out():
    rows = [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.5)]
    results = [
        {"_ng_task_index": task, "_ng_rollout_index": i, "reward": reward, "note": "x"}
        for task, i, reward in rows
    ]
    results[2]["response"] = {"usage": {"output_tokens": 7, "details": {}}}
    found = aggregate([*results, {"_ng_failure_class": "reward", "_ng_task_index": 1}])
    assert found["key_metrics"] == {"mean/reward": 0.5, "mean/output_tokens": 7.0}
    assert (
        found["agent_metrics"]["std/reward"] == 0.5 and found["agent_metrics"]["max/reward"] == 1.0
    )
    assert [
        (group["_ng_task_index"], group["mean/reward"]) for group in found["group_level_metrics"]
    ] == [(0, 0.5), (1, 0.5)]
