"""Finds the mode (modes.py) that is exact for a model: at each start, on the policy itself, before
any sampling or training.

The policy scores two samples that branch off one prefix, each alone and called as plain Hugging
Face is, in evaluation mode. Then it scores them as training has them, in one packed row. The
first mode whose difference is within rounding is used; a model without such a mode is refused.
What both ways share (weights, rotary embeddings, adapters) is compared with inference on the first
batch, before its optimizer step: see `ParityWatch`. Gradients are not tested.

The test runs in float32, where rounding hides little. FlexAttention and compiled layers have
kernels for each type, so they are tested in the run's type too. Windows that exceed the samples
are narrowed meanwhile.
"""

import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch, fill_blocks
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.head import score
from rl.trainer.model.modes import (
    Mode,
    call,
    is_compiled,
    possible_modes,
    set_attention,
    set_mode,
    turn_off_randomness,
)
from rl.trainer.parallel.sharding import compute_in, localise, reshard
from rl.trainer.parallel.world import World

PREFIX, BRANCHES = 12, (20, 17)
"""Tokens of the common prefix, and of each branch."""
NARROW = 8
"""Tokens of a window in this test: fewer than in a sample."""
WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "keep_window_size",
    "local_attention",
    "attention_chunk_size",
)
"""What configs and modules call the number of tokens that an attention sees."""
OWN_CHOICE = {
    "index_topk": "its attention selects among all tokens of a row",
    "window_size": "its attention has a window over the tokens of a row, made with the model",
}
"""Config key -> why no row may hold several samples, whatever a short one shows."""
MOST_LIKELY = 64
"""Number of tokens whose log-probabilities are compared at each position; the head computes all
tokens in the same way."""
ROUNDING = {torch.float32: 5e-4, torch.bfloat16: 2.5e-2}
"""Share of the spread by which rounding may change a log-probability: at most 0.01 and 0.5 nats."""
LEAST_SPREAD, MOST_SPREAD = 0.04, 20.0
"""Nats by which a token's log-probability changes along a sample. A model that says everywhere the
same gets a narrow limit: there, a wrong mask changes little."""
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
COSTS = {
    "eager": "memory and time of attention grow with the square of trainer.micro_batch_tokens",
    "unpacked": "one sample per pass, shared prefixes computed for each",
}


@dataclass(frozen=True)
class Alone:
    """What each of the two samples gets alone."""

    tokens: list[Tensor]  # [T, n] int64: the MOST_LIKELY tokens at each position
    logprobs: list[Tensor]  # [T, n] float32: their log-probabilities
    spread: float
    """Nats by which a token's log-probability changes along the first sample."""


def choose_mode(
    model: PreTrainedModel, settings: TrainerConfig, dtype: torch.dtype, world: World
) -> None:
    """Puts the fastest mode that is exact for the model into the policy, the same on every rank,
    and makes it compute in `dtype`. Rank 0 prints the mode in one line.

    Every rank calls this. Raises RunError on every rank if no mode is exact.
    """
    test, reasons = SelfTest(model, settings, dtype, world), list[str]()
    name, modes = test.name, possible_modes(settings, world)
    try:
        with narrow_windows(model):
            for mode in modes:
                if not (reason := test.why_not(mode)):
                    break
                reasons.append(f"{mode}: {reason}")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"{name}: too little memory to test how to train it "
            f"({str(error).partition(chr(10))[0]}); free memory that other processes use, or use a "
            "device with more"
        ) from error
    rejected = "; ".join(reasons)
    if len(reasons) == len(modes):
        remedy = "choose another model"
        if "unpacked" not in modes:
            remedy = (
                "set trainer.attention = auto and trainer.context_parallel = 1 to try other modes"
            )
        if is_compiled(settings, modes[-1]):
            remedy = f"set trainer.compile = false, or {remedy}"
        why = "no mode matches each sample computed alone"
        if len(test.errors) == len(modes):
            traceback.print_exception(test.errors[-1])
            why = "an error ended the test of each mode; the last one's traceback is above"
        raise RunError(f"{name} cannot be trained: {why} ({rejected}); {remedy}")
    compute_in(model, dtype)
    if "torch._dynamo" in sys.modules:
        # what the test has compiled must not count towards the limit of compilations
        torch._dynamo.reset()
    set_mode(model, settings, mode, is_compiled(settings, mode))
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # so that a server on the same GPU can use the memory
    if world.is_main:
        text = f"trainer.attention: {mode} for {name}"
        if mode in COSTS:
            text = f"WARNING: {text} ({COSTS[mode]})" + " as configured" * (not reasons)
        print(
            f"{text}{'; rejected ' if reasons else ''}{rejected}; differs by "
            f"{test.difference:.1e} nats from each sample computed alone, rounding allows "
            f"{test.limit:.1g}",
            file=sys.stderr if mode in COSTS else sys.stdout,
            flush=True,
        )
        if mode == "flex" and settings.compile is None:
            print(
                "trainer.compile: true, the default with flex; the first steps spend a minute or "
                "more compiling",
                flush=True,
            )


