"""Finds the mode (trainer/model/modes.py) that is exact for a model: at each start, on its own weights, before any sampling or training.

The test row has three samples: two that branch off one prefix, and one at the last positions of the longest sequence. The row is computed
as in training, with training's head in place of the model's, and compared with each sample computed alone by plain Hugging Face. (If
configured, layers are compiled later; every run compares the compiled model with inference.) Windows and similar limits that exceed the
samples are narrowed for both sides. The first mode whose difference is within rounding is used; a model without such a mode is refused.

Rounding is measured: the embeddings are changed by one rounding error of their type, and the resulting change of the log-probabilities,
times MARGIN, is the limit. The test runs in float32, where rounding hides little. FlexAttention has a kernel for each type, so it is
tested in the run's type, after `blocks` has shown in float32 that the masks are right.
"""

import copy
import hashlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import cache_root
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import empty_micro_batch
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.flex import padded, whole_blocks
from rl.trainer.model.head import LossHead
from rl.trainer.model.modes import Mode, implementation, possible_modes, turn_off_randomness
from rl.trainer.model.rope import freeze_rope
from rl.trainer.parallel.world import World

PREFIX, BRANCHES, FAR = 12, (20, 17), 24
"""Tokens of the common prefix, of each branch, and of the sample at the last positions."""
NARROW = 8
"""Tokens of a window in this test: fewer than in a sample."""
WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "keep_window_size", "local_attention"),
    "attention_chunk_size",
)
"""Config keys for the number of tokens that an attention sees; no weight has that size, so the number can be changed."""
SPARSE = "index_topk"
"""Config key for the number of tokens that a sparse attention (DeepSeek-V3.2) selects; it matters only if samples may be longer."""
WHOLE_BYTES = 1 << 28
"""Models with smaller files are tested whole; of others the first layers are, at least LEAST_LAYERS if memory allows."""
LEAST_LAYERS = 8
ROOM = "free memory that other processes use, or use a device with more"
MOST_LIKELY = 64
"""Number of tokens whose log-probabilities are compared at each position; the head computes all tokens in the same way."""
MARGIN = 10.0
"""A mode may differ by this many times the effect of one rounding error in each embedding, because a model has a few hundred roundings in
sequence and modes differ in the order of their sums."""
LEAST_LIMIT, MOST_LIMIT = 2e-5, {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Bounds of the limit in nats: for models whose outputs hardly depend on the embeddings, and for those that rounding dominates."""
MODEL_ERRORS = (RunError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError)
"""Errors that a model's code may raise when it is called in a way it does not support."""


class ModeChoice(msgspec.Struct):
    """The result of the test, which rank 0 sends to the others and writes to the cache."""

    mode: Mode = "blocks"
    implementation: str = ""
    """transformers' name of the attention."""
    note: str = ""
    """One line for the user."""
    fault: str = ""
    """The reason why no mode is exact; empty if there is one."""


def choose_mode(folder: str, config: ModelConfig, settings: TrainerConfig, world: World) -> ModeChoice:
    """Returns the fastest mode that is exact for the model of `folder`, the same on every rank. Rank 0 prints it in one line.

    Raises RunError on every rank if no mode is exact.
    """
    modes = possible_modes(settings, world)
    found = b""
    if world.is_main:
        key = cache_root().parent / "attention" / f"{digest(folder, config, modes, world.device)}.json"
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.encode(msgspec.json.decode(key.read_bytes(), type=ModeChoice))
        if not found:
            choice = examine(folder, config, modes, world.device)
            found = msgspec.json.encode(choice)
            if not choice.fault:
                with suppress(OSError):  # it is only a cache
                    key.parent.mkdir(parents=True, exist_ok=True)
                    write_file(key, found)
    choice = msgspec.json.decode(world.broadcast_bytes(found), type=ModeChoice)
    if choice.fault:
        raise RunError(choice.fault)
    if world.is_main:
        print(choice.note, file=sys.stderr if choice.note.startswith("WARNING") else sys.stdout, flush=True)
    return choice


def digest(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> str:
    """Returns a hash of everything the result depends on: the model's code, shape and some of its weights, versions, settings."""
    found = hashlib.blake2b(digest_size=16)
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    files = ("attention", "blocks", "flex", "head", "logprobs", "modes", "rope", "selftest")
    own = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in files]
    found.update(repr([versions, own, modes, device.type, config.dtype, config.max_model_len]).encode())
    for path in sorted(Path(folder).iterdir()):
        if path.name == "config.json" or path.suffix == ".py":
            found.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size // 2)
                found.update(f"{path.name} {size}".encode() + file.read(1 << 16))
    return found.hexdigest()


def examine(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> ModeChoice:
    """Tries the modes in order. Running out of memory says nothing about a mode, so it is a fault of its own."""
    try:
        return try_modes(folder, config, modes, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said, what = str(error).partition("\n")[0], "up to three copies of some layers and the embeddings in float32"
        return ModeChoice(
            fault=f"model.name = {config.name}: too little memory to test how to train it, which takes {what} ({said}); {ROOM}"
        )
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # so that a server on the same GPU can use the copies' memory


def try_modes(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> ModeChoice:
    try:
        with quiet():
            test = Test(load_part(folder, config, device), config)
    except MODEL_ERRORS as error:
        if isinstance(error, RunError):
            return ModeChoice(fault=str(error))
        let_pass(error)
        return ModeChoice(fault=f"model.name = {config.name}: cannot be computed alone ({describe(error)}); choose another model")
    name, reasons = type(test.model).__name__, []
    for mode in modes:
        reason = test.why_not(mode)
        if not reason:
            return ModeChoice(mode, implementation(mode, type(test.model)), note_of(mode, name, reasons, test.found, test.limit))
        reasons.append(f"{mode}: {reason}")
    remedy = "choose another model"
    if "unpacked" not in modes:
        remedy = "set trainer.attention = auto and trainer.context_parallel = 1 to try other modes"
    return ModeChoice(fault=f"{name} cannot be trained: no mode matches each sample computed alone ({'; '.join(reasons)}); {remedy}")


def note_of(mode: Mode, name: str, reasons: list[str], found: float, limit: float) -> str:
    exact = f"differs by {found:.1e} nats from each sample computed alone, rounding allows {limit:.1e}"
    costs = {
        "eager": "memory and time of attention grow with the square of trainer.micro_batch_tokens",
        "unpacked": "one sample per pass, shared prefixes computed for each",
    }
    if mode not in costs:
        return f"trainer.attention: {mode} for {name}; {exact}{'; rejected ' if reasons else ''}{'; '.join(reasons)}"
    because = f"after rejecting {'; '.join(reasons)}" if reasons else "as configured"
    return f"WARNING: trainer.attention: {mode} for {name} ({costs[mode]}) {because}; {exact}"


def describe(error: Exception) -> str:
    """Returns the error in a few words. Leaves out the remedy of a RunError, since the remedy is already being applied."""
    text = " ".join(str(error).split())
    return text.partition("set trainer.")[0].rstrip(" :;") if isinstance(error, RunError) else f"{type(error).__name__}: {text[:120]}"


def let_pass(error: Exception) -> None:
    """Raises the error again if it is not the model's fault."""
    if is_out_of_memory(error):
        raise error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses transformers' warnings about layers that are left out."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def load_part(folder: str, config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Loads the model in float32 with narrow windows; of a large model only the first layers, enough to include every kind."""
    shape = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    text = shape.get_text_config()
    sparse = [SPARSE] if (getattr(text, SPARSE, None) or config.max_model_len) < config.max_model_len else []
    for name in (*WINDOWS, *sparse):
        if isinstance(getattr(text, name, None), int) and getattr(text, name) > NARROW:
            setattr(text, name, NARROW)
    size = sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin"))
    if size > WHOLE_BYTES:
        keep_layers(text, fitting_layers(size / text.num_hidden_layers, device))
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=shape, dtype=torch.float32, attn_implementation="eager", trust_remote_code=config.trust_remote_code
    )
    freeze_rope(model, config.max_model_len)
    return model.to(device).requires_grad_(False)


def fitting_layers(layer_bytes: float, device: torch.device) -> int:
    """Returns LEAST_LAYERS, or on a GPU as many of them as fit three times in float32, at least one. `layer_bytes`: a layer's share of the
    files, which have two bytes per weight."""
    if device.type != "cuda":
        return LEAST_LAYERS
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(LEAST_LAYERS, int(free / (3 * 2 * layer_bytes))))


def keep_layers(config: PreTrainedConfig, least: int = LEAST_LAYERS) -> None:
    """Shortens a model to its first layers, at least `least`, including one of each kind that the config's lists name."""
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple) and len(value) == count}
    kinds = [value for value in lists.values() if 1 < len(set(map(str, value))) <= 8]
    firsts = [max(list(map(str, value)).index(kind) for kind in set(map(str, value))) + 1 for value in kinds]
    kept = min(count, max([least, *firsts]))
    for name, value in lists.items():
        setattr(config, name, value[:kept])
    config.num_hidden_layers = kept


