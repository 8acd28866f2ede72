"""Samples -> prefix trees -> balanced micro batches for every rank. Pure: integers and lists, tensors only at the end.

Samples of a group begin alike (prompt, history, often the first answer tokens). Each distinct prefix is computed once: the samples
form a tree, laid out depth first; trees one after another make one row of tokens in which a token sees its ancestors and itself. In
such an order the descendants of token j are the tokens j+1..end[j]-1, so "token i sees token j" is `j <= i < end[j]`: one integer a
token describes the whole mask.

Example: samples `a b c` and `a b d e`, everything after `a` trained::

    token_ids  a  b  d     (c and e end their samples: they are predicted, never seen)
    position   0  1  2
    end        3  3  3
    loss tokens (predicted from, target):  (0, b) (0, b) (1, c) (1, d) (2, e)

A token's hidden state depends on its ancestors only, so log-probabilities and gradients are those of the samples one by one.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rl.messages import TrainBatch, TrainingSample


@dataclass
class LossTokens:
    """What the loss needs of each loss token: aligned lists, in the order of the sequences."""

    predicted_from: list[int] = field(default_factory=list)
    """Packed position whose hidden state predicts the token."""
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Place of the token's sample in the batch."""
    teacher_logprobs: list[float] = field(default_factory=list)
    """nan where there is none."""
    fresh: list[bool] = field(default_factory=list)
    """Sampled by exactly the version that is being trained."""


@dataclass
class Tree:
    """One prefix tree. The lists are aligned, one item a packed token."""

    temperature: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    loss: LossTokens = field(default_factory=LossTokens)


@dataclass
class MicroBatch:
    """One forward pass: T tokens, whole trees one after another in one row; P positions with logits, N loss tokens, S sequences.

    Nothing is padded. With context parallelism the ranks of a group hold the same row, each with its own `queries` and with the
    predictors (then places among its queries) and loss tokens that fall on them; S is that of the whole row.
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
    weights: Tensor  # [N] float32, see loss.sample_weights
    sequences: Tensor  # [N] int64, 0..S-1: the token's sample, counted within this micro batch
    samples: Tensor  # [S] int64: place of each sequence's sample in the batch
    envs: Tensor  # [N] int64: place of the token's environment in TrainBatch.envs
    teacher_logprobs: Tensor | None  # [N] float32, nan where there is none; None: none has any
    fresh: Tensor  # [N] bool: sampled by exactly the version that is being trained

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: value if value is None else value.to(device) for name, value in vars(self).items()})


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])


@dataclass(frozen=True)
class Item:
    """A sample of a batch, with what packing has to know of it."""

    sample: TrainingSample
    place: int
    """Among the batch's samples."""
    weight: float
    """Of each of its loss tokens, see loss.sample_weights."""
    inputs: list[int]
    """The tokens that some loss token is predicted from."""


def build_trees(items: Sequence[Item], max_tokens: int, version: int) -> list[Tree]:
    """Trees of the samples of one group and temperature; each holds at most `max_tokens` tokens unless one sample alone is longer."""
    trees: list[Tree] = []
    path: list[int] = []  # packed position of each token of the previous sample
    previous: list[int] = []
    for item in sorted(items, key=lambda item: item.inputs):
        tokens = item.inputs
        if not tokens:
            continue
        shared = common_prefix(previous, tokens)
        if not trees or len(trees[-1].token_ids) + len(tokens) - shared > max_tokens:
            trees.append(Tree(item.sample.temperature))
            path, shared = [], 0
        tree = trees[-1]
        for position in path[shared:]:
            tree.ends[position] = len(tree.token_ids)  # nothing later descends from it
        path = path[:shared] + list(range(len(tree.token_ids), len(tree.token_ids) + len(tokens) - shared))
        tree.token_ids += tokens[shared:]
        tree.positions += range(shared, len(tokens))
        tree.ends += [-1] * (len(tokens) - shared)
        add_loss_tokens(tree.loss, item, path, version)
        previous = tokens
    for tree in trees:
        tree.ends = [len(tree.token_ids) if end < 0 else end for end in tree.ends]
    return trees


def trained_inputs(sample: TrainingSample) -> list[int]:
    """The tokens that some loss token is predicted from: all before the last loss token. Empty without a loss token."""
    last = len(sample.loss_mask) - 1
    while last >= 0 and not sample.loss_mask[last]:
        last -= 1
    return sample.token_ids[: max(last, 0)]


def add_loss_tokens(loss: LossTokens, item: Item, path: list[int], version: int) -> None:
    """Appends the sample's loss tokens; `path` gives the packed position of each of its tokens."""
    sample = item.sample
    trained = [t for t, mask in enumerate(sample.loss_mask) if mask]
    loss.predicted_from += [path[t - 1] for t in trained]
    loss.targets += [sample.token_ids[t] for t in trained]
    loss.logprobs += [sample.logprobs[t] for t in trained]
    loss.advantages += [sample.advantages[t] for t in trained]
    loss.weights += [item.weight] * len(trained)
    loss.samples += [item.place] * len(trained)
    teacher = sample.teacher_logprobs
    loss.teacher_logprobs += [teacher[t] if teacher else math.nan for t in trained]
    loss.fresh += [span.policy_version == version for span in sample.policy_versions for _ in range(span.num_tokens)]


