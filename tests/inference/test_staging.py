"""A second set of a model's modules, which takes the place of the first."""

import gc
import weakref
from types import MethodType

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from rl.inference.staging import Staged, exchange


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


def test_what_a_copy_into_place_borrows_is_given_back_once_all_is_in_place(monkeypatch):
    """On a GPU, which a trainer may share: torch would keep a block as large as the largest
    layer, in addition to what vLLM has measured."""
    pairs, given_back = [(Layer(1.0), Layer(2.0)) for _ in range(2)], []
    monkeypatch.setattr(
        "torch.cuda.empty_cache",
        lambda: given_back.append([live.weight.tolist() for live, _ in pairs]),
    )
    staged = Staged.__new__(Staged)
    staged.config, staged.in_host, staged.twins = VllmConfig(), True, dict(pairs)
    staged.put_in_place()
    assert given_back == [[[2.0] * 4] * 2] and not any(twin._parameters for _, twin in pairs)
