"""A second set of a model's modules, which takes the place of the first."""

import gc
import weakref
from types import MethodType

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from rl.inference.staging import exchange


class Layer(nn.Module):
    """A layer whose weight knows how it is loaded, as vLLM's do."""

    def __init__(self, value: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.weight.weight_loader = MethodType(Layer.load, self)

    def load(self, weight: torch.Tensor) -> None:
        self.weight.data.copy_(weight)


def test_what_is_replaced_goes_at_once_and_not_when_garbage_is_collected():
    live, twin = Layer(1.0), Layer(2.0)
    memory = [weakref.ref(twin), live.weight.data_ptr(), twin.weight.data_ptr()]
    gc.disable()
    try:
        before = exchange(live, twin, {live: twin}, copies=False)
        del twin
        assert memory[0]() is None, "the second set stays, and with it what it was loaded with"
    finally:
        gc.enable()
    assert before[0].data_ptr() == memory[1] and live.weight.data_ptr() == memory[2]
    assert live.weight.tolist() == [2.0] * 4 and live.weight.weight_loader.__self__ is live
