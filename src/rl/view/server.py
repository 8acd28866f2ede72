"""Serves the page's files, and answers as JSON. Reads run directories, and writes nothing."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rl.records.run import UnknownMetricError
from rl.run_dir.files import blake2b
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.system.linux import bind
from rl.view.access import PageGate
from rl.view.library import Library, UnknownRunError
from rl.view.routes import ROUTES, Handlers, Route
from rl.wire.serving import refusal

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
                data = msgspec.json.encode(route.ask(handlers, request.query_params.multi_items()))
                return with_tag(redact_json(data), request)
            except msgspec.ValidationError as error:
                return refusal(400, "bad_parameter", str(error))
            except UnknownRunError as error:
                return refusal(404, "unknown_run", str(error))
            except UnknownMetricError as error:
                return refusal(404, "unknown_metric", str(error))
            except (RunError, OSError) as error:
                return refusal(409, "not_there", str(error))

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
