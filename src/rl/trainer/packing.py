"""Samples -> prefix trees -> balanced micro batches for every rank. Pure: arrays, and tensors only at the end.

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

Sorted within their groups, all samples of a batch stand in one line, each with the length of the prefix that it shares with the one
before it. A micro batch is a piece of that line. A cut within a group costs its shared prefix once more, a cut between groups nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rl.messages import TrainBatch, TrainingSample


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
        """Out of pinned memory this returns at once: the copy is in the order of the device's work."""
        return MicroBatch(**{name: value if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()})

    def pinned(self) -> "MicroBatch":
        """In memory that a GPU can read on its own."""
        return MicroBatch(**{name: value if value is None else value.pin_memory() for name, value in vars(self).items()})


@dataclass(frozen=True)
class Item:
    """A sample in the line, with what packing has to know of it."""

    sample: TrainingSample
    place: int
    """Among the batch's samples."""
    trained: np.ndarray  # [n] places of its loss tokens
    inputs: np.ndarray  # [L] uint32: the tokens that some loss token is predicted from, all before the last loss token


@dataclass(frozen=True)
class Line:
    """The samples of a batch that have loss tokens: group by group, temperature by temperature, sorted by their tokens."""

    items: list[Item]
    lengths: np.ndarray  # [n] int64: input tokens of each item
    shared: np.ndarray  # [n] int64: how many first tokens it shares with the one before it, 0 where a tree begins


def make_line(batch: TrainBatch) -> Line:
    groups: dict[tuple[int, float], list[Item]] = defaultdict(list)
    for place, sample in enumerate(batch.samples):
        trained = np.flatnonzero(np.array(sample.loss_mask, dtype=bool))
        if len(trained):
            inputs = np.array(sample.token_ids[: trained[-1]], dtype=np.uint32)
            groups[sample.group_id, sample.temperature].append(Item(sample, place, trained, inputs))
    items: list[Item] = []
    shared: list[int] = []
    for key in sorted(groups):
        group = sorted(groups[key], key=lambda item: item.inputs.astype(">u4").tobytes())  # bytes in this order sort like the numbers
        items += group
        shared += [0, *(common_prefix(a.inputs, b.inputs) for a, b in pairwise(group))]
    return Line(items, np.array([len(item.inputs) for item in items], dtype=np.int64), np.array(shared, dtype=np.int64))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    first = int(differs.argmax()) if shortest else 0
    return first if shortest and differs[first] else shortest


@dataclass(frozen=True)
class Layout:
    """Whom a batch is packed for."""

    rank: int
    """Among the ranks that have samples of their own (the data-parallel ones)."""
    num_ranks: int
    max_tokens: int
    """Of one micro batch."""
    hidden_size: int
    """For the cost of a token."""


OVERHEAD_PART = 64
"""What a micro batch costs beyond its tokens (gathered weights, launches), as a part of one with max_tokens."""


def path_cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """What the first `lengths` tokens of a sample cost, in (query, key) pairs of attention.

    A token sees itself and its ancestors. In a transformer layer its matrix products take 24 * hidden_size^2 operations (forward), each
    key that it sees 4 * hidden_size: as much as 6 * hidden_size keys.
    """
    return lengths * (6 * hidden_size) + lengths * (lengths + 1) // 2


def fitting_ends(line: Line, max_tokens: int) -> np.ndarray:
    """[n]: where the longest piece ends that begins with item i and has at most `max_tokens`; one item always fits."""
    tokens = np.concatenate([[0], np.cumsum(line.lengths - line.shared)])
    ends = np.searchsorted(tokens, tokens[:-1] - line.shared + max_tokens, side="right") - 1
    return np.maximum(ends, np.arange(1, len(tokens)))


def pieces_needed(fitting: np.ndarray) -> np.ndarray:
    """[n + 1]: the fewest pieces that hold all items from i on. It falls with i, so the longest pieces make the fewest."""
    needed = [0] * (len(fitting) + 1)
    for i, end in reversed(list(enumerate(fitting.tolist()))):
        needed[i] = 1 + needed[end]
    return np.array(needed)


def cut_line(line: Line, layout: Layout, fitting: np.ndarray, needed: np.ndarray, num_pieces: int) -> list[tuple[int, int]]:
    """Cuts the line into pieces (first item, end) of about equal cost; `num_pieces` is at least needed[0].

    Each piece ends where the difference to its fair share of what is left, plus the prefix that the next piece computes again, is
    least. No piece is empty unless there are fewer items than pieces. The more pieces a rank gets, the less the difference counts; where
    no rank waits for another it counts only a little.
    """
    count, lengths, hidden_size = len(line.items), line.lengths, layout.hidden_size
    repeated = np.append(path_cost(line.shared, hidden_size), 0)  # [n + 1], by a piece that begins with the item
    cost = np.concatenate([[0], np.cumsum(path_cost(lengths, hidden_size) - repeated[:-1])])
    care = max(0.01, layout.num_ranks / num_pieces if layout.num_ranks > 1 else 0)
    pieces, start = [], 0
    for left in range(num_pieces, 0, -1):
        if start == count:
            pieces.append((count, count))
            continue
        last = max(min(int(fitting[start]), count - left + 1), start + 1)  # later pieces get an item each
        ends = np.arange(start + 1, last + 1)
        ends = ends[needed[ends] < left]
        own = cost[ends] - cost[start] + repeated[start]
        fair = (cost[count] - cost[start] + repeated[start] + repeated[ends]) / left
        end = int(ends[(repeated[ends] + care * np.abs(own - fair)).argmin()])
        pieces.append((start, end))
        start = end
    return pieces


