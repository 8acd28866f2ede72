"""Policy versions in memory; what is written of them is read in tests/trainer/test_export.py."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl.trainer.store import versions


class Copies(TorchDispatchMode):
    """Notes (type, type) of each copy from a GPU to the CPU."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[1].is_cuda and not args[0].is_cuda:
            self.types.append((args[1].dtype, args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_weights_are_cast_before_they_leave_a_gpu(monkeypatch):
    """Float32 crossed, into a tensor of its own, and was cast on the CPU while training stood still."""
    with FakeTensorMode(), Copies() as copies:
        model = torch.nn.Linear(3, 5, device="cuda")
        model.register_buffer("count", torch.zeros(2, dtype=torch.int64, device="cuda"))
        allocate = {name: torch.empty(value.shape, dtype=torch.bfloat16) for name, value in model.named_parameters()}
        allocate["count"] = torch.empty(2, dtype=torch.int64)
        monkeypatch.setattr(versions, "VersionBuffer", lambda like: SimpleNamespace(tensors=allocate))
        versions.snapshot(model, Path("base"), torch.bfloat16, {}, SimpleNamespace(is_main=True, size=1))
    assert copies.types == [(torch.bfloat16, torch.bfloat16)] * 2 + [(torch.int64, torch.int64)]
