"""What plain Hugging Face computes for a few samples, each alone: the measure of
trainer/model/selftest.py.

Rank 0 loads a part of the model with transformers alone, and frees it before the policy is made.
Windows and similar limits that exceed the samples are narrowed for both sides. Rounding is
measured: the embeddings are changed by one rounding error of their type, and the resulting change
of the log-probabilities, times MARGIN, is the limit.
"""

import copy
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import get_args

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from rl.config.run import ModelConfig
from rl.run_dir.safetensors import model_files
from rl.system.errors import RunError
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.model.modes import WIDER_WINDOWS, Mode, implementation
from rl.trainer.model.rope import freeze_rope, kinds_by_length
from rl.trainer.parallel.experts import experts_of
from rl.trainer.parallel.world import World

PREFIX, BRANCHES, FAR = 12, (20, 17), 24
"""Tokens of the common prefix, of each branch, and of the sample at the last positions."""
NARROW = 8
"""Tokens of a window in this test: fewer than in a sample."""
WINDOWS = (
    *(
        "sliding_window",
        "sliding_window_size",
        "window_size",
        "attention_window_size",
        "keep_window_size",
        "local_attention",
    ),
    "attention_chunk_size",
)
"""Config keys for the number of tokens that an attention sees; no weight has that size, so the
number can be changed."""
SPARSE = "index_topk"
"""Config key for the number of tokens that a sparse attention (DeepSeek-V3.2) selects; it
matters only if samples may be longer."""
WHOLE_BYTES = 1 << 28
"""Models with smaller files are tested whole; of others the first layers are, at least
LEAST_LAYERS if memory allows."""
LEAST_LAYERS = 8
MOST_LIKELY = 64
"""Number of tokens whose log-probabilities are compared at each position; the head computes all
tokens in the same way."""
MARGIN = 10.0
"""A mode may differ by this many times the effect of one rounding error in each embedding,
because a model has a few hundred roundings in sequence and modes differ in the order of their
sums."""
LEAST_LIMIT, MOST_LIMIT = 2e-5, {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Bounds of the limit in nats: for models whose outputs hardly depend on the embeddings, and for
those that rounding dominates."""
MODEL_ERRORS = (
    RunError,
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    ImportError,
)
"""Errors that a model's code may raise when it is called in a way it does not support."""


class Samples:
    """The test samples: two that branch off one prefix, and one at the last positions of the
    longest sequence."""

    def __init__(self, shape: PreTrainedConfig, max_model_len: int) -> None:
        text = shape.get_text_config()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(text.vocab_size, (PREFIX + sum(BRANCHES) + FAR,), generator=generator)
        prefix, *branches, far = ids.split([PREFIX, *BRANCHES, FAR])
        longest = min(
            max_model_len, getattr(text, "max_position_embeddings", None) or max_model_len
        )
        self.ids = [*(torch.cat([prefix, branch]) for branch in branches), far]
        self.positions = [
            *(torch.arange(len(ids)) for ids in self.ids[:2]),
            torch.arange(FAR) + max(0, longest - FAR),
        ]


class Alone(msgspec.Struct):
    """The result for each sample, which rank 0 sends to the others."""

    name: str = ""
    """The model's class."""
    implementations: dict[Mode, str] = {}
    """transformers' name for the attention of each mode; without modes in which the model's
    attention cannot be replaced."""
    tokens: list[list[list[int]]] = []
    """[T, n] of each sample: the MOST_LIKELY tokens at each position. Models without position
    ids have no sample at the last positions."""
    logprobs: list[list[list[float]]] = []
    """Their log-probabilities."""
    limit: float = 0.0
    """Nats by which rounding may change them."""
    fault: str = ""
    """The reason why the samples cannot be computed; empty if they have been."""


def compute_alone(
    folder: str, shape: PreTrainedConfig, config: ModelConfig, dtype: str, device: torch.device
) -> Alone:
    """Computes each sample alone in a dtype. An error that is the model's fault is a `fault`,
    which the other ranks must hear of."""
    try:
        with quiet():
            model = load_plain(folder, shape, config, dtype, device)
        return measure(model, Samples(shape, config.max_model_len))
    except MODEL_ERRORS as error:
        let_pass(error)
        what = (
            f"model.name = {config.name}: cannot be computed alone ({describe(error)}); choose "
            "another model"
        )
        return Alone(fault=str(error) if isinstance(error, RunError) else what)


def load_plain(
    folder: str, shape: PreTrainedConfig, config: ModelConfig, dtype: str, device: torch.device
) -> PreTrainedModel:
    """Loads a part of the model with transformers alone. Two things differ by intent: the
    windows of Command models, and rotary embeddings that inference computes otherwise
    (tests/trainer/model/test_rope.py has their numbers)."""
    shape = copy.deepcopy(shape)
    if shape.model_type in WIDER_WINDOWS:
        shape.sliding_window += 1
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=shape,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        trust_remote_code=config.trust_remote_code,
    )
    if any("dynamic" in kind for kind in kinds_by_length(model)):
        freeze_rope(model, config.max_model_len)
    return model.to(device).requires_grad_(False).eval()


