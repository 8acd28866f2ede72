"""Samples -> prefix trees -> balanced micro batches for every rank. Pure: integers and lists, tensors only at the end.

Samples of a group begin alike (prompt, history, often the first answer tokens). Each distinct prefix is computed once: the samples
form a tree, laid out depth first as one row of tokens in which a token sees its ancestors and itself. In such an order the descendants
of token j are the tokens j+1..end[j]-1, so "token i sees token j" is `j <= i < end[j]`: one integer a token describes the whole mask.

Example: samples `a b c` and `a b d e`, everything after `a` trained::

    token_ids  a  b  d     (c and e end their samples: they are predicted, never seen)
    position   0  1  2
    end        3  3  3
    loss tokens (predicted from, target):  (0, b) (0, b) (1, c) (1, d) (2, e)

A token's hidden state depends on its ancestors only, so log-probabilities and gradients are those of the samples one by one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.messages import TrainingSample


@dataclass
class Tree:
    """One row. The first three lists are aligned, one item a packed token; the last four, one item a loss token."""

    temperature: float
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    predicted_from: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    @property
    def is_chain(self) -> bool:
        """Without a branch: plain causal attention does."""
        return all(end == len(self.token_ids) for end in self.ends)


@dataclass
class MicroBatch:
    """One forward pass: R rows padded to L tokens, P positions with logits, N loss tokens."""

    input_ids: Tensor  # [R, L] int64
    position_ids: Tensor  # [R, L] int64
    ends: Tensor | None  # [R, L] int64, see the module; None: plain causal attention
    logits_at: Tensor  # [R, L] bool, P of them True
    temperatures: Tensor  # [P] float32
    rows: Tensor  # [N] int64, ascending: which of the P positions predicts the token
    targets: Tensor  # [N] int64 token ids
    logprobs: Tensor  # [N] float32, of the sampler
    advantages: Tensor  # [N] float32

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(**{name: value if value is None else value.to(device) for name, value in vars(self).items()})


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])


def build_trees(samples: Sequence[TrainingSample], max_tokens: int) -> list[Tree]:
    """Trees of the samples of one group and temperature; each holds at most `max_tokens` tokens unless one sample alone is longer."""
    trees: list[Tree] = []
    inputs = [trained_inputs(sample) for sample in samples]
    path: list[int] = []  # packed position of each token of the previous sample
    previous: list[int] = []
    for i in sorted(range(len(samples)), key=lambda i: inputs[i]):
        tokens = inputs[i]
        if not tokens:
            continue
        shared = common_prefix(previous, tokens)
        if not trees or len(trees[-1].token_ids) + len(tokens) - shared > max_tokens:
            trees.append(Tree(samples[i].temperature))
            path, shared = [], 0
        tree = trees[-1]
        for position in path[shared:]:
            tree.ends[position] = len(tree.token_ids)  # nothing later descends from it
        path = path[:shared] + list(range(len(tree.token_ids), len(tree.token_ids) + len(tokens) - shared))
        tree.token_ids += tokens[shared:]
        tree.positions += range(shared, len(tokens))
        tree.ends += [-1] * (len(tokens) - shared)
        add_loss_tokens(tree, samples[i], path)
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


def add_loss_tokens(tree: Tree, sample: TrainingSample, path: list[int]) -> None:
    """Appends the sample's loss tokens; `path` gives the packed position of each of its tokens."""
    for t, trained in enumerate(sample.loss_mask):
        if trained:
            tree.predicted_from.append(path[t - 1])
            tree.targets.append(sample.token_ids[t])
            tree.logprobs.append(sample.logprobs[t])
            tree.advantages.append(sample.advantages[t])


