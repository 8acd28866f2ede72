"""Rotary embeddings in one step against the formula in float64 and against transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GlmConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from rl.trainer.rotary import exchange_rotary, rotate
from tests.trainer.device import DEVICE

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}


def inputs(dtype):
    torch.manual_seed(0)
    angles = torch.randn(1, 31, 8).repeat(1, 1, 2)
    query, key = (torch.randn(1, 31, heads, 16).transpose(1, 2) for heads in (6, 2))
    return [tensor.to(DEVICE, dtype) for tensor in (query, key, angles.cos(), angles.sin())]


def with_gradients(function, query, key, cos, sin, grads):
    query, key = query.clone().requires_grad_(), key.clone().requires_grad_()
    results = function(query, key, cos, sin)
    return [*results, *torch.autograd.grad(results, (query, key), grads)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2.5e-3), (torch.float32, 1e-7)])
def test_values_and_gradients_are_nearer_to_the_formula_than_those_of_transformers(dtype, limit):
    rounded = inputs(dtype)
    grads = [torch.randn_like(tensor) for tensor in rounded[:2]]
    ours, theirs = (with_gradients(function, *rounded, grads) for function in (rotate, apply_rotary_pos_emb))
    right = with_gradients(apply_rotary_pos_emb, *(tensor.double() for tensor in rounded), [grad.double() for grad in grads])
    for values in zip(ours, theirs, right, strict=True):
        errors = [float((value.double() - values[2]).norm() / values[2].norm()) for value in values[:2]]
        assert errors[0] < limit and errors[0] < 1.02 * errors[1]
        assert values[0].shape == values[1].shape and values[0].dtype == values[1].dtype == dtype


def test_numbers_of_several_types_go_transformers_way():
    query, key, cos, sin = inputs(torch.bfloat16)
    for ours, theirs in zip(*(f(query, key, cos.float(), sin.float()) for f in (rotate, apply_rotary_pos_emb)), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize(("config", "count"), [(LlamaConfig, 2), (Qwen3Config, 2), (Gemma2Config, 2), (GlmConfig, 0)])
def test_only_functions_with_the_same_code_are_exchanged(config, count):
    """GLM rotates neighbours, and a part of a head only."""
    model = AutoModelForCausalLM.from_config(config(**TINY, num_key_value_heads=2, pad_token_id=0)).to(DEVICE)
    ids = torch.arange(9, device=DEVICE)[None]
    before, forward = model(ids).logits, LlamaAttention.forward
    exchange_rotary(model)
    assert sum("forward" in vars(module) for module in model.modules()) == count
    assert LlamaAttention.forward is forward and "rotate" not in vars(forward)
    assert torch.allclose(model(ids).logits, before, atol=1e-6)
