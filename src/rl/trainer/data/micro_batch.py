"""A micro batch: the tensors of one forward and backward pass on one rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl.config.trainer import TrainerConfig
from rl.trainer.model.flex import padded, whole_blocks
from rl.trainer.model.modes import Mode

MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_GPU = 4096, 16384
"""Tokens of one pass on one rank. Smaller passes would leave a GPU waiting for kernel launches,
and with recomputed activations the larger ones fit in its memory; except with eager attention,
whose scores and mask grow quadratically."""


def micro_batch_tokens(settings: TrainerConfig, device: torch.device, mode: Mode) -> int:
    """Returns the most tokens of one pass on one rank; a longer sample gets a pass of its own."""
    large = (
        device.type == "cuda" and settings.activation_checkpointing == "full" and mode != "eager"
    )
    return settings.micro_batch_tokens or (MICRO_BATCH_TOKENS_GPU if large else MICRO_BATCH_TOKENS)


@dataclass
class MicroBatch:
    """One forward pass over a row of T tokens that holds whole trees one after another; P positions
    have logits, N tokens a loss.

    Only `fill_blocks` adds padding. With context parallelism the ranks of a group hold the same
    row; each has its own `queries` and the predictors and loss tokens that belong to them, and
    predictors are then indices into its queries.

    Example, samples 0 `a b c` and 1 `a b d e` with everything after `a` trained: T = 3 inputs, P =
    3 predictors, N = 5 loss tokens::

        input_ids   a b d        predictor_of  0 0 1 1 2   index into predictors
        predictors  0 1 2        targets       b b c d e   token that is predicted
                                 sequences     0 1 0 1 1   sample in the batch
                                 token_index   0 2 1 3 4   loss token in the batch (sample 0: 0, 1)
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, index of the token in its sample
    subtree_ends: Tensor  # [T] int64: token i sees token j if j <= i < subtree_ends[j]
    # [T'] int64 ascending: the positions that this rank computes (context parallelism); None: all T
    queries: Tensor | None
    predictors: Tensor  # [P] int64 ascending: packed positions that predict some loss token
    temperatures: Tensor  # [P] float32
    predictor_of: Tensor  # [N] int64, ascending: which of the P positions predicts the token
    targets: Tensor  # [N] int64 token ids
    logprobs: Tensor  # [N] float32, the sampler's
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, of the token in the loss; see `minibatch_weights`
    sequences: Tensor  # [N] int64: index of the token's sample in the batch
    # [N] int64: index of the token among all loss tokens of the batch, sample after sample
    token_index: Tensor
    envs: Tensor  # [N] int64: index of the token's environment in TrainBatch.envs
    # [N] float32, nan for tokens without a teacher; None if no token has one
    teacher_logprobs: Tensor | None
    lag_zero: Tensor  # [N] bool: the version that is being trained sampled the token
    # [2, M] int64: each pair of a loss token (index in N, ascending) and an id that truncation kept
    # there. A token without pairs was drawn from the whole vocabulary; None: all tokens were.
    kept: Tensor | None = None
    # [T, width] uint8 (context parallelism: [T', width]), see Routers; None: the routers choose
    routes: Tensor | None = None
    # [N] float32, of the policy that the batch began with; None until computed
    old_logprobs: Tensor | None = None
    # [N] float32, of the reference model; None until computed
    reference_logprobs: Tensor | None = None
    padding: int = 0
    """Number of padding tokens at the end of the T tokens: each sees itself, no other token sees
    it, and it has no loss."""

    @property
    def is_chain(self) -> bool:
        """Whether the row holds the tokens of a single sample."""
        return bool((self.subtree_ends == len(self.subtree_ends)).all())

    @property
    def lookups(self) -> tuple[Tensor, Tensor]:
        """Which of the P rows, and which id, each log-probability that the head must look up
        has: those of the N targets, then of the M kept ids."""
        if self.kept is None:
            return self.predictor_of, self.targets
        tokens, ids = self.kept
        rows = torch.cat([self.predictor_of, self.predictor_of[tokens]])
        return rows, torch.cat([self.targets, ids])

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns a copy on the device. From pinned memory it returns at once: the device does
        the copy in stream order."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """Returns a copy in pinned memory, which a GPU can read by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return MicroBatch(
            **{
                name: function(value) if isinstance(value, Tensor) else value
                for name, value in vars(self).items()
            }
        )


def fill_blocks(batch: MicroBatch, ranks: int) -> MicroBatch:
    """Pads the micro batch so that each of the `ranks` that share its row holds whole
    FlexAttention blocks."""
    length, routes = len(batch.input_ids), batch.routes
    ids, positions, ends = padded(
        batch.input_ids, batch.position_ids, batch.subtree_ends, whole_blocks(length, ranks)
    )
    padding = len(ids) - length
    # Padding gets the last token's experts: one fixed route would overload the same experts in
    # every micro batch.
    if routes is not None:
        routes = torch.cat([routes, routes[-1:].expand(padding, -1)])
    return replace(
        batch,
        input_ids=ids,
        position_ids=positions,
        subtree_ends=ends,
        routes=routes,
        padding=padding,
    )


def empty_micro_batch() -> MicroBatch:
    """Returns one token without any loss, so that a rank without work still takes part in the
    collectives."""
    zero, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    integers = dict.fromkeys(("predictor_of", "targets", "sequences", "token_index", "envs"), none)
    floats = dict.fromkeys(("logprobs", "advantages", "weights"), none.float())
    return MicroBatch(
        input_ids=zero,
        position_ids=zero,
        subtree_ends=zero + 1,
        queries=None,
        predictors=zero,
        temperatures=torch.ones(1),
        teacher_logprobs=None,
        lag_zero=none.bool(),
        **integers,
        **floats,
    )
