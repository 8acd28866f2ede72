"""What is compiled: refused in place of slow in silence, and seen by selective checkpointing."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rl.system.errors import RunError
from rl.trainer.model.compiled import KEEP_RESULT, compiled
from rl.trainer.model.policy import KEPT_OPERATIONS


def test_what_is_compiled_too_often_is_refused(monkeypatch):

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    call = compiled(lambda x, flag: x + len(flag), "set trainer.compile = false")
    with pytest.raises(RunError, match=r"compiled .*<lambda> 8 times, each time for other inputs; set trainer.compile = false"):
        for number in range(10):
            call(torch.ones(3), "x" * number)


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    """As the states of Qwen3-Next and Mamba-2 are, whose sizes inductor cannot have as symbols."""

    def fails(graph, inputs):
        raise TypeError("cannot determine truth value of Relational: 1 < s50")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    call = compiled(lambda x: x.sin() * x, "set trainer.compile = false")
    with pytest.raises(RunError, match=r"torch cannot compile .*<lambda> \(TypeError: .* 1 < s50\); set trainer.compile = false$"):
        call(torch.ones(3))


@pytest.mark.proof
def test_selective_checkpointing_keeps_what_is_compiled_to_be_kept():
    """A stand-in for FlexAttention, which is compiled in the same way but has no backward pass on CPUs."""
    ran = []

    @torch.library.custom_op("rl_test::ran", mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        ran.append(len(x))
        return x.clone()

    note.register_fake(torch.empty_like)
    note.register_autograd(lambda ctx, grad: grad)

    def attend(x):
        return (note(x).exp() * x).sum(-1, keepdim=True) * x

    def runs(options, kept):
        ran.clear()
        inner = compiled(attend, "something else", options)
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        context = partial(create_selective_checkpoint_contexts, kept)
        out = checkpoint(lambda x: inner(x * 1).sin(), x, use_reentrant=False, context_fn=context)
        out.sum().backward()
        return len(ran), x.grad

    kept, gradient = runs(KEEP_RESULT, KEPT_OPERATIONS)
    again, expected = runs(None, [torch.ops.aten.mm.default])
    assert (kept, again) == (1, 2) and torch.equal(gradient, expected)
