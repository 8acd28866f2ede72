"""Three real servers (tied head, untied head, experts) on tiny models: what they answer is
rescored with transformers, token by token."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.envs.policy import Conversation, Policy
from rl.models.chat import assistant_message
from rl.models.tiny import make_tiny_model
from rl.models.tokenizer import load_tokenizer
from rl.orchestrator.batches.contents import group_samples
from rl.run_dir.in_memory import make_again
from rl.trainer.measure.parity import compare
from rl.trainer.model import lora
from rl.trainer.optim import local
from rl.trainer.store.versions import snapshot
from rl.wire.messages import TrainBatch
from rl.wire.parity import parity_of
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import answer_digest
from rl.wire.worker_messages import PolicySpec
from tests.families import CONFIGS, UNTIED, WIDE
from tests.inference.malformed import HARMLESS, MALFORMED, ODD, OPENAI
from tests.inference.servers import (
    HELD,
    MAX_MODEL_LEN,
    TOKEN,
    TOLERANCE,
    Server,
    answer_of,
    as_deltas,
    assert_logprobs,
    damaged_copy,
    image_of,
    in_memory,
    load_policy,
    rescore,
    start_server,
    until_ended,
    write_digests,
)
from tests.trainer.policies import learner
from tests.trainer.samples import make_sample
from tests.waiting import alive, until

KINDS = {
    "tied": None,
    "untied": UNTIED,
    "moe": CONFIGS["qwen3_moe"] | {"tie_word_embeddings": False},
}
"""Experts are weights that vLLM packs in another way than those of plain layers."""


PARSER = {
    "inference__vllm__enable_auto_tool_choice": "true",
    "inference__vllm__tool_call_parser": "hermes",
}


def make_versions(folder: Path, kind: str) -> list[Path]:
    """Of the tied kind the base alone holds the head once more, as Qwen3-0.6B does; its trainer
    writes it once. Of the untied kind the base's files name the end of texts alone, as those of
    base models do, although its template is ChatML."""
    versions = [
        make_tiny_model(folder / f"{version:06d}", KINDS[kind], version) for version in range(4)
    ]
    if kind == "tied":
        file = versions[0] / "model.safetensors"
        tensors = load_file(file)
        save_file(
            tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
            file,
            {"format": "pt"},
        )
    if kind == "untied":
        for name, fields in (
            ("config.json", {"eos_token_id": 0}),
            ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ):
            file = versions[0] / name
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        (versions[0] / "generation_config.json").write_text('{"eos_token_id": 0}')
    return versions


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """By the kind of model. They start at the same time; the last tests of this module end them.
    "untied" is open to others, "moe" has a short patience with its engine."""
    root = tmp_path_factory.mktemp("servers")
    versions = {kind: make_versions(root / f"versions-{kind}", kind) for kind in KINDS}
    started = {
        "tied": start_server(root / "tied", versions["tied"], **PARSER),
        "untied": start_server(root / "untied", versions["untied"], inference__host="0.0.0.0"),
        "moe": start_server(root / "moe", versions["moe"], inference__engine_timeout_s=8),
    }
    yield from until_ended(started)


PROMPT = list(range(10, 40))


@pytest.fixture
def server(servers):
    return servers["tied"]


def test_sampled_logprobs_and_stops(server):
    for temperature in (1.0, 0.7):
        answer = server.generate(PROMPT, max_tokens=40, temperature=temperature, seed=1)
        assert_logprobs(server, PROMPT, answer, temperature)
    of_prompt = server.generate(PROMPT, max_tokens=1, temperature=0.7, prompt_logprobs=True)[
        "prompt_logprobs"
    ]
    assert math.isnan(of_prompt[0]) and not answer["prompt_logprobs"]
    assert (
        rescore(server.weights[0], PROMPT[:1], PROMPT[1:]) - torch.tensor(of_prompt[1:])
    ).abs().max() < TOLERANCE
    long = server.generate(PROMPT, max_tokens=5, temperature=1.0, seed=1, stop_token_ids=[])
    assert (len(long["token_ids"]), long["finish_reason"]) == (5, "length")
    stop = long["token_ids"][2]
    stopped = server.generate(PROMPT, max_tokens=5, temperature=1.0, seed=1, stop_token_ids=[stop])
    index = long["token_ids"].index(stop)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (
        long["token_ids"][: index + 1],
        "stop",
    )


def test_adapters_of_experts_answer_with_the_trainers_log_probabilities(servers, world, tmp_path):
    """The server merges them into experts that vLLM packs; the trainer computes with the
    factors, and publishes them."""
    server = servers["moe"]
    base = server.weights[0]
    adapters = {"rank": 4, "targets": ["all-linear", "experts"]}
    policy, _, config = learner(base, world, model={"max_model_len": MAX_MODEL_LEN}, lora=adapters)
    generator = torch.Generator().manual_seed(1)
    for parameter in lora.trainable(policy).values():
        local(parameter.data).copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    snapshot(policy, base, torch.float32, {}).write(tmp_path / "000001")
    before = server.generate(PROMPT, max_tokens=1)
    assert server.load(1, tmp_path / "000001").status_code == 200
    answer = server.generate(PROMPT, max_tokens=40, temperature=1.0, ignore_eos=True)
    assert answer["policy_versions"] == [[1, 40]] and before["policy_versions"] == [[0, 1]]
    sample = make_sample(
        PROMPT, answer["token_ids"], logprobs=[0.0] * len(PROMPT) + answer["logprobs"]
    )
    found = parity_of(
        [
            difference
            for _, _, difference in compare(
                policy, config, TrainBatch(step=1, samples=[sample]), world
            )
        ]
    )
    assert found.tokens == 40 and found.kl < 1e-9 and found.largest < 1e-4, found
    without = rescore(base, PROMPT, answer["token_ids"])
    assert (without - torch.tensor(answer["logprobs"])).abs().max() > 0.1, (
        "the adapters change what is said"
    )
    assert server.load(0).status_code == 200  # the other tests begin with it


@pytest.mark.parametrize("kind", KINDS)
def test_answers_to_equal_prompts_at_the_same_time_are_each_the_models_own(servers, kind):
    # two blocks and a part of one, which all share
    server, prompt = servers[kind], list(range(5, 80))
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda last: server.generate([*prompt, last], max_tokens=40), [3] * 8 + [4] * 4
            )
        )
    for last, answer in zip([3] * 8 + [4] * 4, answers, strict=True):
        assert_logprobs(server, [*prompt, last], answer)
    assert len({tuple(answer["token_ids"]) for answer in answers}) > 1


def test_a_seed_draws_the_same_tokens_whoever_is_beside_it(server):
    """Its step was drawn by another algorithm when a request beside it was greedy or wanted more
    log-probabilities."""
    wanted = {"max_tokens": 16, "temperature": 1.0, "seed": 7, "stop_token_ids": []}
    alone = server.generate(PROMPT, **wanted)["token_ids"]
    beside = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
    for other in ({"temperature": 0.0}, {"logprobs": 3}):
        was_beside = False
        for _ in range(5):  # on a busy machine one may end before the other has begun
            with ThreadPoolExecutor(1) as pool:
                with server.held():
                    running = pool.submit(server.post, "/v1/completions", **beside, **other)
                    until(lambda: server.status()["num_running"] == 1)
                assert server.generate(PROMPT, **wanted)["token_ids"] == alone, other
                was_beside = not running.done()
                assert running.result().status_code == 200
            if was_beside:
                break
        assert was_beside


def test_a_cut_distribution_is_the_one_whose_logprobs_are_told(server):
    greedy = server.generate(PROMPT, max_tokens=8, temperature=0.0)
    for cut in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        alone = server.generate(PROMPT, max_tokens=8, temperature=1.0, **cut)
        assert alone["token_ids"] == greedy["token_ids"], cut
        assert alone["logprobs"] == pytest.approx([0.0] * 8), cut


CUTS = [
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.1},
    {"top_p": 0.8, "temperature": 0.7},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_tokens_that_a_cut_keeps_are_told_and_sampled_logprobs_are_over_them(server, cut):
    """Also while a greedy request is beside it, which takes another way through the sampler."""
    wanted = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "max_kept": 97} | cut
    with ThreadPoolExecutor(2) as pool:
        with server.held():
            asked = [wanted, wanted | {"temperature": 0.0}]
            running = [pool.submit(server.generate, PROMPT, **sampling) for sampling in asked]
            until(lambda: server.status()["num_running"] == 2)
        answers = [request.result() for request in running]
    assert "kept" not in answers[1], "nothing is left out of a greedy answer's one token"
    for answer in (answers[0], server.generate(PROMPT, **wanted)):
        ids = [*PROMPT, *answer["token_ids"]]
        with torch.no_grad():
            logits = load_policy(server.weights[0])(torch.tensor([ids])).logits[0].double()
        logits = logits[len(PROMPT) - 1 : -1] / wanted["temperature"]
        for row, token, kept, logprob in zip(
            logits, answer["token_ids"], answer["kept"], answer["logprobs"], strict=True
        ):
            assert token in kept and len(kept) < len(row)
            inside = row[kept].log_softmax(-1)[kept.index(token)]
            assert float(inside) == pytest.approx(logprob, abs=TOLERANCE)
            outside = row.clone().index_fill_(0, torch.tensor(kept), -torch.inf).max()
            assert outside <= row[kept].min() + TOLERANCE, "the likeliest are kept"


def test_sets_of_too_many_tokens_are_left_out_and_whole_ones_are_none(server):
    wide = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True, "top_p": 0.999}
    assert server.generate(PROMPT, **wide, max_kept=4)["kept"] == [None] * 6
    assert "kept" not in server.generate(PROMPT, **wide)
    for nothing in ({"top_k": 10**6}, {"top_k": 0}, {"min_p": 1e-30}):
        everything = wide | {"top_p": 1.0, "max_kept": 512} | nothing
        assert "kept" not in server.generate(PROMPT, **everything), nothing


def test_turns_with_tools_are_trained_on_as_they_were_sampled(server, monkeypatch):
    """Three turns with tool results between them, the second cut short: one sample, whose every
    token has its sampled logprob again."""
    monkeypatch.setenv("RL_TOKEN", TOKEN)
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    policy = Policy(
        PolicySpec(
            model_path=str(server.weights[0]),
            max_model_len=MAX_MODEL_LEN,
            inference_urls=[server.url],
        ),
        60.0,
    )

    async def talk() -> Conversation:
        conversation = Conversation(policy, 0, {"max_tokens": 24, "temperature": 0.8, "stop": None})
        messages = [user("1 + 1?")]
        for result in ("2", "3", "4"):
            _, answer = await conversation.answer(
                messages, [tool], {"max_tokens": 5 if result == "3" else 24}
            )
            messages += [
                assistant_message(answer),
                {"role": "tool", "content": result, "tool_call_id": "x"},
            ]
        await policy.servers.close()
        return conversation

    turns = asyncio.run(talk()).turns
    (sample,) = group_samples(
        Group(
            group_id=0,
            env="e",
            task=0,
            rollouts=[Rollout(turns=turns)],
            advantages=[1.0],
            temperature=0.8,
        )
    )
    text = policy.renderer.text(sample.token_ids)
    assert [
        text.count(part) for part in ("Add.", "<tool_response>\n2\n", "<tool_response>\n3\n")
    ] == [1, 1, 1]
    for before, after in pairwise(turns):
        whole = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(whole)] == whole
        # the answer before was computed for that turn, and its last token was never read
        assert len(before.prompt_ids) // 2 < after.num_cached < len(whole)
    ids = sample.token_ids.tolist()
    expected = [0.0, *rescore(server.weights[0], ids[:1], ids[1:], 0.8).tolist()]
    differences = [
        abs(expected[place] - logprob)
        for place, logprob in zip(sample.trained.tolist(), sample.logprobs.tolist(), strict=True)
    ]
    assert len(differences) == sum(len(turn.completion_ids) for turn in turns)
    assert max(differences) < TOLERANCE


def test_openai_routes_stay_and_development_routes_are_closed(server):
    assert httpx.get(server.url + "/health", headers=server.headers).status_code == 200
    chat = server.post(
        "/v1/chat/completions",
        model=str(server.weights[0]),
        messages=[user("hi")],
        max_tokens=4,
        logprobs=True,
    )
    assert chat.status_code == 200, chat.text
    assert chat.json()["choices"][0]["logprobs"]["content"]
    for route in ("/pause", "/collective_rpc", "/resume", "/update_weights"):
        assert server.post(route).status_code == 404


TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def chat(server, messages: list[dict], **more) -> httpx.Response:
    """Asks as NeMo Gym's model server does."""
    asked = {
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    return server.post(
        "/v1/chat/completions", model=str(server.weights[0]), messages=messages, **(asked | more)
    )


def said(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def continued(before: dict, after: dict) -> bool:
    known = [*before["prompt_token_ids"], *before["generation_token_ids"]]
    return after["prompt_token_ids"][: len(known)] == known


def test_special_tokens_are_text_of_an_answer_with_tokens(servers):
    """Regression: a user's own tags may be special tokens, and the environment did not see them."""
    server = servers["tied"]
    tokenizer = load_tokenizer(str(server.weights[0]))
    tag = next(id for id in tokenizer.all_special_ids if id != tokenizer.eos_token_id)
    more = {"logit_bias": {str(tag): 100}, "max_tokens": 2}
    assert said(chat(server, [user("a")], **more))["content"] == tokenizer.decode([tag, tag])
    assert not said(chat(server, [user("a")], skip_special_tokens=True, **more))["content"]


def test_a_chat_continues_the_tokens_that_come_back(servers):
    """Random bytes are rarely text that is encoded as the same bytes again."""
    server, messages, turns = servers["tied"], [user("go on")], []
    for _ in range(3):
        turns.append(answer := said(chat(server, messages)))
        assert [len(answer[key]) for key in TOKENS[1:]] == [12, 12]
        messages = [*messages, answer, user("and?")]
    assert all(continued(*pair) for pair in pairwise(turns))
    tokenizer = load_tokenizer(str(server.weights[0]))
    behind = turns[1]["prompt_token_ids"][len(turns[0]["prompt_token_ids"]) + 12 :]
    assert (
        tokenizer.decode(behind)
        == "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = {
        "token_ids": turns[2]["generation_token_ids"],
        "logprobs": turns[2]["generation_log_probs"],
        "policy_versions": [(0, 12)],
    }
    assert_logprobs(server, turns[2]["prompt_token_ids"], answer)


def test_an_answer_that_ended_by_itself_is_not_ended_again(server):
    ask = user("go on")
    end = load_tokenizer(str(server.weights[0])).eos_token_id
    answer = said(chat(server, [ask], allowed_token_ids=[end], ignore_eos=False))
    after = said(chat(server, [ask, answer, user("and?")]))
    assert answer["generation_token_ids"] == [end] and continued(answer, after)
    assert after["prompt_token_ids"].count(end) == 3  # of three messages


def test_a_chat_of_a_base_model_ends_where_its_template_ends(servers):
    server, ask = servers["untied"], user("hi")
    end = load_tokenizer(str(server.weights[0])).convert_tokens_to_ids("<|im_end|>")
    answer = said(chat(server, [ask], allowed_token_ids=[end], ignore_eos=False))
    assert answer["generation_token_ids"] == [end]
    empty = {"role": "assistant", "content": ""}
    after, plain = (said(chat(server, [ask, each, user("and?")])) for each in (answer, empty))
    assert after["prompt_token_ids"] == plain["prompt_token_ids"]


def test_a_special_token_as_stop_string_stops(servers):
    """By itself vLLM searches a text without special tokens."""
    server, free = (
        servers["tied"],
        {"max_tokens": 700, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    )
    begin = load_tokenizer(str(server.weights[0])).convert_tokens_to_ids("<|im_start|>")
    sampled = server.generate(PROMPT, **free)["token_ids"]
    stopped = server.generate(PROMPT, stop=["<|im_start|>"], **free)
    assert stopped["token_ids"] == sampled[: sampled.index(begin) + 1]
    assert stopped["finish_reason"] == "stop"


def test_a_chat_that_was_rewritten_is_rendered_again(server):
    ask = user("go on")
    answer = said(chat(server, [ask]))
    behind = user("and?")
    plain = said(chat(server, [ask, {"role": "assistant", "content": answer["content"]}, behind]))[
        "prompt_token_ids"
    ]
    assert continued(answer, said(chat(server, [ask, answer | {"reasoning": "hm"}, behind])))
    for first, rewritten in (
        (ask, answer | {"content": "no"}),
        (user("go back"), answer),
        (ask, answer | {"generation_token_ids": ["x"]}),
        (ask, answer | {"generation_token_ids": [1, 2]}),
    ):
        rendered = said(chat(server, [first, rewritten, behind]))
        assert not continued(answer, rendered)
    assert rendered["prompt_token_ids"] == plain
    assert "prompt_token_ids" not in said(chat(server, [ask], return_tokens_as_token_ids=False))


def test_no_grammar_chooses_the_tokens_of_a_chat(server):
    """With vLLM's defaults it would for these tools, and the trainer would compute other
    probabilities."""
    ask = user("go on")
    add = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    }
    offered = {"tools": [{"type": "function", "function": add}], "parallel_tool_calls": False}
    assert len(said(chat(server, [ask], **offered))["generation_token_ids"]) == 12
    for more in (
        {**offered, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ):
        refused = chat(server, [ask], **more)
        assert refused.status_code == 400 and "would choose tokens" in refused.text
    assert (
        server.post(
            "/v1/chat/completions",
            messages=[ask],
            response_format={"type": "json_object"},
            max_tokens=4,
        ).status_code
        == 200
    )


def test_a_continued_chat_that_is_too_long_is_refused_as_vllm_does(server):
    ask = user("x" * 400)
    answer = said(chat(server, [ask], max_tokens=480))
    refused = chat(server, [ask, answer, user("and?")], max_tokens=100)
    assert refused.status_code == 400 and "maximum context length is 960 tokens" in refused.text


def test_the_versions_of_a_chat_are_remembered(server):
    ask = [user("go on")]
    first = said(chat(server, ask))
    assert server.load(1).status_code == 200
    with ThreadPoolExecutor() as pool:
        with server.held():
            long = pool.submit(chat, server, ask, max_tokens=600)
            until(lambda: server.status()["num_running"] == 1)
        assert server.load(0).status_code == 200
        second = said(long.result())
    digests = [answer_digest(*(answer[key] for key in TOKENS)) for answer in (first, second)]
    known, swapped, unknown = server.post("/versions", answers=[*digests, "0" * 32]).json()
    assert (known, unknown) == ([[0, 12]], None)
    assert [version for version, _ in swapped] == [1, 0] and sum(
        count for _, count in swapped
    ) == 600
    assert server.post("/versions", answers=3).status_code == 400


def test_several_answers_to_one_prompt_outlive_a_new_version(server):
    asked = {"prompt": PROMPT, "n": 2, "seed": 1, "max_tokens": 600, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        with server.held():
            both = pool.submit(server.post, "/v1/completions", **asked)
            until(lambda: server.status()["num_running"] == 2)
        assert server.load(1).status_code == 200
        first, second = both.result().json()["choices"]
        assert first["text"] and second["text"]
    assert server.load(0).status_code == 200
    unknown = server.post("/v1/completions", prompt=[10**6], n=2, max_tokens=4)
    assert unknown.status_code == 400
    assert server.post("/v1/completions", prompt=PROMPT, n=2, max_tokens=4).status_code == 200


def test_disconnect_aborts_the_request(server):
    with ThreadPoolExecutor(12) as pool:  # a seed whose answer is long
        answers = list(
            pool.map(
                lambda seed: server.generate(PROMPT, max_tokens=400, temperature=1.0, seed=seed),
                range(12),
            )
        )
    seed = max(range(12), key=lambda seed: len(answers[seed]["token_ids"]))
    body = {"token_ids": PROMPT, "sampling": {"max_tokens": 400, "temperature": 1.0, "seed": seed}}

    def part() -> float:
        """For how much of the time of the whole answer a request runs whose client leaves in its
        first quarter."""
        began = time.monotonic()
        server.post("/generate", **body)
        whole_s, began = time.monotonic() - began, time.monotonic()
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                server.url + "/generate",
                json=body,
                headers=server.headers,
                timeout=min(0.15, whole_s / 4),
            )
        until(lambda: not server.status()["num_running"])
        return (time.monotonic() - began) / whole_s

    parts = [part()]
    while parts[-1] >= 0.7 and len(parts) < 5:  # others use the machine, too
        parts.append(part())
    assert min(parts) < 0.7, parts


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_its_version_while_weights_are_loaded(servers, kind, tmp_path):
    """Version 1 is in its trainer's memory alone. So is version 2, which the server is told of
    in vain: it waits for the folder."""
    server, version_2 = servers[kind], tmp_path / "000002"
    prompts = [[10 + i, *range(40, 40 + 5 * i)] for i in range(10)]
    written = shutil.copytree(server.weights[2], tmp_path / "written")
    for _ in range(5):  # on a busy machine all answers may end before a version is loaded
        with ThreadPoolExecutor(len(prompts)) as pool:
            with in_memory(server.weights[1]) as memory:
                asked = {"max_tokens": 850, "temperature": 1.0, "stop_token_ids": []}
                with server.held():
                    answers = [pool.submit(server.generate, prompt, **asked) for prompt in prompts]
                    until(lambda: server.status()["num_running"] == len(prompts))
                loads = [server.load(1, tmp_path / "000001", memory)]
            if not version_2.exists():
                threading.Timer(0.5, os.rename, (written, version_2)).start()
            loads.append(server.load(2, version_2, memory))
            for version, loaded in enumerate(loads, 1):
                assert loaded.status_code == 200, loaded.text
                assert loaded.json()["policy_version"] == version
                assert 0 < loaded.json()["pause_s"] < 20
            answers = [answer.result() for answer in answers]
        if max(len(answer["policy_versions"]) for answer in answers) >= 2:
            break
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_logprobs(server, prompt, answer)
    assert max(len(answer["policy_versions"]) for answer in answers) >= 2
    assert server.status()["policy_version"] == 2
    # nothing of the old weights is left, neither in a cached prefix nor in a packed copy
    assert_version(server, 2, prompts[-1])


def assert_version(server: Server, version: int, prompt: list[int] = PROMPT) -> None:
    answer = server.generate(prompt, max_tokens=30, temperature=1.0)
    assert [stamp for stamp, _ in answer["policy_versions"]] == [version]
    assert_logprobs(server, prompt, answer)


def test_a_server_lets_go_of_memory_that_it_has_loaded_and_does_not_read_it_once_it_holds_something_else(
    servers, tmp_path
):
    server, image = servers["tied"], image_of(servers["tied"].weights[1])
    memory = image.file
    loaded = server.load(1, tmp_path, memory).json()
    assert loaded["policy_version"] == 1 and min(loaded["bytes_read"], loaded["pause_s"]) > 0
    image.file = make_again(memory)
    assert image.file, "it is still read"
    image.write_header()
    assert_version(server, 1)
    # from its folder: that memory holds something else
    assert server.load(2, memory=memory).json()["policy_version"] == 2
    assert make_again(image.file)
    assert_version(server, 2)


def test_loading_twice(server):
    assert server.load(2).json() == HELD | {"policy_version": 2}
    assert server.status()["policy_version"] == 2
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda version: server.load(version).status_code, (3, 1, 2)))
    assert codes == [200, 200, 200]
    server.load(2)
    # trained again, it may have come out otherwise
    for content, is_read in (("a", True), ("a", False), ("", False), ("b", True)):
        assert (server.load(2, content=content).json()["bytes_read"] > 0) is is_read
        assert server.status()["content"] == (content or "a")


def test_bad_weights_are_refused_and_the_old_version_goes_on(server, tmp_path):
    corrupt = shutil.copytree(server.weights[3], tmp_path / "corrupt") / "model.safetensors"
    corrupt.write_bytes(corrupt.read_bytes()[:-1000])
    wide = make_tiny_model(tmp_path / "wide", WIDE)
    deep = make_tiny_model(tmp_path / "deep", CONFIGS["llama"] | {"num_hidden_layers": 3})
    for path, reason in [
        (corrupt.parent, "its header says"),
        (wide, "has shape"),
        (deep, "is not in the model"),
        (
            damaged_copy(server.weights[3], tmp_path / "flipped"),
            "tensor model.norm.weight is not what was written",
        ),
    ]:
        refused = server.load(9, path)
        assert refused.status_code == 422
        assert refused.json()["error"]["type"] == "bad_weights"
        assert reason in refused.json()["error"]["message"]
    gone = server.load(9, tmp_path / "no")
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "weights_gone")
    write_digests(sound := shutil.copytree(server.weights[3], tmp_path / "sound"))
    assert server.load(3, sound).status_code == server.load(2).status_code == 200
    assert server.post("/load_weights", policy_version="x", path="y").status_code == 400
    assert server.status()["policy_version"] == 2
    assert_version(server, 2)