def plan(samples: Sequence[TrainingSample], num_ranks: int, max_tokens: int, hidden_size: int) -> list[list[list[Tree]]]:
    """[rank][micro batch][row]: every rank gets the same number of micro batches, an idle one empty ones. Deterministic.

    A row of L tokens costs L * (6 * hidden_size + L): the matrix products of a transformer layer take 72 * hidden_size^2 operations a
    token forward and backward, attention over a dense mask 12 * hidden_size * L. Longest first, each to the rank with the least so far.
    """
    groups: dict[tuple[int, float], list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id, sample.temperature].append(sample)
    trees = [tree for key in sorted(groups) for tree in build_trees(groups[key], max_tokens)]
    trees.sort(key=lambda tree: -len(tree.token_ids))
    rows: list[list[Tree]] = [[] for _ in range(num_ranks)]
    costs = [0] * num_ranks
    for tree in trees:
        length = len(tree.token_ids)
        rank = costs.index(min(costs))
        rows[rank].append(tree)
        costs[rank] += length * (6 * hidden_size + length)
    micro_batches = [fill_micro_batches(trees, max_tokens) for trees in rows]
    most = max(1, *map(len, micro_batches))
    return [batches + [[] for _ in range(most - len(batches))] for batches in micro_batches]


def fill_micro_batches(trees: list[Tree], max_tokens: int) -> list[list[Tree]]:
    """Rows of falling length side by side, as many as fit with padding into `max_tokens`."""
    batches: list[list[Tree]] = []
    for tree in trees:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0].token_ids) > max_tokens:
            batches.append([])
        batches[-1].append(tree)
    return batches


def to_tensors(trees: list[Tree]) -> MicroBatch:
    """Pads and stacks. No tree gives one token without any loss: a rank without work still takes part in the collectives."""
    rows = trees or [Tree(1.0, token_ids=[0], positions=[0], ends=[1])]
    num_rows, length = len(rows), max(len(tree.token_ids) for tree in rows)
    chains = all(tree.is_chain for tree in rows)
    input_ids = torch.zeros(num_rows, length, dtype=torch.int64)
    # Padding of chains counts on: a falling position would read as the start of another sequence in transformers' mask code.
    position_ids = torch.arange(length).repeat(num_rows, 1) if chains else torch.zeros_like(input_ids)
    ends = torch.full_like(input_ids, length)
    logits_at = torch.zeros(num_rows, length, dtype=torch.bool)
    temperatures, loss_rows, order = [], [], []
    for r, tree in enumerate(rows):
        n = len(tree.token_ids)
        input_ids[r, :n] = torch.tensor(tree.token_ids)
        position_ids[r, :n] = torch.tensor(tree.positions)
        ends[r, :n] = torch.tensor(tree.ends)
        predictors = sorted(set(tree.predicted_from))
        logits_at[r, predictors if trees else [0]] = True
        place = {position: len(temperatures) + i for i, position in enumerate(predictors)}
        temperatures += [tree.temperature] * len(predictors or [0])
        order += [(place[p], r, i) for i, p in enumerate(tree.predicted_from)]
    order.sort()
    loss_rows = [place for place, _, _ in order]

    def values(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(rows[r], name)[i] for _, r, i in order], dtype=dtype)

    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        ends=None if chains else ends,
        logits_at=logits_at,
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
        rows=torch.tensor(loss_rows, dtype=torch.int64),
        targets=values("targets", torch.int64),
        logprobs=values("logprobs", torch.float32),
        advantages=values("advantages", torch.float32),
    )


def tree_mask(ends: Tensor) -> Tensor:
    """[R, L] ends -> [R, 1, L, L] bool, True where the query (third axis) sees the key (last axis)."""
    index = torch.arange(ends.shape[1], device=ends.device)
    ancestors = (index[None, :] <= index[:, None]) & (index[:, None] < ends[:, None, :])
    return ancestors[:, None]


@dataclass(frozen=True)
class Packed:
    """A batch as one rank trains it."""

    micro_batches: list[MicroBatch]
    shared_token_fraction: float
    """Share of the samples' input tokens that need no computation of their own, over all ranks."""


def pack(samples: Sequence[TrainingSample], rank: int, num_ranks: int, max_tokens: int, hidden_size: int) -> Packed:
    """This rank's part of the batch; every rank computes the same plan from the same batch and takes its part."""
    ranks = plan(samples, num_ranks, max_tokens, hidden_size)
    packed = sum(len(tree.token_ids) for micro_batches in ranks for trees in micro_batches for tree in trees)
    alone = sum(len(trained_inputs(sample)) for sample in samples)
    return Packed([to_tensors(trees) for trees in ranks[rank]], 1.0 - packed / max(1, alone))
