"""What the page can ask for: a table of routes, each with the parameters that it takes and the answer that it gives."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from rl.records.run import Run
from rl.system.errors import RunError
from rl.view import answers, curves, health, rollouts, runs, tasks, timeline, tokens
from rl.view.library import Library


class Parameters(msgspec.Struct, kw_only=True, frozen=True):
    """The base of all parameters: what stands in the address behind the path."""


class NoParameters(Parameters):
    """Of a route that takes none."""


class OfRun(Parameters):
    """One run."""

    run: str


class OfRuns(Parameters):
    """Some runs."""

    run: list[str]


class CurveParameters(OfRuns):
    """Metrics of runs, between two places of the axis."""

    name: list[str] = []
    axis: Literal["step", "samples", "tokens", "time"] = "step"
    begin: float | None = None
    end: float | None = None


class RolloutsParameters(rollouts.Wanted, kw_only=True):
    """A run, and which of its rollouts."""

    run: str


class RolloutParameters(OfRun, kw_only=True):
    """One rollout: of training by its group, of an evaluation by version, evaluation and task."""

    kind: Literal["train", "pending", "eval"] = "train"
    rollout: int
    group: int | None = None
    version: int | None = None
    env: str = ""
    task: int | None = None
    agent: str = ""


class TokensParameters(OfRun):
    """A stretch of a trained rollout."""

    step: int
    group: int
    rollout: int
    offset: int = 0
    limit: int = 1024


class TasksParameters(OfRun):
    """A page of the tasks."""

    kind: Literal["train", "eval"] = "train"
    env: str = ""
    number: int | None = None
    """The task alone that has it, of each environment."""
    sort: str = ""
    descending: bool = True
    offset: int = 0
    limit: int = 50


class TaskParameters(OfRun, kw_only=True):
    """One task."""

    kind: Literal["train", "eval"] = "train"
    env: str
    task: int


class TimelineParameters(OfRun):
    """A stretch of time, seconds since the epoch; without it the newest minutes."""

    begin: float | None = None
    end: float | None = None


class LogParameters(OfRun, kw_only=True):
    """The end of a log."""

    process: str
    attempt: int | None = None
    lines: int = 200


MOST_ROWS, MOST_TOKENS = 500, 4096
"""Of a page."""


class Desk:
    """Answers what the page asks. Several threads may use it."""

    def __init__(self, library: Library):
        self.library, self.list = library, runs.RunList(library)

    @contextmanager
    def reading(self, keys: Sequence[str]) -> Iterator[list[Run]]:
        """The runs, whose metrics and spans no other thread follows meanwhile."""
        found = {key: self.library.run(key) for key in keys}
        with ExitStack() as stack:
            for key in sorted(found):  # in one order, so that two who want the same never wait for each other
                stack.enter_context(found[key].reading)
            yield [found[key] for key in keys]

    def runs(self, _: NoParameters) -> answers.Runs:
        return answers.Runs(runs=self.list.all(), place=self.library.place)

    def compare(self, given: OfRuns) -> answers.Comparison:
        with self.reading(given.run) as found:
            return runs.compare(given.run, found)

    def metrics(self, given: OfRuns) -> answers.Metrics:
        with self.reading(given.run) as found:
            return curves.metrics(found)

    def curves(self, given: CurveParameters) -> answers.Curves:
        with self.reading(given.run) as found:
            return curves.curves(given.run, found, given.name, given.axis, given.begin, given.end)

    def rollouts(self, given: RolloutsParameters) -> answers.Rollouts:
        check_page(given.offset, given.limit)
        return rollouts.page(self.library.run(given.run), given)

    def rollout(self, given: RolloutParameters) -> answers.RolloutDetail:
        run = self.library.run(given.run)
        return rollouts.in_full(
            run, rollouts.find(run, given.kind, given.group, given.rollout, given.version, given.env, given.task, given.agent)
        )

    def tokens(self, given: TokensParameters) -> answers.Tokens:
        check_page(given.offset, given.limit, MOST_TOKENS)
        return tokens.tokens(self.library.run(given.run), given.step, given.group, given.rollout, given.offset, given.limit)

    def tasks(self, given: TasksParameters) -> answers.Tasks:
        check_page(given.offset, given.limit)
        run = self.library.run(given.run)
        rows = tasks.ordered(run, given.kind, given.env, given.number, given.sort, given.descending)
        shown = rows[given.offset : given.offset + given.limit]
        return answers.Tasks(total=len(rows), offset=given.offset, rows=shown, damaged=list(run.damaged.values()))

    def task(self, given: TaskParameters) -> answers.Task:
        return tasks.one_task(self.library.run(given.run), given.kind, given.env, given.task)

    def timeline(self, given: TimelineParameters) -> answers.Timeline:
        with self.reading([given.run]) as (run,):
            return timeline.timeline(run, given.begin, given.end)

    def health(self, given: OfRun) -> answers.Health:
        return health.health(self.library.run(given.run))

    def log(self, given: LogParameters) -> answers.Log:
        return health.log(self.library.run(given.run), given.process, given.attempt, given.lines)


def check_page(offset: int, limit: int, most: int = MOST_ROWS) -> None:
    """Raises RunError for a page that is none."""
    if offset < 0 or not 0 < limit <= most:
        raise RunError(f"offset = {offset}, limit = {limit}: give an offset from 0, and a limit from 1 to {most}")


@dataclass(frozen=True)
class Route:
    """One thing that can be asked for, at `/api/<name>`."""

    name: str
    takes: type[Parameters]
    gives: type[answers.Answer]
    what: str

    def ask(self, desk: Desk, pairs: list[tuple[str, str]]) -> Any:
        """The answer to the parameters of a query. Raises msgspec.ValidationError for wrong ones, and RunError."""
        function: Callable[[Any], Any] = getattr(desk, self.name)
        return function(parse(pairs, self.takes))


def parse(pairs: list[tuple[str, str]], kind: type[Parameters]) -> Any:
    """Parameters from the pairs of a query; an empty value counts as not given. Raises msgspec.ValidationError."""
    lists = {field.name for field in msgspec.structs.fields(kind) if field.type == list[str]}
    known = {field.name for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name not in known:
            raise msgspec.ValidationError(f"{name}: no such parameter; there are: {', '.join(sorted(known)) or 'none'}")
        if name in lists:
            given.setdefault(name, []).append(value)
        elif value != "":
            given[name] = value
    for field in msgspec.structs.fields(kind):
        if field.name in given:
            given[field.name] = parse_value(field.name, given[field.name], field.type)
        elif field.required:
            raise msgspec.ValidationError(f"{field.name}: is missing; give {wanted(field.type)}")
    return kind(**given)


def parse_value(name: str, value: Any, kind: Any) -> Any:
    """What a text of a query means. Raises msgspec.ValidationError."""
    try:
        found = msgspec.convert(value, kind, strict=False)
        if not isinstance(found, float) or math.isfinite(found):
            return found
    except msgspec.ValidationError:
        pass
    raise msgspec.ValidationError(f"{name} = {value}: give {wanted(kind)}")


WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list[str]: "one or more texts"}


def wanted(kind: Any) -> str:
    """A type of parameters in words; that it may be left out is not said."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return WORDS.get(kind) or " or ".join(WORDS[one] for one in get_args(kind) if one is not type(None))


ROUTES = (
    Route("runs", NoParameters, answers.Runs, "every run, those that changed last first"),
    Route("compare", OfRuns, answers.Comparison, "settings that differ, and evaluations"),
    Route("metrics", OfRuns, answers.Metrics, "which metrics there are"),
    Route("curves", CurveParameters, answers.Curves, "values of metrics, and what happened at which step"),
    Route("rollouts", RolloutsParameters, answers.Rollouts, "a page of rollouts"),
    Route("rollout", RolloutParameters, answers.RolloutDetail, "one rollout in full"),
    Route("tokens", TokensParameters, answers.Tokens, "a trained rollout token by token"),
    Route("tasks", TasksParameters, answers.Tasks, "a page of tasks"),
    Route("task", TaskParameters, answers.Task, "one task over all versions"),
    Route("timeline", TimelineParameters, answers.Timeline, "what each process did when"),
    Route("health", OfRun, answers.Health, "what is wrong, with the evidence"),
    Route("log", LogParameters, answers.Log, "the end of a log"),
)
