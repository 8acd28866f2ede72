"""What is checked before a server runs or a weight is touched: engine arguments and weight
files. No server."""

import asyncio
import json
import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.v1.outputs import SamplingMaskLists

from rl.config.run import RLConfig
from rl.inference.chat import Answers
from rl.inference.draw import carried_seed
from rl.inference.engine import CutOffError, VersionedEngine, bound_top_k, kept_of
from rl.inference.engine_args import parse_engine_args
from rl.inference.main import main, newest_sound_version
from rl.inference.routes import make_router
from rl.inference.server import vllm_arguments
from rl.inference.weight_files import Tensors, WeightsGoneError, check_weights, read_tensors
from rl.inference.worker import count_uncompiled
from rl.run_dir.checksums import Mirror, content_of
from rl.run_dir.files import temporary_name
from rl.run_dir.in_memory import OverNetwork
from rl.run_dir.safetensors import HASH, TensorEntry, digest
from rl.system.errors import ConfigError, RunError
from rl.trainer.store import versions
from rl.wire.inference_client import Balancer, LoadedVersion
from rl.wire.messages import WeightVersion
from rl.wire.turns import unpack_kept
from tests import steady
from tests.families import make_old_model, make_seeing_model
from tests.raised import run_error


def test_engine_args_take_numbers_bools_lists_and_tables():
    given = {
        "tensor-parallel-size": 2,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"mode": 0},
        "kv_cache_memory_bytes": "1G",
        "tool_call_parser": "hermes",
    }
    args = parse_engine_args(given, {"dtype": "float32", "enforce_eager": True})
    assert (
        args.tensor_parallel_size,
        args.enable_prefix_caching,
        args.cudagraph_capture_sizes,
    ) == (2, False, [1, 2])
    assert (args.kv_cache_memory_bytes, args.tool_call_parser) == (2**30, "hermes")
    assert int(args.compilation_config.mode) == 0
    assert (args.dtype, args.enforce_eager) == ("float32", True)


