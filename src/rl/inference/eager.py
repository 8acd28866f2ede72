"""Faster versions of what vLLM computes in many small steps when it runs a model on the CPU without
compiling it.

They are installed in a worker before its first request. Compiled models do not need them.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import ir
from vllm.config import CompilationMode
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rl.inference.draw import carried_seed, counted_uniform, draw

KERNEL = "vllm_c_cpu"
"""Our name for vLLM's C++ norm kernels: it has them for CPUs, too, but uses them only on GPUs."""
VECTOR = 16
"""Number of values that vLLM's C++ norm computes at once; the row length must be a multiple of
it."""


def can_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.is_contiguous()
        and x.shape[-1] % VECTOR == 0
    )


def can_add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        can_norm(x, weight, epsilon, variance_size)
        and x_residual.is_contiguous()
        and x_residual.dtype == x.dtype
    )


@ir.ops.rms_norm.register_impl(KERNEL, supports_args=can_norm)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(KERNEL, supports_args=can_add_norm, inplace=True)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def uniforms(runner: Any, rows: int) -> Tensor:
    """A random number in [0, 1) for each row of the runner's batch, derived from the seed if its
    request has one; [rows], float64."""
    uniform = torch.rand(rows, dtype=torch.float64)
    for row, name in enumerate(runner.input_batch.req_ids[:rows]):
        request = runner.requests[name]
        if (seed := carried_seed(request.sampling_params)) is not None:
            uniform[row] = counted_uniform(seed, len(request.output_token_ids))
    return uniform


class Drawing(torch.nn.Module):
    """Replaces vLLM's draw by `draw`. vLLM's makes different tokens from the same seed, and a
    request's tokens must not depend on whether another one in the batch is greedy or wants more
    log-probabilities."""

    def __init__(self, runner: Any):
        super().__init__()
        self.runner = runner

    def forward(
        self, logits: Tensor, _generators: object, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens [rows] and the log-probabilities of the distributions that they are
        drawn from [rows, vocabulary]."""
        logits = apply_top_k_top_p(logits, top_k, top_p)
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
        self.runner, self.topk_topp_sampler = runner, Drawing(runner)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        wanted = sampling_metadata
        if (
            not wanted.all_random
            or wanted.max_num_logprobs != 0
            or wanted.logprob_token_ids
            or logprobs_mode_override
        ):
            return super().forward(logits, wanted, predict_bonus_token, logprobs_mode_override)
        logits = self.apply_logits_processors(self.in_float32(logits), wanted, predict_bonus_token)
        if (wanted.temperature != 1).any():
            logits = self.apply_temperature(logits, wanted.temperature, all_random=True)
        for processor in wanted.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        tokens, logprobs = draw(
            apply_top_k_top_p(logits, wanted.top_k, wanted.top_p),
            uniforms(self.runner, len(logits)),
        )
        tokens = tokens.to(torch.int32)
        return SamplerOutput(
            tokens, LogprobsTensors(tokens, logprobs, torch.zeros(len(tokens), dtype=torch.int64))
        )

    def in_float32(self, logits: Tensor) -> Tensor:
        """The logits themselves, or a float32 copy that is valid until the next step."""
        if logits.dtype == torch.float32:
            return logits
        if self.kept.numel() < logits.numel():
            self.kept = torch.empty(logits.numel())
        return self.kept[: logits.numel()].view_as(logits).copy_(logits)


def speed_up(runner: Any) -> None:
    """Installs the sampler and the norms in a CPU's model runner. With speculative decoding the
    sampler stays vLLM's, and in a compiled model the norms do."""
    if type(runner.sampler) is Sampler and runner.speculative_config is None:
        runner.sampler = DrawingSampler(runner)
    if runner.compilation_config.mode == CompilationMode.NONE:
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            op.set_default([KERNEL, "native"])
