"""What every HTTP request to a server of ours passes before anything else sees it: a check of where it comes from, a limit on its body.

Inference has such a gate for programs (rl.inference.gate), the browser page one for itself (rl.view.access).
"""

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


class HttpGate:
    """ASGI middleware in front of all routes of an app.

    Outermost, so that nothing of a request that is refused is parsed but its headers.
    """

    def __init__(self, app: ASGIApp, token: str, loopback: bool):
        self.app = app
        self.loopback = loopback
        """Whether the server is bound to loopback alone, and then goes by no other name."""
        self.expected = hashlib.sha256(token.encode()).digest()

    def refuse(self, scope: Scope) -> Response | None:
        """The answer to a request that must not go on; None for one that may."""
        raise NotImplementedError

    def foreign_host(self, scope: Scope) -> Response | None:
        """The answer to a request for another host than loopback, where the server is bound to that: a page whose name was made to point
        here shows its own name."""
        if not self.loopback or all(is_loopback(host_name(value)) for value in header(scope, b"host")):
            return None
        return refusal(403, "foreign_host", "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host header", CLOSE)

    def is_token(self, value: bytes) -> bool:
        """Whether it is the token. Digests are compared, in constant time: neither content nor length leaks."""
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


def header(scope: Scope, name: bytes) -> list[bytes]:
    """The values of a header, by its name in lower case."""
    return [value for other, value in scope["headers"] if other == name]


def host_name(value: bytes) -> str:
    """The name or address in a Host header, without its port."""
    host = value.decode("latin-1").strip()
    return host[: host.find("]") + 1] if host.startswith("[") else host.rpartition(":")[0] or host


def announced_length(scope: Scope) -> int:
    """What the request says of its body; 0 if nothing that is a number."""
    values = [value for name, value in scope["headers"] if name == b"content-length"]
    digits = values[0] if values and values[0].isdigit() else b"0"
    return int(digits) if len(digits) < 19 else sys.maxsize
