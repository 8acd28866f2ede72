"""Drawing tokens on the CPU: three passes over the logits, where vLLM's sampler makes a dozen and a random number for each token of the
vocabulary."""

import torch
from torch import Tensor

BLOCK = 1024
"""Tokens of a block, of which the last may be shorter; a search over the blocks comes before one inside a block."""
ROWS = 16
"""Rows of which probabilities are made at once, in the place of the logits: they are in the cache still when they are added up, and fresh
memory of that size, which the kernel fills with zeros, would take longer than all the rest."""


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row, by its probability, and its log-probability in nats; both [rows, 1].

    logits: [rows, vocabulary], float32; probabilities afterwards. uniform: [rows], float64 from 0 up to but not 1.

    By inversion: the token at which the sum of the probabilities up to it first exceeds `uniform`. Of two searches, one over blocks of
    tokens and one inside a block, each adds up in float64: the smallest probability counts, and a token whose logit is -inf never comes.
    """
    vocabulary = logits.shape[1]
    ends = torch.cat([block_sums(torch.softmax(part, dim=-1, out=part)) for part in logits.split(ROWS)]).cumsum(dim=-1, dtype=torch.float64)
    wanted = uniform.unsqueeze(1) * ends[:, -1:]
    block = first_above(ends, wanted)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    tokens = block * BLOCK + torch.arange(min(BLOCK, vocabulary))
    inside = logits.gather(1, tokens.clamp(max=vocabulary - 1)).mul_(tokens < vocabulary)  # 0 behind the end, but nan stays nan
    place = first_above(inside.cumsum(dim=-1, dtype=torch.float64), wanted - before)
    return tokens.gather(1, place).clamp_(max=vocabulary - 1), inside.gather(1, place).log()


def block_sums(probabilities: Tensor) -> Tensor:
    """[rows, vocabulary] -> [rows, blocks]."""
    whole = probabilities.shape[1] // BLOCK * BLOCK
    sums = probabilities[:, :whole].view(len(probabilities), -1, BLOCK).sum(dim=-1)
    rest = probabilities[:, whole:]
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=-1) if rest.numel() else sums


def first_above(ends: Tensor, wanted: Tensor) -> Tensor:
    """In each row of `ends`, which rise, the place of the first that exceeds `wanted` [rows, 1]: the last that rises, should rounding leave
    none (or logits that are no numbers)."""
    below = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))
    return torch.searchsorted(ends, torch.minimum(wanted, below), right=True).clamp_(max=ends.shape[1] - 1)
