"""Mismatch KL by where a token is: its depth in the context, its turn, and the number of chunks in
which the server computed what precedes the answer.

A fault that begins at some depth hardly shows in the mean over all tokens, because most of them
are shallow.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from rl.diagnosis.problems import MismatchRow, Problem
from rl.diagnosis.state import RunState
from rl.run_dir.numbers import FIRST, MAX_LOG_RATIO, SUFFIX, read_token_log
from rl.run_dir.paths import RunDir, numbers
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch
from rl.wire.messages import TrainingSample
from rl.wire.parity import RUN_LIMITS, clear_rises

MAX_STEPS, MAX_BYTES = 8, 128 << 20
"""The newest steps that are read, and the bytes of their files: fewer steps if they have more, but
always one."""
BINS, DEPTH = 32, 128
"""Bins of each kind of place, and the tokens of the first bin of depths; each further bin ends at
twice the number."""
GAP = 2
"""Tokens; templates write more between two turns."""
UNKNOWN = 1 << 40
"""In place of the chunks' size, if no server has reported it."""
KINDS = {
    "depth in the context": (
        DEPTH,
        "from token {first:,} of a sample on",
        "rotary scaling, a sliding window or the type of the KV cache "
        "(inference.vllm.kv_cache_dtype) may differ between trainer and inference: `rl doctor "
        "--parity {model.name} --model.max_model_len {model.max_model_len} --tokens N`, with an N "
        "above {first}, compares them there; until it is mended, lower model.max_model_len to "
        "{first}",
    ),
    "turn": (
        1,
        "after turn {first}",
        "inference continues what it has cached of earlier turns: try "
        "inference.vllm.enable_prefix_caching = false",
    ),
    "chunks of the prompt": (
        1,
        "after prompts of more than {first} x {chunk} tokens",
        "inference computes them in several chunks: try inference.vllm.max_num_batched_tokens = "
        "{model.max_model_len}, which is model.max_model_len",
    ),
}
"""The places of tokens: the width of the first bin, and for the message about a rise where it is,
and its remedy."""


def mismatch_by_place(state: RunState) -> tuple[list[MismatchRow], list[Problem]]:
    """Returns mismatch KL in a run's newest steps by place, and a problem if it clearly rises.
    Leaves out kinds of place of which all tokens are in the first bin.

    Both are empty without tokens of the trained version. Of several minibatches only the first
    counts: the token log has the others after an optimizer step, which is no mismatch.
    """
    run_dir, config, left = state.run_dir, state.config, MAX_BYTES
    has_others = config.trainer.minibatches > 1
    chunk, sums = UNKNOWN, [np.zeros((3, 0, BINS, 3))]
    for event in state.events:
        chunk = event.prefill_tokens or chunk
    steps = numbers(run_dir.tokens_dir, SUFFIX)
    for step in steps[: -MAX_STEPS - 1 : -1]:
        with suppress(RunError, OSError):  # of damaged files, which others report
            left -= run_dir.batch(step).stat().st_size
            if left >= 0 or not sums[1:]:
                changed = run_dir.tokens(step).stat().st_mtime_ns
                sums.append(step_sums(run_dir, step, chunk, has_others, changed))
    rows, rises, limit = list[MismatchRow](), list[Any](), RUN_LIMITS[config.model.dtype].kl
    for kind, by_bin in zip(KINDS, np.concatenate(sums, axis=1), strict=True):
        if by_bin[:, 1:].any():
            rows += rows_of(kind, by_bin)
            rises += [(*rise, kind) for rise in clear_rises(by_bin, limit)]
    if not rises:
        return rows, []
    _, cut, low, high, error, kind = max(rises)
    unit, where, remedy = KINDS[kind]
    text = (
        f"mismatch KL is {high:.2g} {where}, else {low:.2g} (the difference ± {error:.1g}): "
        f"{remedy}"
    ).format(first=unit * (1 << cut >> 1), chunk=chunk, model=config.model)
    return rows, [Problem(text, False, ("mismatch_kl/mean",))]


@lru_cache(2 * MAX_STEPS)
def step_sums(
    run_dir: RunDir, step: int, chunk: int, has_others: bool, _changed: int
) -> np.ndarray:
    """Returns [3, S, BINS, 3] of a batch's S samples: for each of KINDS the number of tokens of the
    trained version, the sum of their k3, and that of their entropies, in nats. chunk: the most
    tokens that the server computes at once. has_others: leaves out tokens that were not scored
    before the batch's first optimizer step.

    Raises CorruptFileError, RunError or OSError.
    """
    path = run_dir.batch(step)
    samples = decode_batch(path.read_bytes(), str(path)).batch.samples
    table = np.array([*stretches(samples, chunk)]).T
    sample, version, length = table[:3]
    columns = read_token_log(run_dir.tokens(step), length.sum())
    logprobs = np.concatenate([sample.logprobs for sample in samples], dtype=np.float64)
    x = np.clip(columns["trainer_logprobs"] - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_unknown = np.isnan(x)
    if has_others:
        is_unknown |= columns["flags"] & FIRST == 0
    values = np.where(is_unknown, 0.0, [x**0, np.expm1(x) - x, columns["entropies"]])
    totals = np.add.reduceat(values, length.cumsum() - length, axis=1) * (version == step - 1)
    sums = np.zeros((3, len(samples), BINS, 3))
    np.add.at(sums, (np.arange(3)[:, None], sample, table[3:]), totals.T)
    return sums


def stretches(samples: list[TrainingSample], chunk: int) -> Iterator[tuple[int, ...]]:
    """Yields (index of the sample, version, number of tokens, bin of each of KINDS) of trained
    tokens that follow each other, in order.

    Spans that touch are one turn, and with kept ids those up to GAP apart, by tokens of which too
    many were kept. Where the version changes within it, the server has dropped
    its cache, and computes all tokens before as a prompt again.
    """
    for index, sample in enumerate(samples):
        turn, chunks, end, version, gap = -1, 0, -1 - GAP, -1, GAP * bool(sample.kept)
        for span in sample.spans:
            start = span.start
            turn += (is_new := start > end + gap)
            if is_new or version != span.policy_version:
                chunks = (start - 1) // chunk
            end, version = span.end, span.policy_version
            while start < end:
                depth = (start // DEPTH).bit_length()
                stop = min(end, DEPTH << depth)
                yield (index, version, stop - start, depth, turn.bit_length(), chunks.bit_length())
                start = stop


def rows_of(kind: str, sums: np.ndarray) -> Iterator[MismatchRow]:
    """Yields the bins that have tokens. sums: [S, BINS, 3], see `step_sums`."""
    unit = KINDS[kind][0]
    for number, (tokens, kls, _) in enumerate(sums.transpose(1, 2, 0)):
        if total := int(tokens.sum()):
            kl = float(kls.sum()) / total
            error = float(np.linalg.norm(kls - kl * tokens)) / total
            samples, from_1 = int(np.count_nonzero(tokens)), 1 // unit  # turns and chunks
            first, last = unit * (1 << number >> 1) + from_1, (unit << number) - 1 + from_1
            yield MismatchRow(kind, first, last, total, samples, kl, error)
