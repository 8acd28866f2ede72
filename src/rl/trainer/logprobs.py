"""Log-probability and entropy of given tokens, without all logits at once in memory.

`head_logprobs` goes from hidden states to log-probabilities and multiplies with the head's weight itself, block by block; `token_logprobs`
takes logits, for models that do something with them after the head. Logits have the type that the model computes in, as in the inference
engine; the softmax is float32.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits worked on at once in float32, a few such buffers at a time: 16 MiB stay near the CPU's caches, 256 MiB keep a GPU busy."""
BLOCK_BYTES = 1 << 28
"""Logits that exist at once, in the model's type: what fits is computed once, the rest again in the backward pass."""


def token_logprobs(
    logits: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits[rows] / temperatures[rows])[targets] in nats, and the entropy of every row.

    Several targets may share a row (samples that go on differently after the same tokens).

    Args:
        logits: [P, V], any float type; the result has float32 accuracy given these values.
        temperatures: [P] float32, > 0.
        rows: [N] int64, ascending, each in 0..P-1.
        targets: [N] int64 token ids.
        entropy_gradient: the entropies have a gradient too.

    Returns: log-probabilities [N] float32 with gradient to `logits`; entropies [P] float32 in nats.
    """
    assert logits.ndim == 2 and temperatures.shape == logits.shape[:1] and rows.shape == targets.shape
    return TokenLogprobs.apply(logits, temperatures, rows, targets, entropy_gradient)


def head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor, rows: Tensor, targets: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of the logits hidden @ weight^T + bias, of which only a block exists at a time.

    Args:
        hidden: [P, H].
        weight: [V, H], of the same type.
        bias: [V] or None.

    Returns: as `token_logprobs`, with gradient to `hidden`, `weight` and `bias`.
    """
    assert hidden.ndim == 2 and temperatures.shape == hidden.shape[:1] and rows.shape == targets.shape
    return HeadLogprobs.apply(hidden, weight, bias, temperatures, rows, targets, entropy_gradient)


def slices(rows: Tensor, starts: list[int]) -> list[tuple[slice, slice]]:
    """The slices of logits rows between the `starts`, each with the slice of the (ascending) `rows` that points into it."""
    bounds = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
    return [(slice(a, b), slice(i, j)) for (a, b), (i, j) in zip(pairwise(starts), pairwise(bounds), strict=True)]


def chunks_of(logits: Tensor) -> list[int]:
    """Where chunks of the rows of `logits` start, and the end."""
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return [*range(0, len(logits), size), len(logits)]


def log_sums_and_entropies(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of logits / T, and the entropy, of every row: [P, V], [P] -> [P], [P] float32.

    With x = logits / T - max, s = sum exp x: log-sum-exp = max + log s, entropy = log s - sum(x exp x) / s.
    """
    log_sums, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
    for a, b in pairwise(chunks_of(logits)):
        x = logits[a:b] / temperatures[a:b, None]  # float32, a copy
        top = x.max(dim=-1, keepdim=True).values
        x.sub_(top)
        weights = x.exp()
        sums = weights.sum(dim=-1)
        log_sums[a:b] = top[:, 0] + sums.log()
        entropies[a:b] = sums.log() - weights.mul_(x).sum(dim=-1) / sums
    return log_sums, entropies


def to_gradient_(
    logits: Tensor, statistics: tuple[Tensor, Tensor, Tensor], rows: Tensor, targets: Tensor, grad: Tensor, grad_entropies: Tensor | None
) -> Tensor:
    """Overwrites logits [P, V] with their gradient; `statistics`: temperatures, log-sum-exps and entropies, [P] each.

    With p = softmax(logits / T) and its entropy H: d log p[k] / d logits[j] = ([j = k] - p[j]) / T, which a row sums over its targets,
    and d H / d logits[j] = -p[j] (log p[j] + H) / T.
    """
    temperatures, log_sums, entropies = statistics
    grad_rows = torch.zeros_like(log_sums).index_add_(0, rows, grad)
    for chunk, span in slices(rows, chunks_of(logits)):
        x = (logits[chunk] / temperatures[chunk, None]).sub_(log_sums[chunk, None])
        if grad_entropies is None:
            x.exp_().mul_(-grad_rows[chunk, None])
        else:
            factors = (x + entropies[chunk, None]).mul_(-grad_entropies[chunk, None]).sub_(grad_rows[chunk, None])
            x.exp_().mul_(factors)
        x.index_put_((rows[span] - chunk.start, targets[span]), grad[span], accumulate=True)
        logits[chunk] = x.div_(temperatures[chunk, None])
    return logits


class TokenLogprobs(torch.autograd.Function):
    """Keeps the log-sum-exp of each row and recomputes the softmax in backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        log_sums, entropies = log_sums_and_entropies(logits, temperatures)
        ctx.save_for_backward(logits, rows, targets, temperatures, log_sums, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logits[rows, targets] / temperatures[rows] - log_sums[rows], entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, targets, *statistics = ctx.saved_tensors
        entropy_part = grad_entropies if ctx.entropy_gradient else None
        return to_gradient_(logits.clone(), tuple(statistics), rows, targets, grad, entropy_part), None, None, None, None


class HeadLogprobs(torch.autograd.Function):
    """Computes the logits in blocks. The last block is kept for the backward pass; the others, if any, are computed again there."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor,
        rows: Tensor,
        targets: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, BLOCK_BYTES // (weight.shape[0] * hidden.element_size()))
        first = len(hidden) % size or min(size, len(hidden))  # the short block first, so that a full one is kept
        ctx.blocks = slices(rows, [0, *range(first, len(hidden), size), len(hidden)])
        log_sums, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
        logprobs = torch.empty(len(rows), device=hidden.device)
        for block, span in ctx.blocks:
            ctx.logits = None  # frees one block before the next
            ctx.logits = linear(hidden[block], weight, bias)
            log_sums[block], entropies[block] = log_sums_and_entropies(ctx.logits, temperatures[block])
            of = rows[span]
            logprobs[span] = ctx.logits[of - block.start, targets[span]] / temperatures[of] - log_sums[of]
        ctx.save_for_backward(hidden, weight, bias, rows, targets, temperatures, log_sums, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, targets, *statistics = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = grad_bias = None
        for block, span in reversed(ctx.blocks):
            logits = linear(hidden[block], weight, bias) if ctx.logits is None else ctx.logits
            ctx.logits = None  # is overwritten
            entropy_part = grad_entropies[block] if ctx.entropy_gradient else None
            own = tuple(statistic[block] for statistic in statistics)
            grad_logits = to_gradient_(logits, own, rows[span] - block.start, targets[span], grad[span], entropy_part)
            del logits
            torch.mm(grad_logits, weight, out=grad_hidden[block])
            if ctx.needs_input_grad[1]:
                grad_weight = add_precisely(grad_weight, grad_logits.t() @ hidden[block])
            if ctx.needs_input_grad[2]:
                grad_bias = add_precisely(grad_bias, grad_logits.sum(0))
            del grad_logits
        grads = (grad if grad is None else grad.to(weight.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *grads, None, None, None, None


def add_precisely(total: Tensor | None, part: Tensor) -> Tensor:
    """total + part; in float32 or better as soon as there are two parts."""
    return part if total is None else total.to(torch.promote_types(part.dtype, torch.float32)).add_(part)
