"""Finds the mode (trainer/model/modes.py) that is exact for a model: at each start, on its own
weights, before any sampling or training.

What is tested is what trains: all ranks make the policy as for training, sharded, with its head,
rotary embeddings, windows and compiled layers, and score a row with it; of a large model only the
first layers. The row has the samples of trainer/model/alone.py, which says what they must get: two
as a tree, then the third. The first mode whose difference is within rounding is used; a model
without such a mode is refused. Gradients are not tested, nor adapters, which add nothing before
they are trained: see `ParityWatch`.

The test runs in float32, where rounding hides little. FlexAttention and compiled layers have
kernels for each type, so they are tested in the run's type too.
"""

import copy
import gc
import hashlib
import importlib.metadata
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import cache_root, weights_digest
from rl.run_dir.files import write_file
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch, fill_blocks
from rl.trainer.measure.performance import is_out_of_memory
from rl.trainer.model.alone import (
    FAR,
    MODEL_ERRORS,
    PREFIX,
    SPARSE,
    Alone,
    Samples,
    compute_alone,
    describe,
    let_pass,
    part_of,
    quiet,
)
from rl.trainer.model.compiled import CompilerError
from rl.trainer.model.head import Scores
from rl.trainer.model.modes import Mode, is_compiled, possible_modes
from rl.trainer.parallel.sharding import localise
from rl.trainer.parallel.world import World

ROOM = "free memory that other processes use, or use a device with more"


@dataclass(frozen=True)
class Candidate:
    """A policy that is to be made, with the functions of trainer/model/policy.py that make and
    score it."""

    folder: str
    config: ModelConfig
    settings: TrainerConfig
    world: World
    frozen: bool
    assemble: Callable[..., PreTrainedModel]
    score: Callable[[PreTrainedModel, MicroBatch, World], Scores]


class ModeChoice(msgspec.Struct):
    """The result of the test, which rank 0 sends to the others and writes to the cache."""

    mode: Mode = "blocks"
    implementation: str = ""
    """transformers' name of the attention."""
    note: str = ""
    """One line for the user."""
    fault: str = ""
    """The reason why no mode is exact; empty if there is one."""
    is_lasting: bool = True
    """Whether the next start would find the same: not if a compiler has failed, whose machine
    may be at fault. Then it is not cached."""


def choose_mode(candidate: Candidate) -> ModeChoice:
    """Returns the fastest mode that is exact for the model, the same on every rank. Rank 0 prints
    it in one line.

    Every rank calls this. Raises RunError on every rank if no mode is exact.
    """
    world, key, found = candidate.world, Path(), b""
    modes = possible_modes(candidate.settings, world)
    if world.is_main:
        key = cache_root().parent / "attention" / f"{digest(candidate, modes)}.json"
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.encode(msgspec.json.decode(key.read_bytes(), type=ModeChoice))
    if found := world.broadcast_bytes(found):
        choice = msgspec.json.decode(found, type=ModeChoice)
    else:
        choice = examine(candidate, modes)
        if world.is_main and choice.is_lasting and not choice.fault:
            with suppress(OSError):  # it is only a cache
                key.parent.mkdir(parents=True, exist_ok=True)
                write_file(key, msgspec.json.encode(choice))
    if choice.fault:
        raise RunError(choice.fault)
    if world.is_main:
        print(
            choice.note,
            file=sys.stderr if choice.note.startswith("WARNING") else sys.stdout,
            flush=True,
        )
    return choice


def digest(candidate: Candidate, modes: list[Mode]) -> str:
    """Returns a hash of everything the result depends on: the model's code, shape and some of
    its weights, versions, settings, ranks and their devices."""
    found, config, settings, world = (
        hashlib.blake2b(digest_size=16),
        candidate.config,
        candidate.settings,
        candidate.world,
    )
    versions = [
        importlib.metadata.version(name)
        for name in ("torch", "transformers", *(["peft"] if settings.lora else []))
    ]
    here = Path(__file__).parent
    own = [file.read_bytes() for file in sorted(here.parent.rglob("*.py"))]
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    ranks = [
        device,
        world.size,
        tuple(world.mesh.shape),
        world.context_size,
        world.experts and tuple(world.experts.shape),
    ]
    put_in = [
        settings.compile,
        settings.activation_checkpointing,
        settings.lora,
        settings.router_replay,
        candidate.frozen,
    ]
    found.update(
        repr([versions, own, modes, ranks, put_in, config.dtype, config.max_model_len]).encode()
    )
    for path in sorted(Path(candidate.folder).iterdir()):
        if path.name == "config.json" or path.suffix == ".py":
            found.update(path.read_bytes())
    found.update(weights_digest(Path(candidate.folder)).encode())
    return found.hexdigest()


