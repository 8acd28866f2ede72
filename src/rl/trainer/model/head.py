"""Computes log-probability and entropy of a micro batch's loss tokens in the model's head, a few
rows at a time: memory holds only some of the logits, and of their float32 copies, at once.

Chunks are recomputed in the backward pass (torch's `checkpoint`). Logits have the type that the
model computes in, as in the inference engine; the softmax is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.flex import compiled
from rl.trainer.model.modes import Mode, call
from rl.trainer.model.routes import Routers
from rl.trainer.parallel.sharding import RowGather, reshard
from rl.trainer.parallel.world import World

LOWEST = -200.0
"""Lower bound of log p in the product p log p: below -104 p is 0 in float32, and 0 * -inf would
be nan."""
CHUNK_ELEMENTS = 1 << 22
"""The most logits that are processed in float32 at once; a few such buffers exist at a time."""
SLICE_BYTES = 1 << 28
"""Bytes of logits that exist at once, in the model's type. If all logits fit they are computed
once, else again in the backward pass."""
FUSED_ON = ("cuda",)
"""Devices on which the work on logits is compiled instead, into one or two passes that keep no
copies."""
SELECTS_ON = ("cpu",)
"""Devices on which sizes that depend on values are known without waiting."""

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows, their temperatures, row index of each target, targets) -> (log-probabilities of the
targets, entropies of the rows)."""


