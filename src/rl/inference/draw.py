"""Drawing tokens on the CPU: three passes over the logits, where vLLM's sampler makes a dozen and a random number for each token of the
vocabulary."""

import functools

import torch
from torch import Tensor

MAX_BLOCK = 1024
"""Tokens of a block at most; a search over the blocks comes before one inside a block."""
ROWS = 16
"""Rows of which probabilities are made at once, in the place of the logits: they are in the cache still when they are added up, and fresh
memory of that size, which the kernel fills with zeros, would take longer than all the rest."""


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row, by its probability, and its log-probability in nats; both [rows, 1].

    logits: [rows, vocabulary], float32; probabilities afterwards. uniform: [rows], float64 from 0 up to but not 1.

    By inversion: the token at which the sum of the probabilities up to it first exceeds `uniform`. Of two searches, one over blocks of
    tokens and one inside a block, each adds up in float64: the smallest probability counts, and a token whose logit is -inf never comes.
    """
    width = block_width(logits.shape[1])
    sums = [torch.softmax(part, dim=-1, out=part).view(len(part), -1, width).sum(dim=-1) for part in logits.split(ROWS)]
    ends = torch.cat(sums).cumsum(dim=-1, dtype=torch.float64)
    wanted = uniform.unsqueeze(1) * ends[:, -1:]
    block = first_above(ends, wanted)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = logits.view(len(logits), -1, width)[torch.arange(len(logits)), block.squeeze(1)]
    place = first_above(inside.cumsum(dim=-1, dtype=torch.float64), wanted - before)
    return block * width + place, inside.gather(1, place).log()


def first_above(ends: Tensor, wanted: Tensor) -> Tensor:
    """In each row of `ends`, which rise, the place of the first that exceeds `wanted` [rows, 1]: the last that rises, should rounding leave
    none (or logits that are no numbers)."""
    below = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))
    return torch.searchsorted(ends, torch.minimum(wanted, below), right=True).clamp_(max=ends.shape[1] - 1)


@functools.cache
def block_width(vocabulary: int) -> int:
    """The largest divisor of the vocabulary's size up to MAX_BLOCK."""
    return next(width for width in range(min(MAX_BLOCK, vocabulary), 0, -1) if vocabulary % width == 0)
