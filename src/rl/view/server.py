"""Serves the page's files, and answers as JSON. Reads run directories, and writes nothing.

Each public method of Handlers answers one request of the page, at `/api/<name>`. Its parameters are
those of the query, its return type is that of the answer.
"""

import contextlib
import inspect
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rl.records.run import Run
from rl.run_dir.files import blake2b
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.system.linux import bind
from rl.view import curves, health, responses, rollouts, runs, tasks, timeline, tokens
from rl.view.access import PageGate
from rl.view.library import Library
from rl.view.rollouts import Limit, Number, Offset, Wanted, Which
from rl.wire.serving import refusal

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


PAGE = Path(__file__).parent / "page"
PORT = 8411
"""The port that is tried first; if it is taken, the kernel chooses one."""


def make_app(library: Library) -> ASGIApp:
    """The page and its data, without the gate."""
    handlers = Handlers(library)

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    def endpoint(route: Route) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:  # starlette calls it in a thread
            try:
                data = msgspec.json.encode(route.ask(handlers, request.query_params))
                return with_tag(redact_json(data), request)
            except msgspec.ValidationError as error:
                return refusal(400, "bad_parameter", str(error))
            except (RunError, OSError) as error:
                return refusal(404, "not_there", str(error))

        return answer

    api = [StarletteRoute(f"/api/{route.name}", endpoint(route)) for route in ROUTES]
    page = [StarletteRoute("/", index), Mount("/page", StaticFiles(directory=PAGE))]
    return GZipMiddleware(Starlette(routes=[*page, *api]), minimum_size=2000)


def with_tag(data: bytes, request: Request) -> Response:
    """The answer, or 304 if the page, which polls, already has it."""
    tag = f'"{blake2b(data).hex()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(
        data,
        media_type="application/json",
        headers={"etag": tag, "cache-control": "private, no-cache"},
    )


def bind_any(host: str, port: int | None) -> socket.socket:
    """A bound socket. If no port is given, tries PORT, then lets the kernel choose. Raises
    RunError."""
    if port is None:
        with contextlib.suppress(RunError):
            return bind(host, PORT, "--port", wait_s=0.0)
    return bind(host, port or 0, "--port", wait_s=0.0)


def address(host: str, port: int) -> str:
    """The URL of the page, without the key that lets a browser in."""
    name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
    return f"http://{name}:{port}/"


def serve(
    library: Library, secret: str, host: str, port: int | None, new_link: Callable[[str, str], None]
) -> None:
    """Serves until the process is asked to stop. Raises RunError.

    new_link: called with the address and the number of each link that lets a browser in: the first
    once the page is up, a new one whenever one was used.
    """
    listener = bind_any(host, port)
    url = address(host, listener.getsockname()[1])
    app = PageGate(make_app(library), secret, host, lambda number: new_link(url, number))
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])
