"""Seconds, tokens a second, FLOP/s and memory of a step."""

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
from rl.trainer.modes import layer_windows
from rl.trainer.packing import MicroBatch, Packed
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
"""Operations a second in bfloat16 on dense matrices, by device name, the first that is found: NVIDIA's data sheets of these products."""


SHORTEST_S = 1e-3
"""Of a part that is noted as a span."""


class Timer:
    """Measures the seconds of each part of a step."""

    def __init__(self, step: int | None = None, device: torch.device | None = None) -> None:
        """step: under which the parts are noted as spans; None: they are not. device: the one that is given work and computes it later."""
        self.step, self.device = step, device
        self.seconds: dict[str, float] = {}
        self.start = self.last = time.monotonic()

    def lap(self, part: str) -> None:
        """Counts the time since the last lap to `part`, also that in which a GPU computes what it was given."""
        if self.device and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        if self.step is not None and now - self.last > SHORTEST_S:
            spans.note(part, self.last, now, "step", self.step)
        self.last = now

    @property
    def step_s(self) -> float:
        """From the start to the last lap."""
        return self.last - self.start

    def metrics(self) -> dict[str, float]:
        return {f"time/{part}": seconds for part, seconds in {**self.seconds, "step": self.step_s}.items()}


@dataclass(frozen=True)
class Work:
    """Floating-point operations that a forward and backward pass takes by its definition: nothing that is computed twice counts twice.

    A matrix of n weights takes 2n operations a token forward, 2n for the gradient of its input and, if it is trained, 2n for its own.
    Attention takes 2 (d_qk + d_v) a head for each key that a token sees (q k and p v), and twice that backward. What is left out (norms,
    activations, rotary embedding, the gate's softmax) is below a percent. See "PaLM: Scaling Language Modeling with Pathways", appendix B,
    https://arxiv.org/abs/2204.02311, there with all keys before a token and the head at every token.
    """

    per_token: int
    """Operations of the layers' matrices; of experts, those that a token is routed to."""
    per_predictor: int
    """Operations of the head, which is computed only where a token is predicted that has a loss."""
    per_key: int
    """Operations of attention in one layer, for each key that a token sees."""
    windows: Mapping[int | None, int]
    """Number of layers by their window, the most keys that a token sees; None: all before it."""

    def of(self, batch: MicroBatch) -> int:
        """Operations of a micro batch on this rank."""
        end = len(batch.position_ids) - batch.padding
        positions = batch.position_ids[:end] if batch.queries is None else batch.position_ids[batch.queries[batch.queries < end]]
        keys = positions + 1  # a token sees its ancestors and itself
        attention = sum(layers * int((keys if window is None else keys.clamp(max=window)).sum()) for window, layers in self.windows.items())
        return self.per_token * len(positions) + self.per_predictor * len(batch.predictors) + self.per_key * attention


def work_of(model: PreTrainedModel) -> Work:
    """Counted from the model's own matrices, whatever the architecture calls them."""
    config = model.config.get_text_config()
    per_token = sum(times * matrix.shape[-2:].numel() * (6 if matrix.requires_grad else 4) for matrix, times in layer_matrices(model))
    heads = getattr(config, "num_attention_heads", 0)  # a model of another kind has none
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    widths = getattr(config, "qk_head_dim", head_dim) + getattr(config, "v_head_dim", head_dim)
    head = model.get_output_embeddings().weight
    return Work(per_token, head.numel() * (6 if head.requires_grad else 4), 6 * heads * widths, Counter(attention_windows(model)))


def attention_windows(model: PreTrainedModel) -> list[int | None]:
    """The windows of the layers that have attention over keys: not of convolutions, state space models or linear attention."""
    config = model.config.get_text_config()
    windows = layer_windows(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["attention"] * len(windows)
    return [window for kind, window in zip(kinds, windows, strict=True) if kind.endswith("attention") and not kind.startswith("linear")]


def layer_matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, int]]:
    """(matrix, how often a token is multiplied with it) of the layers: once, or with as many of a tensor's experts as it is routed to."""
    config = model.config.get_text_config()
    # Architectures name it differently.
    experts = next((value for name in ("num_experts_per_tok", "moe_topk", "top_k") if (value := getattr(config, name, None))), 1)
    apart = {weight for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()}
    apart |= set(model.get_output_embeddings().parameters())
    for weight in model.parameters():
        if weight.ndim >= 2 and weight not in apart:
            yield weight, experts if weight.ndim == 3 else 1


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of a GPU in bfloat16; None where it is not known."""
    return next((flops for pattern, flops in PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


def performance(packed: Packed, timer: Timer, work: Work, dtype: str, world: World, epochs: int = 1) -> dict[str, float]:
    """Throughput, memory and utilisation of a step. Every rank calls this.

    Throughput counts the samples' real tokens over the wall time of the whole step, waiting and writing included, each once in however
    many epochs. Memory is that of the rank with the most; model FLOP/s utilisation is the mean over the ranks, on known GPUs only.
    """
    done = world.reduce(torch.tensor(float(sum(map(work.of, packed.micro_batches))), dtype=torch.float64), dist.ReduceOp.SUM)
    memory = world.reduce(torch.tensor(peak_memory_gib(world.device)), dist.ReduceOp.MAX)
    metrics = {
        "perf/tokens_per_s": sum(len(sample.token_ids) for sample in packed.batch.samples) / timer.step_s,
        "perf/shared_token_fraction": packed.shared_token_fraction,
        "perf/peak_memory_gib": float(memory),
    }
    on_gpu = world.device.type == "cuda" and dtype == "bfloat16"
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
    return metrics | ({"perf/mfu": epochs * float(done) / timer.step_s / (peak * world.size)} if peak else {})


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is of memory: torch.OutOfMemoryError is a RuntimeError, and what the CPU's allocator raises is no more than that."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held: of the GPU as torch counts it, of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