def test_routes_are_asked_of_vllm_on_gpus_alone(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = RLConfig.model_validate({"trainer": {"router_replay": "engine"}})
    assert vllm_arguments(config, "m", on_cpu=False).enable_return_routed_experts
    config.trainer.router_replay = "trainer"
    assert not vllm_arguments(config, "m", on_cpu=True).enable_return_routed_experts
    config.trainer.router_replay = "engine"
    with pytest.raises(ConfigError, match="vLLM gives no routes on CPUs; set it to trainer or off"):
        vllm_arguments(config, "m", on_cpu=True)


def test_vllm_is_asked_for_the_kept_tokens_on_gpus_if_sampling_is_cut(monkeypatch, tmp_path):
    """Its runner wants a top_k of every request then; what is sampled must stay the same."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    for top_p, max_kept, on_cpu in (
        (0.9, 9, False),
        (1.0, 9, False),
        (0.9, 0, False),
        (0.9, 9, True),
    ):
        env = {"id": "e", "sampling": {"top_p": top_p}}
        config = RLConfig.model_validate(
            {"trainer": {"max_kept": max_kept}, "orchestrator": {"environment": [env]}}
        )
        args = vllm_arguments(config, str(tmp_path), on_cpu=on_cpu)
        assert args.return_sampling_mask == (top_p < 1 and max_kept > 0 and not on_cpu)
    alone = RLConfig.model_validate({"orchestrator": {"sampling": {"top_p": 0.9}}})  # `rl record`
    assert vllm_arguments(alone, str(tmp_path), on_cpu=False).return_sampling_mask
    for key, value in (
        ("scheduler_cls", "mine.Scheduler"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
    ):
        alone.inference.vllm = {key: value}
        with pytest.raises(ConfigError, match=f"inference.vllm.{key}: with it vLLM does not tell"):
            vllm_arguments(alone, str(tmp_path), on_cpu=True)
        alone.trainer.max_kept = 0
        assert vllm_arguments(alone, str(tmp_path), on_cpu=True)
        alone.trainer.max_kept = 9
    bounded = {(0.0, 0): (1.0, 1), (0.5, 0): (0.5, 97), (0.5, 4): (0.5, 4)}
    for (temperature, top_k), expected in bounded.items():
        params = SamplingParams(temperature=temperature, top_k=top_k)
        bound_top_k(params, 97)
        assert (params.temperature, params.top_k) == expected


def sampled(prompt: list[int], token_ids: list[int], **answered):
    """The answer of an engine of which vLLM says this."""
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(token_ids))
    answer = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, **answered)

    async def once(*_, **__):
        return SimpleNamespace(
            outputs=[answer],
            finished=True,
            prompt_logprobs=None,
            num_cached_tokens=0,
            version_starts=[(0, 3)],
            get=once,
        )

    engine = SimpleNamespace(sampling=nullcontext, ranks=Balancer(), add_request=once)
    routes = answered["finish_reason"] == "stop"
    return VersionedEngine.sample(engine, prompt, SamplingParams(), routes=routes)


@pytest.mark.parametrize(
    ("given", "said"),
    [((7, 3, 2), ""), ((6, 3, 2), "gave those of 6 of 7 tokens' routes"), (None, "gave none of 7")],
)
def test_an_answer_has_the_routes_of_all_its_tokens_but_the_last(given, said):
    routes = None if given is None else np.arange(math.prod(given), dtype=np.uint16).reshape(given)
    work = sampled([1, 2, 3, 4, 5, 6], [7, 8], finish_reason="stop", routed_experts=routes)
    if said:
        with pytest.raises(ValueError, match=said):
            asyncio.run(work)
    else:
        assert np.frombuffer(asyncio.run(work).routes, dtype=np.uint16).tolist() == list(range(42))


def test_kept_tokens_are_those_of_vllm_within_the_limit():
    """No ids are the whole vocabulary, our draw's -1 and larger sets too many. What was not asked
    for is dropped in the step: of long answers it would fill the memory."""
    sets = [[3], [], [1, 2, 3], [-1], [4, 2]]
    states = {
        str(limit): SimpleNamespace(queue=SimpleNamespace(max_kept=limit)) for limit in (0, 2)
    }
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    arrays = [np.array(ids, np.int32) for ids in sets]
    whole = SamplingMaskLists(np.concatenate(arrays), np.cumsum([0, *map(len, sets)]))
    single = [SamplingMaskLists(ids) for ids in arrays]

    def bounded(masks, request_id):
        steps = [SimpleNamespace(request_id=request_id, new_sampling_mask=mask) for mask in masks]
        for step in steps:
            VersionedEngine.bound_kept(engine, step)
        chunks = [step.new_sampling_mask for step in steps if step.new_sampling_mask]
        return [ids for chunk in chunks for ids in chunk.to_nested_list()]

    for masks in (single, [whole]):  # with speculative decoding a step has several tokens
        mask = SimpleNamespace(token_ids=bounded(masks, "2"))
        assert mask.token_ids == [[3], [], [-1], [-1], [4, 2]]
        answer = SimpleNamespace(token_ids=[3, 0, 1, 1, 4], sampling_mask=mask)
        kept = kept_of(answer)
        assert kept and unpack_kept(kept) == [[3], [], None, None, [4, 2]]
        assert not bounded(masks, "0") and not bounded([None], "2") and not bounded(masks, "ended")
    for mask in (None, SimpleNamespace(token_ids=sets[1:])):
        answer.sampling_mask = mask
        with pytest.raises(ValueError, match="leave them out, or set trainer"):
            kept_of(answer)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_vllm_cut_off_is_none(reason):
    with pytest.raises(CutOffError, match="the server is stopping"):
        asyncio.run(sampled([1], [7], finish_reason=reason, routed_experts=None))


def test_adapters_of_a_model_that_sees_images_are_merged(tmp_path):
    """vLLM serves it as another class than the trained one, finds no layer by the adapter's
    names, and would sample from the base."""
    fields = {"orchestrator": {"environment": [{"id": "e"}]}, "trainer": {"lora": {"rank": 8}}}
    config = RLConfig.model_validate(fields)
    (tmp_path / "config.json").write_text("{}")
    assert vllm_arguments(config, str(tmp_path), on_cpu=False).enable_lora
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    assert not vllm_arguments(config, str(tmp_path), on_cpu=False).enable_lora
    config = RLConfig.model_validate(fields | {"inference": {"adapters": "hot"}})
    with pytest.raises(
        ConfigError,
        match="not known to serve adapters of a model that sees images; set it to merge",
    ):
        vllm_arguments(config, str(tmp_path), on_cpu=False)


def test_engine_args_report_every_fault_with_its_remedy():
    given = {"tensor_paralel_size": 2, "max_model_len": 100, "logprobs_mode": "raw_logprobs"}
    given |= {"max_num_seqs": "many", "enforce_eager": "yes", "api_key": "a-secret"}
    tls = {"ssl_keyfile": "k", "ssl-certfile": "c", "ssl_ca_certs": "a", "ssl_cert_reqs": 2}
    tls |= {"ssl_ciphers": "x", "enable_ssl_refresh": True}
    given |= tls
    with pytest.raises(ConfigError) as error:
        parse_engine_args(given)
    assert str(error.value).splitlines() == [
        "inference.vllm.tensor_paralel_size = 2: vLLM has no such argument; did you mean "
        "tensor_parallel_size?",
        "inference.vllm.max_model_len = 100: set model.max_model_len instead",
        "inference.vllm.logprobs_mode = 'raw_logprobs': cannot be set, training needs the "
        "logprobs of the distribution that was sampled"
        " from (processed_logprobs)",
        "inference.vllm.max_num_seqs = 'many': invalid int value: 'many'",
        "inference.vllm.enforce_eager = 'yes': takes true or false",
        "inference.vllm.api_key = ...: cannot be set, the run's token guards every path, "
        "while vLLM's key leaves some open: set RL_TOKEN",
        *(
            f"inference.vllm.{key} = {value!r}: cannot be set, the server of a run speaks "
            "plain HTTP: put a tunnel or a TLS proxy in front"
            " (docs/security.md)"
            for key, value in tls.items()
        ),
    ]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]], cut: int = 0) -> None:
    """Zeros of the given types (BF16 or F32) and shapes; the last `cut` bytes are left out."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "I32": 4}[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((len(text).to_bytes(8, "little") + text + bytes(offset))[: -cut or None])


EXPECTED = {
    "a.weight": TensorEntry("F32", (2, 3), 0, 24),
    "lm_head.weight": TensorEntry("F32", (4, 2), 24, 56),
}


@pytest.mark.parametrize(
    ("tensors", "tied", "fault"),
    [
        ({"a.weight": ("BF16", [2, 3]), "lm_head.weight": ("F32", [4, 2])}, False, None),
        ({"a.weight": ("F32", [2, 3])}, True, None),
        ({"a.weight": ("F32", [2, 3])}, False, "lm_head.weight is missing"),
        ({"a.weight": ("F32", [3, 2])}, True, r"a.weight has shape \[3, 2\], the model \[2, 3\]"),
        ({"a.weight": ("I32", [2, 3])}, True, "a.weight is I32, the model's F32"),
        ({"a.weight": ("F32", [2, 3]), "b": ("F32", [1])}, True, "b is not in the model"),
    ],
)
def test_weights_must_fit_the_model(tmp_path, tensors, tied, fault):
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with run_error(fault) if fault else nullcontext():
        check_weights(tmp_path, tmp_path, EXPECTED, tied)
    write_safetensors(tmp_path / "model.safetensors", tensors, cut=5)
    with run_error(r"model.safetensors: has .* bytes, its header says"):
        check_weights(tmp_path, tmp_path, EXPECTED, tied)
    (tmp_path / "model.safetensors").unlink()
    with run_error("lacks weights"):
        check_weights(tmp_path, tmp_path, EXPECTED, tied)


@pytest.mark.parametrize("family", ["qwen3_5", "gpt2", "gpt_neox"])
def test_a_version_has_what_is_trained_of_the_base_by_whatever_name(tmp_path, family):
    """Regression: a run ended with "model.visual... is missing" after its first step, as every
    run of a published GPT-2 or Pythia did."""
    base = (
        make_seeing_model(tmp_path / "base")
        if family == "qwen3_5"
        else make_old_model(tmp_path / "base", family)
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    versions.snapshot(model, base, torch.float32, {}).write(tmp_path / "version")
    expected, found = read_tensors(base), read_tensors(tmp_path / "version")
    assert found.keys() != expected.keys()
    check_weights(tmp_path / "version", base, expected, model.config.tie_word_embeddings)
    lost = next(name for name in found if "norm" in name or "ln_" in name)
    for tensors, fault in (
        ({name: found[name] for name in found if name != lost}, "norm|ln_.* is missing"),
        (found | {"mtp.fc": found[lost]}, "mtp.fc is not in the model"),
    ):
        with run_error(fault):
            check_weights(tmp_path / "version", base, expected, True, tensors)


def test_the_newest_sound_version_is_served(run_dir, capfd):
    claimed = []
    assert newest_sound_version(run_dir, Mirror(), claimed.append) is None
    for version in (1, 2, 3, 4):
        file = run_dir.weights(version) / "model.safetensors"
        write_safetensors(
            file,
            {"a.weight": ("F32", [2, 3]), "b.weight": ("F32", [1])},
            cut=5 if version == 4 else 0,
        )
        zeros = {"a.weight": digest(bytes(24)), "b.weight": digest(bytes(4))}
        if version != 1:
            (file.parent / "digests.json").write_text(
                json.dumps(
                    {"hash": HASH, "tensors": zeros | ({"b.weight": "0"} if version == 3 else {})}
                )
            )
    content = content_of({"a.weight": digest(bytes(24)), "b.weight": digest(bytes(4))})
    assert newest_sound_version(run_dir, Mirror(), claimed.append) == WeightVersion(
        2, str(run_dir.weights(2)), content=content
    )
    assert claimed == [4, 3, 2]  # each before it is read
    said = capfd.readouterr().err.splitlines()
    assert [line.partition(": /")[0] for line in said] == [
        f"inference: WARNING: skipping policy version {v}" for v in (4, 3)
    ]
    assert "bytes, its header says" in said[0]
    assert "tensor b.weight is not what was written" in said[1]
    shutil.rmtree(run_dir.weights(2))
    # without checksums
    assert newest_sound_version(run_dir, Mirror(), claimed.append) == WeightVersion(
        1, str(run_dir.weights(1))
    )


def test_a_server_by_hand_needs_no_environment(tmp_path, monkeypatch):
    """`inference @ FILE` asked for one, which it never plays."""
    file = tmp_path / "i.toml"
    file.write_text('[model]\nname = "owner/m"\n')
    monkeypatch.setattr("sys.argv", ["inference", "@", str(file)])
    monkeypatch.setattr(
        "rl.inference.main.run", lambda config: 7 if config.model.name == "owner/m" else 0
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 7


def test_likelier_tokens_are_counted_without_a_compilation(monkeypatch):
    from vllm.v1.sample import sampler

    monkeypatch.setattr(sampler, "batched_count_greater_than", sampler.batched_count_greater_than)
    count_uncompiled()
    compiled = sum(torch._dynamo.utils.counters["stats"].values())
    logprobs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
    found = sampler.Sampler.gather_logprobs(logprobs, 0, torch.tensor([1, 1]))
    assert found.selected_token_ranks.tolist() == [3, 2] and found.logprobs.tolist() == [
        [logprobs[0, 1]],
        [logprobs[1, 1]],
    ]
    assert sum(torch._dynamo.utils.counters["stats"].values()) == compiled


@pytest.mark.parametrize(
    ("seed", "fits"), [(2**63 - 1, True), (-(2**63), True), (2**63, False), (2**64, False)]
)
def test_a_seed_fits_into_the_array_in_which_vllm_keeps_it_on_gpus(seed, fits):
    """One that fits into 64 bits without a sign passed, and would have ended the engine there."""
    engine = SimpleNamespace(
        vocab_size=9, engine_core=SimpleNamespace(encoder=msgspec.msgpack.Encoder())
    )
    request = SimpleNamespace(prompt_token_ids=[1], sampling_params=SamplingParams(seed=seed))
    with (
        nullcontext()
        if fits
        else pytest.raises(ValueError, match="does not fit into a signed 64-bit integer")
    ):
        VersionedEngine.refuse_fatal(engine, request)


def test_speculative_decoding_on_a_cpu_draws_without_the_seed_and_says_so_once(capsys):
    """Regression: each request of an evaluation was refused, for it has a seed, so that every
    evaluation was 0."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"), speculative_config=SimpleNamespace()
    )
    engine = SimpleNamespace(vllm_config=config, told_of_seeds=False)
    for _ in range(2):
        VersionedEngine.hand_over_seed(engine, params := SamplingParams(seed=3))
        assert params.seed is None and carried_seed(params) is None
    assert capsys.readouterr().err.count("no seeds with speculative decoding on a CPU") == 1


def test_a_file_system_that_hangs_ends_the_server_instead_of_the_run(tmp_path):
    """The workers never finish reading. 503: the weights are not refused, so the orchestrator
    asks again once the server is back."""
    folder = tmp_path / "000001"
    folder.mkdir()
    engine = VersionedEngine.__new__(VersionedEngine)
    engine.policy_version, engine.content, engine.read_timeout_s = 0, "", 0.3
    engine.load_lock, engine.mirror = asyncio.Lock(), Mirror()
    engine.check = lambda folder, content: None
    engine.model_config = SimpleNamespace(max_model_len=9)

    asked = []

    async def hang(method, *args):  # after a second of progress
        asked.append(time.monotonic())
        return [(False, "", min(len(asked), 1 + int(5 * (asked[-1] - asked[0])), 5))]

    engine.on_every_worker = hang
    app = FastAPI()
    app.include_router(make_router(engine, "m", Answers()))
    body = {"policy_version": 1, "path": str(folder)}

    async def ask():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            return await client.post("/load_weights", json=body)

    answer, engine.engine_core = steady.run(ask()), None  # its destructor asks
    # `engine_death` ends a broken one
    assert answer.status_code == 503 and engine.broken == answer.json()["error"]["message"]
    assert (
        "was read for 0 s (ten times inference.engine_timeout_s): does the file system"
        in engine.broken
    )
    waited_s = asked[-1] - asked[0]
    assert waited_s > 0.8 + 0.3, "progress counts"
    assert len(asked) < 3 + 20 * (1 + math.log(waited_s / 0.2)), (
        "every 10 ms at first, and less often the longer it takes"
    )


def test_a_version_is_waited_for_as_long_as_its_trainer_writes(tmp_path):
    """It takes three times as long as nothing may happen. Of the next one nothing more comes."""
    engine = VersionedEngine.__new__(VersionedEngine)
    engine.engine_core, engine.read_timeout_s, engine.mirror = None, 60.0, Mirror()
    temporary = temporary_name(folder := tmp_path / "000001")
    temporary.mkdir()

    async def write() -> None:
        for _ in range(15):
            with (temporary / "model.safetensors").open("ab") as file:
                file.write(b"x" * (1 << 16))
            await asyncio.sleep(0.1)
        temporary.rename(folder)

    async def both() -> None:
        await asyncio.gather(engine.in_time(engine.until_there(folder, 0.5)), write())

    steady.run(both())
    stuck = temporary_name(tmp_path / "000002")
    stuck.mkdir()
    (stuck / "model.safetensors").write_bytes(b"x" * (1 << 16))
    with pytest.raises(
        WeightsGoneError,
        match=r"000002: announced, but missing: 65,536 bytes of it are written, none in the last 0 "
        r"s",
    ):
        steady.run(engine.in_time(engine.until_there(tmp_path / "000002", 0.5)))


@pytest.mark.parametrize(
    ("content", "fault", "last", "said"),
    [
        ("right", "", "swap", ""),
        ("wrong", "", "forget_weights", "not the content"),
        ("right", "it is gone", "forget_weights", "it is gone"),
    ],
)
def test_what_is_staged_over_the_network_is_swapped_in_if_its_content_is_right(
    tmp_path, monkeypatch, capsys, content, fault, last, said
):
    """Otherwise the workers forget what they have staged, the folder is waited for, and the old
    version goes on."""
    asked, answers = [], {"staging_state": (True, fault, 0)}
    memory = OverNetwork("", b"", 1, 33, "rl-" + "0" * 32)

    def check_content(
        version: OverNetwork, base: Path, expected: Tensors, tied: bool, content: str
    ) -> None:
        assert version is memory
        if content != "right":
            raise RunError("not the content")

    monkeypatch.setattr("rl.inference.loading.check_content", check_content)
    monkeypatch.setattr("rl.inference.loading.ASKED_AGAIN_S", 0.0)

    async def on_every_worker(method: str, *_: str) -> list[object]:
        asked.append(method)
        return [answers.get(method)]

    async def swap(policy_version: int) -> LoadedVersion:
        asked.append("swap")
        return LoadedVersion(policy_version)

    engine = VersionedEngine.__new__(VersionedEngine)
    vars(engine).update(engine_core=None, read_timeout_s=60.0, mirror=Mirror())
    vars(engine).update(load_lock=asyncio.Lock(), content="old", expected={})
    vars(engine).update(on_every_worker=on_every_worker, swap=swap)
    engine.model_config = SimpleNamespace(model="base")
    with (
        pytest.raises(WeightsGoneError, match="000001: announced, but missing")
        if said
        else nullcontext()
    ):
        assert asyncio.run(
            engine.load_weights(1, str(tmp_path / "000001"), memory, content)
        ) == LoadedVersion(1)
    assert asked == ["stage_weights", "staging_state", last]
    assert engine.content == ("old" if said else content)
    assert said in capsys.readouterr().err
