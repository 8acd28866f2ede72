"""Computes log-probability and entropy of a micro batch's loss tokens in the model's head, so that
logits of all tokens never exist."""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.logprobs import head_logprobs, token_logprobs
from rl.trainer.model.modes import Mode, call
from rl.trainer.model.routes import Routers
from rl.trainer.parallel.sharding import RowGather, reshard
from rl.trainer.parallel.world import World


@dataclass(frozen=True)
class Scores:
    """Log-probability and entropy of a micro batch's N loss tokens."""

    logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that predicts the token


class LossHead:
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
        tokens = (batch.temperatures, batch.predictor_of, batch.targets)
        logprobs, entropies = head_logprobs(
            predicting[0], self.head.weight, self.head.bias, *tokens, self.entropy_gradient
        )
        self.scores = torch.stack([logprobs, entropies[batch.predictor_of]])
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
            logprobs, entropies = token_logprobs(
                output[0], batch.temperatures, batch.predictor_of, batch.targets, entropy_gradient
            )
            return Scores(logprobs, entropies[batch.predictor_of])
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
    head: LossHead = model.get_output_embeddings().forward
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
    micro_batch.old_logprobs = scores.logprobs.detach()
    micro_batch.routes = routers.taken() if routers else None
