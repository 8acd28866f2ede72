"""Rollouts of the page: filters, searches, sorts and pages them, shows one in full, and explains
in a sentence why it was trained or not."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from rl.diagnosis.rollouts import Row, calls_of, contains, content_texts, num_prompt_messages, plain
from rl.records.rollouts import ERROR, Rollouts, StoredRollout
from rl.records.run import Run
from rl.system.errors import RunError
from rl.system.terminal import visible
from rl.view.responses import Call, Histogram, Message, RolloutDetail, RolloutRow
from rl.view.responses import RolloutPage as Page
from rl.wire.rollouts import all_equal

FACETS = ("env", "why", "outcome")
MOST_WORDS = 100
"""Maximum number of listed values of a field."""
BINS = 24
"""Number of bins in the histogram."""
SEARCH_S = 2.5
"""Seconds after which a text search returns what it has found so far."""
MOST_FOUND = 1000
SORTS = ("step", "version", "reward", "advantage", "num_tokens", "num_turns", "task", "retries")
MOST_CHARACTERS = 200_000
"""Maximum length of one message; the middle of a longer one is left out."""


Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A finite number in a query."""
Offset = Annotated[int, msgspec.Meta(ge=0)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=500)]
"""Number of rows on a page."""


class Wanted(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The parameters that select rollouts of a run; None and empty text match any."""

    run: str
    kind: str = "train"
    begin: int | None = None
    """First step (first version in evaluations); `end` is inclusive."""
    end: int | None = None
    env: str = ""
    task: int | None = None
    group: int | None = None
    outcome: str = ""
    why: str = ""
    lowest: Number | None = None
    """Minimum reward."""
    highest: Number | None = None
    shortest: int | None = None
    """Minimum number of sampled tokens."""
    longest: int | None = None
    tool_errors: bool = False
    """Only rollouts with a tool result that mentions an error."""
    q: str = ""
    """Text in the conversation or the error, ignoring case."""
    sort: str = ""
    descending: bool = True
    offset: Offset = 0
    limit: Limit = 50


class Which(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Identifies one rollout of a run: in training by group, in an evaluation by version,
    evaluation and task."""

    run: str
    kind: Literal["train", "pending", "eval"] = "train"
    rollout: int
    group: int | None = None
    version: int | None = None
    env: str = ""
    task: int | None = None
    agent: str = ""


def page(run: Run, wanted: Wanted) -> Page:
    """One page of the selected rollouts. Raises RunError for an unknown kind or sort."""
    everything, filters = run.rollouts(wanted.kind), filters_of(wanted)
    sorts = sorts_of(everything)
    if wanted.sort and wanted.sort not in sorts:
        raise RunError(f"sort = {wanted.sort}: give one of {', '.join(sorts)}")

    def without(name: str) -> Rollouts:
        return everything.where(**{key: filters[key] for key in filters if key != name})

    order = "version" if wanted.kind == "eval" else "step"
    chosen = everything.where(**filters).sorted(order, descending=True)
    if wanted.sort:
        chosen = chosen.sorted(wanted.sort, descending=wanted.descending)
    rows: Sequence[StoredRollout] = chosen
    searched, complete = None, True
    if wanted.q or wanted.tool_errors:
        rows, searched, complete = search(chosen, wanted)
    return Page(
        total=len(rows),
        offset=wanted.offset,
        rows=[row_of(rollout) for rollout in rows[wanted.offset : wanted.offset + wanted.limit]],
        facets={name: facet(without(name), name) for name in FACETS},
        histogram=histogram_of(without("reward")),
        sorts=sorts,
        searched=searched,
        complete=complete,
        damaged=list(run.damaged.values()),
    )


def sorts_of(rollouts: Rollouts) -> list[str]:
    """The names that rollouts can be sorted by: SORTS, and every metric."""
    return [*SORTS, *rollouts.metrics]


def facet(rollouts: Rollouts, name: str) -> dict[str, int]:
    """The number of rollouts that a filter on each value of a field finds, the most frequent
    first."""
    counts = rollouts.counts(name)
    if name == "why" and (failed := len(rollouts.where(why=ERROR))):
        counts = dict(sorted((counts | {ERROR: failed}).items(), key=lambda pair: -pair[1]))
    return dict(list(counts.items())[:MOST_WORDS])


def filters_of(wanted: Wanted) -> dict[str, Any]:
    """The filters as arguments of `Rollouts.where`, without empty ones."""
    filters = {
        "version" if wanted.kind == "eval" else "step": (wanted.begin, wanted.end),
        "reward": (wanted.lowest, wanted.highest),
        "num_tokens": (wanted.shortest, wanted.longest),
        "task": wanted.task,
        "group_id": wanted.group,
        "env": wanted.env,
        "outcome": wanted.outcome,
        "why": wanted.why,
    }
    empty = (None, "", (None, None))
    return {name: value for name, value in filters.items() if value not in empty}


def histogram_of(rollouts: Rollouts) -> Histogram | None:
    """A histogram of the rewards in BINS equal bins; None if there are no rewards, or all are
    equal."""
    values = np.sort(rollouts.column("reward"))
    values = values[np.isfinite(values)]
    if not len(values) or values[0] == values[-1]:
        return None
    counts, edges = np.histogram(values, bins=BINS)
    bins = np.split(values, np.cumsum(counts)[:-1])
    ranges = [[float(values[0]), float(values[-1])] if len(values) else [] for values in bins]
    return Histogram(edges=edges.tolist(), counts=counts.tolist(), ranges=ranges)


def search(rollouts: Rollouts, wanted: Wanted) -> tuple[list[StoredRollout], int, bool]:
    """Returns the rollouts found, the number searched, and whether that were all. Stops after
    SEARCH_S, or at MOST_FOUND."""
    deadline, text = time.monotonic() + SEARCH_S, wanted.q.casefold()
    hits, num_searched = list[StoredRollout](), 0
    for rollout in rollouts:
        if time.monotonic() > deadline or len(hits) >= MOST_FOUND:
            return hits, num_searched, False
        num_searched += 1
        # a file that is gone; one that is damaged is reported elsewhere
        with contextlib.suppress(RunError):
            row = rollout.row
            is_hit = not text or contains(row, text)
            if is_hit and (not wanted.tool_errors or has_tool_error(row)):
                hits.append(rollout)
    return hits, num_searched, True


def has_tool_error(row: Row) -> bool:
    """Whether a tool result mentions an error at its beginning. It is free text, so there is no
    better sign."""
    return any(
        "error" in "\n".join(content_texts(message.get("content")))[:200].casefold()
        for message in row["messages"]
        if message.get("role") == "tool"
    )


def row_of(rollout: StoredRollout) -> RolloutRow:
    """The row of a rollout in a list."""
    is_eval = rollout.kind == "eval"
    return RolloutRow(
        kind=rollout.kind,
        step=rollout.step,
        version=rollout.version,
        env=rollout.env,
        task=rollout.task,
        group=rollout.group_id,
        rollout=rollout.episode if is_eval else rollout.rollout_id,
        agent=rollout["agent"],
        reward=finite(rollout.reward),
        advantage=finite(rollout.advantage),
        outcome=rollout.outcome,
        why=rollout.why,
        tokens=rollout["num_tokens"],
        turns=rollout["num_turns"],
        failed=bool(rollout["failed"]),
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def group_of(run: Run, which: "Which | RolloutRow") -> Rollouts:
    """The group of a rollout; in an evaluation, the samples of its task. Raises RunError if none
    is given."""
    if which.kind == "eval":
        samples = run.rollouts("eval", version=which.version, env=which.env, task=which.task)
        return samples.sorted("episode")
    if which.group is None:
        raise RunError(f"rollout {which.rollout}: give its group, too")
    group = run.rollouts(which.kind, group_id=which.group)
    if which.kind == "train" and not len(group):
        group = run.rollouts("pending", group_id=which.group)
    return group.sorted("rollout_id")


def find(run: Run, which: Which) -> tuple[StoredRollout, Rollouts]:
    """Finds a rollout and its group. Raises RunError if it does not exist."""
    group = group_of(run, which)
    number = {"episode" if which.kind == "eval" else "rollout_id": which.rollout}
    if meant := group.where(**number, agent=which.agent or None):
        return meant[0], group
    of = f"task {which.task}" if which.kind == "eval" else f"group {which.group}"
    raise RunError(f"rollout {which.rollout} of {of} does not exist (any more)")


def in_full(run: Run, rollout: StoredRollout, beside: Rollouts) -> RolloutDetail:
    """A rollout in full, with its group; see `find`. Raises RunError if its text is gone."""
    row, number = rollout.row, row_of(rollout)
    group = [row_of(other) for other in beside]
    shown = {"messages", "metrics", "error", "reward", "advantage"}
    return RolloutDetail(
        row=number,
        messages=messages_of(row),
        prompt=num_prompt_messages(row),
        metrics={name: finite(value) for name, value in rollout.metrics.items()},
        fields={
            name: visible(value) if isinstance(value, str) else value
            for name, value in row.items()
            if name not in shown
        },
        error=visible(str(row.get("error") or "")),
        group=group,
        explanation=explanation(number, group, run),
        has_tokens=number.kind == "train"
        and number.why == "trained"
        and number.step is not None
        and run.run_dir.batch(number.step).exists(),
    )


def messages_of(row: Row) -> list[Message]:
    """The conversation, split into its parts, with control and hidden characters escaped."""
    return [message_of(message) for message in row["messages"]]


def message_of(message: dict[str, Any]) -> Message:
    """One message. Thinking between tags in the content is moved to its own field."""
    text = "\n".join(content_texts(message.get("content")))
    thinking = plain(message.get("reasoning_content") or message.get("thinking") or "")
    if message.get("role") == "assistant" and not thinking:
        head, close, tail = text.partition("</think>")
        if close:
            thinking, text = head.replace("<think>", "", 1).strip(), tail.lstrip("\n")
    shown, left_out = bounded(visible(text))
    return Message(
        role=visible(str(message.get("role") or "")),
        thinking=bounded(visible(thinking))[0],
        text=shown,
        calls=[
            Call(name=visible(name), arguments=visible(pretty(arguments)))
            for name, arguments in calls_of(message)
        ],
        name=visible(str(message.get("name") or message.get("tool_call_id") or "")),
        left_out=left_out,
    )


def pretty(arguments: Any) -> str:
    """Arguments as indented JSON, or unchanged if they are not JSON."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return plain(arguments)
    return (
        json.dumps(value, ensure_ascii=False, indent=1)
        if isinstance(value, (dict, list))
        else plain(arguments)
    )


def bounded(text: str) -> tuple[str, int]:
    """The text, without its middle if it is too long, and the number of characters left out."""
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text, 0
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}", left_out


# Why a rollout was trained or not -----------------------------------------------------------------


REASONS = {
    "error": "another rollout of its group failed, and the rest of a group would be biased",
    "stale": "it is older than orchestrator.max_off_policy_steps allows",
    "surplus": "earlier groups filled its batch (extra groups are started because some have no "
    "signal); its task is played next",
    "empty": "no token was sampled",
    "overlong": "its prompt left no room for an answer: raise model.max_model_len",
    "truncated": "its answer was cut off, and orchestrator.mask_truncated leaves such answers out; "
    "raise orchestrator.sampling.max_tokens",
    "kept_overflow": "at each of its tokens sampling kept more ids than trainer.max_kept; raise "
    "that, or set orchestrator.sampling.top_k",
    "filtered": "orchestrator.filter dropped it",
    "not_trainable": "its agent is not trained",
    "environment": "it failed: the environment's code raised an exception",
    "reward": "it failed: a reward function raised an exception, or returned no finite number",
    "inference": "it failed: the inference server did not answer",
    "timeout": "it failed: a deadline passed",
    "worker": "it failed: its worker process died",
    "teacher": "it failed: the teacher did not score it",
    "logprobs": "it failed: the sampler returned a log-probability that is not finite",
    "pending": "no batch has settled it yet",
}
"""Sentences for the values of `why` in rollouts/*.jsonl."""


def explanation(row: RolloutRow, group: Sequence[RolloutRow], run: Run) -> str:
    """Explains what became of a rollout and why; empty for an evaluation's rollout."""
    if row.kind == "eval":
        return ""
    rewards = [other.reward for other in compared_with(row, group) if other.reward is not None]
    whose = (
        f"agent {row.agent} in its group"
        if len({other.agent for other in group}) > 1
        else "its group"
    )
    if row.why == "no_signal":
        equal = equal_rewards(rewards, whose)
        return (
            f"Not trained: {equal}, so no answer was better than the others and there is nothing "
            "to learn from it."
        )
    if row.why == "trained":
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        if row.advantage and row.reward is not None:
            side = "above" if row.reward > mean else "below" if row.reward < mean else "at"
            if (row.reward - mean) * row.advantage <= 0:  # another baseline, or a length penalty
                return (
                    f"Trained in step {row.step} with advantage {row.advantage:+.3f}, by "
                    f"{credit(run)}; the mean of {whose} is {mean:.3f}."
                )
            return (
                f"Trained in step {row.step} with advantage {row.advantage:+.3f}: its reward is "
                f"{side} the mean of {whose}, {mean:.3f}."
            )
        return (
            f"In the batch of step {row.step} with advantage 0: {credit(run)} gives it nothing to "
            "learn, and its tokens still count in the mean."
        )
    if row.why == "stale" and on_policy(run):
        return (
            "Not trained: with max_lag = 0 a batch has tokens of the newest version only, and an "
            "older one sampled some of it."
        )
    reason = REASONS.get(row.why, row.why)
    return f"Not trained: {reason}." if row.why else ""


def compared_with(row: RolloutRow, group: Sequence[RolloutRow]) -> list[RolloutRow]:
    """The rollouts of its group that credit compares a rollout with, including itself: those of
    its agent that did not fail and may be trained (`compared` in
    orchestrator/groups/group_credit.py)."""
    return [
        other
        for other in group
        if other.agent == row.agent and not other.failed and other.why != "not_trainable"
    ]


def equal_rewards(rewards: Sequence[float], whose: str) -> str:
    """Why a group has no signal, such as `all 8 rewards of its group are 1`. whose: `its group`,
    or one agent in it."""
    if rewards and all_equal(rewards):
        return f"all {len(rewards)} rewards of {whose} are {rewards[0]:g}"
    return f"all advantages of {whose} are 0"


def on_policy(run: Run) -> bool:
    """Whether the run's batches have tokens of the newest version only; False if its
    configuration cannot be read."""
    try:
        return run.config.max_lag == 0
    except RunError:
        return False


def credit(run: Run) -> str:
    """The run's type of credit assignment."""
    try:
        config = run.config.orchestrator.credit
        return config.type + (" with its length_penalty" if config.length_penalty else "")
    except RunError:
        return "the run's credit assignment"