class SelfTest:
    """What the policy scores in each mode against what its samples get alone. Every rank calls
    every method."""

    def __init__(
        self, model: PreTrainedModel, settings: TrainerConfig, dtype: torch.dtype, world: World
    ) -> None:
        self.model, self.settings, self.dtype, self.world = model, settings, dtype, world
        self.name = type(model).__name__.removeprefix("FSDP")
        self.difference = self.limit = 0.0
        self.alone: dict[torch.dtype, Alone] = {}
        self.errors: list[Exception] = []
        """On this rank, of modes that are not known to be impossible."""
        ids = torch.randint(
            model.config.get_text_config().vocab_size,
            (PREFIX + sum(BRANCHES),),
            generator=torch.Generator().manual_seed(0),
        )
        prefix, *branches = ids.split([PREFIX, *BRANCHES])
        self.ids = [torch.cat([prefix, branch]) for branch in branches]

    def why_not(self, mode: Mode) -> str:
        """Returns why a mode is not exact; empty if it is, and then `difference` is the largest
        one and `limit` what rounding allows."""
        plain: Mode = "blocks" if mode == "flex" else mode  # shows that the masks are right
        compiles = is_compiled(self.settings, mode)
        reason = self.try_mode(plain, torch.float32, False)
        if reason or not (compiles or mode == "flex"):
            return reason
        return self.try_mode(mode, self.dtype, compiles)

    def try_mode(self, mode: Mode, dtype: torch.dtype, compiles: bool) -> str:
        compute_in(self.model, dtype, is_test=True)
        if dtype not in self.alone:
            self.alone[dtype] = self.compute_alone(dtype)
        alone, difference, reason = self.alone[dtype], math.inf, ""
        try:
            set_mode(self.model, self.settings, mode, compiles)
            difference = max(self.compare(row) for row in self.rows(alone, mode))
        except MODEL_ERRORS as error:
            let_pass(error)
            reason = describe(error)
            if not isinstance(error, RunError):
                self.errors.append(error)
        largest = torch.tensor(difference, dtype=torch.float64)
        self.difference = float(self.world.reduce(largest, dist.ReduceOp.MAX))
        spread = torch.tensor(alone.spread, dtype=torch.float64)
        self.limit = ROUNDING[dtype] * float(self.world.reduce(spread, dist.ReduceOp.MAX))
        reason = self.world.broadcast_bytes(reason.encode()).decode()
        if self.difference <= self.limit:
            return ""
        return reason or f"{self.difference:.2g} nats off, rounding allows {self.limit:.1g}"

    @torch.no_grad()
    def compute_alone(self, dtype: torch.dtype) -> Alone:
        """Computes each sample alone. Raises RunError for a model that is not causal or not
        complete."""
        try:
            set_mode(self.model, self.settings, "unpacked", False)
            set_attention(self.model, "eager")  # others ignore caps
            self.model.eval()
            scores = [self.logits(ids).log_softmax(-1) for ids in self.ids]
        except MODEL_ERRORS as error:
            let_pass(error)
            raise RunError(
                f"{self.name} cannot be computed alone ({describe(error)}); choose another model"
            ) from None
        turn_off_randomness(self.model)
        tops = [each.topk(min(MOST_LIKELY, each.shape[-1])) for each in scores]
        if not all(bool(top.values.isfinite().all()) for top in tops):
            raise RunError(
                f"{self.name}: its log-probabilities are not finite; are its weights complete?"
            )
        indices, values = (x[:PREFIX] for x in (tops[0].indices, tops[0].values))
        # a token that a model never says is at minus infinity everywhere
        changes = float((scores[0].amax(0) - scores[0].amin(0)).nan_to_num(posinf=0.0).max())
        spread = min(max(changes, LEAST_SPREAD), MOST_SPREAD)
        off = float((scores[1][:PREFIX].gather(-1, indices) - values).abs().max())
        if off > ROUNDING[dtype] * spread:
            raise RunError(
                f"{self.name}: a token's log-probability depends on what follows it; choose a "
                "causal language model"
            )
        return Alone(
            [top.indices.cpu() for top in tops], [top.values.cpu() for top in tops], spread
        )

    def logits(self, ids: Tensor) -> Tensor:
        """[T] ids -> [T, V] float32, as plain Hugging Face computes them."""
        ids = ids.to(self.world.device)
        tree = TreeMask(ids, ids)  # not looked at
        if routers := self.model.get_output_embeddings().forward.routers:
            routers.choose_freely(ids)
        result = call(self.model, "unpacked", ids, ids, tree)[0].float()
        reshard(self.model)
        return result

    @torch.no_grad()
    def compare(self, row: MicroBatch) -> float:
        """Returns the largest difference on this rank between what training scores and the row's
        log-probabilities; inf instead of nan."""
        part = localise(row, self.world).to(self.world.device)
        off = (score(self.model, part, self.world).trainer_logprobs - part.logprobs).abs()
        return float(off.nan_to_num(nan=math.inf).max()) if len(off) else 0.0

    def rows(self, alone: Alone, mode: Mode) -> list[MicroBatch]:
        """Returns the samples as training has them: as a tree, in every other group of ranks in
        the other order, so that what one gets from another by mistake differs. Unpacked, each
        alone in reverse order, to reveal state that a model carries from call to call."""
        samples = list(zip(self.ids, alone.tokens, alone.logprobs, strict=True))
        if mode == "unpacked":
            return [
                row_of(ids, torch.arange(len(ids)), torch.full_like(ids, len(ids)), *expected)
                for ids, *expected in reversed(samples)
            ]
        text = self.model.config.get_text_config()
        for key, reason in OWN_CHOICE.items():
            if getattr(text, key, None):
                raise RunError(reason)
        first, second = samples[:: -1 if self.world.data_rank % 2 else 1]
        ids, tokens, logprobs = (
            torch.cat([whole, branch[PREFIX:]]) for whole, branch in zip(first, second, strict=True)
        )
        start = len(first[0])
        subtree_ends = torch.full_like(ids, len(ids))
        subtree_ends[PREFIX:start] = start
        positions = torch.cat([torch.arange(start), torch.arange(PREFIX, len(second[0]))])
        row = row_of(ids, positions, subtree_ends, tokens, logprobs)
        return [fill_blocks(row, self.world.context_size) if mode == "flex" else row]