def score_rows(
    entropy_gradient: bool, logits: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `token_logprobs` of all rows at once, by
    log p = log_softmax(logits / temperature)[target]."""
    logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    known = logprobs if entropy_gradient else logprobs.detach()
    return logprobs[rows, targets], -(known.exp() * known.clamp(min=LOWEST)).sum(-1)


def token_logprobs(
    logits: Tensor,
    temperatures: Tensor,
    rows: Tensor,
    targets: Tensor,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns log softmax(logits[rows] / temperatures[rows])[targets] in nats, and the entropy of
    every row.

    Several targets may share a row (samples that continue the same tokens differently).

    Args:
        logits: [P, V], any float type; the result has float32 accuracy given these values.
        temperatures: [P] float32, > 0.
        rows: [N] int64, each in 0..P-1.
        targets: [N] int64 token ids.
        entropy_gradient: whether the entropies have a gradient too.

    Returns: log-probabilities [N] float32 with gradient to `logits`; entropies [P] float32 in nats.
    """
    assert (
        logits.ndim == 2 and temperatures.shape == logits.shape[:1] and rows.shape == targets.shape
    )
    if logits.device.type in FUSED_ON:
        return fused(score_rows)(entropy_gradient, logits, temperatures, rows, targets)
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return in_chunks(
        partial(score_rows, entropy_gradient), logits, size, temperatures, rows, targets
    )


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    rows: Tensor,
    targets: Tensor,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `token_logprobs` of the logits hidden @ weight^T + bias, at most SLICE_BYTES of which
    exist at a time.

    Args:
        hidden: [P, H].
        weight: [V, H], of the same type.
        bias: [V] or None.

    Returns: as `token_logprobs`, with gradient to `hidden`, `weight` and `bias`.
    """

    def score(
        hidden: Tensor, temperatures: Tensor, rows: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            linear(hidden, weight, bias), temperatures, rows, targets, entropy_gradient
        )

    size = max(1, SLICE_BYTES // (len(weight) * hidden.element_size()))
    if len(hidden) <= size:
        return score(hidden, temperatures, rows, targets)
    return in_chunks(score, hidden, size, temperatures, rows, targets)


def in_chunks(
    score: ScoreFunction,
    inputs: Tensor,
    size: int,
    temperatures: Tensor,
    rows: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Applies `score` to all rows of `inputs`, `size` at a time; chunks keep nothing but their
    inputs for the backward pass."""
    chosen, entropies = temperatures.new_zeros(len(rows)), list[Tensor]()
    for number, (part, own_temperatures) in enumerate(
        zip(inputs.split(size), temperatures.split(size), strict=True)
    ):
        # On a GPU each chunk looks up all targets and drops those of other chunks, because
        # selecting its own would mean waiting for the device. Those of others are looked up in
        # rows that differ: gradients of equal places are added one by one.
        places, is_own = rows - number * size, rows // size == number
        selects = inputs.device.type in SELECTS_ON
        selected = is_own if selects else slice(None)
        arguments = (part, own_temperatures, (places % len(part))[selected], targets[selected])
        logprobs, of_rows = checkpoint(
            score, *arguments, use_reentrant=False, preserve_rng_state=False
        )
        if selects:
            chosen = chosen.masked_scatter(is_own, logprobs)
        else:
            chosen = torch.where(is_own, logprobs, chosen)
        entropies.append(of_rows)
    return chosen, torch.cat(entropies)


def of_tokens(batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Returns log-probability and entropy of each loss token, [2, N], under the distribution that
    it was drawn from: that of its row, renormalised over the ids that truncation kept.

    Each set holds its own token, so all results are finite if the log-probabilities are.

    Args:
        logprobs: [N + M] of `batch.lookups`.
        entropies: [P] of the rows.
    """
    entropies = entropies[batch.predictor_of]
    if batch.kept is None:
        return torch.stack([logprobs, entropies])
    tokens = batch.kept[0]
    logprobs, kept = logprobs.split([len(entropies), len(tokens)])
    truncated = torch.zeros_like(entropies, dtype=torch.bool).index_fill(0, tokens, True)
    # as in logsumexp
    largest = logprobs.detach().scatter_reduce(0, tokens, kept.detach(), "amax")
    largest = torch.where(truncated, largest, 0.0)
    total = (~truncated).to(kept).index_add(0, tokens, (kept - largest[tokens]).exp())
    log_total = largest + total.log()  # 0 without a set
    known = kept - log_total[tokens]
    if not entropies.requires_grad:
        known = known.detach()
    of_sets = torch.zeros_like(entropies).index_add(
        0, tokens, -known.exp() * known.clamp(min=LOWEST)
    )
    return torch.stack([logprobs - log_total, torch.where(truncated, of_sets, entropies)])


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function, "please report this")


@dataclass(frozen=True)
class Scores:
    """Log-probability and entropy of a micro batch's N loss tokens."""

    trainer_logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that the token was drawn from


class ScoringHead:
    """The forward pass of the model's head: log-probabilities and entropies of a micro batch's loss
    tokens instead of logits.

    The model is still called as a whole: FSDP's hooks depend on that, and a tied head stays tied. A
    model's forward passes nothing but hidden states to its head, so `score` sets the micro batch in
    attributes that `__call__` reads. `mode` is how the whole model computes a row; `set_mode`
    (modes.py) sets it.
    """

    def __init__(self, head: nn.Module, routers: Routers | None = None) -> None:
        self.head, self.logits, self.routers = head, head.forward, routers
        self.mode: Mode = "unpacked"
        self.fused = type(head) is nn.Linear
        """False for other heads and for models that change the logits after the head: the logits
        of the predictors are then returned."""
        self.batch: MicroBatch | None = None
        """The micro batch to score; None if the head is to return all logits."""
        self.entropy_gradient = False
        self.scores: Tensor | None = None  # [2, N], the result of the fused head

    def __call__(self, hidden: Tensor) -> Tensor:
        """[1, T', H] -> scores [2, N], or logits [1, P, V]."""
        if self.batch is None:
            return self.logits(hidden)
        batch, predicting = self.batch, hidden[:, self.batch.predictors]
        if not self.fused:
            return self.logits(predicting)
        tokens = (batch.temperatures, *batch.lookups, self.entropy_gradient)
        self.scores = of_tokens(
            batch, *head_logprobs(predicting[0], self.head.weight, self.head.bias, *tokens)
        )
        return self.scores

    def score(
        self,
        model: PreTrainedModel,
        batch: MicroBatch,
        row: tuple[Tensor, Tensor, TreeMask],
        entropy_gradient: bool,
    ) -> Scores:
        """Scores a batch's loss tokens. `row`: ids [T'] and positions [T'] of the tokens to
        compute, and their mask."""
        self.batch, self.entropy_gradient = batch, entropy_gradient
        if self.routers:
            self.routers.set(batch)
        try:
            output = call(model, self.mode, *row)
            # the model scales or caps its logits, so it must not get scores instead
            if self.fused and output is not self.scores:
                # else both passes' activations would be in memory
                self.fused, self.scores, output = False, None, None
                output = call(model, self.mode, *row)
        finally:
            self.batch, scores, self.scores = None, self.scores, None
        if not self.fused:
            tokens = (batch.temperatures, *batch.lookups, entropy_gradient)
            scores = of_tokens(batch, *token_logprobs(output[0], *tokens))
        assert scores is not None
        return Scores(scores[0], scores[1] if entropy_gradient else scores[1].detach())


def mode_of(*models: PreTrainedModel) -> Mode:
    """Returns the mode in which the model computes a row; for several models that share rows,
    the mode that restricts rows the most."""
    return max(
        (model.get_output_embeddings().forward.mode for model in models), key=get_args(Mode).index
    )


def score(
    model: PreTrainedModel, batch: MicroBatch, world: World, entropy_gradient: bool = False
) -> Scores:
    """Scores the micro batch's loss tokens. `entropy_gradient`: whether the entropies have a
    gradient too.

    A row of an unpacked model must be one sample. Raises RunError if the model does not pass the
    prefix tree on to its attention.
    """
    head: ScoringHead = model.get_output_embeddings().forward
    assert head.mode != "unpacked" or batch.is_chain
    gather = RowGather(len(batch.input_ids), world) if world.context_size > 1 else None
    tree = TreeMask(batch.subtree_ends, batch.position_ids, batch.queries, gather)
    ids, positions = batch.input_ids, batch.position_ids
    if batch.queries is not None:
        ids, positions = ids[batch.queries], positions[batch.queries]
    scores = head.score(model, batch, (ids, positions, tree), entropy_gradient)
    if not torch.is_grad_enabled():
        reshard(model)
    return scores


def keep_old(model: PreTrainedModel, micro_batch: MicroBatch, scores: Scores) -> None:
    """Keeps what the policy that the batch began with has just computed: log-probabilities and,
    with router replay, routes."""
    routers = model.get_output_embeddings().forward.routers
    micro_batch.old_logprobs = scores.trainer_logprobs.detach()
    micro_batch.routes = routers.taken() if routers else None
