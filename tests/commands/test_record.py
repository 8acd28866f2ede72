"""`rl.record`: OpenAI's own clients play the policy, and what they play is written so that it
can be trained."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import rl
from rl.commands.record import Recorder, ServerProcess
from rl.orchestrator.recorded.lines import parse
from rl.system.errors import RunError
from rl.wire.inference_client import InferenceLostError
from tests import jsonl
from tests.envs.stub_policy import StubPolicy, StubServers, call

SAMPLING = {"max_tokens": 64, "temperature": 1.0}
ASK = [{"role": "user", "content": "1 + 1?"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def ask(episode, messages=ASK, **more):
    return episode.client.chat.completions.create(model="any", messages=messages, **more)


def say(text):
    return [{"role": "user", "content": text}]


async def nothing(self):
    """A stub has no connections."""


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(StubServers, "close", nothing, raising=False)
    policy = StubPolicy(
        lambda prompt: (
            call("add")
            if prompt.startswith("[add]") and "tool:" not in prompt
            else f"turn {prompt.count('?')}"
        )
    )
    with Recorder(policy, SAMPLING, "stub", tmp_path / "sub" / "r.jsonl") as recorder:
        yield recorder


def written(recorder):
    return jsonl.read(recorder.output)


def test_a_conversation_is_one_chain_of_exactly_its_ids(recorder):
    episode = recorder.episode("sum", env="math")
    first = ask(episode)
    assert first.choices[0].message.content == "turn 1" and first.choices[0].finish_reason == "stop"
    messages = [
        *ASK,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "user", "content": "sure?"},
    ]
    second = ask(episode, messages, max_tokens=3)
    assert second.choices[0].finish_reason == "length" and second.usage.completion_tokens == 3
    rollout = episode.finish(0.5, {"right": 1.0})
    assert len(rollout.turns) == 2 and len(rollout.turns.chains) == 1
    (one,) = written(recorder)
    assert {
        key: one[key]
        for key in (
            "env",
            "task",
            "sample",
            "agents",
            "reward",
            "metrics",
            "outcome",
            "policy",
            "temperature",
        )
    } == {
        "env": "math",
        "task": "sum",
        "sample": 0,
        "agents": 1,
        "reward": 0.5,
        "metrics": {"right": 1.0},
        "outcome": "truncated",
        "policy": "stub",
        "temperature": 1.0,
    }
    asked = [one["token_ids"] for one in recorder.policy.servers.asked]
    assert [played["prompt_ids"] for played in one["turns"]] == asked
    assert asked[1][: len(asked[0])] == asked[0] and one["turns"][1]["policy_versions"] == [[7, 3]]
    assert one["messages"][-1] == {"role": "assistant", "content": "tur"}
    assert one["num_prompt_messages"] == 1
    assert len(parse(one, "place").turns) == 2
    with pytest.raises(RunError, match="finished already"):
        episode.finish(1.0)
    with pytest.raises(openai.NotFoundError, match="no such episode"):
        ask(episode)


def test_tools_and_asyncio(recorder):
    episode = recorder.episode(3)

    async def play():
        async with episode.async_client as client:
            answer = (
                await client.chat.completions.create(model="any", messages=ASK, tools=[TOOL])
            ).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.tool_calls[0].function.name == "add"
            result = {
                "role": "tool",
                "tool_call_id": answer.message.tool_calls[0].id,
                "content": "2",
            }
            messages = [*ASK, answer.message.model_dump(exclude_none=True), result]
            return await asyncio.gather(
                *(
                    client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
                    for _ in range(2)
                )
            )

    both = asyncio.run(play())
    assert [one.choices[0].message.content for one in both] == ["turn 1"] * 2
    rollout = episode.finish(1)
    assert len(rollout.turns) == 3 and len(rollout.turns.chains) == 2  # both continue the call


def test_samples_of_a_task_are_numbered_on_in_a_file_that_exists(recorder):
    for task in ("a", "b", "a"):
        episode = recorder.episode(task)
        ask(episode)
        episode.finish(0)
    with pytest.raises(RunError, match=r"r.jsonl: another `rl collect` or rl.record writes it"):
        Recorder(recorder.policy, SAMPLING, "stub", recorder.output)
    recorder.on_close.close()
    again = Recorder(recorder.policy, SAMPLING, "stub", recorder.output)
    episode = again.episode("a")
    ask(episode)
    episode.finish(0)
    again.close()
    assert [(one["task"], one["sample"]) for one in written(recorder)] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 2),
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stream": True}, "stream: answers come in one piece"),
        ({"temperature": 0.3}, "orchestrator__sampling__temperature=0.3"),
        ({"top_p": 0.9}, "top_p: is not supported by rl.record"),
        ({"tool_choice": "required"}, "tool_choice = 'required': the policy gives each call one"),
        ({"messages": []}, "messages: give a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "only text can be rendered",
        ),
    ],
)
def test_what_would_not_be_done_is_refused(recorder, more, message):
    episode = recorder.episode(0)
    with pytest.raises(openai.BadRequestError, match=message):
        ask(episode, **more)
    with pytest.raises(RunError, match="has no call of the policy"):
        episode.finish(1)
    ask(episode, temperature=1.0, n=1, user="me", tool_choice="none", tools=[TOOL])
    assert len(episode.finish(1).turns) == 1 and len(written(recorder)) == 1


def test_a_failed_call_fails_the_rollout_and_a_full_context_truncates_it(recorder):
    recorder.policy.servers.reply = lambda prompt: (
        InferenceLostError("gone") if "2?" in prompt else "x"
    )
    failed, long = recorder.episode(0), recorder.episode(1)
    for text in ("1?", "2?"):
        try:
            ask(failed, say(text))
        except openai.BadRequestError as error:  # as an agent that goes on
            assert "gone" in str(error)
    ask(long)
    with pytest.raises(openai.BadRequestError, match=r"fills model\.max_model_len"):
        ask(long, say("x" * 5000))
    failed.finish(1)
    long.finish(1)
    lines = written(recorder)
    assert [(one["outcome"], one["reward"]) for one in lines] == [
        ("failed", None),
        ("overlong", 1.0),
    ]
    assert "gone" in lines[0]["error"]


def test_a_reward_must_be_a_number(recorder):
    episode = recorder.episode(0)
    ask(episode)
    with pytest.raises(RunError, match="the reward is nan"):
        episode.finish(float("nan"))
    episode.finish(1)
    assert len(written(recorder)) == 1


def test_an_answer_that_nobody_waits_for_is_no_turn(recorder):
    arrived, finishes = asyncio.Event(), asyncio.Event()

    async def slowly(prompt):
        arrived.set()
        await finishes.wait()
        return "late"

    def reply(prompt):
        return slowly(prompt) if "slow" in prompt else "quick"

    recorder.policy.servers.reply = reply
    episode = recorder.episode(0)

    async def play():
        slow = episode.async_client.chat.completions.create(model="any", messages=say("slow"))
        task = asyncio.create_task(slow)
        while not arrived.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())
    while recorder.policy.servers.busy:
        asyncio.run(asyncio.sleep(0.01))
    ask(episode, say("again"))
    assert [one["role"] for one in episode.finish(0).messages] == ["user", "assistant"]
    assert len(episode.conversation.turns) == 1


def test_the_end_of_the_server_ends_a_call(recorder, tmp_path, monkeypatch):
    program = tmp_path / "server"
    program.write_text(
        f"#!/bin/sh\necho {tmp_path / 'config.toml'}\nread line\necho out of memory\nexit 7\n"
    )
    program.chmod(0o755)
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setattr("rl.commands.record.PYTHON", (str(program),))
    recorder.server = ServerProcess([])
    hangs = asyncio.Event()
    recorder.policy.servers.reply = lambda prompt: hangs.wait()
    episode = recorder.episode(0)
    recorder.server.process.stdin.write("\n")
    recorder.server.process.stdin.flush()
    with pytest.raises(openai.BadRequestError, match="the policy's server has ended with 7"):
        ask(episode)
    assert episode.finish(1).outcome == "failed"


@pytest.mark.proof
def test_what_an_agent_has_played_with_a_real_engine_is_trained(tmp_path, model):
    """An agent of two turns, eight episodes at once: the trainer computes the recorded
    log-probabilities itself."""
    settings = {
        "model__name": str(model),
        "model__dtype": "float32",
        "model__max_model_len": 512,
        "output_dir": str(tmp_path),
    }

    def play(recorder, number):
        episode, messages = (
            recorder.episode(number // 4, env="talk"),
            [{"role": "user", "content": f"Say {number // 4}"}],
        )
        for again in ("Again", ""):
            answer = (
                episode.client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=8
                )
                .choices[0]
                .message
            )
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": again},
            ]
        episode.finish(float(number % 2))

    with (
        rl.record(None, tmp_path / "r.jsonl", **settings) as recorder,
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(lambda number: play(recorder, number), range(8)))
    lines = [parse(line, "line") for line in jsonl.read(tmp_path / "r.jsonl")]
    assert len(lines) == 8
    assert all(
        len(one.turns) == 2 and one.turns[0].policy_versions[0].policy_version == 0 for one in lines
    )
    more = {
        "recorded__rollouts": str(tmp_path / "r.jsonl"),
        "name": "r",
        "orchestrator__batch_size": 8,
        "learning_rate": 1e-3,
    }
    run = rl.train(None, **settings, **more)
    (kl,) = run.curve("mismatch_kl/mean")[1]
    assert abs(kl) < 1e-8 and run.curve("rollouts/trained")[1].tolist() == [8]
    assert all(
        len(sample.token_ids) > 30 and sample.loss_mask.sum() > 2 for sample in run.tokens(step=1)
    )