def row_of(
    ids: Tensor, positions: Tensor, subtree_ends: Tensor, tokens: Tensor, logprobs: Tensor
) -> MicroBatch:
    """Returns a row of T tokens in which every position predicts `tokens` [T, n], with the
    log-probabilities that they should get."""
    indices, wanted = torch.arange(len(ids)), logprobs.flatten()
    zeros, numbers = torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.int64)
    return MicroBatch(
        ids,
        positions,
        subtree_ends,
        None,
        indices,
        torch.ones(len(ids)),
        indices.repeat_interleave(tokens.shape[1]),
        tokens.flatten(),
        wanted,
        *(zeros, zeros, numbers, numbers, numbers),
        teacher_logprobs=None,
        lag_zero=zeros.bool(),
    )


@contextmanager
def narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Context in which windows have NARROW tokens, in the modules and in their configs."""
    holders = {
        id(holder): vars(holder)
        for module in model.modules()
        for config in [getattr(module, "config", module)]
        for holder in (module, config, getattr(config, "text_config", config))
    }
    before = [
        (fields, key, fields[key])
        for fields in holders.values()
        for key in WINDOWS
        if isinstance(fields.get(key), int) and fields[key] > NARROW
    ]
    for fields, key, _ in before:
        fields[key] = NARROW
    try:
        yield
    finally:
        for fields, key, size in before:
            fields[key] = size


def describe(error: Exception) -> str:
    """Returns the error in a few words. Leaves out the remedy of a RunError, since the remedy is
    already being applied."""
    text = " ".join(str(error).split())
    if isinstance(error, RunError):
        return text.partition("set trainer.")[0].rstrip(" :;")
    return f"{type(error).__name__}: {text[:120]}"


def let_pass(error: Exception) -> None:
    """Raises the error again if it is not the model's fault, but that of memory, another rank or
    a GPU. It then ends this process, and the launcher the others."""
    if is_out_of_memory(error) or isinstance(error, dist.DistError | torch.AcceleratorError):
        raise error
