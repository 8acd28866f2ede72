"""A rank's memory: a test before the first step on a GPU, and an error that names the settings
that help when memory runs out."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rl.config.base import as_ids
from rl.config.run import RLConfig
from rl.system.errors import RunError
from rl.system.linux import return_freed_memory
from rl.system.machine import memory_bytes
from rl.trainer.data.fake import full_batch
from rl.trainer.data.micro_batch import MicroBatch, micro_batch_tokens
from rl.trainer.data.packing import Packed
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.model.head import mode_of, score
from rl.trainer.model.policy import DTYPES
from rl.trainer.parallel.experts import experts_of
from rl.trainer.parallel.sharding import finish_gradients
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch

GIB = 2**30
BESIDE = GIB
"""Bytes of a GPU that a process uses in addition to its tensors: CUDA's context, kernels and
their workspaces."""


@dataclass(frozen=True)
class State:
    """Bytes that one rank holds throughout a run: float32 master weights, gradients, Adam's two
    moments and the weights of a KL reference, all sharded."""

    parameters: float
    gradients: float
    optimizer: float
    reference: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.reference


def state_of(model: PreTrainedModel, config: RLConfig, shards: int) -> State:
    """Returns the state of a model sharded over `shards` ranks. A frozen weight has no gradient,
    no moments and no float32 master."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / shards
    frozen = (
        sum(weight.numel() for weight in model.parameters() if not weight.requires_grad) / shards
    )
    settings, size = config.trainer, DTYPES[config.model.dtype].itemsize
    has_own_reference = settings.loss.kl_coefficient and (
        settings.loss.kl_reference or not settings.lora
    )
    reference = size * (trained + frozen) if has_own_reference else 0.0
    return State(
        4 * trained + size * frozen,
        4 * trained,
        0.0 if settings.optim.offload else 8 * trained,
        reference,
    )


def advice(
    model: PreTrainedModel, batch: MicroBatch, config: RLConfig, world: World, row_tokens: int
) -> str:
    """Names the settings that reduce memory in this case. The figures for state are exact;
    activations use the rest and have no figure."""
    settings, shards, longest = (
        config.trainer,
        world.mesh.size(-1),
        int(batch.position_ids.max()) + 1,
    )
    state = state_of(model, config, shards)
    smaller = []
    mode = mode_of(model)
    if mode != "unpacked" and row_tokens // 2 * world.context_size >= longest:
        smaller.append(f"trainer.micro_batch_tokens = {row_tokens // 2}")
    if mode in ("blocks", "flex"):
        smaller.append(f"trainer.context_parallel = {2 * world.context_size}")
    if experts_of(model) and shards > 1 and settings.expert_parallel < shards:
        smaller.append(
            f"trainer.expert_parallel = {2 * settings.expert_parallel} (a rank then gathers "
            "half as many experts)"
        )
    if settings.activation_checkpointing == "none":
        smaller.append('trainer.activation_checkpointing = "full"')
    less = [
        f"twice as many ranks, or a smaller trainer.dp_replicate ({state.total / 2 / GIB:.2f} GiB)"
    ]
    if not settings.optim.offload and world.device.type == "cuda":
        less.append(
            f"trainer.optim.offload = true ({state.optimizer / GIB:.2f} GiB, which moves to "
            "host memory)"
        )
    if not settings.lora:
        less.append(f"trainer.lora = true ({(state.gradients + state.optimizer) / GIB:.2f} GiB)")
    held = (
        "Weights, gradients, optimizer and KL reference"
        if state.reference
        else "Weights, gradients and optimizer"
    )
    remedies = [f"Smaller activations: {'; '.join(smaller)}."] * bool(smaller) + [
        f"Less state: {'; '.join(less)}"
    ]
    return (
        f"{held} take {state.total / GIB:.2f} GiB on each rank, the activations of a row take "
        f"the rest. {' '.join(remedies)}"
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
    with explain_out_of_memory(model, rows, config, world):
        score(model, rows[0].to(world.device), world).logprobs.sum().backward()
    finish_gradients(model, world)
    optimizer.zero_grad()
    for experts in experts_of(model).values():
        experts.load.zero_()


def keep_to_share(config: RLConfig, device: torch.device) -> None:
    """Limits this process to its own share of a GPU that it shares with inference, so that
    vLLM's share, `gpu_memory_utilization`, stays free for it, also when vLLM is restarted. A
    replay and a benchmark have the GPU to themselves."""
    given = {key.replace("-", "_"): value for key, value in config.inference.vllm.items()}
    alone = config.trainer.data.replay or config.trainer.data.fake
    shared = set(as_ids(config.trainer.gpus)) & set(as_ids(config.inference.gpus))
    if shared and not alone and device.type == "cuda" and "gpu_memory_utilization" in given:
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 - float(given["gpu_memory_utilization"]) - BESIDE / total
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
    model: PreTrainedModel, batches: list[MicroBatch], config: RLConfig, world: World
) -> Iterator[None]:
    """Turns torch's out-of-memory errors while `batches` are trained into RunError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        largest = max(batches, key=lambda batch: len(batch.input_ids))
        row_tokens = micro_batch_tokens(config.trainer, world.device, mode_of(model))
        first_line = str(error).partition("\n")[0]
        raise RunError(
            f"out of memory on rank {world.rank} with a micro batch of "
            f"{len(largest.input_ids)} tokens, its longest sequence "
            f"{int(largest.position_ids.max()) + 1} ({first_line}). "
            f"{advice(model, largest, config, world, row_tokens)}"
        ) from error
