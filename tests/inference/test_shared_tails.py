from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rl.inference import shared_tails
from rl.inference.shared_tails import Copies, SharedTails, share_tails

BLOCK = 32
PROMPT = list(range(100, 144))
BUDGET = {"max_num_batched_tokens": 512, "max_num_seqs": 8}


@pytest.fixture(autouse=True)
def no_gathering(monkeypatch):
    monkeypatch.setattr(shared_tails, "GATHER_S", 0.0)


def make_scheduler(model, non_causal=False, **settings) -> Scheduler:
    """vLLM's scheduler as the server's engine makes it for a model of one layer."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), max_model_len=256, skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(max_model_len=256, is_encoder_decoder=False, async_scheduling=False, **BUDGET | settings),
    )
    share_tails(config)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32, non_causal=non_causal)
    layout = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = 200
    return Scheduler(config, layout, StructuredOutputManager(config), block_size=BLOCK)


def add(scheduler: Scheduler, name: str, prompt: list[int], **more) -> Request:
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    params.update_from_generation_config({}, 1)
    request = Request(name, prompt, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256), **more)
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> tuple[dict[str, int], Copies]:
    """The tokens of each request that a step computes, and what it copies; each gets a token where its prompt is done."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[7] if not scheduler.requests[name].is_prefill_chunk else [] for name in names]
    scheduler.update_from_output(output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled))
    return output.num_scheduled_tokens, output.kv_connector_metadata


def tail_block(scheduler: Scheduler, name: str) -> int:
    return scheduler.kv_cache_manager.get_block_ids(name)[0][1]


def test_equal_prompts_are_computed_once_also_behind_the_last_whole_block(model):
    scheduler = make_scheduler(model)
    for name in ("a", "b", "c"):
        add(scheduler, name, PROMPT)
    add(scheduler, "other", [*PROMPT[:40], 1, 2, 3, 4])
    add(scheduler, "end", [*PROMPT[:-1], 9])  # a whole block would bring another's last token with it
    add(scheduler, "long", [*PROMPT, 5])
    tokens, copies = step(scheduler)
    assert tokens == {"a": 44, "b": 1, "c": 1, "other": 12, "end": 12, "long": 13}
    assert copies.sources == [tail_block(scheduler, "a")] * 2
    assert copies.targets == [tail_block(scheduler, name) for name in ("b", "c")]
    add(scheduler, "later", PROMPT)
    tokens, copies = step(scheduler)
    assert tokens == dict.fromkeys(["a", "b", "c", "other", "end", "long", "later"], 1)
    assert (copies.sources, copies.targets) == ([tail_block(scheduler, "a")], [tail_block(scheduler, "later")])
    assert step(scheduler)[1] == Copies()


def test_only_a_running_request_gives_its_tail(model):
    scheduler = make_scheduler(model)
    add(scheduler, "a", PROMPT)
    step(scheduler)
    scheduler.reset_prefix_cache(reset_running_requests=True)  # new weights
    add(scheduler, "b", PROMPT)
    tokens, copies = step(scheduler)
    assert tokens == {"a": 45, "b": 1}, "computed anew, and shared again"
    assert copies.sources == [tail_block(scheduler, "a")]
    scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.connector.running == {}
    add(scheduler, "c", PROMPT)
    assert step(scheduler)[0] == {"c": 12}, "whole blocks are vLLM's to keep"


def test_a_prompt_that_is_cut_gives_nothing_until_it_is_computed(model):
    scheduler = make_scheduler(model, max_num_batched_tokens=40)
    for name in ("a", "b"):
        add(scheduler, name, PROMPT)
    assert step(scheduler) == ({"a": 40}, Copies())
    tokens, copies = step(scheduler)
    assert tokens == {"a": 4, "b": 12} and copies == Copies(), "it was not computed when b was asked about"


def test_what_has_no_tail_or_another_adapter_or_salt_shares_nothing(model):
    scheduler = make_scheduler(model)
    for name in ("a", "b"):
        add(scheduler, name, PROMPT[:33])
    for name, salt in (("c", "x"), ("d", "y"), ("e", "y")):
        add(scheduler, name, PROMPT[:20], cache_salt=salt)
    tokens, copies = step(scheduler)
    assert tokens == {"a": 33, "b": 1, "c": 20, "d": 20, "e": 1} and len(copies.targets) == 1


@pytest.mark.parametrize(
    "change", [{"non_causal": True}, {"long_prefill_token_threshold": 40}], ids=["a prompt that sees itself", "prompts that are cut"]
)
def test_models_and_settings_for_which_it_is_not_made_share_whole_blocks_alone(model, change):
    scheduler = make_scheduler(model, **change)
    for name in ("a", "b"):
        add(scheduler, name, PROMPT[:40])
    assert step(scheduler)[0] == {"a": 40, "b": 8}


def test_requests_that_meet_an_idle_engine_wait_for_those_right_behind_them(model, monkeypatch):
    monkeypatch.setattr(shared_tails, "GATHER_S", 5.0)
    monkeypatch.setattr(shared_tails, "GATHER_MOST_S", 30.0)
    scheduler, now = make_scheduler(model), [100.0]
    monkeypatch.setattr(shared_tails.time, "monotonic", lambda: now[0])
    for moment, name in ((100.0, "a"), (104.0, "b")):
        now[0] = moment
        add(scheduler, name, PROMPT)
        assert step(scheduler)[0] == {}
    now[0] = 108.9
    assert step(scheduler)[0] == {}
    now[0] = 109.0
    assert step(scheduler)[0] == {"a": 44, "b": 1}
    add(scheduler, "late", PROMPT)
    assert step(scheduler)[0] == {"a": 1, "b": 1, "late": 1}, "who computes waits for nobody"
    scheduler.finish_requests(["a", "b", "late"], RequestStatus.FINISHED_ABORTED)
    assert step(scheduler)[0] == {}
    for moment in range(200, 230, 4):
        now[0] = moment
        add(scheduler, f"at-{moment}", PROMPT[:5])
        assert step(scheduler)[0] == {}
    now[0] = 230.0
    assert len(step(scheduler)[0]) == 8, "nor for ever"


def test_a_worker_copies_behind_the_writing_of_each_layer(model):
    config = make_scheduler(model).vllm_config
    worker = SharedTails(config, None, SimpleNamespace(kv_cache_groups=[]))
    layers = {name: torch.arange(5.0).reshape(5, 1, 1).repeat(1, 2, 3) for name in ("one", "two")}
    worker.register_kv_caches(layers)
    worker.bind_connector_metadata(Copies())
    assert not worker.has_connector_metadata()
    worker.bind_connector_metadata(Copies([1, 1], [3, 4]))
    assert worker.has_connector_metadata()
    worker.start_load_kv(None)
    worker.wait_for_layer_load("two")
    assert layers["two"][:, 0, 0].tolist() == [0, 1, 2, 1, 1] and layers["one"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
