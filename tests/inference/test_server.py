"""Three real servers (tied head, untied head, experts) on tiny models: what they answer is rescored with transformers, token by token."""

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from rl.orchestrator.envs.policy import Conversation, Policy, assistant_message
from rl.orchestrator.rollouts import PolicySpec, Rollout
from rl.orchestrator.samples import rollout_samples
from tests.inference.servers import MAX_MODEL_LEN, TOLERANCE, Server, assert_logprobs, rescore, start_server
from tests.tiny_model import make_tiny_model, make_tokenizer

KINDS = ("tied", "untied", "moe")


def make_versions(folder: Path, kind: str) -> list[Path]:
    make = make_tiny_moe if kind == "moe" else partial(make_tiny_model, tied=kind == "tied")
    return [make(folder / f"{version:06d}", seed=version) for version in range(4)]


def make_tiny_moe(path: Path, seed: int) -> Path:
    """A Qwen3 with four experts, whose weights vLLM packs in another way than those of plain layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, initializer_range=0.2, **sizes, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """By the kind of model. They start at the same time; the two last tests of this module end two of them."""
    root = tmp_path_factory.mktemp("servers")
    started = {kind: start_server(root / kind, make_versions(root / f"versions-{kind}", kind)) for kind in KINDS}
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.end()


def engine_pid(server: Server) -> int:
    return next(
        child.pid for child in psutil.Process(server.process.pid).children() if "EngineCore" in " ".join([*child.cmdline(), child.name()])
    )


PROMPT = list(range(10, 40))


def test_sampled_logprobs_and_stops(servers):
    server = servers["tied"]
    for temperature in (1.0, 0.7):
        answer = server.generate(PROMPT, max_tokens=40, temperature=temperature, seed=1)
        assert_logprobs(server, PROMPT, answer, temperature)
    long = server.generate(PROMPT, max_tokens=5, temperature=1.0, seed=1, stop_token_ids=[])
    assert (len(long["token_ids"]), long["finish_reason"]) == (5, "length")
    stop = long["token_ids"][2]
    stopped = server.generate(PROMPT, max_tokens=5, temperature=1.0, seed=1, stop_token_ids=[stop])
    index = long["token_ids"].index(stop)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (long["token_ids"][: index + 1], "stop")


def test_bad_requests_are_refused(servers):
    server = servers["tied"]
    for body, kind in [
        ({"token_ids": [5] * MAX_MODEL_LEN, "sampling": {"max_tokens": 1}}, "prompt_too_long"),
        ({"token_ids": [], "sampling": {"max_tokens": 1}}, "bad_request"),
        ({"token_ids": [-1], "sampling": {"max_tokens": 1}}, "bad_request"),
        ({"token_ids": [259], "sampling": {"max_tokens": 1}}, "bad_request"),  # the first id that is none
        ({"token_ids": [5], "sampling": {"max_tokens": 0}}, "bad_request"),
        ({"token_ids": [5], "sampling": {"max_tokens": 1, "top_p": 7.0}}, "bad_request"),
        ({"token_ids": [5], "sampling": {"max_tokens": 1, "temprature": 1.0}}, "bad_request"),
    ]:
        response = server.post("/generate", **body)
        assert (response.status_code, response.json()["error"]["type"]) == (400, kind), response.text
    too_long = server.post("/generate", token_ids=[5] * 1000, sampling={"max_tokens": 1}).json()["error"]
    assert (too_long["num_tokens"], too_long["max_model_len"]) == (1000, MAX_MODEL_LEN)


def test_turns_with_tools_are_trained_on_as_they_were_sampled(servers):
    """Three turns with tool results between them, the second cut short: one sample, whose every token has its sampled logprob again."""
    server = servers["tied"]
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}}
    policy = Policy(PolicySpec(model_path=str(server.weights[0]), max_model_len=MAX_MODEL_LEN, inference_urls=[server.url]), 60.0)

    async def talk() -> Conversation:
        conversation = policy.conversation(0, {"max_tokens": 24, "temperature": 0.8, "stop": None})
        messages = [{"role": "user", "content": "1 + 1?"}]
        for result in ("2", "3", "4"):
            _, answer = await conversation.answer(messages, [tool], max_tokens=5 if result == "3" else 24)
            messages += [assistant_message(answer), {"role": "tool", "content": result, "tool_call_id": "x"}]
        await policy.close()
        return conversation

    turns = asyncio.run(talk()).turns
    (sample,) = rollout_samples(Rollout(turns=turns), 1.0, "e", 0, 0, 0.8)
    text = policy.renderer.decode(sample.token_ids)
    assert [text.count(part) for part in ("Add.", "<tool_response>\n2\n", "<tool_response>\n3\n")] == [1, 1, 1]
    for before, after in pairwise(turns):
        whole = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(whole)] == whole
    expected = [0.0, *rescore(server.weights[0], sample.token_ids[:1], sample.token_ids[1:], 0.8).tolist()]
    differences = [abs(a - b) for a, b, sampled in zip(expected, sample.logprobs, sample.loss_mask, strict=True) if sampled]
    assert len(differences) == sum(len(turn.completion_ids) for turn in turns) and max(differences) < TOLERANCE


def test_openai_routes_stay_and_development_routes_are_closed(servers):
    server = servers["tied"]
    assert httpx.get(server.url + "/health").status_code == 200
    chat = server.post(
        "/v1/chat/completions",
        model=str(server.weights[0]),
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        logprobs=True,
    )
    assert chat.status_code == 200, chat.text
    assert chat.json()["choices"][0]["logprobs"]["content"]
    for route in ("/pause", "/collective_rpc", "/resume", "/update_weights"):
        assert server.post(route).status_code == 404


def test_disconnect_aborts_the_request(servers):
    server = servers["tied"]
    with ThreadPoolExecutor(12) as pool:  # a seed whose answer is long
        answers = list(pool.map(lambda seed: server.generate(PROMPT, max_tokens=400, temperature=1.0, seed=seed), range(12)))
    seed = max(range(12), key=lambda seed: len(answers[seed]["token_ids"]))
    began = time.monotonic()
    server.generate(PROMPT, max_tokens=400, temperature=1.0, seed=seed)
    whole_s, began = time.monotonic() - began, time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        body = {"token_ids": PROMPT, "sampling": {"max_tokens": 400, "temperature": 1.0, "seed": seed}}
        httpx.post(server.url + "/generate", json=body, timeout=min(0.15, whole_s / 4))
    while server.status()["num_running"] and time.monotonic() < began + whole_s:
        time.sleep(0.01)
    assert time.monotonic() - began < 0.7 * whole_s


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_its_version_while_weights_are_loaded(servers, kind):
    server = servers[kind]
    prompts = [[10 + i, *range(40, 40 + 5 * i)] for i in range(10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.generate, prompt, max_tokens=400, temperature=1.0) for prompt in prompts]
        for version in (1, 2):
            time.sleep(0.4)
            loaded = server.load(version)
            assert loaded.status_code == 200, loaded.text
            assert loaded.json()["policy_version"] == version
            assert 0 < loaded.json()["pause_s"] < 20
        answers = [answer.result() for answer in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_logprobs(server, prompt, answer)
    assert max(len(answer["policy_versions"]) for answer in answers) >= 2
    assert server.status()["policy_version"] == 2
    # Nothing of the old weights is left, neither in a cached prefix nor in a packed copy.
    again = server.generate(prompts[-1], max_tokens=30, temperature=1.0)
    assert [version for version, _ in again["policy_versions"]] == [2]
    assert_logprobs(server, prompts[-1], again)


def test_ready_and_loading_twice(servers):
    server = servers["tied"]
    assert server.load(2).json() == {"policy_version": 2, "stage_s": 0.0, "drain_s": 0.0, "pause_s": 0.0}
    ready = httpx.get(server.url + "/ready", params={"policy_version": 2})
    assert (ready.status_code, ready.json()) == (200, {"policy_version": 2})
    not_yet = httpx.get(server.url + "/ready", params={"policy_version": 3})
    assert (not_yet.status_code, not_yet.json()) == (503, {"policy_version": 2})
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda version: server.load(version).status_code, (3, 1, 2)))
    assert codes == [200, 200, 200]
    server.load(2)


def test_bad_weights_are_refused_and_the_old_version_goes_on(servers, tmp_path):
    server = servers["tied"]
    corrupt = shutil.copytree(server.weights[3], tmp_path / "corrupt") / "model.safetensors"
    corrupt.write_bytes(corrupt.read_bytes()[:-1000])
    wide = make_tiny_model(tmp_path / "wide", hidden=96)
    deep = make_tiny_model(tmp_path / "deep", layers=3)
    for path, reason in [
        (corrupt.parent, "its header says"),
        (wide, "has shape"),
        (deep, "is not in the model"),
        (tmp_path / "no", "no such"),
    ]:
        refused = server.load(9, path)
        assert refused.status_code == 422
        assert refused.json()["error"]["type"] == "bad_weights"
        assert reason in refused.json()["error"]["message"]
    assert server.post("/load_weights", policy_version="x", path="y").status_code == 400
    assert server.status()["policy_version"] == 2
    answer = server.generate(PROMPT, max_tokens=30, temperature=1.0)
    assert [version for version, _ in answer["policy_versions"]] == [2]
    assert_logprobs(server, PROMPT, answer)


def in_flight(server: Server) -> threading.Thread:
    """A long request whose fate does not matter, started and running."""

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            server.post("/generate", token_ids=PROMPT, sampling={"max_tokens": 400, "stop": ["@@@@"]})

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    time.sleep(0.2)
    return thread


def test_engine_death_ends_the_process(servers):
    server = servers["untied"]
    in_flight(server)
    os.kill(engine_pid(server), signal.SIGKILL)
    assert server.process.wait(timeout=10) == 1
    assert "engine process died" in (server.root / "log").read_text()


def test_sigterm_ends_the_server_and_its_engine(servers):
    server = servers["tied"]
    engine = engine_pid(server)
    in_flight(server)
    server.process.terminate()
    assert server.process.wait(timeout=10) == 0
    deadline = time.monotonic() + 5
    while psutil.pid_exists(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(engine)
