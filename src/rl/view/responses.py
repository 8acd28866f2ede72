"""The types of the server's answers, which it sends as JSON. `page/types.d.ts` has them for the
page.

Numbers that are not finite are null. Times are seconds since the epoch.
"""

from typing import Any, Literal

import msgspec

from rl.diagnosis.problems import MismatchRow
from rl.records.comparison import EvalPoint, SettingDiff

State = Literal["live", "ended", "died", "stopped", "unreadable"]


class PageAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """Base class of all answers."""


class EvalChange(PageAnswer):
    """An evaluation's mean reward at its first and its newest version."""

    name: str
    first: float
    last: float
    first_version: int
    last_version: int
    clear: bool
    """Whether they differ by more than twice the standard error of their difference."""


class RunRow(PageAnswer, kw_only=True):
    """A run in the list of runs; a run that cannot be read has only the fields without a
    default."""

    key: str
    """Identifies the run in all other requests."""
    name: str
    model: str = ""
    environments: list[str] = []
    state: State
    why: str
    """What a live run is doing, or how another one ended."""
    step: int = 0
    max_steps: int = 0
    reward: float | None = None
    rewards: list[float | None] = []
    """Means over at most 40 stretches of steps, for a small curve; the loss in supervised
    fine-tuning and under `rl serve`."""
    measure: str = "reward/mean"
    """The metric that `rewards` shows."""
    evals: list[EvalChange] = []
    lag: float | None = None
    tokens_per_s: float | None = None
    seconds: float = 0.0
    """Seconds from the first sign of life to the last."""
    last_sign: float = 0.0
    """Time of the last sign of life; 0 if there was none."""
    changed: float
    """Time of the last write to its files."""
    bytes: int


class Runs(PageAnswer):
    """The runs, live ones first, then most recently changed first."""

    runs: list[RunRow]
    folders: str
    """The places that were searched for runs."""


class Learned(PageAnswer):
    """The mean rewards of several runs after the same number of rollouts; null if a run has none
    there."""

    rollouts: float
    rewards: list[float | None]


class Comparison(PageAnswer):
    """A comparison of runs; lists are in the order of the runs."""

    settings: list[SettingDiff]
    evals: list[EvalPoint]
    learned: list[Learned]
    """Up to the length of the shortest run; empty if a run has no rewards."""
    faults: list[str]
    """Configurations that could not be read."""
    notes: list[str]
    """Runs that are branches: their rollouts follow those of another run."""


class Metric(PageAnswer):
    """A metric that the runs have."""

    name: str
    section: str
    what: str
    """Its meaning in words; empty for a custom metric."""


class Metrics(PageAnswer):
    """All metrics of some runs, in display order."""

    metrics: list[Metric]


class Series(PageAnswer):
    """A metric of one run. Lists are aligned."""

    run: str
    name: str
    steps: list[int]
    x: list[float | None]
    """The positions of these steps on the axis."""
    values: list[float | None]
    errors: list[float | None]
    """One standard error, for evaluations; empty for other metrics."""
    each: int
    """Each value is a mean over this many original values, or one less; 1 for original values."""
    firsts: list[int]
    """The first step of each mean, of which `steps` has the last; for original values this and
    the next two lists are empty."""
    lows: list[float]
    """The minimum under each mean."""
    highs: list[float]


class CurveMark(PageAnswer):
    """An event at a step."""

    run: str
    kind: Literal["eval", "checkpoint", "restart", "death", "change"]
    step: int
    x: float | None
    text: str


class Curves(PageAnswer):
    """Curves of some metrics of some runs."""

    series: list[Series]
    marks: list[CurveMark]


class RolloutRow(PageAnswer):
    """A rollout in a list."""

    kind: Literal["train", "pending", "eval"]
    step: int | None
    version: int | None
    env: str
    task: int
    group: int | None
    rollout: int | None
    """Index in its group; in an evaluation, index of the sample of its task."""
    agent: str
    reward: float | None
    advantage: float | None
    outcome: str
    why: str
    """`trained`, or the reason why it was not; empty if it was not meant for training."""
    tokens: int
    turns: int
    failed: bool


class Histogram(PageAnswer):
    """Counts of rewards between `edges`, which has one entry more than `counts`."""

    edges: list[float]
    counts: list[int]
    ranges: list[list[float]]
    """The minimum and maximum value in each bin; empty for an empty bin."""


class RolloutPage(PageAnswer):
    """A page of the selected rollouts."""

    total: int
    """Number of selected rollouts; with a search, the number found so far."""
    offset: int
    rows: list[RolloutRow]
    facets: dict[str, dict[str, int]]
    """For `env`, `why` and `outcome`: the number of rollouts with each value, under all other
    filters."""
    histogram: Histogram | None
    """Histogram of the rewards, under all filters except the one on the reward."""
    sorts: list[str]
    searched: int | None
    """Number of rollouts whose text was searched; null without a search."""
    complete: bool
    """Whether a search is complete."""
    damaged: list[str]


