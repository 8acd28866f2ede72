"""Log-probability and entropy of given tokens, without all logits at once in memory.

`head_logprobs` goes from hidden states to log-probabilities and multiplies with the head's weight itself, one slice of the vocabulary
after another; `token_logprobs` takes logits, for models that do something with them after the head. Logits have the type that the model
computes in, as in the inference engine; the softmax is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

from rl.trainer.compiled import compiled

LOWEST = -200.0
"""The lowest logarithm of a probability that is multiplied with it: both are the same 0 from -104 on, and -inf would give nan."""
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""The most logits that are worked on in float32 at once, a few such buffers at a time: 256 MiB keep a GPU busy."""
CACHED_ELEMENTS = 3 << 17
"""About so many of a CPU's chunk at a time: a buffer of 1.5 MiB stays in the cache from one operation to the next."""
SLICE_BYTES = 1 << 28
"""Logits that exist at once, in the model's type: what fits is computed once, the rest again in the backward pass."""

FUSED_ON = ("cuda",)
"""Devices on which what is computed on all logits is compiled."""
LEAST_WIDTH = 128
"""Tokens of the vocabulary in a slice, or a multiple of that, on GPUs."""


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
    """`token_logprobs` of the logits hidden @ weight^T + bias, of which only a slice exists at a time.

    Args:
        hidden: [P, H].
        weight: [V, H], of the same type.
        bias: [V] or None.

    Returns: as `token_logprobs`, with gradient to `hidden`, `weight` and `bias`.
    """
    assert hidden.ndim == 2 and temperatures.shape == hidden.shape[:1] and rows.shape == targets.shape
    return HeadLogprobs.apply(hidden, weight, bias, temperatures, rows, targets, entropy_gradient)


