"""Checks whether the results that a worker sends are possible. The pool trusts no worker: any code
in its sandbox can impersonate it.

Rewards are not verified (docs/security.md), but nothing that a worker sends may reach a batch or
the run's files unless it could have come from the served model.
"""

import math
from array import array
from collections.abc import Iterator

import msgspec
from msgspec import ValidationError

from rl.run_dir.files import UNREADABLE
from rl.wire.rollouts import Rollout, unfit
from rl.wire.turns import AnswerSpan, Turns
from rl.wire.worker_messages import Played, PlayGroup, PolicySpec, ServerSet

MOST_LIKELY = 1e-3
"""Nats. A log-probability above 0 by more than rounding is invalid."""


def validate_played(
    played: Played, order: PlayGroup, policy: PolicySpec, server_set: ServerSet | None
) -> None:
    """Raises msgspec.ValidationError if a worker cannot have played this. `order`: the order for
    the unfinished rest of the group."""
    episodes, finished = {rollout.episode for rollout in played.rollouts}, set(order.done)
    if wrong := episodes & finished or episodes - set(range(order.num_episodes)):
        raise ValidationError(
            f"episode {min(wrong)} of a group of {order.num_episodes}, of which "
            f"{len(finished)} were finished"
        )
    left = order.num_episodes - len(finished) - len(episodes)
    if played.unfinished != left:
        raise ValidationError(
            f"{played.unfinished} unfinished episodes of a group of {order.num_episodes}, of "
            f"which {left} are left"
        )
    for i, rollout in enumerate(played.rollouts):
        if why := next(
            faults_of(
                rollout, policy, server_set.newest if server_set else None, order.split == "train"
            ),
            "",
        ):
            raise ValidationError(f"rollout {i}: {why}")


def faults_of(
    rollout: Rollout, policy: PolicySpec, newest: int | None, trains: bool
) -> Iterator[str]:
    """Yields what is impossible in one rollout. `newest`: the newest policy version; None if
    unknown. `trains`: see faults_of_answer."""
    if why := unfit(rollout):
        yield why
    if isinstance(rollout.text, bytes):
        yield from faults_of_text(rollout.text)
    if not rollout.error:
        yield from faults_of_turns(rollout.turns, policy, newest, trains)


def faults_of_text(text: bytes) -> Iterator[str]:
    """Yields why a text is not the messages of a line: it is copied into files of JSON lines
    without being written again."""
    if b"\n" in text or b"\r" in text:
        yield "messages with the end of a line"
    try:
        text.decode()
        msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
    except UNREADABLE as error:
        yield f"messages that are not JSON ({error})"


def faults_of_turns(
    turns: Turns, policy: PolicySpec, newest: int | None, trains: bool = True
) -> Iterator[str]:
    """Yields what the served model cannot have sampled, or been asked."""
    for chain in turns.chains:
        # not numpy: its import starts a thread, and only a single-threaded process can be forked as
        # a copy
        ids = array("i", chain.tail)
        if ids and (min(ids) < 0 or 0 < policy.vocab_size <= max(ids)):
            yield (
                f"token ids {min(ids)} to {max(ids)}; the model's are 0 to {policy.vocab_size - 1}"
            )
    for answer in turns.answers:
        if answer.end > policy.max_model_len:
            yield f"{answer.end} tokens; model.max_model_len = {policy.max_model_len}"
        yield from faults_of_answer(answer, newest, trains)


def faults_of_answer(answer: AnswerSpan, newest: int | None, trains: bool) -> Iterator[str]:
    """`trains`: whether the log-probabilities are trained. In an evaluation nobody reads them,
    and workers let any through."""
    logprobs = array("f", answer.logprobs) if trains else array("f")
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > MOST_LIKELY:
        yield (
            "the log-probability "
            f"{next((p for p in logprobs if not -math.inf < p <= MOST_LIKELY), -math.inf)}"
        )
    versions = [span.policy_version for span in answer.policy_versions]
    if newest is not None and max(versions, default=0) > newest:
        yield f"tokens of version {max(versions)}; the newest is {newest}"
