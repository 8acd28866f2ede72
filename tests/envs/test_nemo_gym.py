import asyncio
import json
import math
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
import yaml
from aiohttp import web

from rl.envs.nemo_gym import wire
from rl.envs.nemo_gym.environment import NemoGymEnvironment
from rl.envs.policy import RolloutError
from rl.wire.inference_client import InferenceLostError
from rl.wire.messages import VersionSpan
from rl.wire.turns import answer_digest
from rl.wire.worker_messages import Endpoint, EnvSpec, PlayOrder, PolicySpec
from tests.models.conversations import assistant, user
from tests.raised import run_error
from tests.web import WebServer

POLICY_URL = "http://127.0.0.1:8321/v1"


def tokens(prompt, completion):
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": completion,
        "generation_log_probs": [-0.5] * len(completion),
    }


def says(text, **fields):
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        **fields,
    }


def reply(
    *output,
    reward=1.0,
    incomplete=None,
    temperature=None,
    **extra,
):
    details = {"reason": incomplete} if incomplete else None
    response = {
        "output": output,
        "incomplete_details": details,
        "usage": {"output_tokens": 7},
        "temperature": temperature,
    }
    return {"response": response, "reward": reward, **extra}


ANSWER = reply(says("5", **tokens([1, 2], [3, 4])))


class NemoGym:
    """Head server and agents `adder` and `speller` in one; `answer(agent, row)` gives what
    `/run` replies: JSON, or a status and a text."""

    def __init__(
        self,
        answer=lambda agent, row: ANSWER,
        agents=("adder", "speller"),
        returns_tokens=True,
        policy_url=POLICY_URL,
    ):
        self.answer, self.agents, self.returns_tokens, self.policy_url = (
            answer,
            agents,
            returns_tokens,
            policy_url,
        )
        self.asked = []
        self.port = 0

    def handler(self, agent):
        async def run(request):
            row = await request.json()
            self.asked.append((agent, row, dict(request.cookies)))
            given = self.answer(agent, row)
            if isinstance(given, tuple):
                return web.Response(status=given[0], text=given[1])
            done = web.Response(text=json.dumps(given), content_type="application/json")
            done.set_cookie("session", "of this episode")
            return done

        return run

    async def config(self, _):
        model = {
            "base_url": "${policy_base_url}",
            "return_token_id_information": self.returns_tokens,
        }
        servers = {
            name: {
                "responses_api_agents": {
                    "simple_agent": {
                        "host": "127.0.0.1",
                        "port": port,
                        "model_server": {"name": "policy_model"},
                    }
                }
            }
            for name, port in self.ports.items()
        }
        config = {
            "policy_base_url": self.policy_url,
            "policy_model": {"responses_api_models": {"vllm_model": model}},
            **servers,
        }
        return web.json_response(yaml.safe_dump(config))

    async def serve(self, *routes, port=0):
        server = await self.servers.enter_async_context(WebServer(*routes, port=port))
        return server.port

    async def __aenter__(self):
        self.servers = AsyncExitStack()
        self.ports = {
            name: await self.serve(web.post("/run", self.handler(name))) for name in self.agents
        }
        self.port = await self.serve(
            web.get("/global_config_dict_yaml", self.config), port=self.port
        )
        return self

    async def __aexit__(self, *_):
        await self.servers.aclose()


FIVE = says("5", **tokens([1], [2]))


def replying(*output, returns_tokens=True, **fields):
    """A gym whose agents all reply the same."""
    return NemoGym(lambda *_: reply(*output, **fields), returns_tokens=returns_tokens)


class Servers:
    """Stands for InferenceServers."""

    def __init__(self, version=3):
        self.version = version
        self.others = {}
        """Further servers, and what they hold."""
        self.answered = {}
        """The versions of answers that the servers remember."""

    def find(self):
        return [POLICY_URL.removesuffix("/v1"), *self.others]

    async def loaded_version(self, urls=()):
        if self.version < 0:
            raise InferenceLostError("waited 1 s for inference server 0")
        held = {POLICY_URL.removesuffix("/v1"): self.version} | self.others
        return min(version for url, version in held.items() if not urls or url in urls)

    async def versions(self, digests, urls=()):
        return {digest: spans for digest, spans in self.answered.items() if digest in digests}


