"""A batch of samples -> this rank's micro batches: `prefix_tree` sorts the samples into a line, `balance` cuts it into pieces of equal
cost, and a piece becomes tensors. A token's hidden state depends on its ancestors only, so log-probabilities and gradients are those of
the samples one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from rl.config.trainer import TrainerConfig
from rl.trainer.balance import Layout, piece_tokens, plan
from rl.trainer.flex import padded, whole_blocks
from rl.trainer.modes import Mode
from rl.trainer.prefix_tree import Line, Piece, lay_out, make_line
from rl.wire.messages import TrainBatch

MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_GPU = 4096, 16384
"""Of one pass on one rank. A GPU has less to do in a smaller one than its calls cost, and the memory where activations are recomputed; but
not for eager attention, whose scores and mask grow with the square."""


def micro_batch_tokens(settings: TrainerConfig, device: torch.device, mode: Mode) -> int:
    """The most tokens of one pass on one rank; a sample that is longer goes alone."""
    large = device.type == "cuda" and settings.activation_checkpointing != "none" and mode != "eager"
    return settings.micro_batch_tokens or (MICRO_BATCH_TOKENS_GPU if large else MICRO_BATCH_TOKENS)


@dataclass
class MicroBatch:
    """One forward pass: T tokens, whole trees one after another in one row; P positions with logits, N loss tokens.

    Nothing is padded but by `fill_blocks`. With context parallelism the ranks of a group hold the same row, each with its own `queries`
    and with the predictors (then places among its queries) and loss tokens that fall on them.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, place of the token in its sample
    ends: Tensor  # [T] int64: token i sees token j if j <= i < ends[j]
    queries: Tensor | None  # [T'] int64 ascending: the positions that this rank computes (context parallelism); None: all T
    predictors: Tensor  # [P] int64 ascending: packed positions that some loss token is predicted from
    temperatures: Tensor  # [P] float32
    rows: Tensor  # [N] int64, ascending: which of the P positions predicts the token
    targets: Tensor  # [N] int64 token ids
    logprobs: Tensor  # [N] float32, of the sampler
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float32, see minibatches.sample_weights
    sequences: Tensor  # [N] int64: place of the token's sample in the batch
    places: Tensor  # [N] int64: place of the token among all loss tokens of the batch, sample after sample
    envs: Tensor  # [N] int64: place of the token's environment in TrainBatch.envs
    teacher_logprobs: Tensor | None  # [N] float32, nan where there is none; None: none has any
    fresh: Tensor  # [N] bool: sampled by exactly the version that is being trained
    old_logprobs: Tensor | None = None  # [N] float32, of the policy that the batch began with, once a clipped loss needs them
    reference_logprobs: Tensor | None = None  # [N] float32, of the reference model, once they were computed
    padding: int = 0
    """How many of the T tokens, the last ones, stand for nothing: they see themselves, nothing else sees them, and no loss is theirs."""

    @property
    def is_chain(self) -> bool:
        """Whether the row is the tokens of one sample."""
        return bool((self.ends == len(self.ends)).all())

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on the device. Out of pinned memory this returns at once: the copy is in the order of the device's work."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        """A copy in memory that a GPU can read on its own."""
        return self._each(Tensor.pin_memory)

    def _each(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return MicroBatch(**{name: function(value) if isinstance(value, Tensor) else value for name, value in vars(self).items()})


@dataclass(frozen=True)
class Packed:
    """A batch, and how one rank trains it."""

    batch: TrainBatch
    minibatches: list[list[MicroBatch]]
    """The micro batches of each minibatch: as many on every rank."""
    shared_token_fraction: float
    """The part of all ranks' input tokens that is not computed, because another sample of the micro batch begins alike."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return list(chain(*self.minibatches))


def pack(batch: TrainBatch, weights: Sequence[float], layout: Layout, parts: Sequence[Sequence[int]] | None = None) -> Packed:
    """Packs a batch for one rank; every rank computes the same plan from the same batch and takes its part.

    `weights`: what each loss token of each sample counts, see minibatches.py. `parts`: the samples of each minibatch by their places;
    default: one of all.
    """
    minibatches, computed, length = [], 0, 0
    starts = list(accumulate((sum(sample.loss_mask) for sample in batch.samples), initial=0))
    for places in parts or [None]:
        line = make_line(batch, places)
        ranks = plan(line, layout)
        minibatches.append([to_micro_batch(line, piece, batch, weights, starts) for piece in ranks[layout.rank]])
        computed += sum(piece_tokens(line, piece) for pieces in ranks for piece in pieces)
        length += int(line.lengths.sum())
    return Packed(batch, minibatches, 1.0 - computed / max(1, length))


def to_micro_batch(line: Line, piece: Piece, batch: TrainBatch, weights: Sequence[float], starts: Sequence[int]) -> MicroBatch:
    """The samples of one piece: their tokens as trees in one row, and what each loss token brings along.

    starts: how many loss tokens of the batch come before each sample.
    """
    items = line.items[piece[0] : piece[1]]
    if not items:
        return empty_micro_batch()
    token_ids, positions, ends, paths = lay_out(line, piece)
    predicted_from = np.concatenate([path[item.trained - 1] for item, path in zip(items, paths, strict=True)])
    order = np.argsort(predicted_from, kind="stable")
    predictors, first, rows = np.unique(predicted_from[order], return_index=True, return_inverse=True)
    counts = [len(item.trained) for item in items]

    def by_item(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)[order])

    def by_token(name: str) -> Tensor:
        lists = [np.array(getattr(item.sample, name) or [np.nan] * len(item.sample.token_ids), dtype=np.float32) for item in items]
        return torch.from_numpy(np.concatenate([values[item.trained] for item, values in zip(items, lists, strict=True)])[order])

    env_of = {env: i for i, env in enumerate(batch.envs)}
    spans = [span for item in items for span in item.sample.policy_versions]
    fresh = np.repeat([span.policy_version == batch.step - 1 for span in spans], [span.num_tokens for span in spans])
    has_teacher = any(item.sample.teacher_logprobs for item in items)
    return MicroBatch(
        input_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(positions),
        ends=torch.from_numpy(ends),
        queries=None,
        predictors=torch.from_numpy(predictors),
        temperatures=by_item([item.sample.temperature for item in items], np.float32)[torch.from_numpy(first)],
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(np.concatenate([np.array(item.sample.token_ids)[item.trained] for item in items])[order]),
        logprobs=by_token("logprobs"),
        advantages=by_token("advantages"),
        weights=by_item([weights[item.place] for item in items], np.float32),
        sequences=by_item([item.place for item in items], np.int64),
        places=torch.from_numpy(
            np.concatenate([starts[item.place] + np.arange(count) for item, count in zip(items, counts, strict=True)])[order]
        ),
        envs=by_item([env_of[item.sample.env] for item in items], np.int64),
        teacher_logprobs=by_token("teacher_logprobs") if has_teacher else None,
        fresh=torch.from_numpy(fresh[order]),
    )


def fill_blocks(batch: MicroBatch, ranks: int) -> MicroBatch:
    """The micro batch with as much padding as FlexAttention needs for whole blocks on each of the ranks that share its row."""
    length = len(batch.input_ids)
    row = padded(batch.input_ids, batch.position_ids, batch.ends, whole_blocks(length, ranks))
    return replace(batch, input_ids=row[0], position_ids=row[1], ends=row[2], padding=len(row[0]) - length)


def empty_micro_batch() -> MicroBatch:
    """One token without any loss: a rank without work still takes part in the collectives."""
    zero, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    row = {"input_ids": zero, "position_ids": zero, "ends": zero + 1, "queries": None, "predictors": zero, "temperatures": torch.ones(1)}
    integers = dict.fromkeys(("rows", "targets", "sequences", "places", "envs"), none)
    floats = dict.fromkeys(("logprobs", "advantages", "weights"), none.float())
    return MicroBatch(**row, **integers, **floats, teacher_logprobs=None, fresh=none.bool())
