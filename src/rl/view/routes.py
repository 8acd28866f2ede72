"""The requests of the page: each public method of Handlers answers one, at `/api/<name>`. Its
parameters are those of the query, its return type is that of the answer."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

import msgspec
from starlette.datastructures import QueryParams

from rl.records.run import Run
from rl.view import curves, health, responses, rollouts, runs, tasks, timeline, tokens
from rl.view.library import Library
from rl.view.rollouts import Limit, Number, Offset, Wanted, Which

Kind = Literal["train", "eval"]


class Handlers:
    """Answers the requests of the page. Thread-safe."""

    def __init__(self, library: Library):
        self._library, self._list = library, runs.RunList(library)

    @contextmanager
    def _reading(self, keys: Sequence[str]) -> Iterator[list[Run]]:
        """The runs, locked so that no other thread updates their metrics and spans meanwhile."""
        opened = {key: self._library.run(key) for key in keys}
        with ExitStack() as stack:
            for key in sorted(opened):  # a fixed order avoids deadlocks
                stack.enter_context(opened[key].reading)
            yield [opened[key] for key in keys]

    def runs(self) -> responses.Runs:
        """Every run, most recently changed first."""
        return responses.Runs(runs=self._list.all(), folders=self._library.folders)

    def compare(self, run: list[str]) -> responses.Comparison:
        """Settings that differ, and evaluations."""
        with self._reading(run) as opened:
            return runs.compare(run, opened)

    def metrics(self, run: list[str]) -> responses.Metrics:
        """The names and meanings of all metrics."""
        with self._reading(run) as opened:
            return curves.metrics(opened)

    def curves(
        self,
        run: list[str],
        name: list[str] = [],  # noqa: B006
        axis: curves.Axis = "step",
        begin: Number | None = None,
        end: Number | None = None,
    ) -> responses.Curves:
        """Values of metrics, and what happened at which step, between two positions on the axis."""
        with self._reading(run) as opened:
            return curves.curves(run, opened, name, axis, begin, end)

    def rollouts(self, wanted: Wanted) -> responses.RolloutPage:
        """A page of rollouts."""
        return rollouts.page(self._library.run(wanted.run), wanted)

    def rollout(self, which: Which) -> responses.RolloutDetail:
        """One rollout in full."""
        run = self._library.run(which.run)
        return rollouts.in_full(run, *rollouts.find(run, which))

    def tokens(
        self,
        run: str,
        step: int,
        group: int,
        rollout: int,
        offset: Offset = 0,
        limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1024,
    ) -> responses.Tokens:
        """A stretch of a trained rollout token by token."""
        return tokens.tokens(self._library.run(run), step, group, rollout, offset, limit)

    def tasks(
        self,
        run: str,
        kind: Kind = "train",
        env: str = "",
        number: int | None = None,
        sort: str = "",
        descending: bool = True,
        offset: Offset = 0,
        limit: Limit = 50,
    ) -> responses.Tasks:
        """A page of tasks. number: only the task with this number, in each environment."""
        opened = self._library.run(run)
        rows = tasks.ordered(opened, kind, env, number, sort, descending)
        return responses.Tasks(
            total=len(rows),
            offset=offset,
            rows=tasks.with_prompts(opened.rollouts(kind), rows[offset : offset + limit]),
            damaged=list(opened.damaged.values()),
        )

    def task(self, run: str, env: str, task: int, kind: Kind = "train") -> responses.TaskDetail:
        """One task over all versions."""
        return tasks.one_task(self._library.run(run), kind, env, task)

    def timeline(
        self, run: str, begin: Number | None = None, end: Number | None = None
    ) -> responses.LaneTimeline:
        """What each process did between two times, by default in the newest minutes."""
        with self._reading([run]) as (opened,):
            return timeline.timeline(opened, begin, end)

    def health(self, run: str) -> responses.Health:
        """Problems with their evidence."""
        return health.health(self._library.run(run))

    def log(
        self,
        run: str,
        process: str,
        attempt: int | None = None,
        lines: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 200,
    ) -> responses.Log:
        """The end of a log."""
        return health.log(self._library.run(run), process, attempt, lines)


class Route:
    """One request."""

    def __init__(self, method: Callable[..., Any]):
        signature = inspect.signature(method)
        _, *parameters = signature.parameters.values()
        self.name, self.method = method.__name__, method
        self.gives: type[responses.PageAnswer] = signature.return_annotation
        self.is_whole = parameters != [] and parameters[0].annotation in (Wanted, Which)
        """Whether the method takes the query as one object."""
        fields = [
            (each.name, each.annotation, *([] if each.default is each.empty else [each.default]))
            for each in parameters
        ]
        self.takes: type[msgspec.Struct] = (
            parameters[0].annotation
            if self.is_whole
            else msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)
        )
        self.lists = {name for name, kind, *_ in fields if kind == list[str]}
        """The parameters that may occur several times."""

    def ask(self, handlers: Handlers, query: QueryParams) -> Any:
        """The answer to a query; an empty value counts as not given. Raises
        msgspec.ValidationError for invalid parameters, and RunError."""
        values = {
            name: query.getlist(name) if name in self.lists else value
            for name, value in query.items()
            if value
        }
        taken = msgspec.convert(values, self.takes, strict=False)
        if self.is_whole:
            return self.method(handlers, taken)
        return self.method(handlers, **msgspec.structs.asdict(taken))


ROUTES = [Route(method) for name, method in vars(Handlers).items() if name[0] != "_"]