def policy(**spec):
    return SimpleNamespace(
        endpoint=spec.get("endpoint"), servers=Servers(), spec=PolicySpec(**spec)
    )


def write_rows(path, *agents):
    rows = [
        {
            "responses_create_params": {"input": f"task {i}", "temperature": 0.1, "top_p": 0.9},
            "answer": i,
            "difficulty": 2.0,
        }
        | ({"agent_ref": {"name": agent}} if agent else {})
        for i, agent in enumerate(agents)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def order(task=0, **sampling):
    asked = {"temperature": 1.0, "max_tokens": 16} | sampling
    return PlayOrder(play_id=0, split="train", task=task, num_episodes=1, sampling=asked, session=0)


def play(tmp_path, gym, *, task=0, agents=("adder",), with_policy=None, sampling=None, **spec):
    """One episode against `gym`; the rollout."""

    async def run():
        async with gym:
            env = make(tmp_path, gym, agents, with_policy, **spec)
            await env.start()
            try:
                [[rollout]] = await env.play(order(task, **(sampling or {})), 1)
                return rollout
            finally:
                await env.close()

    return asyncio.run(run())


def make(tmp_path, gym, agents=("adder",), with_policy=None, **spec):
    rows = write_rows(tmp_path / "rows.jsonl", *agents)
    head = f"http://127.0.0.1:{gym.port}/"
    return NemoGymEnvironment(
        EnvSpec(name="gym", dataset=rows, head_server=head, **spec), with_policy or policy()
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(wire, "PAUSES_S", (0.01, 0.01, 0.01, 0.01, 0.01))


def fails(cause, text, *args, **kwargs):
    with pytest.raises(RolloutError, match=text) as caught:
        play(*args, **kwargs)
    assert caught.value.cause == cause


def test_a_row_goes_to_the_agent_that_it_names_with_our_sampling(tmp_path):
    gym = NemoGym(lambda agent, row: reply(says(agent, **tokens([1], [2]))))
    rollout = play(
        tmp_path,
        gym,
        task=1,
        agents=("adder", "speller"),
        args={"max_tool_calls": 2},
        sampling={"top_k": 5, "seed": 7},
    )
    [(agent, row, cookies)] = gym.asked
    assert (agent, row["answer"], cookies) == ("speller", 1, {})
    params = row["responses_create_params"]
    metadata = json.loads(params.pop("metadata")["extra_body"])
    assert metadata == {"top_k": 5, "seed": 7}
    # the row's top_p is gone
    assert params == {
        "input": "task 1",
        "temperature": 1.0,
        "max_output_tokens": 16,
        "max_tool_calls": 2,
    }
    assert rollout.messages == [
        user("task 1"),
        assistant("speller"),
    ]


def test_a_row_without_agent_goes_to_the_only_one(tmp_path):
    assert play(tmp_path, NemoGym(agents=("adder",)), agents=(None,)).reward == 1.0
    with run_error(r"agents are adder, speller; .*ng_prepare_data \+mode=example_validation"):
        play(tmp_path, NemoGym(), agents=(None,))
    with run_error(r"rows are for agent painter; .* has adder, speller"):
        play(tmp_path, NemoGym(), agents=("painter",))


def test_turns_with_tools_keep_their_tokens_and_become_messages(tmp_path):
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c1"}
    answer = reply(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        call | tokens([1, 2], [3, 4, 9]),
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        says("two", **tokens([1, 2, 3, 4, 9, 5], [6, 9])),
        reward=0.5,
        accuracy=True,
        overlap=0.25,
        difficulty=2.0,
        note="text",
        rate=math.inf,
    )
    rollout = play(tmp_path, NemoGym(lambda *_: answer))
    assert [(turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in rollout.turns] == [
        ([1, 2], [3, 4, 9], [-0.5] * 3),
        ([1, 2, 3, 4, 9, 5], [6, 9], [-0.5] * 2),
    ]
    assert [turn.policy_versions for turn in rollout.turns] == [
        [VersionSpan(3, 3)],
        [VersionSpan(3, 2)],
    ]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert rollout.messages == [
        user("task 0"),
        assistant(
            "",
            reasoning_content="hm",
            tool_calls=[{"id": "c1", "type": "function", "function": function}],
        ),
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        assistant("two"),
    ]
    # difficulty came with the row
    assert (rollout.reward, rollout.metrics) == (0.5, {"accuracy": 1.0, "overlap": 0.25})
    assert (rollout.stop, rollout.truncated, rollout.overlong) == ("completed", False, False)
    assert rollout.num_prompt_messages == 1


@pytest.mark.parametrize("reward", [math.nan, None, "1", math.inf])
def test_a_reward_that_is_no_finite_number_fails_the_rollout(tmp_path, reward):
    fails(
        "reward",
        "not a finite number",
        tmp_path,
        replying(FIVE, reward=reward),
    )


def test_server_errors_are_repeated_but_not_for_ever(tmp_path):
    answers = [(500, "busy"), (503, "busy"), ANSWER]
    assert play(tmp_path, NemoGym(lambda *_: answers.pop(0))).reward == 1.0
    broken = NemoGym(lambda *_: (500, "KeyError('gold')"))
    fails(
        "environment",
        r"head server http://127.0.0.1:\d+\): .*/run answered 500: KeyError\('gold'\)",
        tmp_path,
        broken,
    )
    assert len(broken.asked) == 3
    wrong = NemoGym(lambda *_: (422, "answer: field required"))
    fails("environment", "422: answer: field required", tmp_path, wrong)
    assert len(wrong.asked) == 1
    fails("environment", "without response.output", tmp_path, NemoGym(lambda *_: {"reward": 1.0}))


def test_a_gym_that_dies_and_comes_back_elsewhere_costs_only_failed_rollouts(tmp_path):
    async def run():
        gym = NemoGym()
        async with gym:
            env = make(tmp_path, gym)
            await env.start()
            await env.play(order(), 1)
            before = dict(gym.ports)
        with pytest.raises(
            RolloutError,
            match=r"Cannot connect.* See ng_run's output; if it is gone, start it with",
        ) as caught:
            await env.play(order(), 1)
        assert caught.value.cause == "environment"
        async with gym:
            assert gym.ports != before
            [[rollout]] = await env.play(order(), 1)
            assert rollout.reward == 1.0
            await env.close()

    asyncio.run(run())


def test_load_names_what_is_missing(tmp_path):
    async def start(env):
        await env.start()

    nobody = SimpleNamespace(port=9)
    with run_error(r"no NeMo Gym head server at http://127.0.0.1:9 .*scripts/nemo_gym.py start"):
        asyncio.run(start(make(tmp_path, nobody)))
    with run_error(r"agent adder returns no token ids; .*vllm_model_for_training.yaml"):
        play(tmp_path, NemoGym(returns_tokens=False))
    with run_error(r"args.temperature is set by the sampling settings"):
        make(tmp_path, nobody, args={"temperature": 0.5})
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    for dataset, said in (
        (None, "needs dataset"),
        ("none.jsonl", "no file none.jsonl"),
        (str(tmp_path / "bad.jsonl"), r"bad.jsonl:1 is not"),
    ):
        with run_error(said):
            NemoGymEnvironment(
                EnvSpec(name="gym", dataset=dataset, head_server="http://127.0.0.1:9"), policy()
            )


def test_replies_without_tokens(tmp_path):
    fails(
        "inference",
        "returns no token ids; .*vllm_model_for_training.yaml",
        tmp_path,
        replying(says("5")),
    )
    full = play(tmp_path, replying(says(""), incomplete="max_output_tokens", reward=0.0))
    assert (len(full.turns), full.overlong, full.truncated) == (0, True, True)
    later = play(
        tmp_path,
        replying(says("a", **tokens([1], [2])), says(""), incomplete="max_output_tokens"),
    )
    assert (len(later.turns), later.overlong, later.turns[0].finish_reason) == (1, True, "stop")
    cut = play(tmp_path, replying(FIVE, incomplete="max_output_tokens"))
    assert (cut.truncated, cut.overlong, cut.turns[0].finish_reason) == (True, False, "length")
    uneven = says(
        "5", prompt_token_ids=[1], generation_token_ids=[2, 3], generation_log_probs=[-0.5]
    )
    fails(
        "inference",
        r"model server: an answer's tokens, logprobs, policy versions and kept tokens differ in number: "
        r"\[1, 2\]",
        tmp_path,
        replying(uneven),
    )


def test_another_temperature_than_the_trainers_is_refused(tmp_path):
    cool = replying(FIVE, temperature=0.6)
    assert play(tmp_path, cool, sampling={"temperature": 0.6}).reward == 1.0
    fails("environment", "sampled at temperature 0.6, not at the requested 1.0", tmp_path, cool)


def test_a_gym_that_asks_another_server_of_this_machine_is_refused(tmp_path):
    fails(
        "inference",
        r"asks port \[8000\] .*serves at \[8321\]",
        tmp_path,
        NemoGym(policy_url="http://localhost:8000/v1"),
    )
    assert play(tmp_path, NemoGym(policy_url="http://gateway:8000/v1")).reward == 1.0


def test_the_version_is_that_of_the_episodes_start(tmp_path):
    ours = policy()
    gym = NemoGym(lambda *_: setattr(ours.servers, "version", 4) or ANSWER)
    assert [play(tmp_path, gym, with_policy=ours).versions for _ in range(2)] == [[3], [4]]
    ours.servers.version = -1
    fails("inference", "waited 1 s", tmp_path, NemoGym(), with_policy=ours)


def test_an_answer_that_a_server_remembers_has_its_exact_versions(tmp_path):
    ours = policy()
    ours.servers.answered[answer_digest([1, 2], [3, 4], [-0.5, -0.5])] = [
        VersionSpan(4, 1),
        VersionSpan(5, 1),
    ]
    gym = replying(says("5", **tokens([1, 2], [3, 4])), says("6", **tokens([1, 2, 3, 4, 7], [8])))
    rollout = play(tmp_path, gym, with_policy=ours)
    assert [turn.policy_versions for turn in rollout.turns] == [
        [VersionSpan(4, 1), VersionSpan(5, 1)],
        [VersionSpan(3, 1)],
    ]


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        ("http://localhost:8321/v1", 7),
        (["http://127.0.0.1:8321/v1", "http://10.0.0.2:8000/v1"], 5),
        ("http://10.0.0.3:8000/v1", 2),
        ("http://router:8000/v1", 2),  # which may pass a request to any
    ],
)
def test_an_agent_that_asks_some_of_several_servers_has_the_versions_of_those(
    tmp_path, asked, version
):
    ours = policy()
    ours.servers.version, ours.servers.others = (
        7,
        {"http://10.0.0.2:8000": 5, "http://10.0.0.3:8000": 2},
    )
    assert play(tmp_path, NemoGym(policy_url=asked), with_policy=ours).versions == [version]


def test_a_gym_in_front_of_an_endpoint_is_played_without_tokens(tmp_path):
    other = policy(endpoint=Endpoint(base_url="http://elsewhere/v1", model="m"))
    rollout = play(tmp_path, replying(says("5"), returns_tokens=False), with_policy=other)
    assert (len(rollout.turns), rollout.num_tokens, rollout.reward) == (0, 7, 1.0)


def test_splits_and_tasks(tmp_path):
    held_out = write_rows(tmp_path / "eval.jsonl", "adder")
    env = make(tmp_path, SimpleNamespace(port=9), ("adder", "adder"), eval_dataset=held_out)
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (2, 1)
    task = env.task("train", 1)
    assert (task["prompt"], task["answer"]) == ([user("task 1")], 1)
    assert env.describe()["rows of each agent"] == {"adder": 2}
