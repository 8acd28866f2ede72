"""The gate that every HTTP request to one of our servers passes first: it checks the sender, and limits the size of the body.

Inference has a gate for programs (rl.wire.token_gate), `rl view` one for its browser page (rl.view.access).
"""

import hashlib
import secrets
import sys
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.run_dir.access_token import is_loopback

MAX_BODY_BYTES = 16 << 20
"""A prompt of a million token ids takes 7 MB."""
CLOSE = {"connection": "close"}
"""Closes the connection, so that the rest of the client's request is not read."""


def refusal(status: int, kind: str, message: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """Returns an error response: `{"error": {"type": kind, "message": message, **more}}`."""
    content = msgspec.json.encode({"error": {"type": kind, "message": message, **more}})
    return Response(content, status, headers, media_type="application/json")


class HttpGate:
    """ASGI middleware in front of all routes of an app.

    It has to be outermost, so that only the headers of a refused request are parsed.
    """

    max_body_bytes = MAX_BODY_BYTES

    def __init__(self, app: ASGIApp, token: str, loopback: bool):
        self.app = app
        self.loopback = loopback
        """Whether the server is bound only to loopback, and so has no other host names."""
        self.expected = hashlib.sha256(token.encode()).digest()

    def refuse(self, scope: Scope) -> Response | None:
        """Returns the response that refuses a request; None if it may pass."""
        raise NotImplementedError

    def foreign_host(self, scope: Scope) -> Response | None:
        """Refuses requests for a host other than loopback if the server is bound to loopback: in DNS rebinding, the Host header has the
        name of the attacking page."""
        if not self.loopback or all(is_loopback(host_name(value)) for value in header(scope, b"host")):
            return None
        return refusal(403, "foreign_host", "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host header", CLOSE)

    def is_token(self, value: bytes) -> bool:
        """Whether `value` is the token. Compares digests in constant time, so that neither content nor length leaks."""
        return secrets.compare_digest(hashlib.sha256(value).digest(), self.expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif refused := self.refuse(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refused(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.app(scope, receive, send)
        else:
            await self.limited(scope, receive, send)

    async def limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; if its body gets too long, the app sees a disconnected client."""
        body_bytes, too_long, answered = announced_length(scope), False, False
        if body_bytes > self.max_body_bytes:
            message = f"the body has {body_bytes} bytes, {self.max_body_bytes} are allowed"
            await refusal(413, "too_large", message, CLOSE)(scope, receive, send)
            return
        body_bytes = 0

        async def receive_counted() -> Message:
            nonlocal body_bytes, too_long
            message = await receive()
            body_bytes += len(message.get("body", b""))
            too_long = too_long or body_bytes > self.max_body_bytes
            return {"type": "http.disconnect"} if too_long else message

        async def send_unless_too_long(message: Message) -> None:
            nonlocal answered
            if not too_long:
                answered = True
                await send(message)

        try:
            await self.app(scope, receive_counted, send_unless_too_long)
        except ClientDisconnect:
            if not too_long:
                return
        if too_long and not answered:
            await refusal(413, "too_large", f"the body has more than {self.max_body_bytes} bytes", CLOSE)(scope, receive, send)


def header(scope: Scope, name: bytes) -> list[bytes]:
    """Returns the values of a header; `name` is in lower case."""
    return [value for other, value in scope["headers"] if other == name]


def host_name(value: bytes) -> str:
    """Returns the name or address in a Host header, without the port."""
    host = value.decode("latin-1").strip()
    return host[: host.find("]") + 1] if host.startswith("[") else host.rpartition(":")[0] or host


def announced_length(scope: Scope) -> int:
    """Returns the request's content length, bytes; 0 if it is missing or not a number."""
    values = header(scope, b"content-length")
    digits = values[0] if values and values[0].isdigit() else b"0"
    return int(digits) if len(digits) < 19 else sys.maxsize
