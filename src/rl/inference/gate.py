"""What every HTTP request passes before anything else sees it: where it comes from, the run's token, a limit on the size of its body."""

import hashlib
import secrets
import sys
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.run_dir.token import is_loopback

MAX_BODY_BYTES = 16 << 20
"""A prompt of a million token ids takes 7 MB."""
CLOSE = {"connection": "close"}
"""Has the connection closed: what the client still sends is not read."""


def refusal(status: int, kind: str, message: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """An error of ours: `{"error": {"type": kind, "message": message, **more}}`."""
    content = msgspec.json.encode({"error": {"type": kind, "message": message, **more}})
    return Response(content, status, headers, media_type="application/json")


class Gate:
    """ASGI middleware in front of all routes, vLLM's own included: its `api_key` leaves /metrics, /health and others open.

    Outermost, so that nothing of a request that is refused is parsed but its headers.
    """

    def __init__(self, app: ASGIApp, token: str, loopback: bool):
        self.app = app
        self.loopback = loopback
        """Whether the server is bound to loopback alone, and then goes by no other name."""
        self.expected = hashlib.sha256(token.encode()).digest()

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

    def refuse(self, scope: Scope) -> Response | None:
        """The answer to a request that must not go on: a web page's, one for another host, or one without the token; else None."""
        headers = {name: [value for other, value in scope["headers"] if other == name] for name in (b"host", b"origin", b"authorization")}
        if headers[b"origin"]:
            return refusal(403, "foreign_origin", "this server answers programs, not web pages: send no Origin header", CLOSE)
        if self.loopback and not all(is_loopback(host_name(value)) for value in headers[b"host"]):
            return refusal(
                403, "foreign_host", "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host header", CLOSE
            )
        if self.shows_token(headers[b"authorization"]):
            return None
        message = "this server wants the run's token: send `Authorization: Bearer TOKEN`, TOKEN from RL_TOKEN or status/token"
        return refusal(401, "unauthorized", message, CLOSE | {"www-authenticate": "Bearer"})

    def shows_token(self, values: list[bytes]) -> bool:
        """Whether Authorization shows the token. Digests are compared, in constant time: neither content nor length leaks."""
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and secrets.compare_digest(hashlib.sha256(token.strip()).digest(), self.expected)

    async def limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; one whose body gets too long looks to the app as if its client had gone."""
        body_bytes, too_long, answered = announced_length(scope), False, False
        if body_bytes > MAX_BODY_BYTES:
            message = f"the body has {body_bytes} bytes, {MAX_BODY_BYTES} are allowed"
            await refusal(413, "too_large", message, CLOSE)(scope, receive, send)
            return
        body_bytes = 0

        async def receive_counted() -> Message:
            nonlocal body_bytes, too_long
            message = await receive()
            body_bytes += len(message.get("body", b""))
            too_long = too_long or body_bytes > MAX_BODY_BYTES
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
            await refusal(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes", CLOSE)(scope, receive, send)


def host_name(value: bytes) -> str:
    """The name or address in a Host header, without its port."""
    host = value.decode("latin-1").strip()
    return host[: host.find("]") + 1] if host.startswith("[") else host.rpartition(":")[0] or host


def announced_length(scope: Scope) -> int:
    """What the request says of its body; 0 if nothing that is a number."""
    values = [value for name, value in scope["headers"] if name == b"content-length"]
    digits = values[0] if values and values[0].isdigit() else b"0"
    return int(digits) if len(digits) < 19 else sys.maxsize
