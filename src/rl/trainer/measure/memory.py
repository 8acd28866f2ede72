"""A rank's memory, estimated from the architecture: an out-of-memory error names the settings that help, and by how much."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from rl.config.check import as_ids
from rl.config.run import RLConfig
from rl.config.trainer import LoraConfig
from rl.system.errors import RunError
from rl.trainer.fake import full_batch
from rl.trainer.logprobs import CHUNK_ELEMENTS, SLICE_BYTES
from rl.trainer.measure.performance import is_out_of_memory, layer_matrices
from rl.trainer.model import DTYPES, mode_of, score
from rl.trainer.packing import MicroBatch, Packed, micro_batch_tokens
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch

SAVED_PER_WIDTH = 1.6
"""A layer keeps for the backward pass about this many numbers for each number that goes into or out of one of its matrices: Llama 1.25,
Qwen3-MoE 1.5, Qwen3 1.6, Gemma3 2.3 (measured in bfloat16; norms and activations of these keep float32 copies and steps between)."""
MIN_FREED = 0.02
"""A remedy that frees a smaller part of the memory than this is not named."""
GIB = 2**30
BESIDE = GIB
"""Bytes of a GPU that a process takes beside its tensors: CUDA's context, kernels and their workspaces."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in numbers of elements."""

    trained: int
    frozen: int
    layer: int
    """Elements of the largest layer."""
    layers: int
    hidden: int
    vocab: int
    widths: int
    """Elements a token that go into and out of all matrices of the layers; of experts, those that it is routed to."""
    outputs: int
    """Elements a token that come out of these matrices."""


@dataclass(frozen=True)
class Case:
    """The settings, the ranks and the largest micro batch that an estimate is made for."""

    tokens: int
    """Tokens of the row, on all ranks that share it together."""
    longest: int
    """Tokens of its longest sequence, which cannot be divided among rows."""
    predictors: int
    shards: int
    """Ranks over which one copy of the model is sharded."""
    context_parallel: int
    checkpointing: str
    offload: bool
    compute_bytes: int
    """Bytes of an element in the dtype that is computed with: 2 in bfloat16."""
    device: str

    def with_rows_of(self, tokens: int, context_parallel: int) -> "Case":
        """This case with other rows, as short as the longest sequence allows."""
        tokens = max(self.longest, tokens)
        return replace(self, tokens=tokens, predictors=self.predictors * tokens // self.tokens, context_parallel=context_parallel)


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Counted from the model's own tensors; experts and embeddings as in performance.layer_matrices."""
    config = model.config.get_text_config()
    layer_sizes: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        if found := re.match(r".*?\.\d+\.", name):
            layer_sizes[found[0]] += weight.numel()
    widths = sum(times * sum(matrix.shape[-2:]) for matrix, times in layer_matrices(model))
    outputs = sum(times * matrix.shape[-2] for matrix, times in layer_matrices(model))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for weight in model.parameters()) - trained
    layer = max(layer_sizes.values(), default=0)
    return Sizes(trained, frozen, layer, config.num_hidden_layers, config.hidden_size, config.vocab_size, widths, outputs)


def estimate(sizes: Sizes, case: Case) -> dict[str, float]:
    """Bytes on one rank's device, by their use; within a factor of 1.5 of what was measured, see tests/trainer/measure/test_memory.py.

    Float32 masters, gradients and two moments are sharded; the weights computed with are whole, all of them where nothing is sharded,
    else two layers and what is outside the layers. A block of logits and their gradient exists in the dtype computed with, and a few
    chunks of it in float32.
    """
    outside = max(0, sizes.trained + sizes.frozen - sizes.layers * sizes.layer)
    whole = sizes.trained + sizes.frozen if case.shards == 1 else outside + 2 * sizes.layer
    sharded = 1.0 / case.shards
    tokens, logits = case.tokens / case.context_parallel, case.predictors / case.context_parallel * sizes.vocab
    everything = SAVED_PER_WIDTH * sizes.widths
    kept = {
        "none": everything,
        "selective": sizes.outputs + sizes.hidden * sizes.layers + everything / sizes.layers,
        "full": sizes.hidden * sizes.layers + everything / sizes.layers,
    }
    return {
        "parameters": sharded * (4 * sizes.trained + case.compute_bytes * sizes.frozen) + case.compute_bytes * whole,
        "gradients": sharded * 4 * sizes.trained + (4 + case.compute_bytes) * min(sizes.layer, sizes.trained),
        "optimizer": 0.0 if case.offload else sharded * 8 * sizes.trained,
        "activations": case.compute_bytes * kept[case.checkpointing] * tokens,
        "logits": 2 * min(case.compute_bytes * logits, SLICE_BYTES) + 3 * 4 * min(logits, CHUNK_ELEMENTS[case.device]),
    }


def on_host(sizes: Sizes, case: Case) -> float:
    """Bytes that a rank whose optimizer is offloaded takes of the host's memory."""
    return 8 * sizes.trained / case.shards


