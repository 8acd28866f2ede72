"""What vLLM computes in many small steps where it runs a model on the CPU without compiling it, in few.

Put into a worker before its first request. Where a model is compiled, the compiler does it.
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

from rl.inference.draw import draw
from rl.inference.threads import Threads

KERNEL = "vllm_c_cpu"
"""vLLM's kernels in C++ of the norms, under a name of their own: it has them for CPUs and takes them on GPUs alone."""
VECTOR = 16
"""Values that vLLM's norm in C++ computes at once; a row is a whole number of these."""


def can_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous() and x.shape[-1] % VECTOR == 0


def can_add_norm(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return can_norm(x, weight, epsilon, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


@ir.ops.rms_norm.register_impl(KERNEL, supports_args=can_norm)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(KERNEL, supports_args=can_add_norm, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def uniforms(rows: int, generators: dict[int, torch.Generator]) -> Tensor:
    """A random number for each row, of its own generator where its request has a seed; [rows], float64."""
    uniform = torch.rand(rows, dtype=torch.float64)
    for row, generator in generators.items():
        uniform[row] = torch.rand((), dtype=torch.float64, generator=generator)
    return uniform


class Drawing(torch.nn.Module):
    """`draw` in the place of vLLM's draw, which makes other tokens of the same seed: those of a request must not depend on whether one
    beside it is greedy, or wants more log-probabilities."""

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(tokens [rows], log-probabilities of the distributions that they are drawn from [rows, vocabulary])."""
        logits = apply_top_k_top_p(logits, top_k, top_p)
        logprobs = logits.log_softmax(dim=-1)
        tokens, _ = draw(logits, uniforms(len(logits), generators))
        return tokens.squeeze(1), logprobs


class DrawingSampler(Sampler):
    """vLLM's sampler with our draw; in few steps where requests are random and want the log-probability of the sampled token alone, as
    those of a run do.

    Its steps up to top_k and top_p are vLLM's own; then `draw`. Nobody who asks for that one log-probability is told a rank: it is 0.
    """

    kept = torch.empty(0)
    """Memory for logits in float32; fresh memory of that size costs more than the copy."""

    def __init__(self) -> None:
        super().__init__("processed_logprobs")
        self.topk_topp_sampler = Drawing()

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        wanted = sampling_metadata
        if not wanted.all_random or wanted.max_num_logprobs != 0 or wanted.logprob_token_ids or logprobs_mode_override:
            return super().forward(logits, wanted, predict_bonus_token, logprobs_mode_override)
        logits = self.apply_logits_processors(self.in_float32(logits), wanted, predict_bonus_token)
        if (wanted.temperature != 1).any():
            logits = self.apply_temperature(logits, wanted.temperature, all_random=True)
        for processor in wanted.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        tokens, logprobs = draw(apply_top_k_top_p(logits, wanted.top_k, wanted.top_p), uniforms(len(logits), wanted.generators))
        tokens = tokens.to(torch.int32)
        return SamplerOutput(tokens, LogprobsTensors(tokens, logprobs, torch.zeros(len(tokens), dtype=torch.int64)))

    def in_float32(self, logits: Tensor) -> Tensor:
        """The logits, or a copy of them that is good until the next step."""
        if logits.dtype == torch.float32:
            return logits
        if self.kept.numel() < logits.numel():
            self.kept = torch.empty(logits.numel())
        return self.kept[: logits.numel()].view_as(logits).copy_(logits)


def speed_up(runner: Any) -> Threads | None:
    """Makes a CPU's model runner compute so. With speculative decoding the sampler stays vLLM's, in a compiled model everything else.

    Returns what chooses the threads, None where all compute everything.
    """
    if type(runner.sampler) is Sampler and runner.speculative_config is None:
        runner.sampler = DrawingSampler()
    if runner.compilation_config.mode != CompilationMode.NONE:
        return None
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([KERNEL, "native"])
    # Several workers wait for each other inside of a step anyway.
    return Threads(runner) if runner.parallel_config.world_size == 1 else None