def test_deltas_are_applied_or_refused_until_a_whole_version_comes(server, tmp_path):
    """The server joins late, at a delta. A damaged one, and those after it, are refused; the
    next whole version is loaded, and deltas on it."""
    _, two, three, four = as_deltas([server.weights[version] for version in (3, 1, 2, 3)], tmp_path)
    assert server.load(1, two).status_code == 200
    assert_version(server, 1)
    file = three / "delta-00001-of-00001.zst"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    for version, path in ((2, three), (3, four)):
        refused = server.load(version, path)
        assert (refused.status_code, refused.json()["error"]["type"]) == (422, "bad_weights")
        assert f"{file}: damaged" in refused.json()["error"]["message"]
    shutil.move(three, tmp_path / "lost")
    refused = server.load(3, four)
    assert refused.status_code == 422
    assert f"changes since {three}, which is missing" in refused.json()["error"]["message"]
    assert_version(server, 1)
    assert server.load(3).status_code == 200  # without checksums, in its folder
    write_digests(shutil.copytree(server.weights[2], three))
    assert server.load(2, three).status_code == 200  # whole, by way of the mirror
    assert_version(server, 2)
    assert server.load(3, four).status_code == 200
    assert_version(server, 3)
    assert server.load(2).status_code == 200


def in_flight(server: Server) -> None:
    """A long request whose fate does not matter, started and running."""

    def ask() -> None:
        sampling = {"max_tokens": 400, "stop": ["@@@@"]}
        with contextlib.suppress(httpx.HTTPError):
            server.post("/generate", token_ids=PROMPT, sampling=sampling)

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(0.2)