def deal(line: Line, layout: Layout, pieces: list[tuple[int, int]]) -> tuple[list[list[tuple[int, int]]], int]:
    """Pieces to ranks, round by round, and what the step then costs: ranks wait for each other after every micro batch.

    The costliest pieces of all are the ranks' first ones, and so on: memory runs out at once if it does, and the pieces of a round are
    alike. Within a round the rank with the least so far gets the most.
    """
    ranks = layout.num_ranks
    costs = [piece_cost(line, piece, layout) for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda i: (-costs[i], i))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for start in range(0, len(order), ranks):
        for piece, rank in zip(order[start : start + ranks], sorted(range(ranks), key=lambda r: (sums[r], r)), strict=True):
            dealt[rank].append(pieces[piece])
            sums[rank] += costs[piece]
    own_cost = int(path_cost(np.array(layout.max_tokens), layout.hidden_size)) // OVERHEAD_PART
    return dealt, sum(costs[i] + own_cost for i in order[::ranks])


def plan(line: Line, layout: Layout) -> list[list[tuple[int, int]]]:
    """[rank][micro batch] -> (first item, end) in the line. Deterministic. Every rank gets the same number of micro batches.

    As few as possible, or up to an eighth more where fewer cuts within groups make that cheaper.
    """
    fitting = fitting_ends(line, layout.max_tokens)
    needed = pieces_needed(fitting)
    least = max(1, -(-int(needed[0]) // layout.num_ranks))
    rounds = sorted({least + -(-least * extra // 64) for extra in range(9)})
    plans = [deal(line, layout, cut_line(line, layout, fitting, needed, n * layout.num_ranks)) for n in rounds]
    return min(plans, key=lambda plan: plan[1])[0]


def piece_tokens(line: Line, piece: tuple[int, int]) -> int:
    """Tokens of a micro batch: its first item is computed in full."""
    start, end = piece
    return int((line.lengths - line.shared)[start:end].sum() + line.shared[start:end][:1].sum())


def piece_cost(line: Line, piece: tuple[int, int], layout: Layout) -> int:
    """As `path_cost`, of a micro batch."""
    start, end = piece
    own, repeated = (path_cost(lengths[start:end], layout.hidden_size) for lengths in (line.lengths, line.shared))
    return int(own.sum() - repeated[1:].sum())


def lay_out(line: Line, piece: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Depth first: token ids, positions and ends, [T] each, and for each item the packed positions of its tokens."""
    start, end = piece
    items, shared = line.items[start:end], line.shared[start:end].copy()
    shared[:1] = 0
    new = [item.inputs[n:] for item, n in zip(items, shared.tolist(), strict=True)]
    total = sum(map(len, new))
    ends = np.full(total, total, dtype=np.int64)
    paths: list[np.ndarray] = []
    path, used = np.zeros(0, dtype=np.int64), 0
    for tokens, n in zip(new, shared.tolist(), strict=True):
        ends[path[n:]] = used  # nothing later descends from what the item does not share
        path = np.concatenate([path[:n], np.arange(used, used + len(tokens))])
        used += len(tokens)
        paths.append(path)
    positions = [np.arange(n, n + len(tokens)) for tokens, n in zip(new, shared.tolist(), strict=True)]
    return np.concatenate(new).astype(np.int64), np.concatenate(positions), ends, paths


def to_tensors(line: Line, piece: tuple[int, int], batch: TrainBatch, weights: Sequence[float]) -> MicroBatch:
    """One row of whole trees."""
    items = line.items[piece[0] : piece[1]]
    if not items:
        return nothing()
    token_ids, positions, ends, paths = lay_out(line, piece)
    predicted_from = np.concatenate([path[item.trained - 1] for item, path in zip(items, paths, strict=True)])
    order = np.argsort(predicted_from, kind="stable")
    predictors, first, rows = np.unique(predicted_from[order], return_index=True, return_inverse=True)
    counts = [len(item.trained) for item in items]

    def by_item(values: Sequence[float] | np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)[order])

    def by_token(name: str) -> Tensor:
        lists = [np.array(getattr(item.sample, name) or [np.nan] * len(item.sample.token_ids), dtype=np.float32) for item in items]
        return torch.from_numpy(np.concatenate([values[item.trained] for item, values in zip(items, lists, strict=True)])[order])

    places = [item.place for item in items]
    rank_of = np.argsort(np.argsort(places))
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
        weights=by_item([weights[place] for place in places], np.float32),
        sequences=by_item(rank_of, np.int64),
        samples=torch.tensor(sorted(places)),
        envs=by_item([env_of[item.sample.env] for item in items], np.int64),
        teacher_logprobs=by_token("teacher_logprobs") if has_teacher else None,
        fresh=torch.from_numpy(fresh[order]),
    )


def nothing() -> MicroBatch:
    """One token without any loss: a rank without work still takes part in the collectives."""
    zero, none, no_floats = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return MicroBatch(
        input_ids=zero,
        position_ids=zero,
        ends=zero + 1,
        queries=None,
        predictors=zero,
        temperatures=torch.ones(1),
        rows=none,
        targets=none,
        logprobs=no_floats,
        advantages=no_floats,
        weights=no_floats,
        sequences=none,
        samples=none,
        envs=none,
        teacher_logprobs=None,
        fresh=none.bool(),
    )


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
    line = make_line(batch)
    ranks = plan(line, layout)
    packed = sum(piece_tokens(line, piece) for pieces in ranks for piece in pieces)
    alone = int(line.lengths.sum())
    return Packed([to_tensors(line, piece, batch, weights) for piece in ranks[layout.rank]], 1.0 - packed / max(1, alone))
