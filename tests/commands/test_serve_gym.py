"""`rl env --serve-gym`: the server that NeMo Gym's programs ask, as a process."""

import asyncio
import json
import signal
import urllib.error
import urllib.request

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rl.commands.serve_gym import programs_only
from tests import jsonl
from tests.commands.driver import start
from tests.envs.model_server import ModelServer
from tests.ports import free_ports
from tests.web import serving


def post(port, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=60
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def entry_of(process):
    """The entry that a server prints when it is ready."""
    lines = []
    while not lines or "name: policy_model" not in lines[-1]:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        lines.append(line)
    return "".join(lines)


def test_an_environment_is_played_over_http(tmp_path):
    [port] = free_ports(1)
    model = ModelServer(
        lambda body: {"content": body["messages"][-1]["content"].removeprefix("say ")},
        agent="say-digit",
    )
    with serving(model) as gym:
        flags = ("--limit 3 --args.fail first --orchestrator.rollout_retries 0",)
        process = start(
            tmp_path, f"env say-digit --serve-gym {port} --head-server", gym.url, *flags
        )
        try:
            entry = entry_of(process)
            folder = tmp_path / "outputs/nemo_gym/say-digit"
            assert (folder / "agent.yaml").read_text() == entry
            assert (
                yaml.safe_load(entry)["say-digit"]["responses_api_agents"]["say-digit"]["port"]
                == port
            )
            rows = jsonl.read(folder / "train.jsonl")
            held_out = jsonl.read(folder / "eval.jsonl")
            assert [row["rl_task"]["index"] for row in rows] == [0, 1, 2] and len(held_out) == 2
            status, failed = post(port, "/run", rows[0])
            assert (status, failed["_ng_failure_class"]) == (
                200,
                "environment",
            )
            assert "reward" not in failed
            assert "OSError: flaky" in failed["error"]
            params = rows[1]["responses_create_params"]
            asked = rows[1] | {
                "responses_create_params": params | {"temperature": 0.5, "max_output_tokens": 8},
                "_ng_task_index": 1,
            }
            status, result = post(port, "/run", asked)
            assert (status, result["reward"], result["_ng_task_index"]) == (200, 1.0, 1)
            assert result["response"]["output"][0]["generation_token_ids"] == [2]
            assert (gym.asked[0]["temperature"], gym.asked[0]["max_tokens"]) == (0.5, 8)
            assert (
                post(port, "/aggregate_metrics", {"verify_responses": [result]})[1]["key_metrics"][
                    "mean/reward"
                ]
                == 1.0
            )
            for row, said in (
                ({"x": 1}, "KeyError 'responses_create_params'"),
                ({"responses_create_params": params}, "it has no rl_task; give a file that"),
                (
                    rows[1] | {"responses_create_params": {"input": "say 2"}},
                    "the input of train task 1 differs",
                ),
                (
                    rows[1] | {"responses_create_params": params | {"instructions": "x"}},
                    "instructions cannot be passed on",
                ),
            ):
                status, answer = post(port, "/run", row)
                assert status == 422 and said in answer["error"], answer
        finally:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "/run refused: not a row of say-digit" in err, err


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({"Host": "evil.example:1"}, 403),
        ({"Host": "127.0.0.1:1", "Origin": "https://evil.example"}, 403),
        ({"Host": "127.0.0.1:1", "Origin": "null"}, 403),
        ({}, 403),
    ],
)
def test_web_pages_are_refused(headers, status):
    async def handler(request):
        return web.Response()

    answer = asyncio.run(programs_only(make_mocked_request("POST", "/run", headers), handler))
    assert answer.status == status
