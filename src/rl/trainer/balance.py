"""Cuts the line of samples into micro batches of equal cost, and deals these to the ranks. Pure: numbers only.

A micro batch is a piece of the line. A cut within a group costs its shared prefix once more, a cut between groups nothing.
"""

from dataclasses import dataclass

import numpy as np

from rl.trainer.prefix_tree import Line, Piece

OVERHEAD_PART = 64
"""A micro batch costs, beyond its tokens (gathered weights, launches), one part in 64 of one with `max_tokens`."""


@dataclass(frozen=True)
class Layout:
    """The rank that a batch is packed for, among how many, and how large its micro batches may be."""

    rank: int
    """Place among the ranks that have samples of their own (the data-parallel ones)."""
    num_ranks: int
    max_tokens: int
    """The most tokens of a micro batch; one sample that is longer has a micro batch of its own. 0: each sample has."""
    hidden_size: int
    """The model's; it says how a token's matrix products compare with its attention, see `path_cost`."""


def plan(line: Line, layout: Layout) -> list[list[Piece]]:
    """The pieces of each rank, every rank the same number of them. Deterministic.

    As few micro batches as possible, or up to an eighth more where fewer cuts within groups make that cheaper.
    """
    fitting = fitting_ends(line, layout.max_tokens)
    needed = pieces_needed(fitting)
    least = max(1, -(-int(needed[0]) // layout.num_ranks))
    rounds = sorted({least + -(-least * extra // 64) for extra in range(9)})
    plans = [deal(line, layout, cut_line(line, layout, fitting, needed, n * layout.num_ranks)) for n in rounds]
    return min(plans, key=lambda plan: plan[1])[0]


def pieces_needed(fitting: np.ndarray) -> np.ndarray:
    """[n + 1]: the fewest pieces that hold all items from i on. It falls with i, so the longest pieces make the fewest."""
    needed = [0] * (len(fitting) + 1)
    for i, end in reversed(list(enumerate(fitting.tolist()))):
        needed[i] = 1 + needed[end]
    return np.array(needed)


def fitting_ends(line: Line, max_tokens: int) -> np.ndarray:
    """[n]: where the longest piece ends that begins with item i and has at most `max_tokens`; one item always fits."""
    tokens = np.concatenate([[0], np.cumsum(line.lengths - line.shared)])
    ends = np.searchsorted(tokens, tokens[:-1] - line.shared + max_tokens, side="right") - 1
    return np.maximum(ends, np.arange(1, len(tokens)))


def cut_line(line: Line, layout: Layout, fitting: np.ndarray, needed: np.ndarray, num_pieces: int) -> list[Piece]:
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


def deal(line: Line, layout: Layout, pieces: list[Piece]) -> tuple[list[list[Piece]], int]:
    """The pieces of each rank, and what the step then costs: ranks wait for each other after every micro batch.

    Round by round: the costliest pieces of all are the ranks' first ones, and so on, so that memory runs out at once if it does, and the
    pieces of a round cost alike. Within a round the rank with the least so far gets the most.
    """
    ranks = layout.num_ranks
    costs = [piece_cost(line, piece, layout) for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda i: (-costs[i], i))
    dealt: list[list[Piece]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for start in range(0, len(order), ranks):
        for piece, rank in zip(order[start : start + ranks], sorted(range(ranks), key=lambda r: (sums[r], r)), strict=True):
            dealt[rank].append(pieces[piece])
            sums[rank] += costs[piece]
    own_cost = int(path_cost(np.array(layout.max_tokens), layout.hidden_size)) // OVERHEAD_PART
    return dealt, sum(costs[i] + own_cost for i in order[::ranks])


def piece_tokens(line: Line, piece: Piece) -> int:
    """Number of tokens of a micro batch: its first item is computed in full."""
    start, end = piece
    return int((line.lengths - line.shared)[start:end].sum() + line.shared[start:end][:1].sum())


def piece_cost(line: Line, piece: Piece, layout: Layout) -> int:
    """Cost of a micro batch, in the unit of `path_cost`."""
    start, end = piece
    own, repeated = (path_cost(lengths[start:end], layout.hidden_size) for lengths in (line.lengths, line.shared))
    return int(own.sum() - repeated[1:].sum())


def path_cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Cost of the first `lengths` tokens of a sample, in (query, key) pairs of attention.

    A token sees itself and its ancestors. In a transformer layer its matrix products take 24 * hidden_size^2 operations (forward), each
    key that it sees 4 * hidden_size: as much as 6 * hidden_size keys.
    """
    return lengths * (6 * hidden_size) + lengths * (lengths + 1) // 2
