"""The state against what torch really holds, and what the message says."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rl.config.run import RLConfig
from rl.config.trainer import OptimConfig
from rl.launch.devices import MALLOC
from rl.system.errors import RunError
from rl.trainer.data.fake import full_batch
from rl.trainer.measure.memory import (
    GIB,
    State,
    advice,
    explain_out_of_memory,
    free_bytes,
    keep_to_share,
    state_of,
)
from rl.trainer.model.head import score
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import make_optimizer
from tests.trainer.samples import pack_alone


def test_the_state_is_exactly_what_torch_holds(tied_folder, world):
    config = RLConfig.model_validate({"model": {"dtype": "float32"}})
    model = load_policy(str(tied_folder), config.model, config.trainer, world)
    optimizer = make_optimizer(model, OptimConfig())
    moments = sum(
        v[key].numel() * 4 for v in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    )
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert (
        state_of(model, config, shards=1) == State(weights, weights, moments)
        and moments == 2 * weights
    )
    assert state_of(model, config, shards=4).total == weights
    offloaded = RLConfig.model_validate(
        {"model": {"dtype": "float32"}, "trainer": {"optim": {"offload": True}}}
    )
    assert state_of(model, offloaded, shards=1) == State(weights, weights, 0.0)
    model.requires_grad_(False)
    assert state_of(
        model, RLConfig.model_validate({"model": {"dtype": "bfloat16"}}), shards=1
    ) == State(weights / 2, 0.0, 0.0)


def advised(model, world, longest: int = 64, **trainer) -> str:
    config = RLConfig.model_validate({"model": {"dtype": "float32"}, "trainer": trainer})
    batch = SimpleNamespace(position_ids=torch.arange(longest))
    return advice(model, batch, config, world, 128)


def test_only_settings_that_help_in_this_case_are_named(tied_folder, world, monkeypatch):
    config = RLConfig.model_validate({"model": {"dtype": "float32"}})
    model = load_policy(str(tied_folder), config.model, config.trainer, world)
    said = advised(model, world)
    assert (
        "trainer.micro_batch_tokens = 64; trainer.context_parallel = 2; "
        "trainer.activation_checkpointing" in said
    )
    assert "trainer.lora = true (" in said and "offload" not in said  # on a CPU
    # a sequence cannot be divided among rows
    assert "micro_batch_tokens" not in advised(model, world, longest=65)
    assert "activation_checkpointing" not in advised(model, world, activation_checkpointing="full")
    assert "trainer.lora" not in advised(model, world, lora={"rank": 4})
    head = model.get_output_embeddings().forward
    for mode, rows, shared in (
        ("eager", True, False),
        ("unpacked", False, False),
        ("flex", True, True),
    ):
        monkeypatch.setattr(head, "mode", mode)
        said = advised(model, world)
        assert ("micro_batch_tokens" in said, "context_parallel" in said) == (rows, shared), mode
        has_remedy = "Smaller activations" in advised(model, world, activation_checkpointing="full")
        assert has_remedy == (rows or shared), mode
    monkeypatch.undo()
    with_reference = RLConfig.model_validate(
        {"model": {"dtype": "bfloat16"}, "trainer": {"loss": {"kl_coefficient": 0.1}}}
    )
    assert state_of(model, with_reference, shards=2).reference == sum(
        p.numel() for p in model.parameters()
    )
    assert "optimizer and KL reference take" in advised(model, world, loss={"kl_coefficient": 0.1})
    assert "KL reference" not in advised(
        model, world, loss={"kl_coefficient": 0.1}, lora={"rank": 4}
    )
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), mesh=world.mesh, context_size=1)
    assert "trainer.optim.offload = true (" in advised(model, on_gpu)
    assert "offload" not in advised(model, on_gpu, optim={"offload": True})


@pytest.mark.parametrize(
    ("trainer", "inference", "share"),
    [([0], [0], 0.5875), ([0], [1], None), ([0], 0, None), (None, None, None)],
)
def test_on_a_shared_gpu_the_trainer_leaves_alone_what_is_vllms(
    monkeypatch, trainer, inference, share
):
    """80 GiB, of which vLLM has 40 % and a GiB is no tensor's."""
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
from rl.trainer.measure.memory import free_bytes
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
    config = RLConfig.model_validate(
        {"model": {"dtype": "float32"}, "trainer": {"micro_batch_tokens": 128}}
    )
    model = load_policy(str(tied_folder), config.model, config.trainer, world)
    rows = pack_alone(full_batch(1, 128, 65, 259), max_tokens=128).micro_batches
    assert score(model, rows[0], world).logprobs.shape == (128,)
    with pytest.raises(RunError) as error, explain_out_of_memory(model, rows, config, world):
        torch.empty(1 << 50)
    said = str(error.value)
    assert said.startswith(
        "out of memory on rank 0 with a micro batch of 128 tokens, its longest sequence 64 ("
    )
    assert (
        "can't allocate memory" in said
        and "trainer.micro_batch_tokens = 64; " in said
        and "trainer.optim.offload" not in said
    )
    with (
        pytest.raises(RunError, match=r"CUDA out of memory\. Tried"),
        explain_out_of_memory(model, rows, config, world),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        explain_out_of_memory(model, rows, config, world),
    ):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
