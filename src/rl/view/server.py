"""The server of the page: files of the page, and answers as JSON. It reads run directories and writes nothing."""

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

from rl.run_dir.hashes import blake2b
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.view.access import PARAMETER, PageGate
from rl.view.library import Library, UnknownRunError
from rl.view.routes import ROUTES, Desk, Route
from rl.view.schema import openapi
from rl.wire.gate import refusal

PAGE = Path(__file__).parent / "page"
Pairs = list[tuple[str, str]]
"""A query."""
SAME_S = 0.5
"""For so long an answer is given again; a tab asks every two seconds."""
PORT = 8411
"""The port that is tried first; if it is taken, the kernel chooses one."""


def make_app(library: Library) -> ASGIApp:
    """The page and its data, without the gate."""
    desk = Desk(library)

    async def index(_: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def schema(_: Request) -> Response:
        return Response(msgspec.json.encode(openapi()), media_type="application/json")

    routes = [
        At("/", index),
        At("/api/schema", schema),
        *(At(f"/api/{route.name}", answering(desk, route)) for route in ROUTES),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return GZipMiddleware(Starlette(routes=routes), minimum_size=2000)


class Shared:
    """Answers that are being made, or were made a moment ago: whoever asks the same gets the same. Of one event loop."""

    def __init__(self, make: Callable[[Pairs], bytes]):
        """make: makes an answer; called in a thread."""
        self.make = make
        self.making: dict[tuple[tuple[str, str], ...], asyncio.Future[bytes]] = {}
        self.made: dict[tuple[tuple[str, str], ...], tuple[float, bytes]] = {}
        """Question -> when its answer was there (time.monotonic), and the answer."""

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


def answering(desk: Desk, route: Route) -> Callable:
    """The endpoint of a route: what it asks for is read in a thread, once for all who ask it at the same moment."""
    shared = Shared(lambda pairs: redact_json(msgspec.json.encode(route.ask(desk, pairs))))

    async def endpoint(request: Request) -> Response:
        try:
            answer = await shared(request.query_params.multi_items())
        except msgspec.ValidationError as error:
            return refusal(400, "bad_parameter", str(error))
        except UnknownRunError as error:
            return refusal(404, "unknown_run", str(error))
        except (RunError, OSError) as error:
            return refusal(409, "not_there", str(error))
        return with_tag(answer, request)

    return endpoint


def with_tag(data: bytes, request: Request) -> Response:
    """The answer, or 304 where the page has the same one already: it asks again and again."""
    tag = f'"{blake2b(data).hex()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(data, media_type="application/json", headers={"etag": tag, "cache-control": "private, no-cache"})


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens. Without a port PORT is tried, then the kernel chooses. Raises RunError."""
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


def address(host: str, port: int, token: str) -> str:
    """What is to be opened; it has the token."""
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
    return f"http://{shown}:{port}/?{PARAMETER}={token}"


def serve(library: Library, token: str, host: str, port: int | None, ready: Callable[[str], None]) -> None:
    """Serves until the process is told to end. ready: called with the address once it is open. Raises RunError."""
    listener = bind(host, port)
    number = listener.getsockname()[1]
    app = PageGate(make_app(library), token, host, number)
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=1)
    ready(address(host, number, token))
    uvicorn.Server(config).run(sockets=[listener])