class Call(PageAnswer):
    """A tool call."""

    name: str
    arguments: str


class Message(PageAnswer):
    """One message of a conversation."""

    role: str
    thinking: str
    text: str
    calls: list[Call]
    name: str
    """For a tool result: the tool, or the id of the call."""
    left_out: int
    """Number of characters cut out of the middle of a long text."""


class RolloutDetail(PageAnswer):
    """One rollout in full."""

    row: RolloutRow
    messages: list[Message]
    prompt: int
    """Number of messages in the prompt; 0 if the rollout's line does not have it."""
    metrics: dict[str, float | None]
    """Values of reward functions and other metrics."""
    fields: dict[str, Any]
    """The other fields of its line."""
    error: str
    group: list[RolloutRow]
    """Its group, including itself; in an evaluation, the samples of its task."""
    explanation: str
    """Why it was trained or not, in a sentence."""
    has_tokens: bool


class Signal(PageAnswer):
    """A value of each trained token, and its scale in this rollout."""

    what: str
    most: float
    """Upper bound of the absolute value (of the logarithm for a ratio) at almost all tokens."""
    values: list[float]
    """The distinct policy versions, ascending; empty for other signals."""


class Tokens(PageAnswer):
    """A range of a rollout's tokens, with its training samples concatenated. Lists are aligned."""

    total: int
    """Number of tokens of the rollout."""
    starts: list[int]
    """Index of the first token of each sample."""
    offset: int
    pieces: list[str]
    ids: list[int]
    trained: list[bool]
    values: dict[str, list[float | None]]
    """Values by signal; null where there is none."""
    signals: dict[str, Signal]
    note: str
    """What is missing, and why."""


class TaskRow(PageAnswer):
    """A task in the list of tasks."""

    env: str
    task: int
    rollouts: int
    first: float | None
    """Mean reward in the first third of the versions that played it."""
    last: float | None
    change: float | None
    prompt: str = ""
    """The beginning of its prompt's last message."""


class Tasks(PageAnswer):
    """A page of the tasks of a run."""

    total: int
    offset: int
    rows: list[TaskRow]
    damaged: list[str]


class TaskVersion(PageAnswer):
    """A task's rollouts of one policy version."""

    version: int
    mean: float | None
    count: int
    """Number of rollouts; an exported page has fewer rows."""
    rows: list[RolloutRow]


class TaskDetail(PageAnswer):
    """One task over all versions."""

    env: str
    task: int
    prompt: list[Message]
    versions: list[TaskVersion]
    without_version: int
    """Number of rollouts that failed before their first token, which `versions` does not have."""
    note: str = ""
    """What is left out."""


class LaneSpan(PageAnswer):
    """What a lane was doing from `begin` to `end`."""

    name: str
    begin: float
    end: float
    text: str
    waits_for: str = ""
    """The process or other thing that it waited for; empty if it worked."""


class Lane(PageAnswer):
    """A part of a process over time."""

    process: str
    name: str
    """Name of the part; empty for the process itself."""
    spans: list[LaneSpan]


class Moment(PageAnswer):
    """An event at one time."""

    kind: str
    time: float
    process: str
    text: str
    step: int | None


class LaneTimeline(PageAnswer):
    """Lanes between two times; `first` and `last` are those of the whole run."""

    begin: float
    end: float
    first: float
    last: float
    lanes: list[Lane]
    moments: list[Moment]
    quiet: list[LaneSpan]
    """Intervals in which no process worked."""
    note: str


class Finding(PageAnswer):
    """A problem with its evidence."""

    text: str
    serious: bool
    metrics: list[str]
    why: str
    """The `why` of the rollouts that show it."""
    files: list[str]


class ProcessRow(PageAnswer):
    """A process of the run."""

    name: str
    doing: str
    heartbeat: float | None
    attempts: list[int]
    """The attempts that have a log."""


class MachineRow(PageAnswer):
    """A machine of a run on a cluster. Times are by this server's clock, and null for one that
    is not there."""

    index: int
    host: str
    does: str
    facts: str
    """Its devices, and its part in the training."""
    state: Literal["live", "leaving", "lost", "absent"]
    since: float | None
    last_sign: float | None
    processes: list[str]


class Health(PageAnswer):
    """The diagnosis of `rl doctor RUN`."""

    state: State
    bottleneck: str
    lines: list[str]
    findings: list[Finding]
    processes: list[ProcessRow]
    machines: list[MachineRow]
    mismatch: list[MismatchRow] = []


class Log(PageAnswer):
    """The end of a log."""

    lines: list[str]
    bytes: int
