"""Log-probability and entropy of given tokens, a few rows at a time, so that memory holds only some
of the logits, and of their float32 copies, at once.

Chunks are recomputed in the backward pass (torch's `checkpoint`). Logits have the type that the
model computes in, as in the inference engine; the softmax is float32.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rl.trainer.model.compiled import compiled

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
    chosen, entropies = torch.zeros(len(rows), device=inputs.device), list[Tensor]()
    for number, (part, own_temperatures) in enumerate(
        zip(inputs.split(size), temperatures.split(size), strict=True)
    ):
        # Each chunk looks up all targets and drops those of other chunks: counting its own would
        # mean waiting for the device.
        places = rows - number * size
        indices = places.clamp(0, len(part) - 1)
        arguments = (part, own_temperatures, indices, targets)
        logprobs, of_rows = checkpoint(
            score, *arguments, use_reentrant=False, preserve_rng_state=False
        )
        chosen = torch.where(indices == places, logprobs, chosen)
        entropies.append(of_rows)
    return chosen, torch.cat(entropies)


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled(function, "please report this")
