"""What is compiled is refused in place of slow in silence."""

from functools import partial

import pytest
import torch

from rl.system.errors import RunError
from rl.trainer.model.compiled import compiled
from rl.trainer.model.logprobs import score_rows


def test_what_is_compiled_too_often_is_refused(monkeypatch):

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    call = compiled(lambda x, flag: x + len(flag), "set trainer.compile = false")
    with pytest.raises(
        RunError,
        match=r"compiled .*<lambda> 16 times, each time for other inputs; set trainer.compile = "
        r"false",
    ):
        for number in range(18):
            call(torch.ones(3), "x" * number)


def test_rows_of_all_kinds_fit_the_limit(monkeypatch):
    """Each size 0 or 1, rows and targets of equal number, with and without gradients: the ninth
    graph ended the run."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    call = compiled(score_rows, "please report this")
    for gradient in (True, False):
        for rows, targets in ((7, 7), (6, 9), (5, 0), (1, 0), (1, 1), (1, 6), (8, 1), (9, 8)):
            logits = torch.randn(rows, 11, requires_grad=gradient)
            with torch.set_grad_enabled(gradient):
                logprobs, entropies = call(
                    False,
                    logits,
                    torch.ones(rows),
                    torch.zeros(targets, dtype=torch.int64),
                    torch.arange(targets) % 11,
                )
            assert len(logprobs) == targets and len(entropies) == rows


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    """As the states of Qwen3-Next and Mamba-2 are, whose sizes inductor cannot have as symbols."""

    def fails(graph, inputs):
        raise TypeError("cannot determine truth value of Relational: 1 < s50")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    call = compiled(lambda x: x.sin() * x, "set trainer.compile = false")
    with pytest.raises(
        RunError,
        match=r"torch cannot compile .*<lambda> \(TypeError: .* 1 < s50\); set trainer.compile = "
        r"false$",
    ):
        call(torch.ones(3))
