"""What a rank's memory holds, estimated from the architecture: out of memory comes with the settings that help, and by how much."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.trainer.config import LoraConfig
from rl.trainer.distributed import World
from rl.trainer.logprobs import CHUNK_ELEMENTS, SLICE_BYTES
from rl.trainer.model import DTYPES
from rl.trainer.packing import MicroBatch
from rl.trainer.performance import experts_per_token

SAVED_PER_WIDTH = 1.6
"""A layer keeps for the backward pass about this many numbers for each number that goes into or out of one of its matrices: Llama 1.25,
Qwen3-MoE 1.5, Qwen3 1.6, Gemma3 2.3 (measured in bfloat16; norms and activations of these keep float32 copies and steps between)."""
WORTH = 0.02
"""A remedy that frees a smaller part than this is not named."""
GIB = 2**30


class OutOfMemoryError(Exception):
    """There is not enough memory for a micro batch; the message says what would free how much."""


@dataclass(frozen=True)
class Sizes:
    """Of a model, in numbers (elements)."""

    trained: int
    frozen: int
    layer: int
    """Of the largest layer."""
    layers: int
    hidden: int
    vocab: int
    widths: int
    """What goes into and out of all matrices of the layers, a token; of experts those that it goes to."""
    outputs: int
    """What comes out of them."""


@dataclass(frozen=True)
class Case:
    """What is asked about: the settings that matter, the ranks, and the row of the largest micro batch."""

    tokens: int
    """Of the row, all ranks that share it together."""
    longest: int
    """Of them in one sequence, which cannot be divided among rows."""
    predictors: int
    shards: int
    """Ranks over which one copy of the model is sharded."""
    context_parallel: int
    checkpointing: str
    offload: bool
    compute_bytes: int
    """Of a number that is computed with: 2 in bfloat16."""
    device: str

    def with_rows_of(self, tokens: int, context_parallel: int) -> "Case":
        """The same with other rows, as far as the longest sequence allows."""
        tokens = max(self.longest, tokens)
        return replace(self, tokens=tokens, predictors=self.predictors * tokens // self.tokens, context_parallel=context_parallel)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Counted from the model's own tensors; experts and embeddings as in performance.work_of."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    apart = {weight for module in model.modules() if isinstance(module, nn.Embedding) for weight in module.parameters()}
    apart |= set(head.parameters()) if head is not None else set()
    layer_sizes: dict[str, int] = {}
    widths = outputs = 0
    for name, weight in model.named_parameters():
        if found := re.match(r".*?\.\d+\.", name):
            layer_sizes[found[0]] = layer_sizes.get(found[0], 0) + weight.numel()
        if weight.ndim >= 2 and weight not in apart:
            times = experts_per_token(config) if weight.ndim == 3 else 1
            widths += times * sum(weight.shape[-2:])
            outputs += times * weight.shape[-2]
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for weight in model.parameters()) - trained
    layer = max(layer_sizes.values(), default=0)
    return Sizes(trained, frozen, layer, config.num_hidden_layers, config.hidden_size, config.vocab_size, widths, outputs)


def estimate(sizes: Sizes, case: Case) -> Memory:
    """Within a factor of 1.5 of what was measured, see tests/trainer/test_memory.py.

    Float32 masters, gradients and two moments are sharded; the weights computed with are whole, all of them where nothing is sharded,
    else two layers and what is outside the layers. A block of logits and their gradient exists in the dtype computed with, and a few
    chunks of it in float32.
    """
    outside = max(0, sizes.trained + sizes.frozen - sizes.layers * sizes.layer)
    whole = sizes.trained + sizes.frozen if case.shards == 1 and not case.offload else outside + 2 * sizes.layer
    sharded = 0.0 if case.offload else 1.0 / case.shards
    tokens, logits = case.tokens / case.context_parallel, case.predictors / case.context_parallel * sizes.vocab
    everything = SAVED_PER_WIDTH * sizes.widths
    kept = {
        "none": everything,
        "selective": sizes.outputs + sizes.hidden * sizes.layers + everything / sizes.layers,
        "full": sizes.hidden * sizes.layers + everything / sizes.layers,
    }
    return Memory(
        parameters=sharded * (4 * sizes.trained + case.compute_bytes * sizes.frozen) + case.compute_bytes * whole,
        gradients=sharded * 4 * sizes.trained + (4 + case.compute_bytes) * min(sizes.layer, sizes.trained),
        optimizer=sharded * 8 * sizes.trained,
        activations=case.compute_bytes * kept[case.checkpointing] * tokens,
        logits=2 * min(case.compute_bytes * logits, SLICE_BYTES) + 3 * 4 * min(logits, CHUNK_ELEMENTS[case.device]),
    )


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
    before = estimate(sizes, case).total
    freed = {name: before - estimate(*other).total for name, other in changed.items()}
    return dict(sorted(((name, free) for name, free in freed.items() if free > WORTH * before), key=lambda item: -item[1]))


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
    """Where the memory goes, and what would free how much of it."""
    memory = estimate(sizes, case)
    parts = ", ".join(f"{part.name} {getattr(memory, part.name) / GIB:.2f}" for part in fields(memory))
    frees = "; ".join(f"{name}: {free / GIB:.2f} GiB" for name, free in remedies(sizes, case, micro_batch_tokens).items())
    return f"A rank needs about {memory.total / GIB:.2f} GiB ({parts}). Each of these frees about so much: {frees}"


@contextlib.contextmanager
def explained(model: PreTrainedModel, batches: list[MicroBatch], config: RLConfig, world: World) -> Iterator[None]:
    """Turns torch's out-of-memory errors, while `batches` are trained, into OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and what the CPU's allocator raises is no more than that
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        case = case_of(max(batches, key=lambda batch: len(batch.input_ids)), config, world)
        said = str(error).partition("\n")[0]
        raise OutOfMemoryError(
            f"out of memory on rank {world.rank} with a micro batch of {case.tokens} tokens, its longest sequence {case.longest} ({said}). "
            + advice(sizes_of(model), case, config.trainer.micro_batch_tokens)
        ) from error
