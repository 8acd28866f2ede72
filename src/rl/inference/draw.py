"""Draws tokens on the CPU in three passes over the logits; vLLM's sampler makes a dozen, and
takes a random number for each token of the vocabulary."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

BLOCK = 1024
"""Tokens per block (the last may be shorter); a search over the blocks precedes one inside a
block."""
ROWS = 16
"""Rows whose probabilities are computed at once, overwriting the logits: they are still in the
cache when they are summed, and fresh memory of that size, which the kernel fills with zeros,
would take longer than everything else."""


SEED = "rl_seed"
"""The key of a request's seed among its `extra_args`. With vLLM's own `seed` it would get a
generator, whose last draw the engine undoes when a prompt is computed in pieces. CPU generators
cannot do that, and the engine dies."""
MASK = 2**64 - 1


def carry_seed(params: "SamplingParams") -> None:
    """Moves a request's seed to the place where the draw on the CPU looks for it."""
    if params.seed is not None:
        params.extra_args = {**(params.extra_args or {}), SEED: params.seed}
        params.seed = None


def carried_seed(params: "SamplingParams | None") -> int | None:
    """The seed of a request; None if it has none."""
    return params.extra_args.get(SEED) if params is not None and params.extra_args else None


def counted_uniform(seed: int, position: int) -> float:
    """The number in [0, 1) with which a request with this seed draws its token at this position (0
    is the first of its answer).

    It depends on these two alone, so a request gets the same numbers whatever is computed beside it
    and in however many pieces. It is the upper 53 bits of two rounds of SplitMix64: Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014,
    https://doi.org/10.1145/2714064.2660195).
    """
    return (mix(mix(seed & MASK) + position) >> 11) * 2.0**-53


def mix(state: int) -> int:
    """The output of SplitMix64 after a state; both are unsigned 64-bit integers."""
    bits = (state + 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by its probability. Returns the tokens and their log-probabilities
    in nats, both [rows, 1].

    logits: [rows, vocabulary], float32; overwritten with the probabilities. uniform: [rows],
    float64 in [0, 1).

    Draws by inversion: takes the first token at which the cumulative probability exceeds `uniform`.
    Two searches, one over blocks and one inside a block, sum in float64, so that the smallest
    probability counts and a token whose logit is -inf is never drawn.
    """
    vocabulary = logits.shape[1]
    ends = torch.cat(
        [block_sums(torch.softmax(part, dim=-1, out=part)) for part in logits.split(ROWS)]
    ).cumsum(dim=-1, dtype=torch.float64)
    wanted = uniform.unsqueeze(1) * ends[:, -1:]
    block = first_above(ends, wanted)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    tokens = block * BLOCK + torch.arange(min(BLOCK, vocabulary))
    # 0 past the end, but nan stays nan
    inside = logits.gather(1, tokens.clamp(max=vocabulary - 1)).mul_(tokens < vocabulary)
    place = first_above(inside.cumsum(dim=-1, dtype=torch.float64), wanted - before)
    return tokens.gather(1, place).clamp_(max=vocabulary - 1), inside.gather(1, place).log()


def block_sums(probabilities: Tensor) -> Tensor:
    """Sums over blocks of tokens: [rows, vocabulary] -> [rows, blocks]."""
    whole = probabilities.shape[1] // BLOCK * BLOCK
    sums = probabilities[:, :whole].view(len(probabilities), -1, BLOCK).sum(dim=-1)
    rest = probabilities[:, whole:]
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=-1) if rest.numel() else sums


def first_above(ends: Tensor, wanted: Tensor) -> Tensor:
    """For each row of the non-decreasing `ends`, the index of the first value above `wanted`
    [rows, 1]; if rounding (or nan) leaves none, the index of the last increase."""
    below = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))
    return torch.searchsorted(ends, torch.minimum(wanted, below), right=True).clamp_(
        max=ends.shape[1] - 1
    )
