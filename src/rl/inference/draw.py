"""Draws tokens on the CPU in three passes over the logits; vLLM's sampler makes a dozen, and
takes a random number for each token of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, SamplingMaskLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rl.wire.messages import TOO_MANY

BLOCK = 1024
"""Tokens per block (the last may be shorter); a search over the blocks precedes one inside a
block."""
ROWS = 16
"""Rows whose probabilities are computed at once, overwriting the logits: they are still in the
cache when they are summed, and fresh memory of that size, which the kernel fills with zeros,
would take longer than everything else."""


SEED = "rl_seed"
"""The key of a request's seed among its `extra_args`. vLLM's own `seed` makes a generator whose
last draw the engine undoes when it computes a prompt in pieces. A CPU generator cannot be rewound,
and the engine dies."""
MASK = 2**64 - 1
MAX_KEPT = "rl_max_kept"
"""The key among a request's `extra_args` that asks for the ids that truncation keeps, and says of
how many at a token."""


def carry_seed(params: SamplingParams) -> None:
    """Moves a request's seed to the place where the draw on the CPU looks for it."""
    if params.seed is not None:
        params.extra_args = {**(params.extra_args or {}), SEED: params.seed}
        params.seed = None


def carried_seed(params: SamplingParams | None) -> int | None:
    """The seed of a request; None if it has none."""
    return params.extra_args.get(SEED) if params is not None and params.extra_args else None


def max_kept(params: SamplingParams | None) -> int:
    """Of how many ids at a token a request wants to know; 0 if of none."""
    return (params.extra_args or {}).get(MAX_KEPT, 0) if params else 0


def bounded(rows: Sequence[np.ndarray], limits: Sequence[int]) -> SamplingMaskLists:
    """Packs the ids that were kept at each token, none for the whole vocabulary: TOO_MANY alone
    for those beyond its limit."""
    kept = [
        ids if len(ids) <= limit else [TOO_MANY] for ids, limit in zip(rows, limits, strict=True)
    ]
    ends = np.cumsum([0, *map(len, kept)])
    return SamplingMaskLists(np.concatenate(kept, dtype=np.int32), ends)


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
    index = first_above(inside.cumsum(dim=-1, dtype=torch.float64), wanted - before)
    return tokens.gather(1, index).clamp_(max=vocabulary - 1), inside.gather(1, index).log()


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


def uniforms(runner: Any, rows: int) -> Tensor:
    """A random number in [0, 1) for each row of the runner's batch, derived from the seed if its
    request has one; [rows], float64."""
    uniform = torch.rand(rows, dtype=torch.float64)
    for row, name in enumerate(runner.input_batch.req_ids[:rows]):
        request = runner.requests[name]
        if (seed := carried_seed(request.sampling_params)) is not None:
            uniform[row] = counted_uniform(seed, len(request.output_token_ids))
    return uniform


class Truncation:
    """Remembers which ids truncation has left at each token of a step, for the requests that ask
    for them; vLLM's own runner for CPUs cannot (its argument `return_sampling_mask`)."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.sample = runner, runner.sample_tokens
        self.masks: SamplingMaskLists | None = None
        runner.sample_tokens = self.sample_tokens

    def see(self, logits: Tensor) -> None:
        """Takes the ids from truncated logits, [rows, vocabulary]: the others are at -inf."""
        names = self.runner.input_batch.req_ids[: len(logits)]
        limits = [max_kept(self.runner.requests[name].sampling_params) for name in names]
        if not any(limits):
            return
        rows = [
            np.flatnonzero(row if limit and not row.all() else [])
            for row, limit in zip(logits.isfinite().numpy(), limits, strict=True)
        ]
        self.masks = bounded(rows, limits)

    def sample_tokens(self, *args: Any) -> Any:
        """The runner's method; its output gets the ids."""
        self.masks = None
        output = self.sample(*args)
        output.sampling_masks = self.masks
        return output


class KeptScheduler(Scheduler):
    """vLLM's scheduler, which passes on the ids that `Truncation` finds. Its own argument for that
    is refused on CPUs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.return_sampling_mask = True


class Drawing(torch.nn.Module):
    """Replaces vLLM's draw by `draw`. vLLM's makes different tokens from the same seed, and a
    request's tokens must not depend on whether another one in the batch is greedy or wants more
    log-probabilities."""

    def __init__(self, runner: Any, truncation: Truncation):
        super().__init__()
        self.runner, self.truncation = runner, truncation

    def forward(
        self, logits: Tensor, _generators: object, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens [rows] and the log-probabilities of the distributions that they are
        drawn from [rows, vocabulary]."""
        logits = apply_top_k_top_p(logits, top_k, top_p)
        self.truncation.see(logits)
        logprobs = logits.log_softmax(dim=-1)
        tokens, _ = draw(logits, uniforms(self.runner, len(logits)))
        return tokens.squeeze(1), logprobs


class DrawingSampler(Sampler):
    """vLLM's sampler with our draw. It takes fewer steps if all requests are random and want only
    the log-probability of the sampled token, as those of a run do: vLLM's own up to top_k and
    top_p, then `draw`. The rank of the sampled token is then reported as 0.
    """

    kept = torch.empty(0)
    """Reused memory for logits in float32; allocating it anew costs more than the copy."""

    def __init__(self, runner: Any) -> None:
        super().__init__("processed_logprobs")
        self.runner, self.truncation = runner, Truncation(runner)
        self.topk_topp_sampler = Drawing(runner, self.truncation)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        wanted = sampling_metadata
        is_plain = wanted.all_random and wanted.max_num_logprobs == 0
        if not is_plain or wanted.logprob_token_ids or logprobs_mode_override:
            return super().forward(logits, wanted, predict_bonus_token, logprobs_mode_override)
        logits = self.apply_logits_processors(self.in_float32(logits), wanted, predict_bonus_token)
        if (wanted.temperature != 1).any():
            logits = self.apply_temperature(logits, wanted.temperature, all_random=True)
        for processor in wanted.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, wanted.top_k, wanted.top_p)
        self.truncation.see(logits)
        tokens, logprobs = draw(logits, uniforms(self.runner, len(logits)))
        tokens, ranks = tokens.to(torch.int32), torch.zeros(len(tokens), dtype=torch.int64)
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs, ranks))

    def in_float32(self, logits: Tensor) -> Tensor:
        """The logits themselves, or a float32 copy that is valid until the next step."""
        if logits.dtype == torch.float32:
            return logits
        if self.kept.numel() < logits.numel():
            self.kept = torch.empty(logits.numel())
        return self.kept[: logits.numel()].view_as(logits).copy_(logits)


def speed_up(runner: Any) -> None:
    """Installs the sampler in a CPU's model runner. With speculative decoding it stays vLLM's."""
    if type(runner.sampler) is Sampler and runner.speculative_config is None:
        runner.sampler = DrawingSampler(runner)
