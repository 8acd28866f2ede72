"""What the server answers, as types: each route's answer is one of these as JSON, and `schema.py` describes them to the page.

A number that is not finite is null. Times are seconds since the epoch.
"""

from typing import Any, Literal

import msgspec

State = Literal["live", "ended", "died", "stopped", "unreadable"]


class Answer(msgspec.Struct, kw_only=True, frozen=True):
    """The base of all answers."""


class EvalChange(Answer):
    """An evaluation's mean reward at its first and its newest version."""

    name: str
    first: float
    last: float
    first_version: int
    last_version: int
    clear: bool
    """Whether they are further apart than twice the standard error of their difference."""


class RunRow(Answer):
    """A run in the list of runs."""

    key: str
    """What names the run in every other request."""
    name: str
    model: str
    environments: list[str]
    state: State
    why: str
    """What a live run does, how another one ended."""
    step: int
    max_steps: int
    reward: float | None
    rewards: list[float | None]
    """Means over at most 40 stretches of steps, for a small curve; of supervised fine-tuning its loss."""
    measure: str
    """The metric that `rewards` shows."""
    evals: list[EvalChange]
    lag: float | None
    tokens_per_s: float | None
    seconds: float
    """From the first sign of life to the last."""
    heard: float
    """When the run last gave a sign of life; 0 if it never did."""
    changed: float
    """When anything of it was last written."""
    bytes: int


class Runs(Answer):
    """The runs, those that changed last first."""

    runs: list[RunRow]
    place: str
    """Where they were looked for."""


class Learned(Answer):
    """The mean reward of several runs after the same number of rollouts; null where a run has none there."""

    samples: float
    rewards: list[float | None]


class SettingDiff(Answer):
    """A setting that differs; null where it is not set."""

    key: str
    values: list[Any]


class EvalPoint(Answer):
    """An evaluation of one version by each run; the error is one standard error over examples."""

    name: str
    version: int
    means: list[float | None]
    errors: list[float | None]


class Comparison(Answer):
    """Several runs side by side; lists are in the order of the runs."""

    runs: list[str]
    settings: list[SettingDiff]
    evals: list[EvalPoint]
    learned: list[Learned]
    """As far as the shortest run goes; empty where one has no rewards."""
    faults: list[str]
    """Configurations that could not be read."""


class Metric(Answer):
    """A metric that the runs have."""

    name: str
    section: str
    what: str
    """What it is, in words; empty for one of the user's own."""
    source: str


class Metrics(Answer):
    """All metrics of some runs, in the order in which they are shown."""

    metrics: list[Metric]


class Series(Answer):
    """A metric of one run. Lists are aligned."""

    run: str
    name: str
    steps: list[int]
    x: list[float | None]
    """What the axis asks for at these steps."""
    values: list[float | None]
    errors: list[float | None]
    """One standard error, of evaluations; empty for other metrics."""
    each: int
    """Of so many values, or one less, each is the mean; 1: they are as they were written."""
    firsts: list[int]
    """Of means, the first step of each, `steps` having the last; empty for values as they were written, as are the next two."""
    lows: list[float]
    """The least value of each."""
    highs: list[float]


class Mark(Answer):
    """Something that happened at a step."""

    run: str
    kind: Literal["eval", "checkpoint", "restart", "death", "change"]
    step: int
    x: float | None
    text: str


class Curves(Answer):
    """Curves of some metrics of some runs."""

    axis: Literal["step", "samples", "tokens", "time"]
    series: list[Series]
    marks: list[Mark]


class RolloutRow(Answer):
    """A rollout in a list."""

    kind: Literal["train", "pending", "eval"]
    step: int | None
    version: int | None
    env: str
    task: int
    group: int | None
    rollout: int | None
    """Its place in the group; of an evaluation the sample of its task."""
    agent: str
    reward: float | None
    advantage: float | None
    outcome: str
    why: str
    """`trained`, or why it was not; empty where it was not meant to be."""
    tokens: int
    turns: int
    failed: bool


class Histogram(Answer):
    """Counts between `edges`, one more than there are counts."""

    name: str
    edges: list[float]
    counts: list[int]
    ranges: list[list[float]]
    """The least and the greatest value that is counted in each; empty where there is none."""


