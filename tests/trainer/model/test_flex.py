"""FlexAttention: how often it is compiled, and that padding changes nothing. Its numbers are in
test_attention.py. What torch cannot compile is refused, never slow in silence.
"""

from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch

from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.model import flex
from rl.trainer.model.attention import TreeMask, attend_flex
from rl.trainer.model.flex import compiled, padded, whole_blocks
from rl.trainer.model.head import differentiate, row_sums, score
from tests.raised import run_error
from tests.trainer.device import on_cpu
from tests.trainer.model.test_attention import random_row
from tests.trainer.model.test_policy import policy, rows_of
from tests.trainer.samples import branching_batch


@pytest.fixture
def counted(monkeypatch):
    """The graphs that torch compiles, on the CPU too; they return their query."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        query = next(
            i
            for i, x in enumerate(inputs)
            if isinstance(x, torch.Tensor) and x.ndim == 4 and x.is_floating_point()
        )
        return lambda *inputs: (inputs[query].clone(),)

    compile_by_torch = torch.compile
    monkeypatch.setattr(flex, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic: compile_by_torch(function, dynamic=dynamic, backend=backend),
    )
    # which refuses gradients on CPUs
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    flex.compiled_kernel.cache_clear()
    yield graphs
    flex.compiled_kernel.cache_clear()


@on_cpu
def test_one_compilation_for_each_window_and_grad_mode_whatever_the_lengths(counted):
    """The first row has as many blocks as there are heads of keys: sizes that are equal once are
    no symbol for each other."""
    for gradient in (True, False):
        for length in (1, 200, 300, 640, 130):
            subtree_ends, positions = random_row(length, length)
            _, positions, subtree_ends = padded(
                positions, positions, subtree_ends, whole_blocks(length)
            )
            tensors = [
                torch.randn(1, heads, len(subtree_ends), 16, requires_grad=True)
                for heads in (6, 2, 2)
            ]
            for window in (None, 64, 200):
                with torch.set_grad_enabled(gradient):
                    out = attend_flex(*tensors, TreeMask(subtree_ends, positions), window, 0.25)
                assert out.shape == (1, len(subtree_ends), 6, 16) and out.requires_grad == gradient
    assert len(counted) == flex.compiled_kernel.cache_info().currsize == 6
    calls = [
        node
        for graph in counted
        for node in graph.graph.nodes
        if node.target is torch.ops.higher_order.flex_attention
    ]
    # rows are whole blocks: no bound is checked
    assert [call.args[6]["IS_DIVISIBLE"] for call in calls] == [True] * 6


def test_rows_have_whole_blocks_on_every_rank():
    assert [whole_blocks(n) for n in (1, 256, 257, 4000)] == [256, 256, 384, 4096]
    assert [whole_blocks(n, 4) for n in (1, 1025, 4000)] == [1024, 1536, 4096]


def test_padding_changes_no_number(tied_folder, world):
    model = policy(tied_folder, world)
    (row,) = rows_of(branching_batch())
    found = []
    for each in (row, fill_blocks(row, 1)):
        scores = score(model, each, world)
        (each.advantages * scores.trainer_logprobs).sum().backward()
        found.append(
            (
                scores.trainer_logprobs.detach(),
                [p.grad.clone() for p in model.parameters()],
            )
        )
        model.zero_grad()
    (logprobs, gradients), (same, as_before) = found
    assert each.padding > 0 and len(each.input_ids) == len(
        row.input_ids
    ) + each.padding == whole_blocks(len(row.input_ids))
    assert (logprobs - same).abs().max() < 2e-6
    assert all((a - b).norm() < 1e-5 * a.norm() for a, b in zip(gradients, as_before, strict=True))


def test_what_is_compiled_too_often_is_refused(monkeypatch):

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    call = compiled(lambda x, flag: x + len(flag), "set trainer.compile = false")
    with run_error(
        r"compiled .*<lambda> 16 times, each time for other inputs; set trainer.compile = "
        r"false"
    ):
        for number in range(18):
            call(torch.ones(3), "x" * number)


def test_rows_of_all_kinds_fit_the_limit(monkeypatch):
    """Sizes 1 and equal to another have graphs of their own: the ninth graph ended the run."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    calls = (compiled(function, "please report this") for function in (row_sums, differentiate))
    sums, slopes = calls
    for entropy_gradient in (True, False):
        for rows in (7, 6, 1, 11, 3, 2, 8):
            logits, temperatures = torch.randn(rows, 11), torch.ones(rows)
            found = sums(logits, temperatures)
            slopes(logits, temperatures, found, torch.ones(rows, 2), entropy_gradient)
            assert found.shape == (rows, 3) and logits.isfinite().all()


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    """As the states of Qwen3-Next and Mamba-2 are, whose sizes inductor cannot have as symbols."""

    def fails(graph, inputs):
        raise TypeError("cannot determine truth value of Relational: 1 < s50")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    call = compiled(lambda x: x.sin() * x, "set trainer.compile = false")
    with run_error(
        r"torch cannot compile .*<lambda> \(TypeError: .* 1 < s50\); set trainer.compile = "
        r"false$"
    ):
        call(torch.ones(3))
