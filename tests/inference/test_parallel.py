"""A server of several engines, and one of several workers: each holds its part of a version, and all of them the same one."""

import asyncio
import weakref
from types import SimpleNamespace

import pytest

from rl.models.tiny import make_tiny_model
from rl.system.errors import RunError
from tests.inference.servers import assert_logprobs, damaged_copy, start_server

PROMPT = list(range(10, 40))


@pytest.mark.proof
def test_a_fault_of_any_engine_is_seen_before_any_of_them_swaps():
    from rl.inference.engine import VersionedEngine

    calls = []

    async def call(_utility, method, _timeout, args, _kwargs, *, engine):
        calls.append((engine, method, *args))
        return [(True, "OSError: it is gone" if engine == "second" else "")] if method == "staging_state" else [None]

    engine = VersionedEngine.__new__(VersionedEngine)
    engine.engine_core = SimpleNamespace(core_engines=["first", "second"], _call_utility_async=call)
    with pytest.raises(RunError, match="weights/000003: OSError: it is gone"):
        asyncio.run(engine.stage(3, "weights/000003"))
    methods = [call[1:] for call in calls if call[0] == "first"]
    assert methods == [call[1:] for call in calls if call[0] == "second"]
    assert methods == [("stage_weights", "weights/000003"), ("staging_state",), ("forget_weights",)]
    engine.engine_core = None  # its destructor asks


@pytest.mark.proof
@pytest.mark.parametrize(("world_size", "data_parallel_size", "copies"), [(1, 1, 1), (2, 1, 0), (1, 4, 0), (2, 4, 0)])
def test_of_several_workers_none_holds_a_version_while_it_is_staged(tmp_path, monkeypatch, world_size, data_parallel_size, copies):
    """Bytes of tensors that live from staging to the swap where modules cannot be staged, as on GPUs; then one tensor at a time."""
    from rl.inference import staging, worker

    folder = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(staging, "can_stage", lambda config: False)
    loader = worker.WeightLoader()
    loader.model_config = SimpleNamespace(model=str(folder))
    parallel = SimpleNamespace(world_size=world_size, data_parallel_size=data_parallel_size)
    loader.vllm_config = SimpleNamespace(parallel_config=parallel)
    staged = loader._stage(folder)
    sizes = {name: tensor.nbytes for name, tensor in worker.read_weights(folder)}
    held = sum(tensor.nbytes for _, tensor in staged) if isinstance(staged, list) else 0
    assert held == copies * sum(sizes.values())
    if not copies:
        alive, most = weakref.WeakSet(), 0
        for name, tensor in staged:
            assert sizes.pop(name) == tensor.nbytes
            alive.add(tensor)
            most = max(most, len(alive))
            del tensor
        assert not sizes and most <= 2  # the reader's and the loader's


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["data", "tensor"])
def test_several_engines_and_several_workers(tmp_path, kind):
    """Every engine answers by the version that it says, before and after a load; a version that one cannot read is loaded by none."""
    versions = [make_tiny_model(tmp_path / f"{version:06d}", None, version) for version in range(2)]
    server = start_server(tmp_path / "server", versions, inference__vllm=f"{{{kind}_parallel_size = 2}}")
    try:
        server.wait_ready()
        for version in (0, 1):
            answers = [server.post("/generate", token_ids=PROMPT, sampling={"max_tokens": 8}, session=session) for session in range(4)]
            for answer in answers:
                assert answer.status_code == 200 and {span[0] for span in answer.json()["policy_versions"]} == {version}
                assert_logprobs(server, PROMPT, answer.json())
            if version == 0:
                refused = server.load(7, damaged_copy(versions[1], tmp_path / "damaged"))
                assert (refused.status_code, server.status()["policy_version"]) == (422, 0), refused.text
                gone = server.load(7, tmp_path / "none")
                assert gone.status_code == 404
                assert server.load(1).json()["policy_version"] == 1
    finally:
        server.end()


@pytest.mark.proof
def test_a_first_request_of_one_token_is_answered(tmp_path):
    """In bfloat16, where the processor has AMX: vLLM's attention ended the engine with an illegal instruction, each time anew."""
    server = start_server(tmp_path / "server", [make_tiny_model(tmp_path / "model")], model__dtype="bfloat16")
    try:
        server.wait_ready()
        assert 1 <= len(server.generate([5], max_tokens=3)["token_ids"]) <= 3
    finally:
        server.end()
