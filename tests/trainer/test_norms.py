"""Norms in one step against the formula in float64 and against transformers' own."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rl.trainer.norms import exchange_norms, rms_norm
from tests.trainer.device import DEVICE

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("shape", [(1, 257, 576), (1, 31, 5, 48)])
def test_values_and_gradients_are_nearer_to_the_formula_than_those_of_transformers(dtype, weight_dtype, shape):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], 1e-5).to(DEVICE, weight_dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    before, grad = (torch.randn(shape) * 3).to(DEVICE, dtype), torch.randn(shape).to(DEVICE, torch.promote_types(dtype, weight_dtype))
    exact = LlamaRMSNorm(shape[-1], 1e-5).to(DEVICE, torch.float64)
    exact.weight.data.copy_(norm.weight.data)
    x, results = before.clone().requires_grad_(), []
    for forward in (lambda x: rms_norm(norm, x), norm):
        y = forward(x)
        results.append((y, *torch.autograd.grad(y, (x, norm.weight), grad)))
    wide = before.double().requires_grad_()
    y = exact.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = (y, *torch.autograd.grad(y, (wide, exact.weight), grad.double()))
    for (ours, theirs), right in zip(zip(*results, strict=True), expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        error, other = (float((value.double() - right).norm() / right.norm()) for value in (ours, theirs))
        assert error < (1.8e-3 if ours.dtype == torch.bfloat16 else 1e-6) and error < max(1.02 * other, 3e-7)  # 1.8e-3: one rounding
    assert torch.equal(x, before)


def test_what_is_frozen_gets_no_gradient():
    norm = LlamaRMSNorm(8)
    x = torch.randn(3, 8)
    rms_norm(norm, x).sum().backward()
    assert norm.weight.grad is not None and x.grad is None
    norm.weight.requires_grad_(False).grad = None
    rms_norm(norm, x.requires_grad_()).sum().backward()
    assert norm.weight.grad is None and x.grad is not None


def test_only_norms_with_the_same_code_are_exchanged():
    """Gemma's multiplies with 1 + its weight, and in float32."""
    models = [LlamaForCausalLM(LlamaConfig(**TINY)), Gemma2ForCausalLM(Gemma2Config(**TINY, num_key_value_heads=2))]
    for model in models:
        exchange_norms(model)
    exchanged = [[hasattr(m.forward, "func") for m in model.modules() if type(m).__name__.endswith("RMSNorm")] for model in models]
    assert exchanged == [[True] * 3, [False] * 5]
