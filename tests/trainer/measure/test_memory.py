"""The state against what torch really holds, and what the message says."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from rl.config.run import RLConfig
from rl.launch.devices import MALLOC
from rl.system.errors import RunError
from rl.trainer.data.fake import full_batch
from rl.trainer.measure.memory import GIB, explain_out_of_memory, free_bytes, keep_to_share
from rl.trainer.model.head import score
from tests.trainer.policies import learner
from tests.trainer.samples import pack_alone


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
    model, _, _ = learner(tied_folder, world, micro_batch_tokens=128)
    rows = pack_alone(full_batch(1, 128, 65, 259), max_tokens=128).micro_batches
    assert score(model, rows[0], world).logprobs.shape == (128,)
    with pytest.raises(RunError) as error, explain_out_of_memory(model, rows, world):
        torch.empty(1 << 50)
    said = str(error.value)
    assert said.startswith(
        "out of memory on rank 0 with a micro batch of 128 tokens, its longest sequence 64 ("
    )
    assert "can't allocate memory" in said
    assert "in the mode blocks. What helps: trainer.micro_batch_tokens" in said
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
