"""Computes log-probability and entropy of a micro batch's loss tokens in the model's head. Memory
holds no float32 copy of all logits, and no gradient beside them.

Logits have the type that the model computes in, as in the inference engine; the softmax is
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
CHUNK_ELEMENTS = 1 << 20
"""The most logits that a CPU processes in float32 at once: its caches hold a few such buffers."""
SLICE_BYTES = 1 << 28
"""Bytes of logits that are computed at once, in the model's type."""
KEPT_SHARE = 1 / 16
"""Share of this process's GPU memory that logits may take until the backward pass; on a CPU one
slice is kept. If all logits are more, each slice is computed again there."""
FUSED_ON = ("cuda",)
"""Devices on which the work on logits is compiled instead, into one or two passes that keep no
copies."""


def row_sums(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Returns [P, 3] in float32 or better, for each row of x = logits / temperature: the largest
    x, the sum of exp(x - largest), and the entropy of softmax(x) in nats.

    Args:
        logits: [P, V].
        temperatures: [P].
    """
    scaled = logits / temperatures[:, None]
    largest = scaled.amax(-1)
    scaled = scaled.sub_(largest[:, None]).clamp_(min=LOWEST)
    exponentials = scaled.exp()
    totals = exponentials.sum(-1)
    entropies = totals.log() - exponentials.mul_(scaled).sum(-1) / totals
    return torch.stack([largest, totals, entropies], dim=-1)


def differentiate(
    logits: Tensor,
    temperatures: Tensor,
    sums: Tensor,
    grads: Tensor,
    entropy_gradient: bool,
) -> None:
    """Replaces the logits [P, V] by their gradient, but for what targets add to their own:
    -p (g + h (log p + entropy)) / temperature, with p = softmax(logits / temperature).

    Args:
        sums: [P, 3] of `row_sums`.
        grads: [P, 2]: g, the gradients of a row's log-probabilities, summed, and h, that of its
            entropy.
    """
    largest, totals, entropies = sums.unbind(-1)
    scaled = (logits / temperatures[:, None]).sub_(largest[:, None])
    scales = -(grads / (totals * temperatures)[:, None])
    scale = scales[:, :1]
    if entropy_gradient:
        known = scaled.clamp(min=LOWEST) + (entropies - totals.log())[:, None]
        scale = scale + scales[:, 1:] * known
    logits.copy_(scaled.exp_().mul_(scale))


def in_parts(function: Callable[..., Any], *tensors: Tensor, **settings: bool) -> list[Any]:
    """Applies a function to tensors of P rows: compiled, or some rows at a time."""
    if tensors[0].device.type in FUSED_ON:
        return [fused(function)(*tensors, **settings)]
    size = max(1, CHUNK_ELEMENTS // tensors[0].shape[1])
    pieces = zip(*(tensor.split(size) for tensor in tensors), strict=True)
    return [function(*part, **settings) for part in pieces]


class HeadScores(torch.autograd.Function):
    """`head_logprobs`, or without a weight `token_logprobs`. Logits are computed in slices; in
    the backward pass their gradient takes their place."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        temperatures: Tensor,
        rows: Tensor,
        targets: Tensor,
        entropy_gradient: bool,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.size, width = max(1, len(inputs)), inputs.shape[1]
        limit = 0.0
        if weight is not None:
            width = len(weight)
            ctx.size = max(1, SLICE_BYTES // (width * inputs.element_size()))
            limit = SLICE_BYTES
            if inputs.is_cuda:
                memory = torch.cuda.get_device_properties(inputs.device).total_memory
                share = torch.cuda.get_per_process_memory_fraction(inputs.device)
                limit = KEPT_SHARE * share * memory
        keeps &= len(inputs) * width * inputs.element_size() <= limit
        sums, ctx.kept = list[Tensor](), {}
        precise = torch.promote_types(inputs.dtype, temperatures.dtype)
        chosen = temperatures.new_zeros(len(rows), dtype=precise)
        for start in range(0, len(inputs), ctx.size):
            end = min(start + ctx.size, len(inputs))
            logits = logits_of(inputs[start:end], weight, bias)
            sums += in_parts(row_sums, logits[: end - start], temperatures[start:end])
            inside, places = places_in(rows, start, end)
            chosen = torch.where(inside, logits[places, targets].to(chosen.dtype), chosen)
            if keeps:
                ctx.kept[start] = logits
        of_rows = torch.cat(sums) if sums else temperatures.new_zeros(0, 3)
        largest, totals, entropies = of_rows.unbind(-1)
        logprobs = chosen / temperatures[rows] - largest[rows] - totals[rows].log()
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        tensors = (temperatures, rows, targets, of_rows, logprobs)
        ctx.save_for_backward(inputs, weight, bias, *tensors)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, temperatures, rows, targets, sums, logprobs = ctx.saved_tensors
        of_rows = torch.zeros_like(temperatures).index_add(0, rows, grad)
        grads = torch.stack([of_rows, entropy_grad], dim=-1)
        # The logits of targets get their whole gradient at once: rounded in between, the
        # difference of two nearly equal numbers would be lost.
        known = logprobs.clamp(min=LOWEST) + sums[rows, 2]
        both = of_rows[rows] + entropy_grad[rows] * known
        whole = sum_of_equals(grad, rows, targets) - logprobs.exp() * both
        whole /= temperatures[rows]
        grad_inputs, grad_weight, grad_bias = (
            torch.zeros_like(x) if needed else None
            for x, needed in zip((inputs, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for start in range(0, len(inputs), ctx.size):
            end = min(start + ctx.size, len(inputs))
            logits = ctx.kept.pop(start, None)
            if logits is None:
                logits = logits_of(inputs[start:end], weight, bias)
            if weight is None:  # it may be in use elsewhere
                logits = logits.clone()
            _, places = places_in(rows, start, end)
            slopes = logits[: end - start]
            of_part = (x[start:end] for x in (temperatures, sums, grads))
            in_parts(differentiate, slopes, *of_part, entropy_gradient=ctx.entropy_gradient)
            logits[places, targets] = whole.to(logits.dtype)
            if weight is None:
                grad_inputs = slopes
                continue
            if grad_inputs is not None:
                torch.mm(slopes, weight, out=grad_inputs[start:end])
            if grad_weight is not None:
                grad_weight.addmm_(slopes.T, inputs[start:end])
            if grad_bias is not None:
                grad_bias += slopes.sum(0)
        return grad_inputs, grad_weight, grad_bias, *[None] * 5


def logits_of(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """[n, H] -> [n + 1, V], whose last row holds nothing: see `places_in`. Without a weight,
    `inputs` are the logits."""
    if weight is None:
        return inputs
    logits = inputs.new_empty(len(inputs) + 1, len(weight))
    if bias is None:
        torch.mm(inputs, weight.T, out=logits[:-1])
    else:
        torch.addmm(bias, inputs, weight.T, out=logits[:-1])
    return logits


def places_in(rows: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Returns which of the rows are in the slice start..end, and the place of each in it. Those
    of other slices get the place behind its end: to select its own, a GPU would have to be waited
    for."""
    inside = (rows >= start) & (rows < end)
    return inside, torch.where(inside, rows - start, end - start)


def sum_of_equals(values: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """Returns at each place of `values` [N] the sum over all places with the same row and the
    same target."""
    keys, order = (rows * (targets.max() + 1) + targets).sort() if len(rows) else (rows, rows)
    group = torch.zeros_like(keys)
    group[1:] = (keys[1:] != keys[:-1]).cumsum(0)
    sums = torch.zeros_like(values).index_add(0, group, values[order])
    return torch.empty_like(values).scatter(0, order, sums[group])


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
    assert temperatures.shape == logits.shape[:1] and rows.shape == targets.shape
    tokens = (temperatures, rows, targets, entropy_gradient, False)
    return HeadScores.apply(logits, None, None, *tokens)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    rows: Tensor,
    targets: Tensor,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `token_logprobs` of the logits hidden @ weight^T + bias, about SLICE_BYTES of which
    are computed at a time.

    Args:
        hidden: [P, H].
        weight: [V, H], of the same type.
        bias: [V] or None.

    Returns: as `token_logprobs`, with gradient to `hidden`, `weight` and `bias`.
    """
    tokens = (temperatures, rows, targets, entropy_gradient, torch.is_grad_enabled())
    return HeadScores.apply(hidden, weight, bias, *tokens)


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