@torch.no_grad()
def measure(model: PreTrainedModel, samples: Samples) -> Alone:
    """Computes each sample alone, and the limit that rounding sets. Raises RunError for a model
    that is not causal or not complete."""
    by_length, name, error = (
        bool(kinds_by_length(model)),
        type(model).__name__,
        torch.finfo(model.dtype).eps,
    )

    def logits(number: int, with_positions: bool = False) -> Tensor:
        """[T, V]. Rotary embeddings that depend on length get the longest one, by one more
        token, which the others do not see."""
        ids, positions = samples.ids[number], samples.positions[number]
        if by_length:
            ids, positions = (
                torch.cat([ids, ids[:1]]),
                torch.cat([positions, samples.positions[-1][-1:]]),
            )
        more = (
            {"position_ids": positions[None].to(model.device)}
            if with_positions or by_length
            else {}
        )
        return (
            model(input_ids=ids[None].to(model.device), use_cache=False, **more)
            .logits[0, : len(samples.ids[number])]
            .float()
        )

    def change(module: object, args: object, output: Tensor) -> Tensor:
        generator = torch.Generator(output.device).manual_seed(0)
        return output * (
            1
            + error
            * torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        )

    found = [logits(0), logits(1)]
    hook = model.get_input_embeddings().register_forward_hook(change)
    changed = logits(0)
    hook.remove()
    try:
        found.append(logits(2, with_positions=True))
    except MODEL_ERRORS as failure:  # models without position ids
        let_pass(failure)
    tops = [each.topk(min(MOST_LIKELY, each.shape[-1])) for each in found]
    logprobs = [
        top.values - each.logsumexp(-1, keepdim=True) for top, each in zip(tops, found, strict=True)
    ]

    def distance(other: Tensor) -> float:
        """The largest difference of the first sample's log-probabilities from those of logits
        [T, V] of its first T tokens."""
        own = other.gather(-1, tops[0].indices[: len(other)]) - other.logsumexp(-1, keepdim=True)
        return float((own - logprobs[0][: len(other)]).abs().max())

    noise = distance(changed)
    limit = min(max(MARGIN * noise, LEAST_LIMIT), MOST_LIMIT[model.dtype])
    if not math.isfinite(noise):
        raise RunError(f"{name}: its log-probabilities are not finite; are its weights complete?")
    if distance(found[1][:PREFIX]) > limit:
        raise RunError(
            f"{name}: a token's log-probability depends on what follows it; choose a causal "
            "language model"
        )
    return Alone(
        name,
        replaceable(model),
        [top.indices.tolist() for top in tops],
        [each.tolist() for each in logprobs],
        limit,
    )


def replaceable(model: PreTrainedModel) -> dict[Mode, str]:
    """Returns transformers' name for the attention of each mode in which the model can have it."""
    found: dict[Mode, str] = {}
    for mode in get_args(Mode):
        wanted = implementation(mode, type(model))
        with quiet(), suppress(*MODEL_ERRORS):
            model.set_attn_implementation(wanted)
        if model.config._attn_implementation == wanted or mode == "unpacked":
            found[mode] = wanted
    return found


def part_of(folder: str, config: ModelConfig, world: World) -> PreTrainedConfig:
    """Returns the model's config with narrow windows and, of a large model, only the first
    layers, enough to include every kind."""
    shape = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    text = shape.get_text_config()
    sparse = (
        [SPARSE]
        if (getattr(text, SPARSE, None) or config.max_model_len) < config.max_model_len
        else []
    )
    for name in (*WINDOWS, *sparse):
        if isinstance(getattr(text, name, None), int) and getattr(text, name) > NARROW:
            setattr(text, name, NARROW)
    size = sum(path.stat().st_size for path in model_files(Path(folder)))
    if size > WHOLE_BYTES:
        fitting = world.broadcast_int(fitting_layers(size / text.num_hidden_layers, world.device))
        keep_layers(text, max(fitting, first_with_experts(shape, config.trust_remote_code)))
    return shape


def first_with_experts(shape: PreTrainedConfig, trust_remote_code: bool) -> int:
    """Returns the number of layers up to the first one with experts, which some models have
    after dense ones; 0 without any, or if the model cannot be made without memory."""
    numbers: list[int] = []
    with suppress(*MODEL_ERRORS), torch.device("meta"), quiet():
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust_remote_code)
        numbers = [
            int(number)
            for name in experts_of(model)
            for number in re.findall(r"\.(\d+)\.", f".{name}.")[:1]
        ]
    return min(numbers, default=-1) + 1


def fitting_layers(layer_bytes: float, device: torch.device) -> int:
    """Returns LEAST_LAYERS, or on a GPU as many of them as fit twice in float32 (sharded, and
    gathered), at least one. `layer_bytes`: a layer's share of the files, which have two bytes
    per weight."""
    if device.type != "cuda":
        return LEAST_LAYERS
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(LEAST_LAYERS, int(free / (2 * 2 * layer_bytes))))


def keep_layers(config: PreTrainedConfig, least: int = LEAST_LAYERS) -> None:
    """Shortens a model to its first layers, at least `least`, including one of each kind that
    the config's lists name."""
    count = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    kinds = [value for value in lists.values() if 1 < len(set(map(str, value))) <= 8]
    firsts = [
        max(list(map(str, value)).index(kind) for kind in set(map(str, value))) + 1
        for value in kinds
    ]
    kept = min(count, max([least, *firsts]))
    for name, value in lists.items():
        setattr(config, name, value[:kept])
    config.num_hidden_layers = kept


def describe(error: Exception) -> str:
    """Returns the error in a few words. Leaves out the remedy of a RunError, since the remedy is
    already being applied."""
    text = " ".join(str(error).split())
    return (
        text.partition("set trainer.")[0].rstrip(" :;")
        if isinstance(error, RunError)
        else f"{type(error).__name__}: {text[:120]}"
    )


def let_pass(error: Exception) -> None:
    """Raises the error again if it is not the model's fault, but that of memory, another rank or
    a GPU. It then ends this process, and the launcher the others."""
    if is_out_of_memory(error) or isinstance(error, dist.DistError | torch.AcceleratorError):
        raise error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what is said while a part of a model is made: transformers' warnings about
    layers that are left out, and what is said again when the whole is made."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