def remedies(sizes: Sizes, case: Case, micro_batch_tokens: int) -> dict[str, float]:
    """Settings and the bytes that each alone would free, the most first."""
    half, ranks = max(1, micro_batch_tokens // 2), case.context_parallel
    adapters = replace(sizes, trained=LoraConfig().rank * sizes.widths, frozen=sizes.trained)
    changed: dict[str, tuple[Sizes, Case]] = {
        f"trainer.micro_batch_tokens = {half}": (sizes, case.with_rows_of(half * ranks, ranks)),
        f"trainer.context_parallel = {2 * ranks}": (sizes, case.with_rows_of(micro_batch_tokens * 2 * ranks, 2 * ranks)),
        'trainer.activation_checkpointing = "selective"': (sizes, replace(case, checkpointing="selective")),
        'trainer.activation_checkpointing = "full"': (sizes, replace(case, checkpointing="full")),
        f"the model sharded over {2 * case.shards} ranks (more of them, or a smaller trainer.dp_replicate)": (
            sizes,
            replace(case, shards=2 * case.shards),
        ),
    }
    if case.device == "cuda":
        changed["trainer.optim.offload = true"] = sizes, replace(case, offload=True)
    if not sizes.frozen:
        changed["trainer.lora = true"] = adapters, case
    before = sum(estimate(sizes, case).values())
    freed = {name: before - sum(estimate(*other).values()) for name, other in changed.items()}
    return dict(sorted(((name, free) for name, free in freed.items() if free > MIN_FREED * before), key=lambda item: -item[1]))


def case_of(batch: MicroBatch, config: RLConfig, world: World) -> Case:
    """The case of a run and one of its micro batches."""
    return Case(
        tokens=len(batch.input_ids),
        longest=int(batch.position_ids.max()) + 1,
        predictors=len(batch.predictors) * world.context_size,
        shards=world.mesh.size(-1),
        context_parallel=world.context_size,
        checkpointing=config.trainer.activation_checkpointing,
        offload=config.trainer.optim.offload,
        compute_bytes=DTYPES[config.model.dtype].itemsize,
        device=world.device.type,
    )


def advice(sizes: Sizes, case: Case, micro_batch_tokens: int) -> str:
    """Text that says what takes how much memory, and which setting would free how much."""
    memory = estimate(sizes, case)
    parts = ", ".join(f"{use} {needed / GIB:.2f}" for use, needed in memory.items())
    host = f"{on_host(sizes, case) / GIB:.2f} GiB of the host's memory"
    costs = {"trainer.optim.offload = true": f" (for {host})"}
    freed = remedies(sizes, case, micro_batch_tokens)
    frees = "; ".join(f"{name}: {free / GIB:.2f} GiB{costs.get(name, '')}" for name, free in freed.items())
    beside = f" and {host}" if case.offload else ""
    return f"A rank needs about {sum(memory.values()) / GIB:.2f} GiB ({parts}){beside}. Each of these frees about so much: {frees}"


def try_largest(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, pack: Callable[[TrainBatch], Packed], config: RLConfig, world: World
) -> None:
    """Trains a full row of random tokens and drops the gradients, so that a GPU is out of memory now and not at some later step."""
    row_tokens = micro_batch_tokens(config.trainer, world.device, mode_of(model)) * world.context_size
    vocab_size = model.config.get_text_config().vocab_size
    rows = pack(full_batch(world.data_size, row_tokens, config.model.max_model_len, vocab_size)).micro_batches
    with explain_out_of_memory(model, rows, config, world):
        score(model, rows[0].to(world.device), world).logprobs.sum().backward()
    optimizer.zero_grad()


def keep_to_share(config: RLConfig, device: torch.device) -> None:
    """On a GPU that it shares with inference this process is out of memory at its own share, and leaves alone what vLLM has taken or will
    look for when it is started again: `gpu_memory_utilization`. A replay and a benchmark have the GPU for themselves."""
    given = {key.replace("-", "_"): value for key, value in config.inference.vllm.items()}
    alone = config.trainer.data.replay or config.trainer.data.fake
    shared = set(as_ids(config.trainer.gpus)) & set(as_ids(config.inference.gpus))
    if shared and not alone and device.type == "cuda" and "gpu_memory_utilization" in given:
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 - float(given["gpu_memory_utilization"]) - BESIDE / total
        torch.cuda.set_per_process_memory_fraction(max(0.0, share), device)


@contextlib.contextmanager
def explain_out_of_memory(model: PreTrainedModel, batches: list[MicroBatch], config: RLConfig, world: World) -> Iterator[None]:
    """Turns torch's out-of-memory errors, while `batches` are trained, into RunError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        case = case_of(max(batches, key=lambda batch: len(batch.input_ids)), config, world)
        first_line, row_tokens = str(error).partition("\n")[0], micro_batch_tokens(config.trainer, world.device, mode_of(model))
        raise RunError(
            f"out of memory on rank {world.rank} with a micro batch of {case.tokens} tokens, its longest sequence {case.longest} "
            f"({first_line}). " + advice(sizes_of(model), case, row_tokens)
        ) from error