def test_malformed_bodies_are_refused_and_change_nothing(server):
    before, version = (
        server.generate(PROMPT, max_tokens=20, temperature=0.0),
        server.status()["policy_version"],
    )

    def answer(route: str, body: bytes) -> httpx.Response:
        return httpx.post(
            server.url + route,
            content=body,
            timeout=60,
            headers=server.headers | {"Content-Type": "application/json"},
        )

    for body in MALFORMED:
        found = answer("/generate", body)
        assert found.status_code == 400 and found.json()["error"]["type"] in (
            "bad_request",
            "prompt_too_long",
        ), (body[:200], found.text)
    too_long = server.post("/generate", token_ids=[5] * 1000, sampling={"max_tokens": 1}).json()[
        "error"
    ]
    sizes = {"num_tokens": 1000, "max_model_len": MAX_MODEL_LEN}
    assert too_long.items() >= {"type": "prompt_too_long", **sizes}.items()
    for body in HARMLESS:
        assert answer("/generate", body).status_code == 200, body[:200]
    routes = "load_weights v1/completions v1/chat/completions tokenize inference/v1/generate"
    for route in (f"/{name}" for name in routes.split()):
        for body in MALFORMED[:9]:
            assert answer(route, body).status_code in range(400, 500), (route, body[:100])
    for odd in ODD:
        body = ",".join(f'"{key}":{value}' for key, value in (OPENAI | odd).items())
        assert answer("/v1/completions", f"{{{body}}}".encode()).status_code < 600, odd
    for route in ("/generate", "/v1/completions"):
        assert answer(route, b"x" * (17 << 20)).status_code == 413
    status = server.status()
    assert (status["num_running"], status["policy_version"]) == (0, version)
    assert server.generate(PROMPT, max_tokens=20, temperature=0.0) == before


