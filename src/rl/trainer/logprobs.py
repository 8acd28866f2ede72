"""Log-probability and entropy of given tokens from logits, in chunks: never a float32 tensor of all logits."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits worked on at once in float32, a few such buffers at a time: 16 MiB stay near the CPU's caches, 256 MiB keep a GPU busy."""


def token_logprobs(logits: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(logits[rows] / temperatures[rows])[targets] in nats, and the entropy of every row.

    Several targets may share a row (samples that go on differently after the same tokens).

    Args:
        logits: [P, V], any float type; the result has float32 accuracy given these values.
        temperatures: [P] float32, > 0.
        rows: [N] int64, ascending, each in 0..P-1.
        targets: [N] int64 token ids.

    Returns: log-probabilities [N] float32 with gradient to `logits`; entropies [P] float32 in nats without gradient.
    """
    assert logits.ndim == 2 and temperatures.shape == logits.shape[:1] and rows.shape == targets.shape
    return TokenLogprobs.apply(logits, temperatures, rows, targets)


def chunk_slices(rows: Tensor, num_rows: int, vocab: int) -> list[tuple[slice, slice]]:
    """Chunks of logits rows, each with the slice of the (ascending) `rows` that points into it."""
    size = max(1, CHUNK_ELEMENTS[rows.device.type] // vocab)
    starts = [*range(0, num_rows, size), num_rows]
    bounds = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
    return [(slice(a, b), slice(i, j)) for a, b, i, j in zip(starts, starts[1:], bounds, bounds[1:], strict=False)]


class TokenLogprobs(torch.autograd.Function):
    """Keeps the log-sum-exp of each row and recomputes the softmax in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropies = torch.empty_like(log_sums)
        chunks = chunk_slices(rows, *logits.shape)
        for chunk, _ in chunks:
            # With x = logits / T - max, s = sum exp x: log-sum-exp = max + log s, entropy = log s - sum(x exp x) / s.
            x = logits[chunk] / temperatures[chunk, None]  # float32, a copy
            top = x.max(dim=-1, keepdim=True).values
            x.sub_(top)
            weights = x.exp()
            sums = weights.sum(dim=-1)
            log_sums[chunk] = top[:, 0] + sums.log()
            entropies[chunk] = sums.log() - weights.mul_(x).sum(dim=-1) / sums
        logprobs = logits[rows, targets] / temperatures[rows] - log_sums[rows]
        ctx.save_for_backward(logits, temperatures, rows, targets, log_sums)
        ctx.chunks = chunks
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, temperatures, rows, targets, log_sums = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        grad_rows = torch.zeros_like(log_sums).index_add_(0, rows, grad)
        for chunk, span in ctx.chunks:
            # d logprob / d logits = (onehot(target) - softmax) / T; a row sums this over its targets.
            softmax = (logits[chunk] / temperatures[chunk, None]).sub_(log_sums[chunk, None]).exp_()
            softmax.mul_(-grad_rows[chunk, None])
            softmax.index_put_((rows[span] - chunk.start, targets[span]), grad[span], accumulate=True)
            grad_logits[chunk] = softmax.div_(temperatures[chunk, None])
        return grad_logits, None, None, None