def examine(candidate: Candidate, modes: list[Mode]) -> ModeChoice:
    """Tries the modes in order. Raises RunError if memory runs out, which says nothing about a
    mode; if that is on one rank alone, the launcher ends the others."""
    devices = [candidate.world.device] if candidate.world.device.type == "cuda" else []
    try:
        # adapters draw numbers; the run's must not depend on whether the result was cached
        with torch.random.fork_rng(devices):
            return try_modes(candidate, modes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said, what = str(error).partition("\n")[0], "some layers and the embeddings in float32"
        raise RunError(
            f"model.name = {candidate.config.name}: too little memory to test how to train "
            f"it, which takes {what} ({said}); {ROOM}"
        ) from error
    finally:
        gc.collect()
        if "torch._dynamo" in sys.modules:
            # what the test has compiled must not count towards the limit of compilations
            torch._dynamo.reset()
        if devices:
            torch.cuda.empty_cache()  # so that a server on the same GPU can use the memory


def try_modes(candidate: Candidate, modes: list[Mode]) -> ModeChoice:
    config, reasons = candidate.config, list[str]()
    try:
        test = Test(candidate)
        alone = test.alone("float32")
    except MODEL_ERRORS as error:
        if isinstance(error, RunError):
            return ModeChoice(fault=str(error))
        let_pass(error)
        return ModeChoice(
            fault=f"model.name = {config.name}: cannot be computed alone ({describe(error)}); "
            "choose another model"
        )
    for mode in modes:
        if not (reason := test.why_not(mode)):
            note = note_of(mode, alone.name, reasons, test.found, test.limit)
            return ModeChoice(
                mode, alone.implementations[mode], note, is_lasting=not test.compiler_failed
            )
        reasons.append(f"{mode}: {reason}")
    remedy = "choose another model"
    if "unpacked" not in modes:
        remedy = "set trainer.attention = auto and trainer.context_parallel = 1 to try other modes"
    if is_compiled(candidate.settings, modes[-1]):
        remedy = f"set trainer.compile = false, or {remedy}"
    return ModeChoice(
        fault=f"{alone.name} cannot be trained: no mode matches each sample computed alone "
        f"({'; '.join(reasons)}); {remedy}"
    )


def note_of(mode: Mode, name: str, reasons: list[str], found: float, limit: float) -> str:
    exact = (
        f"differs by {found:.1e} nats from each sample computed alone, rounding allows {limit:.1e}"
    )
    costs = {
        "eager": "memory and time of attention grow with the square of trainer.micro_batch_tokens",
        "unpacked": "one sample per pass, shared prefixes computed for each",
    }
    if mode not in costs:
        return (
            f"trainer.attention: {mode} for {name}; "
            f"{exact}{'; rejected ' if reasons else ''}{'; '.join(reasons)}"
        )
    because = f"after rejecting {'; '.join(reasons)}" if reasons else "as configured"
    return f"WARNING: trainer.attention: {mode} for {name} ({costs[mode]}) {because}; {exact}"


class Test:
    """What a policy scores in each mode against what its samples get alone. Every rank calls
    every method."""

    __test__ = False

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, self.config, self.world = candidate, candidate.config, candidate.world
        self.shape = part_of(candidate.folder, self.config, self.world)
        self.samples = Samples(self.shape, self.config.max_model_len)
        self.found = self.limit = 0.0
        self.compiler_failed = False
        """Whether any rank's compiler has failed in any mode."""
        self.computed: dict[str, Alone] = {}

    def alone(self, dtype: str) -> Alone:
        """Returns what each sample gets alone in a dtype. Raises RunError if that cannot be
        computed."""
        if dtype not in self.computed:
            where = self.candidate.folder, self.shape, self.config, dtype, self.world.device
            found = msgspec.msgpack.encode(compute_alone(*where)) if self.world.is_main else b""
            self.computed[dtype] = msgspec.msgpack.decode(
                self.world.broadcast_bytes(found), type=Alone
            )
        if self.computed[dtype].fault:
            raise RunError(self.computed[dtype].fault)
        return self.computed[dtype]

    def why_not(self, mode: Mode) -> str:
        """Returns why a mode is not exact; empty if it is, and then `found` is the largest
        difference and `limit` what rounding allows."""
        plain: Mode = "blocks" if mode == "flex" else mode  # shows that the masks are right
        has_kernels = mode == "flex" or is_compiled(self.candidate.settings, mode)
        if (
            (reason := self.try_mode(plain, "float32"))
            or not has_kernels
            or (mode, "float32") == (plain, self.config.dtype)
        ):
            return reason
        return self.try_mode(mode, self.config.dtype)

    def try_mode(self, mode: Mode, dtype: str) -> str:
        alone, found, failed, reason = self.alone(dtype), math.inf, False, ""
        if mode not in alone.implementations:
            return "its attention cannot be replaced"
        try:
            rows, of = self.rows(alone, mode), self.candidate
            part = of.config.model_copy(update={"dtype": dtype}), of.settings, self.world, of.frozen
            if self.limit:
                gc.collect()  # the policy that was tried before; FSDP makes cycles of references
            with quiet():
                model = of.assemble(
                    of.folder, *part, mode, alone.implementations[mode], copy.deepcopy(self.shape)
                )
            found = max(self.difference(model, row) for row in rows)
        except MODEL_ERRORS as error:
            let_pass(error)
            failed, reason = isinstance(error, CompilerError), describe(error)
        self.found, failed = self.world.reduce(
            torch.tensor([found, failed], dtype=torch.float64), dist.ReduceOp.MAX
        ).tolist()
        self.compiler_failed |= bool(failed)
        self.limit, reason = alone.limit, self.world.broadcast_bytes(reason.encode()).decode()
        return (
            ""
            if self.found <= self.limit
            else reason or f"{self.found:.2g} nats off, rounding allows {self.limit:.1e}"
        )

    def difference(self, model: PreTrainedModel, row: MicroBatch) -> float:
        """Returns the largest difference on this rank between what training scores and the row's
        log-probabilities; inf instead of nan."""
        part = localise(row, self.world).to(self.world.device)
        found = (
            self.candidate.score(model, part, self.world).logprobs.detach() - part.logprobs
        ).abs()
        return float(torch.nan_to_num(found, nan=math.inf).max()) if len(found) else 0.0

    def rows(self, alone: Alone, mode: Mode) -> list[MicroBatch]:
        """Returns the samples as training has them: two as a tree, and after it the third, which
        must not depend on them. Every other group of ranks has the two in the other order, so that
        what one gets from another one by mistake differs.

        Unpacked, the two alone in reverse order, to reveal state that a model carries from call to
        call.
        """
        ids, positions = self.samples.ids, self.samples.positions
        if mode == "unpacked":
            return [
                row_of(
                    ids[n],
                    positions[n],
                    torch.full_like(ids[n], len(ids[n])),
                    alone.tokens[n],
                    alone.logprobs[n],
                )
                for n in (1, 0)
            ]
        if len(alone.tokens) < len(ids):
            raise RunError("it takes no position ids")
        if getattr(self.shape.get_text_config(), SPARSE, None):
            raise RunError("its attention selects among all tokens of a row")
        order = (1, 0, 2) if self.world.data_rank % 2 else (0, 1, 2)
        ids, positions, tokens, logprobs = (
            [values[n] for n in order] for values in (ids, positions, alone.tokens, alone.logprobs)
        )
        first, tree = len(ids[0]), sum(map(len, ids[:2])) - PREFIX
        subtree_ends = torch.full((tree + FAR,), tree + FAR)
        subtree_ends[:tree] = tree
        subtree_ends[PREFIX:first] = first
        whole = (
            torch.cat([values[0], values[1][PREFIX:], values[2]]) for values in (ids, positions)
        )
        expected = ([*values[0], *values[1][PREFIX:], *values[2]] for values in (tokens, logprobs))
        row = row_of(*whole, subtree_ends, *expected)
        return [fill_blocks(row, self.world.context_size) if mode == "flex" else row]


def row_of(
    ids: Tensor,
    positions: Tensor,
    subtree_ends: Tensor,
    tokens: list[list[int]],
    logprobs: list[list[float]],
) -> MicroBatch:
    """Returns a row of T tokens in which every position predicts `tokens` [T, n], with the
    log-probabilities that they should get."""
    places, targets, wanted = (
        torch.arange(len(ids)),
        torch.tensor(tokens),
        torch.tensor(logprobs).flatten(),
    )
    predicted = (
        places,
        torch.ones(len(ids)),
        places.repeat_interleave(targets.shape[1]),
        targets.flatten(),
        wanted,
    )
    zeros, numbers = torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.int64)
    return MicroBatch(
        ids,
        positions,
        subtree_ends,
        None,
        *predicted,
        zeros,
        zeros,
        numbers,
        numbers,
        numbers,
        None,
        zeros.bool(),
    )
