import math
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from rl.trainer.data.micro_batch import empty_micro_batch
from rl.trainer.model import head
from rl.trainer.model.head import head_logprobs, of_tokens, token_logprobs
from tests.bounds import rounding
from tests.trainer.device import DEVICE, on_cpu


def dense(logits, temperatures, rows, targets):
    """The same by the textbook, with everything in memory."""
    log_softmax = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    return log_softmax[rows, targets], -(log_softmax.exp() * log_softmax).sum(-1)


def near(ours, theirs):
    """Whether they differ by no more than the roundings of the longest sums: of 101 logits, each
    of 17 products."""
    return (ours - theirs).abs().max() <= rounding(101 + 17, float(theirs.abs().max()))


def case(dtype=torch.float32):
    torch.manual_seed(0)
    logits = (torch.randn(13, 101) * 4).to(dtype)
    temperatures = torch.tensor([1.0, 0.7, 1.3] * 4 + [2.0])
    # several targets of one row; rows without any
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 3, 5, 8, 12, 12])
    targets = torch.tensor([4, 4, 9, 100, 0, 7, 8, 50, 99, 1, 2])
    return [tensor.to(DEVICE) for tensor in (logits, temperatures, rows, targets, torch.randn(11))]


@pytest.mark.parametrize("elements", [1, 250, 10**6])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_equal_dense(monkeypatch, elements, entropy_gradient):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", elements)
    logits, temperatures, rows, targets, grad = case()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    values, entropies = token_logprobs(ours, temperatures, rows, targets, entropy_gradient)
    expected, expected_entropies = dense(theirs, temperatures, rows, targets)
    assert near(values, expected)
    assert near(entropies, expected_entropies)
    assert entropies.requires_grad == entropy_gradient
    bonus = torch.randn(13, device=DEVICE) if entropy_gradient else torch.zeros(13, device=DEVICE)
    ((values * grad).sum() + ((entropies * bonus).sum() if entropy_gradient else 0)).backward()
    ((expected * grad).sum() + (expected_entropies * bonus).sum()).backward()
    assert near(ours.grad, theirs.grad)