def test_a_seed_gives_the_same_tokens_however_its_prompt_is_cut(server):
    """Sixty prompts at once do not fit into a step: some are computed in pieces."""
    asked = [
        {
            "token_ids": [10 + i % 200, *PROMPT * 3],
            "sampling": {"max_tokens": 8, "temperature": 1.0, "seed": i},
        }
        for i in range(60)
    ]
    alone = [answer_of(server.post("/generate", **body))["token_ids"] for body in asked[::12]]
    with ThreadPoolExecutor(60) as pool:
        together = list(
            pool.map(lambda body: answer_of(server.post("/generate", **body))["token_ids"], asked)
        )
    assert together[::12] == alone


ROUTES = (
    "/ /health /metrics /docs /openapi.json /version /ping /status /v1/models /generate "
    "/load_weights /pause /collective_rpc /v1/completions /tokenize /invocations"
)


def test_the_token_guards_every_path(servers):
    server = servers["untied"]
    for route in ROUTES.split():
        for ask in (httpx.get, httpx.post, httpx.options):
            # probes have no token
            expected = 200 if (ask, route) == (httpx.get, "/health") else 401
            assert ask(server.url + route).status_code == expected, route
    for route in ("/health", "/status", "/v1/models"):
        assert httpx.get(server.url + route, headers={"X-API-Key": TOKEN}).status_code == 200
    names = [
        served["id"]
        for served in httpx.get(server.url + "/v1/models", headers=server.headers).json()["data"]
    ]
    assert names == [str(server.weights[0]), server.weights[0].name]
    assert TOKEN not in (server.root / "log").read_text()
    # headers without an end
    with socket.create_connection(tuple(server.url.removeprefix("http://").split(":"))) as line:
        line.sendall(b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 200_000)
        line.settimeout(20)
        assert b"400" in line.recv(1000)


