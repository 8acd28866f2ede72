"""Measures seconds, tokens per second, FLOP/s and memory of a step; tries out a rank's memory
before the first step on a GPU, and names the settings that help when memory runs out.
"""

import contextlib
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.config.base import as_ids
from rl.config.run import RLConfig
from rl.run_dir import spans
from rl.system.errors import RunError
from rl.system.linux import return_freed_memory
from rl.system.machine import memory_bytes
from rl.trainer.data.batch_sources import full_batch
from rl.trainer.data.micro_batch import MicroBatch, micro_batch_tokens
from rl.trainer.data.packing import Packed
from rl.trainer.model.head import mode_of, score
from rl.trainer.parallel.experts import experts_of, num_chosen
from rl.trainer.parallel.sharding import finish_gradients
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch

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
    """Floating-point operations of a forward and backward pass by the usual estimate, without
    recomputation: 6 for each weight that a token is multiplied with (4 if it is frozen), and 12 for
    each key that it sees, layer, head and width of a head."""

    per_token: float
    per_predictor: float
    """Of the head, which computes only predictors' logits."""
    per_key: int
    """Of all layers. Windows and layers without attention are not looked at."""

    def of(self, batch: MicroBatch) -> float:
        """Returns the operations of this rank's part of a micro batch, without padding."""
        length = len(batch.input_ids) - batch.padding
        positions = batch.position_ids[:length]
        if batch.queries is not None:
            positions = batch.position_ids[batch.queries[batch.queries < length]]
        keys = int((positions + 1).sum())  # a token sees its ancestors and itself
        return (
            self.per_token * len(positions)
            + self.per_predictor * len(batch.predictors)
            + self.per_key * keys
        )


def work_of(model: PreTrainedModel) -> Work:
    """Counts the weights of the layers, those of experts by the share that a token is sent to."""
    config = model.config.get_text_config()
    embeddings = {
        weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters()
    }
    head = model.get_output_embeddings().weight
    shares = {
        weight: (num_chosen(config) or 1) / len(weight)
        for experts in experts_of(model).values()
        for weight in experts.parameters()
    }
    per_token = sum(
        weight.numel() * operations(weight) * shares.get(weight, 1.0)
        for weight in model.parameters()
        if weight.ndim >= 2 and weight is not head and weight not in embeddings
    )
    heads = getattr(config, "num_attention_heads", 0)  # models without attention have none
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    return Work(
        per_token, head.numel() * operations(head), 12 * config.num_hidden_layers * heads * width
    )


def operations(weight: Tensor) -> int:
    """Of a token with a weight: those for its own gradient are left out if it is frozen."""
    return 6 if weight.requires_grad else 4


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
    done = torch.tensor(float(sum(map(work.of, packed.micro_batches))), dtype=torch.float64)
    done = epochs * float(world.reduce(done, dist.ReduceOp.SUM))
    memory = world.reduce(torch.tensor(peak_memory_gib(world.device)), dist.ReduceOp.MAX)
    tokens = sum(sample.num_tokens for sample in packed.batch.samples)
    metrics = {
        "tokens/trained": packed.batch.num_loss_tokens,
        "tokens/batch": tokens,
        "perf/tokens_per_s": tokens / timer.step_s,
        "perf/shared_token_fraction": packed.shared_token_fraction,
        "perf/peak_memory_gib": float(memory),
    }
    on_gpu = world.device.type == "cuda" and dtype == "bfloat16"
    if on_gpu and (peak := peak_flops(torch.cuda.get_device_name(world.device))):
        metrics["perf/mfu"] = done / timer.step_s / (peak * world.size)
    return metrics


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


GIB = 2**30
BESIDE = GIB
"""Bytes of a GPU that a process uses in addition to its tensors: CUDA's context, kernels and
their workspaces."""


REMEDIES = (
    "trainer.micro_batch_tokens (half as many, if that holds the longest sequence), "
    'trainer.activation_checkpointing = "full", trainer.context_parallel (with blocks or flex) and '
    "trainer.expert_parallel need less memory for activations; more ranks or a smaller "
    "trainer.dp_replicate, trainer.optim.offload (on GPUs) and trainer.lora less for weights, "
    "gradients and optimizer; a smaller inference.vllm.gpu_memory_utilization leaves more of a GPU "
    "that inference shares"
)


def try_largest(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    pack: Callable[[TrainBatch], Packed],
    config: RLConfig,
    world: World,
) -> None:
    """Trains a full row of random tokens and drops the gradients, so that a GPU runs out of
    memory now and not at some later step."""
    row_tokens = (
        micro_batch_tokens(config.trainer, world.device, mode_of(model)) * world.context_size
    )
    vocab_size = model.config.get_text_config().vocab_size
    rows = pack(
        full_batch(world.data_size, row_tokens, config.model.max_model_len, vocab_size)
    ).micro_batches
    with explain_out_of_memory(model, rows, world):
        score(model, rows[0].to(world.device), world).trainer_logprobs.sum().backward()
    finish_gradients(model, world)
    optimizer.zero_grad()
    for experts in experts_of(model).values():
        experts.load.zero_()


def keep_to_share(config: RLConfig, device: torch.device) -> None:
    """Limits this process to its own share of a GPU that it shares with inference, so that
    vLLM's share, `gpu_memory_utilization`, stays free for it, also when vLLM is restarted: what
    vLLM uses beside its tensors is not in its share. A replay and a benchmark have the GPU to
    themselves."""
    options = {key.replace("-", "_"): value for key, value in config.inference.vllm.items()}
    alone = config.trainer.data.replay or config.trainer.data.fake
    shared = set(as_ids(config.trainer.gpus)) & set(as_ids(config.inference.gpus))
    if shared and not alone and device.type == "cuda" and "gpu_memory_utilization" in options:
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 - float(options["gpu_memory_utilization"]) - 2 * BESIDE / total
        torch.cuda.set_per_process_memory_fraction(max(0.0, share), device)


def free_bytes(device: torch.device) -> int:
    """Returns the memory that new tensors may take, with that of tensors that are gone: on a GPU
    what torch has taken from the driver and does not use, at most the share of this process
    (`keep_to_share`)."""
    if device.type != "cuda":
        return_freed_memory()
        return memory_bytes()[1]
    free, total = torch.cuda.mem_get_info(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), share) - torch.cuda.memory_allocated(
        device
    )


@contextlib.contextmanager
def explain_out_of_memory(
    model: PreTrainedModel, batches: list[MicroBatch], world: World
) -> Iterator[None]:
    """Turns torch's out-of-memory errors while `batches` are trained into RunError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        largest = max(batches, key=lambda batch: len(batch.input_ids))
        raise RunError(
            f"out of memory on rank {world.rank} with a micro batch of "
            f"{len(largest.input_ids)} tokens, its longest sequence "
            f"{int(largest.position_ids.max()) + 1} ({str(error).partition(chr(10))[0]}), in the "
            f"mode {mode_of(model)}. What helps: {REMEDIES}"
        ) from error