@pytest.mark.parametrize("at_once", [1, 5, 13])
@pytest.mark.parametrize("bias", [False, True])
def test_head_equals_logits_of_the_same_weight(monkeypatch, at_once, bias):
    """Rows that are computed again, a shorter last chunk, and all at once, which are kept."""
    monkeypatch.setattr(head, "SLICE_BYTES", at_once * 101 * 4)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 250)
    _, temperatures, rows, targets, grad = case()
    tensors = [
        torch.randn(13, 17, device=DEVICE),
        torch.randn(101, 17, device=DEVICE),
        torch.randn(101, device=DEVICE),
    ]
    ours, theirs = (
        [tensor.clone().requires_grad_() for tensor in tensors[: 2 + bias]] for _ in range(2)
    )
    results = head_logprobs(*ours, *[None] * (not bias), temperatures, rows, targets, True)
    expected = token_logprobs(
        torch.nn.functional.linear(*theirs), temperatures, rows, targets, True
    )
    bonus = torch.randn(13, device=DEVICE)
    for logprob, entropy in (results, expected):
        ((logprob * grad).sum() + (entropy * bonus).sum()).backward()
    assert all(near(a, b) for a, b in zip(results, expected, strict=True))
    assert all(near(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_no_more_logits_exist_than_asked_for(monkeypatch):
    """40 rows of 1000 logits, 10 rows at once, and one for other slices' targets: the largest
    result of an operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == 1000:
                self.elements = max(self.elements, result.numel())
            return result

    monkeypatch.setattr(head, "SLICE_BYTES", 10 * 1000 * 4)
    kept, logits_of = WeakSet(), head.logits_of

    def watched(*args):
        logits = logits_of(*args)
        kept.add(logits)
        return logits

    monkeypatch.setattr(head, "logits_of", watched)
    hidden, weight = (
        torch.randn(40, 8, requires_grad=True),
        torch.randn(1000, 8, requires_grad=True),
    )
    with Largest() as largest:
        values, _ = head_logprobs(
            hidden, weight, None, torch.ones(40), torch.arange(40), torch.arange(40)
        )
        assert not kept
        values.sum().backward()
    assert largest.elements == 11 * 1000
    monkeypatch.setattr(head, "SLICE_BYTES", 40 * 1000 * 4)
    for grows in (False, True):
        with torch.set_grad_enabled(grows):
            tokens = (torch.ones(40), torch.arange(40), torch.arange(40))
            values, _ = head_logprobs(hidden, weight, None, *tokens)
        assert len(kept) == grows
    values.sum().backward()
    assert not kept


def test_bfloat16_logits_give_float32_accuracy():
    logits, temperatures, rows, targets, _ = case(torch.bfloat16)
    values, _ = token_logprobs(logits, temperatures, rows, targets)
    assert values.dtype == torch.float32
    assert near(values, dense(logits, temperatures, rows, targets)[0])


def test_impossible_tokens_leave_the_entropy_finite(monkeypatch):
    """Logits of -inf: values and gradients are those of the tokens that are left."""
    monkeypatch.setattr(head, "SLICE_BYTES", 5 * 101 * 4)
    _, temperatures, rows, targets, grad = case()
    targets = targets % 20
    bias = torch.zeros(101, device=DEVICE)
    bias[21:] = bias[[3, 5]] = -math.inf
    hidden, weight = torch.randn(13, 17, device=DEVICE), torch.randn(101, 17, device=DEVICE)
    left = bias.isfinite()
    places = left.cumsum(0) - 1
    ours, theirs, plain = (hidden.clone().requires_grad_() for _ in range(3))
    found = [
        head_logprobs(ours, weight, bias, temperatures, rows, targets, True),
        token_logprobs(
            torch.nn.functional.linear(plain, weight, bias), temperatures, rows, targets, True
        ),
        dense(
            torch.nn.functional.linear(theirs, weight[left]), temperatures, rows, places[targets]
        ),
    ]
    assert left[targets].all()
    for values, entropies in found:
        assert near(values, found[2][0]) and near(entropies, found[2][1])
        ((values * grad).sum() + entropies.sum()).backward()
    assert all(near(x.grad, theirs.grad) for x in (ours, plain))


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.proof)]
)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_what_is_compiled_on_gpus_computes_the_same(monkeypatch, backend, entropy_gradient):
    _, temperatures, rows, targets, grad = case()
    hidden, weight = torch.randn(13, 17, device=DEVICE), torch.randn(101, 17, device=DEVICE)

    def run(rows, targets, grad):
        tensors = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        values, entropies = head_logprobs(
            *tensors, None, temperatures, rows, targets, entropy_gradient
        )
        (values * grad).sum().backward()
        return [values.detach(), entropies.detach(), *(tensor.grad for tensor in tensors)]

    monkeypatch.setattr(head, "SLICE_BYTES", 5 * 101 * 4)  # three chunks
    monkeypatch.setattr(head, "FUSED_ON", ())
    several = [(rows, targets, grad)]
    # as with kept ids: more of them, which begin again at the first row
    several += [[tensor.repeat(times) for tensor in several[0]] for times in (2, 5)]
    expected = [run(*case) for case in several]
    compile_by_torch, counter = torch.compile, CompileCounterWithBackend(backend)
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic: compile_by_torch(function, dynamic=dynamic, backend=counter),
    )
    monkeypatch.setattr(head, "FUSED_ON", (DEVICE.type,))
    head.fused.cache_clear()
    found = [run(*case) for case in several]
    head.fused.cache_clear()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(near(a, b) for a, b in zip(ours, theirs, strict=True))
    # another one where temperatures do not begin at 0
    assert sum(len(graph.graph.nodes) > 0 for graph in counter.graphs) <= 2


def truncated_case(dtype):
    """Hidden states and a weight; five tokens with sets, two of which share their predictor with
    another set, and three without; and the row's ids that each may not be."""
    torch.manual_seed(0)
    batch = replace(
        empty_micro_batch(),
        predictor_of=torch.tensor([0, 0, 0, 1, 3, 8, 12, 12]),
        targets=torch.tensor([4, 4, 9, 100, 7, 50, 1, 2]),
        temperatures=torch.rand(13, dtype=dtype) + 0.5,
    )
    sets = {0: [9, 4, 30], 1: [4], 3: [5, 60, 100, 99], 6: [1, 2, 3], 7: [2, 8]}
    pairs = [(token, kept) for token, ids in sets.items() for kept in ids]
    left_out = torch.zeros(8, 101, dtype=torch.bool)
    left_out[[*sets]] = True
    left_out[tuple(zip(*pairs, strict=True))] = False
    tensors = [torch.randn(13, 17, dtype=dtype), torch.randn(101, 17, dtype=dtype)]
    return replace(batch, kept=torch.tensor(pairs).T), left_out, tensors


@on_cpu
@pytest.mark.parametrize("at_once", [1, 5, 13])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_truncated_tokens_equal_dense(monkeypatch, at_once, entropy_gradient):
    """In float64, against logits in which all ids but the kept ones are -inf."""
    monkeypatch.setattr(head, "SLICE_BYTES", at_once * 101 * 8)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 250)
    batch, left_out, tensors = truncated_case(torch.float64)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    lookups = (batch.temperatures, *batch.lookups, entropy_gradient)
    result = of_tokens(batch, *head_logprobs(*ours, None, *lookups))
    logits = torch.nn.functional.linear(*theirs) / batch.temperatures[:, None]
    logprobs = logits[batch.predictor_of].masked_fill(left_out, -math.inf).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)
    expected = torch.stack([logprobs[range(8), batch.targets], entropies])
    assert (result - expected).abs().max() < 1e-13 and result[0, 1] == 0
    grad = torch.randn(2, 8, dtype=torch.float64)
    grad[1] *= entropy_gradient
    (result * grad).sum().backward()
    (expected * grad).sum().backward()
    assert all((a.grad - b.grad).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_extreme_logits_leave_truncated_tokens_finite(scale):
    """Also where a token or its whole set is as good as impossible."""
    batch, _, tensors = truncated_case(torch.float32)
    logits = (torch.nn.functional.linear(*tensors) * scale).to(DEVICE).requires_grad_()
    batch = batch.to(DEVICE)
    found = of_tokens(batch, *token_logprobs(logits, batch.temperatures, *batch.lookups, True))
    assert found.isfinite().all() and (found[0] <= 0).all() and (found[1] >= 0).all()
    assert found[0].min() < -scale / 10
    found.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().max() > 0.1
