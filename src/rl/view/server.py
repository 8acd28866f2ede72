"""Serves the page's files, and answers as JSON. Reads run directories, and writes nothing."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as At
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rl.records.run import UnknownMetricError
from rl.run_dir.hashes import blake2b
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.view.access import PageGate
from rl.view.library import Library, UnknownRunError
from rl.view.routes import ROUTES, Handlers, Route
from rl.wire.gate import refusal

PAGE = Path(__file__).parent / "page"
Pairs = list[tuple[str, str]]
"""The parameters of a query."""
SAME_S = 0.5
"""Seconds for which an answer is reused; a tab asks every two seconds."""
PORT = 8411
"""The port that is tried first; if it is taken, the kernel chooses one."""


def make_app(library: Library) -> ASGIApp:
    """The page and its data, without the gate."""
    handlers = Handlers(library)

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    routes = [
        At("/", index),
        *(At(f"/api/{route.name}", answering(handlers, route)) for route in ROUTES),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return GZipMiddleware(Starlette(routes=routes), minimum_size=2000)


class Shared:
    """Shares answers between equal requests, while they are made and for SAME_S after. Belongs to one event loop."""

    def __init__(self, make: Callable[[Pairs], bytes]):
        """make: computes an answer; called in a thread."""
        self.make = make
        self.making: dict[tuple[tuple[str, str], ...], asyncio.Future[bytes]] = {}
        self.made: dict[tuple[tuple[str, str], ...], tuple[float, bytes]] = {}
        """Question -> time of its answer (time.monotonic), and the answer."""

    async def __call__(self, pairs: Pairs) -> bytes:
        question, now = tuple(pairs), time.monotonic()
        self.made = {other: made for other, made in self.made.items() if now - made[0] < SAME_S}
        if question in self.made:
            return self.made[question][1]
        task = self.making.get(question) or asyncio.ensure_future(run_in_threadpool(self.make, pairs))
        self.making[question] = task
        try:
            answer = await asyncio.shield(task)
        finally:
            if self.making.get(question) is task:
                del self.making[question]
        self.made[question] = time.monotonic(), answer
        return answer


def answering(handlers: Handlers, route: Route) -> Callable:
    """The endpoint of a route. Reads in a thread, once for all equal requests at the same time."""
    shared = Shared(lambda pairs: redact_json(msgspec.json.encode(route.ask(handlers, pairs))))

    async def endpoint(request: Request) -> Response:
        try:
            answer = await shared(request.query_params.multi_items())
        except msgspec.ValidationError as error:
            return refusal(400, "bad_parameter", str(error))
        except UnknownRunError as error:
            return refusal(404, "unknown_run", str(error))
        except UnknownMetricError as error:
            return refusal(404, "unknown_metric", str(error))
        except (RunError, OSError) as error:
            return refusal(409, "not_there", str(error))
        return with_tag(answer, request)

    return endpoint


def with_tag(data: bytes, request: Request) -> Response:
    """The answer, or 304 if the page, which polls, already has it."""
    tag = f'"{blake2b(data).hex()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(data, media_type="application/json", headers={"etag": tag, "cache-control": "private, no-cache"})


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket. If no port is given, tries PORT, then lets the kernel choose. Raises RunError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port is not None else (PORT, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(64)
            return listener
        except OverflowError:
            raise RunError(f"--port {candidate}: a port is a number from 1 to 65535") from None
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or port is not None:
                raise RunError(f"--host {host} --port {candidate}: {error.strerror}; choose others") from None
    raise RunError(f"no port of {host} is free")


def address(host: str, port: int) -> str:
    """The URL of the page, without the key that lets a browser in."""
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
    return f"http://{shown}:{port}/"


def serve(library: Library, secret: str, host: str, port: int | None, new_link: Callable[[str, str], None]) -> None:
    """Serves until the process is asked to stop. Raises RunError.

    new_link: called with the address and the number of each link that lets a browser in: the first once the page is up, a new one
    whenever one was used.
    """
    listener = bind(host, port)
    place = address(host, listener.getsockname()[1])
    app = PageGate(make_app(library), secret, host, lambda number: new_link(place, number))
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
