"""A rank's memory: a test before the first step on a GPU, and an error that names the settings
that help when memory runs out."""

import contextlib
from collections.abc import Callable, Iterator

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
from rl.trainer.parallel.experts import experts_of
from rl.trainer.parallel.sharding import finish_gradients
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch

GIB = 2**30
BESIDE = GIB
"""Bytes of a GPU that a process uses in addition to its tensors: CUDA's context, kernels and
their workspaces."""


REMEDIES = (
    "trainer.micro_batch_tokens (half as many, if that holds the longest sequence), "
    'trainer.activation_checkpointing = "full", trainer.context_parallel (with blocks or flex) and '
    "trainer.expert_parallel need less memory for activations; more ranks or a smaller "
    "trainer.dp_replicate, trainer.optim.offload (on GPUs) and trainer.lora less for weights, "
    "gradients and optimizer"
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
        score(model, rows[0].to(world.device), world).logprobs.sum().backward()
    finish_gradients(model, world)
    optimizer.zero_grad()
    for experts in experts_of(model).values():
        experts.load.zero_()


def keep_to_share(config: RLConfig, device: torch.device) -> None:
    """Limits this process to its own share of a GPU that it shares with inference, so that
    vLLM's share, `gpu_memory_utilization`, stays free for it, also when vLLM is restarted. A
    replay and a benchmark have the GPU to themselves."""
    options = {key.replace("-", "_"): value for key, value in config.inference.vllm.items()}
    alone = config.trainer.data.replay or config.trainer.data.fake
    shared = set(as_ids(config.trainer.gpus)) & set(as_ids(config.inference.gpus))
    if shared and not alone and device.type == "cuda" and "gpu_memory_utilization" in options:
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 - float(options["gpu_memory_utilization"]) - BESIDE / total
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