def test_sampled_tokens_show_in_the_status(server):

    def progress() -> int:
        now = time.time()
        return until(lambda: (reported := server.reported())["heartbeat"] > now and reported)[
            "progress"
        ]

    before = progress()
    tokens = len(server.generate(PROMPT, max_tokens=40, temperature=1.0, seed=3)["token_ids"])
    assert progress() == before + tokens


@pytest.mark.parametrize(
    ("kind", "signum", "said"),
    [
        ("moe", signal.SIGSTOP, "process {} is stopped; killing it"),
        ("untied", signal.SIGKILL, "engine process died"),
    ],
)
def test_an_engine_that_stops_or_dies_ends_the_server(servers, kind, signum, said):
    server = servers[kind]
    in_flight(server)
    engine = server.engine_pid()
    os.kill(engine, signum)
    assert server.process.wait(timeout=30) == 1
    assert said.format(engine) in (server.root / "log").read_text()
    until(lambda: not alive(engine))


def test_signals_while_it_starts_leave_nothing(tmp_path):
    """SIGTERM to one server and SIGKILL to another, whose engine is stopped too, as soon as they
    have an engine process."""
    model = make_tiny_model(tmp_path / "model")
    starting = {
        signum: start_server(tmp_path / signum.name, [model])
        for signum in (signal.SIGTERM, signal.SIGKILL)
    }
    try:
        for signum, server in starting.items():
            deadline = time.monotonic() + 120
            while (engine := server.engine_pid()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if signum == signal.SIGKILL:
                os.kill(engine, signal.SIGSTOP)
            server.process.send_signal(signum)
            assert server.process.wait(timeout=30) == (
                0 if signum == signal.SIGTERM else -signal.SIGKILL
            )
            until(lambda: not alive(engine))
    finally:
        for server in starting.values():
            server.end()


def test_sigterm_ends_the_server_and_its_engine_and_no_answer_is_cut_off(server):
    """The signal goes to both processes, as with Ctrl-C."""
    engine = server.engine_pid()

    def ask(seed: int) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            return server.post(
                "/generate",
                token_ids=PROMPT,
                sampling={"max_tokens": 900, "temperature": 1.0, "seed": seed},
            )
        return None

    with ThreadPoolExecutor(8) as pool:
        with server.held():
            asked = [pool.submit(ask, seed) for seed in range(8)]
            until(lambda: server.status()["num_running"] == 8)
            os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=30) == 0
    answers = [one.result() for one in asked]
    reasons = {
        answer_of(answer)["finish_reason"]
        for answer in answers
        if answer and answer.status_code == 200
    }
    assert reasons <= {"stop", "length"}
    until(lambda: not alive(engine))
    # the end of a log is what `rl doctor` shows of a dead run
    assert "Traceback" not in (server.root / "log").read_text()
