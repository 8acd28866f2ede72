"""Which mode (trainer/modes.py) is exact for a model: found at each start, on its own weights, before anything is sampled or trained.

A row of three samples, two that branch off one prefix and one at the far end of the longest sequence, is computed as training would, and
each sample alone by plain Hugging Face. Windows and the like, which are longer than these samples, are narrowed for both. The mode with the
first difference that is no more than rounding is taken; a model without any is refused.

Rounding is measured: the embeddings are changed by one rounding error of their type, and what that does to the log-probabilities, times
MARGIN, is the most that a mode may differ. It is computed in float32, where rounding hides little; FlexAttention, a kernel of its own for
each type, in the type of the run, once `blocks` has shown in float32 that its masks are right.
"""

import copy
import hashlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
from rl.trainer.attention import TreeMask
from rl.trainer.flex import padded, whole_blocks
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.modes import Mode, call, implementation, possible_modes, turn_off_randomness
from rl.trainer.parallel.world import World
from rl.trainer.rope import freeze_rope

PREFIX, BRANCHES, FAR = 12, (20, 17), 24
"""Tokens of the common prefix, of each branch, and of the far sample."""
NARROW = 8
"""Tokens of a window in this test: fewer than those of a sample."""
WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "keep_window_size", "local_attention"),
    "attention_chunk_size",
)
"""What configs call the number of tokens that an attention sees, where no weight has that size."""
SPARSE = "index_topk"
"""The number of tokens that a sparse attention (DeepSeek-V3.2) picks: it counts only where samples may be longer."""
WHOLE_BYTES = 1 << 28
"""Models whose files are smaller are tested whole, of others the first layers, at least LEAST_LAYERS where there is the memory."""
LEAST_LAYERS = 8
ROOM = "end what else uses the memory, or take a device with more"
MOST_LIKELY = 64
"""Tokens whose log-probabilities are compared at each place; the head computes all of them alike."""
MARGIN = 10.0
"""A mode may differ by so many times what one rounding error of each embedding does: a model has a few hundred roundings one after another,
and another order of their sums."""
LEAST_LIMIT, MOST_LIMIT = 2e-5, {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Bounds of the limit, nats, for models whose numbers hardly depend on the embeddings, and for those in which rounding is everything."""
MODEL_ERRORS = (RunError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError)
"""What the code of a model raises when it is called in a way that it does not know."""


class Choice(msgspec.Struct):
    """What the test has found, as rank 0 tells the others and the cache."""

    mode: Mode = "blocks"
    implementation: str = ""
    """transformers' name of the attention."""
    note: str = ""
    """One line for the user."""
    fault: str = ""
    """Why there is no mode; else empty."""


def choose_mode(folder: str, config: ModelConfig, settings: TrainerConfig, world: World) -> Choice:
    """The fastest mode that is exact for the model of `folder`, the same on every rank. Rank 0 says it in one line.

    Raises RunError, on every rank, if there is none.
    """
    modes = possible_modes(settings, world)
    found = b""
    if world.is_main:
        key = cache_root().parent / "attention" / f"{digest(folder, config, modes, world.device)}.json"
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.encode(msgspec.json.decode(key.read_bytes(), type=Choice))
        if not found:
            choice = examine(folder, config, modes, world.device)
            found = msgspec.json.encode(choice)
            if not choice.fault:
                with suppress(OSError):  # no more than a cache
                    key.parent.mkdir(parents=True, exist_ok=True)
                    write_file(key, found)
    choice = msgspec.json.decode(world.broadcast_bytes(found), type=Choice)
    if choice.fault:
        raise RunError(choice.fault)
    if world.is_main:
        print(choice.note, file=sys.stderr if choice.note.startswith("WARNING") else sys.stdout, flush=True)
    return choice


def digest(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> str:
    """A name for all that the result depends on: the model's code, shape and some of its weights, versions, settings."""
    found = hashlib.blake2b(digest_size=16)
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    files = ("attention", "blocks", "flex", "modes", "norms", "rope", "rotary", "selftest")
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


def examine(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> Choice:
    """Tries the modes one after another. Being out of memory says nothing about them: it is a fault of its own."""
    try:
        return try_modes(folder, config, modes, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said, what = str(error).partition("\n")[0], "up to three copies of some layers and the embeddings in float32"
        return Choice(fault=f"model.name = {config.name}: no memory to find out how it can be trained, which takes {what} ({said}); {ROOM}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the copies took is free for a server on the same GPU


def try_modes(folder: str, config: ModelConfig, modes: list[Mode], device: torch.device) -> Choice:
    try:
        with quiet():
            test = Test(load_part(folder, config, device), config)
    except MODEL_ERRORS as error:
        if isinstance(error, RunError):
            return Choice(fault=str(error))
        let_pass(error)
        return Choice(fault=f"model.name = {config.name}: cannot be computed alone ({describe(error)}); choose another model")
    name, reasons = type(test.model).__name__, []
    for mode in modes:
        reason = test.why_not(mode)
        if not reason:
            return Choice(mode, implementation(mode, type(test.model)), note_of(mode, name, reasons, test.found, test.limit))
        reasons.append(f"{mode}: {reason}")
    remedy = "choose another model"
    if "unpacked" not in modes:
        remedy = "set trainer.attention = auto and trainer.context_parallel = 1, so that other modes are tried"
    return Choice(fault=f"{name} cannot be trained with the numbers that it has alone ({'; '.join(reasons)}); {remedy}")


def note_of(mode: Mode, name: str, reasons: list[str], found: float, limit: float) -> str:
    exact = f"differs by {found:.1e} nats from each sample alone, where rounding makes {limit:.1e}"
    costs = {
        "eager": "memory and time of attention grow with the square of trainer.micro_batch_tokens",
        "unpacked": "one sample a pass, common prefixes computed for each",
    }
    if mode not in costs:
        return f"trainer.attention: {mode} for {name}; {exact}{'; not ' if reasons else ''}{'; '.join(reasons)}"
    because = f"because of {'; '.join(reasons)}" if reasons else "as set"
    return f"WARNING: trainer.attention: {mode} for {name} ({costs[mode]}) {because}; {exact}"


def describe(error: Exception) -> str:
    """The error in a few words; of our own without the remedy, which is what is being done."""
    text = " ".join(str(error).split())
    return text.partition("set trainer.")[0].rstrip(" :;") if isinstance(error, RunError) else f"{type(error).__name__}: {text[:120]}"


def let_pass(error: Exception) -> None:
    """Raises an error that is no model's."""
    if is_out_of_memory(error):
        raise error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' words about layers that are left out."""
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
    """The model in float32 with narrow windows; of a large one the first layers, as many as show every kind."""
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
    """LEAST_LAYERS, or on a GPU the fewer of which three copies in float32 fit, at least one. `layer_bytes`: a layer's share of the files,
    which have two bytes a weight."""
    if device.type != "cuda":
        return LEAST_LAYERS
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(LEAST_LAYERS, int(free / (3 * 2 * layer_bytes))))


def keep_layers(config: PreTrainedConfig, least: int = LEAST_LAYERS) -> None:
    """Shortens a model to its first layers, at least `least`, among them one of each kind that a list of the config names."""
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple) and len(value) == count}
    kinds = [value for value in lists.values() if 1 < len(set(map(str, value))) <= 8]
    firsts = [max(list(map(str, value)).index(kind) for kind in set(map(str, value))) + 1 for value in kinds]
    kept = min(count, max([least, *firsts]))
    for name, value in lists.items():
        setattr(config, name, value[:kept])
    config.num_hidden_layers = kept


class Alone:
    """What a sample gives alone: at each place the log-probabilities of its MOST_LIKELY tokens."""

    def __init__(self, logits: Tensor) -> None:
        logits = logits.float()
        top = logits.topk(min(MOST_LIKELY, logits.shape[-1]))
        self.tokens, self.logprobs = top.indices, top.values - logits.logsumexp(-1, keepdim=True)

    def distance(self, logits: Tensor) -> float:
        """The largest difference to log-probabilities of the first T places, computed in another way: from logits [T, V]. Maybe nan."""
        logits, tokens = logits.float(), self.tokens[: len(logits)]
        return float((logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True) - self.logprobs[: len(logits)]).abs().max())


class Test:
    """A model, its probes, and what each of them gives alone."""

    __test__ = False

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.model, self.dtype, self.device = model, getattr(torch, config.dtype), model.device
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
        """Computes the samples alone, as plain Hugging Face does, and how far rounding reaches.

        On a copy, as every mode: what a model changes at its first call (BigBird its kind of attention) must not help the next.
        """
        model = copy.deepcopy(self.model).eval()
        outputs = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in self.samples]
        self.alone = [Alone(logits) for logits in outputs]
        generator = torch.Generator(self.device).manual_seed(0)
        error = torch.finfo(self.model.dtype).eps

        def change(module: object, args: object, output: Tensor) -> Tensor:
            return output * (1 + error * torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype))

        hook = model.get_input_embeddings().register_forward_hook(change)
        changed = model(input_ids=self.samples[0][None], use_cache=False).logits[0]
        hook.remove()
        try:
            self.alone.append(Alone(model(input_ids=self.far[None], position_ids=self.far_positions[None], use_cache=False).logits[0]))
        except MODEL_ERRORS as error:  # models that take no positions
            let_pass(error)
        noise = self.alone[0].distance(changed)
        self.limit = min(max(MARGIN * noise, LEAST_LIMIT), MOST_LIMIT[self.model.dtype])
        name = type(self.model).__name__
        if not math.isfinite(noise):
            raise RunError(f"{name}: its log-probabilities are not finite; are its weights whole?")
        if self.alone[0].distance(outputs[1][:PREFIX]) > self.limit:
            raise RunError(f"{name}: a token's log-probability depends on what follows it; choose a causal language model")

    def why_not(self, mode: Mode) -> str:
        """Why a mode is not exact, or an empty text; `found` is then the largest difference."""
        if mode == "flex":
            return self.why_not("blocks") or self.in_dtype(lambda: self.try_mode(mode))
        return self.try_mode(mode)

    def in_dtype(self, check: Callable[[], str]) -> str:
        """A check in the type of the run, with the limit of that type."""
        before, precise = (self.alone, self.limit), self.model
        try:
            self.model = copy.deepcopy(precise).to(self.dtype)
            self.measure()
            return check()
        except MODEL_ERRORS as error:
            let_pass(error)
            return describe(error)
        finally:
            self.model, (self.alone, self.limit) = precise, before

    @torch.no_grad()
    def try_mode(self, mode: Mode) -> str:
        try:
            with quiet():
                model = copy.deepcopy(self.model).train()
                turn_off_randomness(model)
                wanted = implementation(mode, type(model))
                model.set_attn_implementation(wanted)
            if model.config._attn_implementation != wanted and mode != "unpacked":
                return "its attention cannot be exchanged"
            self.found = self.unpacked_difference(model) if mode == "unpacked" else self.packed_difference(model, mode)
        except MODEL_ERRORS as error:
            let_pass(error)
            return describe(error)
        if not self.found <= self.limit:
            return f"{self.found:.2g} nats off, where rounding makes {self.limit:.1e}"
        return ""

    def unpacked_difference(self, model: PreTrainedModel) -> float:
        """In the other order, so that state that stays from call to call shows."""
        tree = TreeMask(self.far, self.far)  # not used
        pairs = zip(reversed(self.alone[: len(self.samples)]), reversed(self.samples), strict=True)
        return largest(alone.distance(call(model, "unpacked", ids, ids, tree)[0]) for alone, ids in pairs)

    def packed_difference(self, model: PreTrainedModel, mode: Mode) -> float:
        """Both samples as a tree, and a third at the far end, of which nothing may depend on the first ones."""
        if len(self.alone) == len(self.samples):
            raise RunError("it takes no positions")
        if getattr(model.config.get_text_config(), SPARSE, None):
            raise RunError("its attention picks among all tokens of a row")
        a, b = self.samples
        length = PREFIX + sum(BRANCHES)
        ids = torch.cat([a, b[PREFIX:], self.far])
        first, second = torch.arange(len(a), device=self.device), torch.arange(PREFIX, len(b), device=self.device)
        positions = torch.cat([first, second, self.far_positions])
        ends = torch.full_like(ids, len(ids))
        ends[:length] = length
        ends[PREFIX : len(a)] = len(a)
        total = len(ids)
        if mode == "flex":  # as training pads its rows: the kernel of shorter ones is another
            ids, positions, ends = padded(ids, positions, ends, whole_blocks(total))
        found = call(model, mode, ids, positions, TreeMask(ends, positions))[0, :total]
        parts = [found[: len(a)], torch.cat([found[:PREFIX], found[len(a) : length]]), found[length:]]
        return largest(alone.distance(logits) for alone, logits in zip(self.alone, parts, strict=True))


def largest(values: Iterable[float]) -> float:
    """nan if there is one among them."""
    return float(torch.tensor(list(values)).max())
