"""Operations by hand, and by torch's own counter, which sees every matrix product of a real forward
and backward pass. Memory: the state against what torch really holds, and what the message says.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from rl.config.loss import PolicyGradientConfig
from rl.config.run import RLConfig
from rl.launch.devices import MALLOC
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import full_batch
from rl.trainer.measure.performance import (
    GIB,
    Timer,
    explain_out_of_memory,
    free_bytes,
    keep_to_share,
    peak_flops,
    performance,
    work_of,
)
from rl.trainer.model.head import score
from rl.wire.messages import TrainBatch
from tests.trainer.policies import learner
from tests.trainer.samples import make_sample, pack_alone, sample_weights

LLAMA = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
MOE = LLAMA | {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
TOKENS = 24


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )


def chain(tokens):
    """One sequence of `tokens` inputs, each with a loss."""
    sample = make_sample([5], [6] * tokens)
    batch = TrainBatch(step=1, samples=[sample])
    return batch, pack_alone(
        batch, sample_weights([sample], PolicyGradientConfig(), 1)
    ).micro_batches[0]


def test_llama_by_hand():
    work = work_of(model_of(LlamaConfig(**LLAMA)))
    matrices = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 96  # q, k and v, o; gate, up and down
    assert work.per_token == 6 * 3 * matrices == 774_144
    assert work.per_predictor == 6 * 64 * 100  # tied, and counted as the head alone
    assert work.per_key == 12 * 3 * 4 * 32
    _, batch = chain(TOKENS)
    assert work.of(batch) == 24 * 774_144 + 24 * 38_400 + 3 * 1_536 * (24 * 25 // 2)
    batch.queries, batch.predictors = torch.tensor([3, 23]), torch.tensor([1])
    assert work.of(batch) == 2 * 774_144 + 38_400 + 3 * 1_536 * (4 + 24)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**LLAMA),
        Qwen3MoeConfig(**MOE),
        GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=2),
    ],
)
def test_the_counter_of_torch_agrees(config):
    """It counts attention to all keys, masked or not, and the rotary embedding's angles: less
    than 0.1 % here."""
    model, predictors = model_of(config).train(), torch.arange(3, 20)
    ids = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, logits_to_keep=predictors, use_cache=False).logits.sum().backward()
    work = work_of(model)
    ours = TOKENS * work.per_token + len(predictors) * work.per_predictor + work.per_key * TOKENS**2
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-3)


def test_frozen_weights_have_no_gradient_of_their_own():
    model = model_of(LlamaConfig(**LLAMA))
    whole = work_of(model)
    model.requires_grad_(False)
    assert work_of(model).per_token == whole.per_token * 4 // 6
    assert work_of(model).per_key == whole.per_key


def test_utilisation_is_of_the_whole_step_and_of_known_devices(world, monkeypatch):
    batch, micro_batch = chain(TOKENS)
    packed = SimpleNamespace(
        batch=batch, micro_batches=[micro_batch, micro_batch], shared_token_fraction=0.25
    )
    work = work_of(model_of(LlamaConfig(**LLAMA)))
    metrics = performance(packed, SimpleNamespace(step_s=2.0), work, "bfloat16", world)
    assert (metrics["tokens/trained"], metrics["tokens/batch"]) == (24, 25)
    assert metrics["perf/tokens_per_s"] == 25 / 2 and metrics["perf/shared_token_fraction"] == 0.25
    assert 0.1 < metrics["perf/peak_memory_gib"] < 50 and "perf/mfu" not in metrics
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 3 << 29)
    gpu = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), size=1, reduce=lambda values, _: values
    )
    metrics = performance(packed, SimpleNamespace(step_s=2.0), work, "bfloat16", gpu)
    assert metrics["perf/mfu"] == pytest.approx(2 * work.of(micro_batch) / 2.0 / 989e12)
    assert metrics["perf/peak_memory_gib"] == 1.5
    assert "perf/mfu" not in performance(packed, SimpleNamespace(step_s=2.0), work, "float32", gpu)
    # of which the names of known devices are beginnings
    for other, peak in (("H100 PCIe", 756e12), ("GeForce RTX 4090 D", None)):
        assert peak_flops(f"NVIDIA {other}") == peak


def test_a_part_has_the_seconds_that_the_gpu_computes_in_it(monkeypatch):
    """What a GPU was given in the passes was waited for, and counted, in the optimizer's part."""
    clock, queued = [0.0], [0.0]

    def synchronize(device):
        clock[0], queued[0] = clock[0] + queued[0], 0.0

    monkeypatch.setattr(
        "rl.trainer.measure.performance.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    for device, seconds in (
        ("cuda", {"passes": 3.0, "optimizer": 0.5}),
        ("cpu", {"passes": 0.0, "optimizer": 0.0}),
    ):
        timer = Timer(device=torch.device(device))
        for part, work in (("passes", 3.0), ("optimizer", 0.5)):
            queued[0] += work
            timer.lap(part)
        assert timer.seconds == seconds


