import math

import pytest
import torch

from rl.trainer import logprobs
from rl.trainer.logprobs import token_logprobs


def dense(logits, temperatures, rows, targets):
    """The same by the textbook, with everything in memory."""
    log_softmax = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    return log_softmax[rows, targets], -(log_softmax.exp() * log_softmax).sum(-1)


def case(dtype=torch.float32):
    torch.manual_seed(0)
    logits = (torch.randn(13, 101) * 4).to(dtype)
    temperatures = torch.tensor([1.0, 0.7, 1.3] * 4 + [2.0])
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 3, 5, 8, 12, 12])  # several targets of one row; rows without any
    targets = torch.tensor([4, 4, 9, 100, 0, 7, 8, 50, 99, 1, 2])
    return logits, temperatures, rows, targets, torch.randn(11)


@pytest.mark.parametrize("elements", [1, 250, 10**6])
def test_values_and_gradients_equal_dense(monkeypatch, elements):
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", elements)
    logits, temperatures, rows, targets, grad = case()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    values, entropies = token_logprobs(ours, temperatures, rows, targets)
    expected, expected_entropies = dense(theirs, temperatures, rows, targets)
    values.backward(grad)
    expected.backward(grad)
    assert torch.allclose(values, expected, atol=1e-6, rtol=1e-6)
    assert torch.allclose(entropies, expected_entropies, atol=1e-5)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert not entropies.requires_grad


def test_bfloat16_logits_give_float32_accuracy():
    logits, temperatures, rows, targets, _ = case(torch.bfloat16)
    values, _ = token_logprobs(logits, temperatures, rows, targets)
    assert values.dtype == torch.float32
    assert torch.allclose(values, dense(logits, temperatures, rows, targets)[0], atol=1e-5)


def test_literals():
    # logits (0, log 3) at temperature 1: probabilities 1/4, 3/4; at temperature 1/2: 1/10, 9/10.
    logits = torch.tensor([[0.0, math.log(3)]] * 2)
    values, entropies = token_logprobs(logits, torch.tensor([1.0, 0.5]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert values.tolist() == pytest.approx([math.log(0.25), math.log(0.9)])
    assert entropies[0].item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_no_targets_give_a_zero_gradient():
    logits = torch.randn(2, 5, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    token_logprobs(logits, torch.ones(2), none, none)[0].sum().backward()
    assert logits.grad.tolist() == [[0.0] * 5] * 2