class Rollouts(Answer):
    """A page of the rollouts that were asked for."""

    total: int
    """How many there are like that; with a search, how many were found so far."""
    offset: int
    rows: list[RolloutRow]
    facets: dict[str, dict[str, int]]
    """Of `env`, `why` and `outcome`: how many would be left with each value, all other filters kept."""
    histogram: Histogram | None
    """Of the rewards, with all filters but that of the reward."""
    sorts: list[str]
    searched: int | None
    """Of how many the text was looked through; null without a search."""
    complete: bool
    """Whether a search came to its end."""
    damaged: list[str]


class Call(Answer):
    """A tool call."""

    name: str
    arguments: str


class Message(Answer):
    """One message of a conversation."""

    role: str
    thinking: str
    text: str
    calls: list[Call]
    name: str
    """Of a tool's result: the tool, or the id of the call."""
    left_out: int
    """Characters that were cut out of the middle of a huge text."""


class RolloutDetail(Answer):
    """One rollout in full."""

    row: RolloutRow
    messages: list[Message]
    prompt: int
    """So many of the messages are the prompt; 0 where the rollout's line does not say."""
    metrics: dict[str, float | None]
    """Values of reward functions and other metrics."""
    fields: dict[str, Any]
    """What else its line says."""
    error: str
    group: list[RolloutRow]
    """Its group, itself included; of an evaluation the samples of its task."""
    explanation: str
    """Why it was trained or not, in a sentence."""
    has_tokens: bool


class Signal(Answer):
    """Something that is known of each trained token, and its scale in this rollout."""

    what: str
    most: float
    """Of almost all tokens the value, of a ratio its logarithm, is at most so large."""
    values: list[float]
    """Of policy versions those that there are, ascending; empty for other signals."""


class Tokens(Answer):
    """A stretch of a rollout's tokens, the samples that the trainer made of it one after the other. Lists are aligned."""

    total: int
    """Tokens of the rollout."""
    starts: list[int]
    """Where each sample begins."""
    offset: int
    pieces: list[str]
    ids: list[int]
    trained: list[bool]
    values: dict[str, list[float | None]]
    """By signal; null where it has no value."""
    signals: dict[str, Signal]
    note: str
    """What is missing, and why."""


class TaskRow(Answer):
    """A task in the list of tasks."""

    env: str
    task: int
    rollouts: int
    first: float | None
    """Mean reward in the first third of the versions that played it."""
    last: float | None
    change: float | None


class Tasks(Answer):
    """A page of the tasks of a run."""

    total: int
    offset: int
    rows: list[TaskRow]
    damaged: list[str]


class TaskVersion(Answer):
    """A task's rollouts of one policy version."""

    version: int
    mean: float | None
    count: int
    """How many there are; an exported page has fewer rows."""
    rows: list[RolloutRow]


class Task(Answer):
    """One task over all versions."""

    env: str
    task: int
    prompt: list[Message]
    versions: list[TaskVersion]
    without_version: int
    """Rollouts that failed before a version had sampled a token, which are not among them."""
    note: str = ""
    """What is left out."""


class Span(Answer):
    """What a lane did from `begin` to `end`."""

    name: str
    begin: float
    end: float
    text: str
    waits_for: str = ""
    """The process, or what else, that it waited for meanwhile; empty: it worked."""


class Lane(Answer):
    """A part of a process over time."""

    process: str
    name: str
    """Which part; empty for the process itself."""
    spans: list[Span]


class Moment(Answer):
    """Something that happened at one time."""

    kind: str
    time: float
    process: str
    text: str
    step: int | None


class Timeline(Answer):
    """Lanes between two times; `first` and `last` are those of the whole run."""

    begin: float
    end: float
    first: float
    last: float
    lanes: list[Lane]
    moments: list[Moment]
    quiet: list[Span]
    """When no process worked."""
    note: str


class Finding(Answer):
    """Something that is wrong, with its evidence."""

    text: str
    serious: bool
    metrics: list[str]
    why: str
    """The reason for which the rollouts were not trained that show it."""
    files: list[str]


class ProcessRow(Answer):
    """A process of the run."""

    name: str
    doing: str
    heartbeat: float | None
    attempts: list[int]
    """Those that have a log."""


class Health(Answer):
    """What `rl doctor RUN` says."""

    state: State
    bottleneck: str
    lines: list[str]
    findings: list[Finding]
    processes: list[ProcessRow]
    now: float


class Log(Answer):
    """The end of a log."""

    process: str
    attempt: int
    lines: list[str]
    bytes: int
