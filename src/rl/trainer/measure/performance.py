"""Measures seconds, tokens per second, FLOP/s and memory of a step."""

import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from rl.run_dir import spans
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.data.packing import Packed
from rl.trainer.model.modes import layer_windows
from rl.trainer.model.routes import CHOSEN
from rl.trainer.parallel.world import World

PEAK_FLOPS = {
    r"A100": 312e12,
    r"H100 PCIe": 756e12,
    r"(H100|H200) NVL": 835e12,
    r"H100|H200|GH200": 989e12,
    r"B200": 2250e12,
    r"L40S": 362e12,
    r"RTX 4090$": 165.2e12,
    r"RTX A6000$": 154.8e12,
}
"""Peak bfloat16 operations per second on dense matrices by device name, first match first, from
NVIDIA's data sheets."""


SHORTEST_S = 1e-3
"""Shortest part of a step that is recorded as a span."""


class Timer:
    """Measures the seconds of each part of a step."""

    def __init__(self, step: int | None = None, device: torch.device | None = None) -> None:
        """`step`: the step of the spans that record the parts; None records none. `device`: the
        device that computes asynchronously."""
        self.step, self.device = step, device
        self.seconds: dict[str, float] = {}
        self.start = self.last = time.monotonic()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to `part`, after the GPU has finished its queued
        work."""
        if self.device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        if self.step is not None and now - self.last > SHORTEST_S:
            spans.note(part, self.last, now, "step", self.step)
        self.last = now

    @property
    def step_s(self) -> float:
        """Seconds from the start to the last lap."""
        return self.last - self.start

    def metrics(self) -> dict[str, float]:
        return {
            f"time/{part}": seconds
            for part, seconds in {**self.seconds, "step": self.step_s}.items()
        }


@dataclass(frozen=True)
class Work:
    """Floating-point operations that a forward and backward pass needs by definition, without
    recomputation.

    A matrix of n weights takes 2n operations per token forward, 2n for the gradient of its input
    and, if it is trained, 2n for its own. Attention takes 2 (d_qk + d_v) per head for each key that
    a token sees (q k and p v), and twice that backward. The operations left out (norms,
    activations, rotary embedding, the gate's softmax) are below a percent. See "PaLM: Scaling
    Language Modeling with Pathways", appendix B, https://arxiv.org/abs/2204.02311, which counts all
    keys before a token and the head at every token.
    """

    per_token: int
    """Operations per token of the layers' matrices; of experts, only those that a token is
    routed to."""
    per_predictor: int
    """Operations of the head per position that predicts a loss token; other positions skip the
    head."""
    per_key: int
    """Operations of attention in one layer, for each key that a token sees."""
    windows: Mapping[int | None, int]
    """Number of layers by window, which is the most keys that a token sees; None for full
    attention."""

    def of(self, batch: MicroBatch) -> int:
        """Returns the operations of a micro batch on this rank."""
        end = len(batch.position_ids) - batch.padding
        positions = (
            batch.position_ids[:end]
            if batch.queries is None
            else batch.position_ids[batch.queries[batch.queries < end]]
        )
        keys = positions + 1  # a token sees its ancestors and itself
        attention = sum(
            layers * int((keys if window is None else keys.clamp(max=window)).sum())
            for window, layers in self.windows.items()
        )
        return (
            self.per_token * len(positions)
            + self.per_predictor * len(batch.predictors)
            + self.per_key * attention
        )


def work_of(model: PreTrainedModel) -> Work:
    """Counts the operations from the model's own matrices, whatever their names."""
    config = model.config.get_text_config()
    per_token = sum(
        weights * (6 if matrix.requires_grad else 4) for matrix, weights in layer_matrices(model)
    )
    heads = getattr(config, "num_attention_heads", 0)  # models without attention have none
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    widths = getattr(config, "qk_head_dim", head_dim) + getattr(config, "v_head_dim", head_dim)
    head = model.get_output_embeddings().weight
    return Work(
        per_token,
        head.numel() * (6 if head.requires_grad else 4),
        6 * heads * widths,
        Counter(attention_windows(model)),
    )


def attention_windows(model: PreTrainedModel) -> list[int | None]:
    """Returns the windows of the layers with attention over keys, which excludes convolutions,
    state space models and linear attention."""
    config = model.config.get_text_config()
    windows = layer_windows(model)
    kinds = (
        getattr(config, "layer_types", None)
        or getattr(config, "layers_block_type", None)
        or ["attention"] * len(windows)
    )
    return [
        window
        for kind, window in zip(kinds, windows, strict=True)
        if kind.endswith("attention") and not kind.startswith("linear")
    ]


def layer_matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, int]]:
    """Yields the layers' matrices and with how many weights of each a token is multiplied: with
    all, or those of its experts."""
    config = model.config.get_text_config()
    chosen = next(
        (value for name in (*CHOSEN, "top_k") if (value := getattr(config, name, None))), 1
    )
    apart = {
        weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    apart |= set(model.get_output_embeddings().parameters())
    factors = {
        # peft has the factors of all experts in one matrix
        weight: len(getattr(wrapper.get_base_layer(), wrapper.parameter_name))
        for wrapper in model.modules()
        if type(wrapper).__name__ == "ParamWrapper"
        for weight in (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters())
    }
    for weight in model.parameters():
        if weight.ndim >= 2 and weight not in apart:
            share = (
                chosen / factors[weight] if weight in factors else chosen if weight.ndim == 3 else 1
            )
            yield weight, round(weight.shape[-2:].numel() * share)


def peak_flops(device_name: str) -> float | None:
    """Returns a GPU's peak FLOP/s in bfloat16; None if it is not known."""
    return next(
        (flops for pattern, flops in PEAK_FLOPS.items() if re.search(pattern, device_name)), None
    )


def performance(
    packed: Packed, timer: Timer, work: Work, dtype: str, world: World, epochs: int = 1
) -> dict[str, float]:
    """Returns throughput, memory and utilisation of a step. Every rank calls this.

    Throughput is the number of the samples' real tokens, each counted once regardless of epochs,
    over the wall time of the whole step, including waiting and writing. Memory is the maximum over
    the ranks. Model FLOP/s utilisation is their mean, on known GPUs only.
    """
    done = world.reduce(
        torch.tensor(float(sum(map(work.of, packed.micro_batches))), dtype=torch.float64),
        dist.ReduceOp.SUM,
    )
    memory = world.reduce(torch.tensor(peak_memory_gib(world.device)), dist.ReduceOp.MAX)
    metrics = {
        "perf/tokens_per_s": sum(sample.num_tokens for sample in packed.batch.samples)
        / timer.step_s,
        "perf/shared_token_fraction": packed.shared_token_fraction,
        "perf/peak_memory_gib": float(memory),
    }
    on_gpu = world.device.type == "cuda" and dtype == "bfloat16"
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
    return metrics | (
        {"perf/mfu": epochs * float(done) / timer.step_s / (peak * world.size)} if peak else {}
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means out of memory. torch.OutOfMemoryError is a RuntimeError; the CPU's
    allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def peak_memory_gib(device: torch.device) -> float:
    """Returns this rank's peak memory: of the GPU as counted by torch, or without a GPU of the
    process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