@dataclass(frozen=True)
class Layout:
    """Whom a batch is packed for."""

    rank: int
    """Among the ranks that have samples of their own (the data-parallel ones)."""
    num_ranks: int
    max_tokens: int
    """Of one micro batch."""
    hidden_size: int
    """For the cost of a tree."""


def plan(batch: TrainBatch, weights: Sequence[float], layout: Layout) -> list[list[list[Tree]]]:
    """[rank][micro batch][tree]: every rank gets the same number of micro batches, an idle one empty ones. Deterministic.

    A tree of L tokens costs L * (6 * hidden_size + L): the matrix products of a transformer layer take 72 * hidden_size^2 operations a
    token forward and backward, attention over a dense mask 12 * hidden_size * L. Longest first, each to the rank with the least so far.
    """
    groups: dict[tuple[int, float], list[Item]] = defaultdict(list)
    for place, (sample, weight) in enumerate(zip(batch.samples, weights, strict=True)):
        groups[sample.group_id, sample.temperature].append(Item(sample, place, weight, trained_inputs(sample)))
    trees = [tree for key in sorted(groups) for tree in build_trees(groups[key], layout.max_tokens, batch.step - 1)]
    trees.sort(key=lambda tree: -len(tree.token_ids))
    ranks: list[list[Tree]] = [[] for _ in range(layout.num_ranks)]
    costs = [0] * layout.num_ranks
    for tree in trees:
        length = len(tree.token_ids)
        rank = costs.index(min(costs))
        ranks[rank].append(tree)
        costs[rank] += length * (6 * layout.hidden_size + length)
    micro_batches = [fill_micro_batches(trees, layout.max_tokens) for trees in ranks]
    most = max(1, *map(len, micro_batches))
    return [batches + [[] for _ in range(most - len(batches))] for batches in micro_batches]


def fill_micro_batches(trees: list[Tree], max_tokens: int) -> list[list[Tree]]:
    """Trees one after another, as many as fit into `max_tokens`."""
    batches: list[list[Tree]] = []
    for tree in trees:
        if not batches or sum(len(other.token_ids) for other in batches[-1]) + len(tree.token_ids) > max_tokens:
            batches.append([])
        batches[-1].append(tree)
    return batches


def to_tensors(trees: list[Tree], batch: TrainBatch) -> MicroBatch:
    """One row of whole trees. No tree gives one token without any loss: a rank without work still takes part in the collectives."""
    trees = trees or [Tree(1.0, token_ids=[0], positions=[0], ends=[1])]
    starts = [0, *accumulate(len(tree.token_ids) for tree in trees)]
    predicted_from = [start + p for start, tree in zip(starts, trees, strict=False) for p in tree.loss.predicted_from]
    predictors = sorted(set(predicted_from)) or [0]
    row_of = {position: row for row, position in enumerate(predictors)}
    order = sorted(range(len(predicted_from)), key=lambda i: (predicted_from[i], i))
    temperatures = [tree.temperature for tree in trees for _ in tree.token_ids]

    def values(name: str, dtype: torch.dtype) -> Tensor:
        flat = [value for tree in trees for value in getattr(tree.loss, name)]
        return torch.tensor([flat[i] for i in order], dtype=dtype)

    samples, sequences = torch.unique(values("samples", torch.int64), return_inverse=True)
    env_of = {env: i for i, env in enumerate(batch.envs)}
    sample_env = torch.tensor([env_of[batch.samples[i].env] for i in samples.tolist()], dtype=torch.int64)
    teacher = values("teacher_logprobs", torch.float32)
    return MicroBatch(
        input_ids=torch.tensor([token for tree in trees for token in tree.token_ids]),
        position_ids=torch.tensor([position for tree in trees for position in tree.positions]),
        ends=torch.tensor([start + end for start, tree in zip(starts, trees, strict=False) for end in tree.ends]),
        queries=None,
        predictors=torch.tensor(predictors),
        temperatures=torch.tensor([temperatures[p] for p in predictors], dtype=torch.float32),
        rows=torch.tensor([row_of[predicted_from[i]] for i in order], dtype=torch.int64),
        targets=values("targets", torch.int64),
        logprobs=values("logprobs", torch.float32),
        advantages=values("advantages", torch.float32),
        weights=values("weights", torch.float32),
        sequences=sequences,
        samples=samples,
        envs=sample_env[sequences],
        teacher_logprobs=None if teacher.isnan().all() else teacher,
        fresh=values("fresh", torch.bool),
    )


def tree_mask(ends: Tensor) -> Tensor:
    """[T] ends -> [T, T] bool, True where the query (first axis) sees the key (last axis)."""
    index = torch.arange(len(ends), device=ends.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < ends[None, :])


@dataclass(frozen=True)
class Packed:
    """A batch as one rank trains it."""

    micro_batches: list[MicroBatch]
    shared_token_fraction: float
    """Share of the samples' input tokens that need no computation of their own, over all ranks."""


def pack(batch: TrainBatch, weights: Sequence[float], layout: Layout) -> Packed:
    """This rank's part of the batch; every rank computes the same plan from the same batch and takes its part.

    `weights`: what each loss token of each sample counts, see loss.sample_weights.
    """
    ranks = plan(batch, weights, layout)
    packed = sum(len(tree.token_ids) for micro_batches in ranks for trees in micro_batches for tree in trees)
    alone = sum(len(trained_inputs(sample)) for sample in batch.samples)
    return Packed([to_tensors(trees, batch) for trees in ranks[layout.rank]], 1.0 - packed / max(1, alone))
