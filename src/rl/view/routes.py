"""The table of routes that the page can request, each with its parameters and the type of its
answer."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from rl.records.run import Run
from rl.view import curves, health, responses, rollouts, runs, tasks, timeline, tokens
from rl.view.library import Library
from rl.view.queries import Limit, Number, Offset, Query
from rl.view.rollouts import Wanted, Which


class OfRun(Query):
    """One run."""

    run: str


class OfRuns(Query):
    """Several runs."""

    run: list[str]


class CurveParameters(OfRuns):
    """Metrics of runs, between two positions on the axis."""

    name: list[str] = []
    axis: Literal["step", "rollouts", "tokens", "time"] = "step"
    begin: Number | None = None
    end: Number | None = None


class TokensParameters(OfRun):
    """A stretch of a trained rollout."""

    step: int
    group: int
    rollout: int
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1024


class TasksParameters(OfRun):
    """A page of the tasks."""

    kind: Literal["train", "eval"] = "train"
    env: str = ""
    number: int | None = None
    """Only the task with this number, in each environment."""
    sort: str = ""
    descending: bool = True
    offset: Offset = 0
    limit: Limit = 50


class TaskParameters(OfRun, kw_only=True):
    """One task."""

    kind: Literal["train", "eval"] = "train"
    env: str
    task: int


class TimelineParameters(OfRun):
    """An interval in seconds since the epoch; by default the newest minutes."""

    begin: Number | None = None
    end: Number | None = None


class LogParameters(OfRun, kw_only=True):
    """The end of a log."""

    process: str
    attempt: int | None = None
    lines: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 200


class Handlers:
    """Answers the requests of the page. Thread-safe."""

    def __init__(self, library: Library):
        self.library, self.list = library, runs.RunList(library)

    @contextmanager
    def reading(self, keys: Sequence[str]) -> Iterator[list[Run]]:
        """The runs, locked so that no other thread updates their metrics and spans meanwhile."""
        found = {key: self.library.run(key) for key in keys}
        with ExitStack() as stack:
            for key in sorted(found):  # a fixed order avoids deadlocks
                stack.enter_context(found[key].reading)
            yield [found[key] for key in keys]

    def runs(self, _: Query) -> responses.Runs:
        return responses.Runs(runs=self.list.all(), place=self.library.place)

    def compare(self, given: OfRuns) -> responses.Comparison:
        with self.reading(given.run) as found:
            return runs.compare(given.run, found)

    def metrics(self, given: OfRuns) -> responses.Metrics:
        with self.reading(given.run) as found:
            return curves.metrics(found)

    def curves(self, given: CurveParameters) -> responses.Curves:
        with self.reading(given.run) as found:
            return curves.curves(given.run, found, given.name, given.axis, given.begin, given.end)

    def rollouts(self, given: Wanted) -> responses.Rollouts:
        return rollouts.page(self.library.run(given.run), given)

    def rollout(self, given: Which) -> responses.RolloutDetail:
        run = self.library.run(given.run)
        return rollouts.in_full(run, *rollouts.find(run, given))

    def tokens(self, given: TokensParameters) -> responses.Tokens:
        return tokens.tokens(
            self.library.run(given.run),
            given.step,
            given.group,
            given.rollout,
            given.offset,
            given.limit,
        )

    def tasks(self, given: TasksParameters) -> responses.Tasks:
        run = self.library.run(given.run)
        rows = tasks.ordered(run, given.kind, given.env, given.number, given.sort, given.descending)
        shown = tasks.with_prompts(
            run.rollouts(given.kind), rows[given.offset : given.offset + given.limit]
        )
        return responses.Tasks(
            total=len(rows), offset=given.offset, rows=shown, damaged=list(run.damaged.values())
        )

    def task(self, given: TaskParameters) -> responses.Task:
        return tasks.one_task(self.library.run(given.run), given.kind, given.env, given.task)

    def timeline(self, given: TimelineParameters) -> responses.Timeline:
        with self.reading([given.run]) as (run,):
            return timeline.timeline(run, given.begin, given.end)

    def health(self, given: OfRun) -> responses.Health:
        return health.health(self.library.run(given.run))

    def log(self, given: LogParameters) -> responses.Log:
        return health.log(self.library.run(given.run), given.process, given.attempt, given.lines)


@dataclass(frozen=True)
class Route:
    """One route of the API, at `/api/<name>`."""

    name: str
    takes: type[Query]
    gives: type[responses.Answer]
    what: str

    def ask(self, handlers: Handlers, pairs: list[tuple[str, str]]) -> Any:
        """The answer to a query. Raises msgspec.ValidationError for invalid parameters, and
        RunError."""
        return getattr(handlers, self.name)(parse(pairs, self.takes))


def parse(pairs: list[tuple[str, str]], kind: type[Query]) -> Any:
    """Parses the pairs of a query; an empty value counts as not given. Raises
    msgspec.ValidationError."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in pairs:
        if types.get(name) == list[str]:
            given.setdefault(name, []).append(value)
        elif value != "":
            given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).split("`")[-2].removeprefix("$.")  # the message ends with the field
    if name not in types:
        raise msgspec.ValidationError(
            f"{name}: no such parameter; there are: {', '.join(sorted(types)) or 'none'}"
        )
    said = f"{name} = {given[name]}: give" if name in given else f"{name}: is missing; give"
    raise msgspec.ValidationError(f"{said} {wanted(types[name])}")


WORDS: dict[Any, str] = {
    int: "a whole number",
    Number: "a number",
    bool: "true or false",
    str: "a text",
    list[str]: "one or more texts",
}


def wanted(kind: Any) -> str:
    """A parameter's type in words, without whether it is optional."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if kind in WORDS:
        return WORDS[kind]
    if get_origin(kind) is Annotated:
        inner, bounds = get_args(kind)
        return f"{WORDS[inner]} from {bounds.ge}" + (
            "" if bounds.le is None else f" to {bounds.le}"
        )
    return " or ".join(WORDS[one] for one in get_args(kind) if one is not type(None))


ROUTES = (
    Route("runs", Query, responses.Runs, "every run, most recently changed first"),
    Route("compare", OfRuns, responses.Comparison, "settings that differ, and evaluations"),
    Route("metrics", OfRuns, responses.Metrics, "the names and meanings of all metrics"),
    Route(
        "curves",
        CurveParameters,
        responses.Curves,
        "values of metrics, and what happened at which step",
    ),
    Route("rollouts", Wanted, responses.Rollouts, "a page of rollouts"),
    Route("rollout", Which, responses.RolloutDetail, "one rollout in full"),
    Route("tokens", TokensParameters, responses.Tokens, "a trained rollout token by token"),
    Route("tasks", TasksParameters, responses.Tasks, "a page of tasks"),
    Route("task", TaskParameters, responses.Task, "one task over all versions"),
    Route("timeline", TimelineParameters, responses.Timeline, "what each process did when"),
    Route("health", OfRun, responses.Health, "problems with their evidence"),
    Route("log", LogParameters, responses.Log, "the end of a log"),
)
