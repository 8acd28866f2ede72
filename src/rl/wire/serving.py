"""HTTP servers of ours: the gate that every request passes first, which checks the sender and
limits the size of the body, and serving on a bound socket until a signal ends the process.

Inference has a gate for programs (Gate), `rl view` one for its browser page (rl.view.access).
"""

import asyncio
import contextlib
import hashlib
import secrets
import signal
import socket
from typing import Any

import msgspec
import uvicorn
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rl.run_dir.access_token import is_loopback
from rl.run_dir.status import Phase, Status, reachable
from rl.system.errors import RESTART, RunError
from rl.wire.messages import MAX_BODY_BYTES

CLOSE = {"connection": "close"}
"""Closes the connection, so that the rest of the client's request is not read."""


def refusal(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None, **facts: Any
) -> Response:
    """Returns an error response: `{"error": {"type": kind, "message": message, **facts}}`."""
    content = msgspec.json.encode({"error": {"type": kind, "message": message, **facts}})
    return Response(content, status, headers, media_type="application/json")


class HttpGate:
    """ASGI middleware in front of all routes of an app.

    It has to be outermost, so that only the headers of a refused request are parsed.
    """

    max_body_bytes = MAX_BODY_BYTES

    def __init__(self, app: ASGIApp, token: str, loopback: bool):
        self.app = RequestBodyLimitMiddleware(app, self.max_body_bytes)
        self.loopback = loopback
        """Whether the server is bound only to loopback, and so has no other host names."""
        self.expected = hashlib.sha256(token.encode()).digest()

    def refuse(self, scope: Scope) -> Response | None:
        """Returns the response that refuses a request; None if it may pass."""
        raise NotImplementedError

    def foreign_host(self, scope: Scope) -> Response | None:
        """Refuses requests for a host other than loopback if the server is bound to loopback: in
        DNS rebinding, the Host header has the name of the attacking page."""
        if not self.loopback or all(
            is_loopback(host_name(value)) for value in header(scope, b"host")
        ):
            return None
        return refusal(
            403,
            "foreign_host",
            "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host header",
            CLOSE,
        )

    def shows_token(self, scope: Scope) -> bool:
        """Whether a request has the token, as OpenAI's clients send it or as Anthropic's and
        Tinker's do, and no other."""
        shown = [
            value[7:] if value[:7].lower() == b"bearer " else b""
            for value in header(scope, b"authorization")
        ]
        keys = shown + header(scope, b"x-api-key")
        return bool(keys) and all(self.is_token(key.strip()) for key in keys)

    def is_token(self, value: bytes) -> bool:
        """Whether `value` is the token. Compares digests in constant time, so that neither
        content nor length leaks."""
        return secrets.compare_digest(hashlib.sha256(value).digest(), self.expected)

    def too_long(self, scope: Scope) -> Response | None:
        """Refuses a request that announces too long a body. One that announces nothing is cut
        off at the limit."""
        values = header(scope, b"content-length")
        length = int(values[0][:20]) if values and values[0].isdigit() else 0
        if length <= self.max_body_bytes:
            return None
        return refusal(
            413,
            "too_large",
            f"the body has {length} bytes, {self.max_body_bytes} are allowed",
            CLOSE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = (
            None if scope["type"] == "lifespan" else self.refuse(scope) or self.too_long(scope)
        )
        if refused and refused.status_code == 413:
            # a client that still sends would see a closed connection, and no answer
            while (await receive()).get("more_body"):
                pass
        if not refused:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refused(scope, receive, send)


def header(scope: Scope, name: bytes) -> list[bytes]:
    """Returns the values of a header; `name` is in lower case."""
    return [value for other, value in scope["headers"] if other == name]


def host_name(value: bytes) -> str:
    """Returns the name or address in a Host header, without the port."""
    host = value.decode("latin-1").strip()
    return host[: host.find("]") + 1] if host.startswith("[") else host.rpartition(":")[0] or host


class Gate(HttpGate):
    """The gate in front of all routes, vLLM's own included: its `api_key` leaves /metrics and
    others open."""

    def refuse(self, scope: Scope) -> Response | None:
        """The refusal of a request that comes from a web page, names another host, or lacks the
        token; None for other requests."""
        if header(scope, b"origin"):
            return refusal(
                403,
                "foreign_origin",
                "this server answers programs, not web pages: send no Origin header",
                CLOSE,
            )
        if refused := self.foreign_host(scope):
            return refused
        # probes have no token
        if self.shows_token(scope) or (scope.get("method"), scope["path"]) == ("GET", "/health"):
            return None
        message = (
            "this server wants the run's token, RL_TOKEN or status/token: send `Authorization: "
            "Bearer TOKEN` or `X-API-Key: TOKEN`"
        )
        return refusal(401, "unauthorized", message, CLOSE | {"www-authenticate": "Bearer"})


LISTEN = 1024
KEEP_ALIVE_S = 600
"""Idle connections stay open longer than any client keeps them."""


class QuietServer(uvicorn.Server):
    """A server that leaves the signals of the process alone."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


async def serve_app(
    app: Any, host: str, sock: socket.socket, status: Status, *work: asyncio.Task[None]
) -> None:
    """Serves until SIGTERM or SIGINT. Raises the error of the server or of a task that it needs,
    and RunError if either just ends."""
    # Clients elsewhere get the slower parser, because the other one does not limit lines and
    # headers.
    parser = "auto" if is_loopback(host) else "h11"
    settings = uvicorn.Config(
        app,
        http=parser,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server, stop = QuietServer(settings), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    sock.listen(LISTEN)
    needed = [asyncio.create_task(server.serve(sockets=[sock])), *work]
    name, port = reachable(host), sock.getsockname()[1]
    status.enter(Phase.SERVING, address=f"http://{f'[{name}]' if ':' in name else name}:{port}")
    await asyncio.wait(
        [*needed, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    server.should_exit = server.force_exit = True
    for task in needed:
        if task.done():
            task.result()
    if not stop.is_set():
        raise RunError("the HTTP server has ended by itself", RESTART)
