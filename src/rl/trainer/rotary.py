"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in one step of autograd and three operations, each way.

y = x cos + r(x) sin with r(x1, x2) = (-x2, x1), as transformers' `apply_rotary_pos_emb`, with one rounding less: that one makes r(x), both
products and their sum one after another, and as many for the gradient of each.
"""

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class Rotate(torch.autograd.Function):
    """The transpose of a rotation is the one back: with (y1, y2) in place of (x1, x2), -sin and its halves exchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[1, H, T, D], [1, 1, T, D] twice, of one type -> [1, H, T, D], as x lies in memory."""
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, *sin.chunk(2, -1), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, *reversed(sin.chunk(2, -1)), -1), None, None


def rotated(x: Tensor, cos: Tensor, first: Tensor, second: Tensor, sign: int) -> Tensor:
    """x cos + sign * (-x2 first, x1 second)."""
    y = x * cos
    (x1, x2), (y1, y2) = x.chunk(2, -1), y.chunk(2, -1)
    y1.addcmul_(x2, first, value=-sign)
    y2.addcmul_(x1, second, value=sign)
    return y


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb`."""
    if not q.dtype == k.dtype == cos.dtype:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


def exchange_rotary(model: PreTrainedModel) -> None:
    """Has every module whose forward pass calls a function with the byte code of Llama's `apply_rotary_pos_emb` by that name call `rotate`.

    The function is a name in the file of each architecture; the module gets a forward pass that finds another one under it.
    """
    name, known = apply_rotary_pos_emb.__name__, codes(vars(modeling_llama))
    for module in model.modules():
        forward = type(module).forward
        if not inspect.isfunction(forward) or name not in forward.__code__.co_names or "forward" in vars(module):
            continue
        if codes(forward.__globals__) == known:
            names = forward.__globals__ | {name: rotate}
            copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copy, module)


def codes(names: dict[str, Any]) -> list[object]:
    """What a file's `apply_rotary_pos_emb` does, and the function that this calls: GPT-J's and gpt-oss's have another one, or none."""
    functions = (inspect.unwrap(names.get(name, object)) for name in ("apply_rotary_pos_emb", "rotate_half"))
    return [code_of(one) if inspect.isfunction(one) else None for one in functions]


def code_of(function: FunctionType) -> tuple[bytes, tuple[object, ...], tuple[str, ...]]:
    """What the function does, but for its documentation."""
    code = function.__code__
    return code.co_code, tuple(value for value in code.co_consts if value != function.__doc__), code.co_names