@pytest.mark.parametrize(
    ("trainer", "inference", "share"),
    [([0], [0], 0.575), ([0], [1], None), ([0], 0, None), (None, None, None)],
)
def test_on_a_shared_gpu_the_trainer_leaves_alone_what_is_vllms(
    monkeypatch, trainer, inference, share
):
    """80 GiB, of which vLLM has 40 % and a GiB of each process is no tensor's."""
    limits = []
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB)
    )
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda fraction, _: limits.append(fraction)
    )
    settings = {
        "inference": {"gpus": inference, "vllm": {"gpu-memory-utilization": 0.4}},
        "trainer": {"gpus": trainer},
    }
    keep_to_share(RLConfig.model_validate(settings), torch.device("cuda", 0))
    keep_to_share(RLConfig.model_validate(settings), torch.device("cpu"))
    settings["trainer"]["data"] = {"fake": {}}
    keep_to_share(RLConfig.model_validate(settings), torch.device("cuda", 0))
    assert limits == ([] if share is None else [pytest.approx(share)])


@pytest.mark.parametrize(("share", "free"), [(1.0, 30), (0.5, 15)])
def test_free_memory_of_a_gpu_includes_what_torch_holds_unused_up_to_the_share(
    monkeypatch, share, free
):
    """What a model has left behind stays with torch: the driver never shows it as free."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 45 * GIB)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 25 * GIB)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _: share)
    assert free_bytes(torch.device("cuda", 0)) == free * GIB


FREED = """
import psutil, torch
from rl.trainer.measure.performance import free_bytes
taken = [torch.ones(1 << 18) for _ in range(300)]
before = psutil.Process().memory_info().rss
del taken
free_bytes(torch.device("cpu"))
print(before - psutil.Process().memory_info().rss >> 20)
"""


def test_memory_of_tensors_that_are_gone_is_free_on_a_cpu():
    """Also under the settings with which `rl` starts a trainer, by which glibc keeps it: no
    model that left made room for another."""
    done = subprocess.run(
        [sys.executable, "-c", FREED],
        env=os.environ | MALLOC,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > 250  # of 300 MiB


def test_the_error_of_the_allocator_is_explained_and_others_are_not(tied_folder, world):
    model, _, _ = learner(tied_folder, world, micro_batch_tokens=128)
    rows = pack_alone(full_batch(1, 128, 65, 259), max_tokens=128).micro_batches
    assert score(model, rows[0], world).trainer_logprobs.shape == (128,)
    with pytest.raises(RunError) as error, explain_out_of_memory(model, rows, world):
        torch.empty(1 << 50)
    said = str(error.value)
    assert said.startswith(
        "out of memory on rank 0 with a micro batch of 128 tokens, its longest sequence 64 ("
    )
    assert "can't allocate memory" in said
    assert "in the mode blocks. What helps: trainer.micro_batch_tokens" in said
    assert "a smaller inference.vllm.gpu_memory_utilization leaves more of a GPU" in said
    with (
        pytest.raises(RunError, match=r"CUDA out of memory\. Tried"),
        explain_out_of_memory(model, rows, world),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        explain_out_of_memory(model, rows, world),
    ):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
