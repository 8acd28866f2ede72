"""A server of several engines, and one of several workers: each holds its part of a version, and
all of them the same one."""

import asyncio
from types import SimpleNamespace

import pytest

from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import Mirror
from rl.system.errors import RunError
from tests.families import CONFIGS
from tests.inference.servers import (
    answer_of,
    as_deltas,
    assert_logprobs,
    damaged_copy,
    start_server,
)

PROMPT = list(range(10, 40))


@pytest.mark.proof
def test_a_fault_of_any_engine_is_seen_before_any_of_them_swaps():
    from rl.inference.engine import VersionedEngine

    calls = []

    async def call(_utility, method, _timeout, args, _kwargs, *, engine):
        calls.append((engine, method, *args))
        return (
            [(True, "OSError: it is gone" if engine == "second" else "", 0)]
            if method == "staging_state"
            else [None]
        )

    engine = VersionedEngine.__new__(VersionedEngine)
    engine.engine_core = SimpleNamespace(core_engines=["first", "second"], _call_utility_async=call)
    engine.read_timeout_s, engine.mirror = 60.0, Mirror()
    with pytest.raises(RunError, match="weights/000003: OSError: it is gone"):
        asyncio.run(engine.stage(3, lambda: None, "weights/000003"))
    methods = [call[1:] for call in calls if call[0] == "first"]
    assert methods == [call[1:] for call in calls if call[0] == "second"]
    assert methods == [("stage_weights", "weights/000003"), ("staging_state",), ("forget_weights",)]
    engine.engine_core = None  # its destructor asks


SPLIT = {
    "data": "{data_parallel_size = 2}",
    "tensor": "{tensor_parallel_size = 2}",
    "experts": "{tensor_parallel_size = 2}",
}
"""Experts are split as other layers are: vLLM's kernel for CPUs ends with a segmentation fault
where each worker has whole experts."""


@pytest.mark.proof
@pytest.mark.parametrize("kind", SPLIT)
def test_several_engines_and_several_workers(tmp_path, kind):
    """Every engine answers by the version that it says, before and after a load, and workers bit
    for bit as those that were started with it; a version that one cannot read is loaded by none."""
    config = CONFIGS["qwen3_moe"] | {"tie_word_embeddings": False} if kind == "experts" else None
    versions = [
        make_tiny_model(tmp_path / f"{version:06d}", config, version) for version in range(2)
    ]
    server = start_server(tmp_path / "server", versions, inference__vllm=SPLIT[kind])
    try:
        server.wait_ready()
        for version in (0, 1):
            asked = {"token_ids": PROMPT, "sampling": {"max_tokens": 8}}
            for session in range(4):
                sampled = answer_of(server.post("/generate", **asked, session=session))
                assert {span[0] for span in sampled["policy_versions"]} == {version}
                assert_logprobs(server, PROMPT, sampled)
            if version == 0:
                refused = server.load(7, damaged_copy(versions[1], tmp_path / "damaged"))
                assert (refused.status_code, server.status()["policy_version"]) == (422, 0), (
                    refused.text
                )
                gone = server.load(7, tmp_path / "none")
                assert gone.status_code == 404
                # then all workers read one mirror
                path = as_deltas(versions, tmp_path / "deltas")[1] if kind == "tensor" else None
                assert server.load(1, path).json()["policy_version"] == 1
        if kind == "data":  # each of its engines is one of tests/inference/test_server.py
            return
        greedy = {"max_tokens": 32, "temperature": 0.0}
        loaded = server.generate(PROMPT, **greedy)
        server.end()
        server = start_server(tmp_path / "fresh", versions[1:], inference__vllm=SPLIT[kind])
        server.wait_ready()
        fresh = server.generate(PROMPT, **greedy)
        assert (loaded["token_ids"], loaded["logprobs"]) == (fresh["token_ids"], fresh["logprobs"])
    finally:
        server.end()


@pytest.mark.proof
def test_a_first_request_of_one_token_is_answered(tmp_path):
    """In bfloat16, where the processor has AMX: vLLM's attention ended the engine with an
    illegal instruction, each time anew."""
    server = start_server(
        tmp_path / "server", [make_tiny_model(tmp_path / "model")], model__dtype="bfloat16"
    )
    try:
        server.wait_ready()
        assert 1 <= len(server.generate([5], max_tokens=3)["token_ids"]) <= 3
    finally:
        server.end()
