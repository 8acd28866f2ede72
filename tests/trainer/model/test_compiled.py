"""What is compiled is refused in place of slow in silence."""

from functools import partial

import pytest
import torch

from rl.system.errors import RunError
from rl.trainer.model.compiled import compiled


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
