"""Shared prefixes are computed once: the samples of a batch sorted into one line, and pieces of that line laid out as trees.

Samples of a group begin alike (prompt, history, often the first answer tokens). In the line, sorted within groups, each has the length of
the prefix that it shares with the one before it. A piece of the line, laid out depth first, is one row of tokens in which a token sees its
ancestors and itself. In such an order the descendants of token j are the tokens j+1..end[j]-1, so "token i sees token j" is
`j <= i < end[j]`: one integer a token describes the whole mask.

Example: samples `a b c` and `a b d e`, everything after `a` trained::

    token_ids  a  b  d     (c and e end their samples: they are predicted, never seen)
    position   0  1  2
    end        3  3  3
    loss tokens (predicted from, target):  (0, b) (0, b) (1, c) (1, d) (2, e)
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rl.wire.messages import TrainBatch, TrainingSample

Piece = tuple[int, int]
"""First item and end of a part of the line: the samples of one micro batch."""


@dataclass(frozen=True)
class Item:
    """A sample in the line."""

    sample: TrainingSample
    place: int  # among the batch's samples
    trained: np.ndarray  # [n] places of its loss tokens
    inputs: np.ndarray  # [L] uint32: the tokens that some loss token is predicted from, all before the last loss token


@dataclass(frozen=True)
class Line:
    """The samples of a batch that have loss tokens: group by group, temperature by temperature, sorted by their tokens."""

    items: list[Item]
    lengths: np.ndarray  # [n] int64: input tokens of each item
    shared: np.ndarray  # [n] int64: how many first tokens it shares with the one before it, 0 where a tree begins


def make_line(batch: TrainBatch, places: Iterable[int] | None = None) -> Line:
    """The samples at these places of a batch, default all, in the order in which neighbours share the most."""
    groups: dict[tuple[int, float], list[Item]] = defaultdict(list)
    for place in range(len(batch.samples)) if places is None else places:
        sample = batch.samples[place]
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


def lay_out(line: Line, piece: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """The piece depth first: token ids, positions and ends, [T] each, and for each item the packed positions of its tokens."""
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