class ReferenceLogprobs:
    """The result of a sample computed alone: at each position the log-probabilities of its MOST_LIKELY tokens."""

    def __init__(self, logits: Tensor) -> None:
        logits = logits.float()
        top = logits.topk(min(MOST_LIKELY, logits.shape[-1]))
        self.tokens, self.logprobs = top.indices, top.values - logits.logsumexp(-1, keepdim=True)

    def distance(self, logits: Tensor) -> float:
        """Returns the largest difference of log-probabilities at the first T positions from those of the model's logits [T, V]."""
        logits, tokens = logits.float(), self.tokens[: len(logits)]
        return float((logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True) - self.logprobs[: len(logits)]).abs().max())


class Test:
    """A model, its test samples, and the result of each sample computed alone."""

    __test__ = False

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.model, self.config, self.device = model, config, model.device
        text = model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(text.vocab_size, (PREFIX + sum(BRANCHES) + FAR,), generator=generator)
        prefix, *branches, far = ids.split([PREFIX, *BRANCHES, FAR])
        self.samples = [torch.cat([prefix, branch]).to(self.device) for branch in branches]
        self.far = far.to(self.device)
        longest = min(config.max_model_len, getattr(text, "max_position_embeddings", None) or config.max_model_len)
        self.far_positions = torch.arange(FAR, device=self.device) + max(0, longest - FAR)
        self.found = self.limit = 0.0
        self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Computes each sample alone with plain Hugging Face, and the limit that rounding sets.

        Works on a copy, as every mode does: what a model changes at its first call (BigBird its kind of attention) must not help the next.
        """
        model = copy.deepcopy(self.model).eval()
        outputs = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in self.samples]
        self.alone = [ReferenceLogprobs(logits) for logits in outputs]
        generator = torch.Generator(self.device).manual_seed(0)
        error = torch.finfo(self.model.dtype).eps

        def change(module: object, args: object, output: Tensor) -> Tensor:
            return output * (1 + error * torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))

        hook = model.get_input_embeddings().register_forward_hook(change)
        changed = model(input_ids=self.samples[0][None], use_cache=False).logits[0]
        hook.remove()
        try:
            self.alone.append(
                ReferenceLogprobs(model(input_ids=self.far[None], position_ids=self.far_positions[None], use_cache=False).logits[0])
            )
        except MODEL_ERRORS as error:  # models without position ids
            let_pass(error)
        noise = self.alone[0].distance(changed)
        self.limit = min(max(MARGIN * noise, LEAST_LIMIT), MOST_LIMIT[self.model.dtype])
        name = type(self.model).__name__
        if not math.isfinite(noise):
            raise RunError(f"{name}: its log-probabilities are not finite; are its weights complete?")
        if self.alone[0].distance(outputs[1][:PREFIX]) > self.limit:
            raise RunError(f"{name}: a token's log-probability depends on what follows it; choose a causal language model")

    def why_not(self, mode: Mode) -> str:
        """Returns why a mode is not exact; empty if it is, and then `found` is the largest difference and `limit` what rounding allows."""
        if mode != "flex":
            return self.try_mode(mode)
        if reason := self.try_mode("blocks"):
            return reason
        try:
            rounded = Test(copy.deepcopy(self.model).to(getattr(torch, self.config.dtype)), self.config)
        except MODEL_ERRORS as error:
            let_pass(error)
            return describe(error)
        if not (reason := rounded.try_mode(mode)):
            self.found, self.limit = rounded.found, rounded.limit
        return reason

    @torch.no_grad()
    def try_mode(self, mode: Mode) -> str:
        try:
            with quiet():
                model = copy.deepcopy(self.model)
                turn_off_randomness(model)
                wanted = implementation(mode, type(model))
                model.set_attn_implementation(wanted)
            if model.config._attn_implementation != wanted and mode != "unpacked":
                return "its attention cannot be replaced"
            self.found = self.unpacked_difference(model) if mode == "unpacked" else self.packed_difference(model, mode)
        except MODEL_ERRORS as error:
            let_pass(error)
            return describe(error)
        if not self.found <= self.limit:
            return f"{self.found:.2g} nats off, rounding allows {self.limit:.1e}"
        return ""

    def unpacked_difference(self, model: PreTrainedModel) -> float:
        """Computes the samples in reverse order, to reveal state that a model carries from call to call."""
        tree = TreeMask(self.far, self.far)  # not used
        pairs = list(zip(self.alone, self.samples, strict=False))  # without the sample at the last positions
        found = [difference(model, "unpacked", (ids, ids, tree), alone.tokens, alone.logprobs) for alone, ids in reversed(pairs)]
        return float(torch.tensor(found).max())  # nan if one is

    def packed_difference(self, model: PreTrainedModel, mode: Mode) -> float:
        """Computes two samples as a tree, and after it a third at the last positions, which must not depend on them."""
        if len(self.alone) == len(self.samples):
            raise RunError("it takes no position ids")
        if getattr(model.config.get_text_config(), SPARSE, None):
            raise RunError("its attention selects among all tokens of a row")
        a, b = self.samples
        length = PREFIX + sum(BRANCHES)
        ids = torch.cat([a, b[PREFIX:], self.far])
        first, second = torch.arange(len(a), device=self.device), torch.arange(PREFIX, len(b), device=self.device)
        positions = torch.cat([first, second, self.far_positions])
        subtree_ends = torch.full_like(ids, len(ids))
        subtree_ends[:length] = length
        subtree_ends[PREFIX : len(a)] = len(a)
        if mode == "flex":  # padded as in training: shorter rows would use another kernel
            ids, positions, subtree_ends = padded(ids, positions, subtree_ends, whole_blocks(len(ids)))
        parts = list(zip(self.alone, (0, PREFIX, 0), strict=True))
        tokens, logprobs = (torch.cat([getattr(alone, name)[start:] for alone, start in parts]) for name in ("tokens", "logprobs"))
        return difference(model, mode, (ids, positions, TreeMask(subtree_ends, positions)), tokens, logprobs)


def difference(model: PreTrainedModel, mode: Mode, row: tuple[Tensor, Tensor, TreeMask], tokens: Tensor, logprobs: Tensor) -> float:
    """Returns the largest difference from `logprobs` [T, n] of the log-probabilities that training's head computes for `tokens` [T, n] at
    the first T positions of a row. May be nan."""
    if (head := model.get_output_embeddings()) is None:
        raise RunError("it has no language-model head")
    places = torch.arange(len(tokens), device=tokens.device)
    rows, temperatures = places.repeat_interleave(tokens.shape[1]), torch.ones(len(places), device=tokens.device)
    batch = replace(empty_micro_batch(), predictors=places, temperatures=temperatures, rows=rows, targets=tokens.flatten())
    own, head.forward = head.forward, (scoring := LossHead(head, mode))
    try:
        return float((scoring.score(model, batch, row, entropy_gradient=False).logprobs - logprobs.flatten()).abs().max())
    finally:
        head.forward = own