def chunks(logits: Tensor) -> list[slice]:
    """Chunks of the rows of `logits`. On CPUs they have two rows or more, but for one that is left over behind a multiple of the largest:
    a single row is summed by all threads, in another order, so that the chunks decide about the last bit."""
    rows, size = len(logits), max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    bounds = [*range(0, rows, size), rows]
    if not logits.is_cuda:
        least = max(2, CACHED_ELEMENTS // logits.shape[1])
        bounds = [a + (b - a) * part // parts for a, b in pairwise(bounds) for parts in [max(1, (b - a) // least)] for part in range(parts)]
        bounds.append(rows)
    return [slice(a, b) for a, b in pairwise(bounds)]


def log_sums_and_entropies(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of logits / T, and the entropy of its softmax, of every row: [P, V], [P] -> [P], [P] float32."""
    if logits.device.type in FUSED_ON:  # nothing of its size is in memory in between
        return fused(statistics_of_rows)(logits, temperatures)
    log_sums, entropies, divide = torch.empty_like(temperatures), torch.empty_like(temperatures), needs_division(temperatures)
    for chunk in chunks(logits):
        log_sums[chunk], entropies[chunk] = statistics_of_rows(logits[chunk], temperatures[chunk], divide)
    return log_sums, entropies


def statistics_of_rows(logits: Tensor, temperatures: Tensor, divide: bool = True) -> tuple[Tensor, Tensor]:
    """`log_sums_and_entropies` at once: with x = logits / T - max, s = sum exp x it is max + log s, and log s - sum(x exp x) / s."""
    x = divided(logits, temperatures, divide)
    top = x.max(dim=-1, keepdim=True).values.clamp_(min=torch.finfo(torch.float32).min)  # of a row of -inf, too
    x.sub_(top)
    weights = x.exp()
    sums = weights.sum(dim=-1)
    return top[:, 0] + sums.log(), sums.log() - weights.mul_(x.clamp_(min=LOWEST)).sum(dim=-1) / sums


def needs_division(temperatures: Tensor) -> bool:
    """Whether logits on a CPU are not those at temperature 1 already; each division is another walk through all of them."""
    return bool((temperatures != 1).any())


def divided(logits: Tensor, temperatures: Tensor, divide: bool) -> Tensor:
    """logits / T in float32, a copy. Two types in one operation are slow on CPUs."""
    x = logits.to(torch.promote_types(logits.dtype, temperatures.dtype), copy=True)
    return x.div_(temperatures[:, None]) if divide else x


def softmax_gradient(
    logits: Tensor,
    temperatures: Tensor,
    log_sums: Tensor,
    entropies: Tensor,
    grad_rows: Tensor,
    grad_entropies: Tensor | None,
    divide: bool = True,
) -> Tensor:
    """What the softmax of each row contributes to the gradient of its logits, times T: [P, v] -> [P, v] float32."""
    x = divided(logits, temperatures, divide).sub_(log_sums[:, None])
    if grad_entropies is None:
        return x.exp_().mul_(-grad_rows[:, None])
    factors = (x.clamp_(min=LOWEST) + entropies[:, None]).mul_(-grad_entropies[:, None]).sub_(grad_rows[:, None])
    return x.exp_().mul_(factors)


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in one or two passes over its logits, where single operations take eight."""
    return compiled(function, "please report this")


def merge_slices(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-sum-exps and entropies over two slices of the vocabulary, from those of each.

    A slice has the share w = exp(its log-sum-exp - that of both) of the probability; the entropy is the sum of w * (its own - log w).
    """
    log_sums = torch.logaddexp(a[0], b[0])
    shares = [(part[0] - log_sums, part[1]) for part in (a, b)]
    return log_sums, sum(torch.where(log_share > LOWEST, log_share.exp() * (entropy - log_share), 0.0) for log_share, entropy in shares)


@dataclass
class Tokens:
    """N target tokens in P rows of logits, and the statistics of the rows as soon as they are known."""

    rows: Tensor  # [N] int64, ascending
    targets: Tensor  # [N] int64
    temperatures: Tensor  # [P] float32
    log_sums: Tensor  # [P] float32
    entropies: Tensor  # [P] float32

    def inside(self, start: int, width: int) -> tuple[Tensor, Tensor]:
        """[N] bool: which targets are in a slice of the vocabulary; [N] their places there, any place for the others."""
        places = self.targets - start
        return (places >= 0) & (places < width), places.clamp(0, width - 1)

    def to_gradient_(self, logits: Tensor, start: int, grad: Tensor, grad_entropies: Tensor | None) -> Tensor:
        """Overwrites logits [P, v] of the vocabulary from `start` on with their gradient.

        With p = softmax(logits / T) and its entropy H: d log p[k] / d logits[j] = ([j = k] - p[j]) / T, which a row sums over its
        targets, and d H / d logits[j] = -p[j] (log p[j] + H) / T.
        """
        grad_rows = torch.zeros_like(self.log_sums).index_add_(0, self.rows, grad)
        inside, places = self.inside(start, logits.shape[1])
        grad = grad.where(inside, 0)
        compiles = logits.device.type in FUSED_ON
        divide = compiles or needs_division(self.temperatures)
        of_softmax = fused(softmax_gradient) if compiles else partial(softmax_gradient, divide=divide)
        for chunk in chunks(logits):
            entropies = None if grad_entropies is None else grad_entropies[chunk]
            statistics = (self.temperatures[chunk], self.log_sums[chunk], self.entropies[chunk])
            x = of_softmax(logits[chunk], *statistics, grad_rows[chunk], entropies)
            # All targets, those of other rows as zeros: to count the chunk's own would be to wait for the device.
            rows = self.rows - chunk.start
            own = grad.where((rows >= 0) & (rows < len(x)), 0)
            x.index_put_((rows.clamp(0, len(x) - 1), places), own, accumulate=True)
            logits[chunk] = x.div_(self.temperatures[chunk, None]) if divide else x
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
        logits, *tokens = ctx.saved_tensors
        grad_logits = Tokens(*tokens).to_gradient_(logits.clone(), 0, grad, grad_entropies if ctx.entropy_gradient else None)
        return grad_logits, None, None, None, None


class HeadLogprobs(torch.autograd.Function):
    """Computes the logits in slices of the vocabulary: so the weight's gradient is made slice by slice too, each once.

    The last slice is kept for the backward pass; the others, if any, are computed again there.
    """

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
        width = max(1, SLICE_BYTES // (len(hidden) * hidden.element_size()))
        if hidden.is_cuda:  # products of other widths are slow there
            width = max(LEAST_WIDTH, width // LEAST_WIDTH * LEAST_WIDTH)
        vocab = weight.shape[0]
        first = vocab % width or min(width, vocab)  # the short slice first, so that a full one is kept
        ctx.slices = [slice(a, b) for a, b in pairwise([0, *range(first, vocab, width), vocab])]
        tokens = Tokens(rows, targets, temperatures, torch.full_like(temperatures, -torch.inf), torch.zeros_like(temperatures))
        chosen = torch.zeros(len(rows), device=hidden.device)
        for part in ctx.slices:
            ctx.logits = None  # frees one slice before the next
            ctx.logits = linear(hidden, weight[part], None if bias is None else bias[part])
            found = log_sums_and_entropies(ctx.logits, temperatures)
            so_far = (tokens.log_sums, tokens.entropies)
            tokens.log_sums, tokens.entropies = found if part.start == 0 else merge_slices(so_far, found)
            inside, places = tokens.inside(part.start, part.stop - part.start)
            chosen = torch.where(inside, ctx.logits[rows, places] / temperatures[rows], chosen)
        ctx.save_for_backward(hidden, weight, bias, *vars(tokens).values())
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(tokens.entropies)
        return chosen - tokens.log_sums[rows], tokens.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *tokens = ctx.saved_tensors
        precise = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = None  # [P, H]
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for part in reversed(ctx.slices):
            logits, ctx.logits = ctx.logits, None  # what is kept serves once: it is overwritten
            if logits is None:
                logits = linear(hidden, weight[part], None if bias is None else bias[part])
            grad_logits = Tokens(*tokens).to_gradient_(logits, part.start, grad, grad_entropies if ctx.entropy_gradient else None)
            own = grad_logits @ weight[part]
            grad_hidden = own if grad_hidden is None else grad_hidden.to(precise).add_(own)
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[part])
            if grad_bias is not None:
                torch.sum(grad_logits, 0, out=grad_bias[part])
            del logits, grad_logits  # before the next
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None
