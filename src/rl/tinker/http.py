"""How a request to the server of the Tinker API is let in, and how answers look to its SDK: an
error's status decides its class, 408 means "ask again"."""

import hmac
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from rl.run_dir.access_token import derived
from rl.wire.serving import CLOSE, HttpGate, header

KEY_PREFIX = "tml-"
"""With which the SDK wants its keys to begin."""
DOWNLOADS = "/files/"
"""Beginning of the paths that a signed address may read."""
JSON = "application/json"


def reply(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Returns an error: 400 BadRequestError, 401 AuthenticationError, 403 PermissionDeniedError,
    404 NotFoundError."""
    return Response(msgspec.json.encode({"detail": message}), status, headers, media_type=JSON)


def signature(secret: str, path: str, expires: int) -> str:
    """Returns the text with which an address may be read without the key, until `expires`
    (seconds since the epoch)."""
    return derived(secret, f"download {path} {expires}")


class KeyGate(HttpGate):
    """The gate in front of all routes: a key in `X-API-Key`, or as OpenAI's clients send it, or
    an address that is signed."""

    max_body_bytes = 256 << 20
    """The SDK sends data in parts of 5 MB, but a larger datum whole: 8,192 tokens with 256
    targets each have 25 MB."""

    def __init__(self, app: ASGIApp, token: str, secret: str, loopback: bool):
        """`secret`: what addresses are signed with; not the key, at which whoever has an address
        could guess."""
        super().__init__(app, token, loopback)
        self.secret = secret

    def is_token(self, value: bytes) -> bool:
        return super().is_token(value.removeprefix(KEY_PREFIX.encode()))

    def is_signed(self, scope: Scope) -> bool:
        """Returns whether a request has a signature for its path that has not expired."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        expires, signed = (query.get(key, [""])[0] for key in ("expires", "signature"))
        if not expires.isdecimal() or len(expires) > 12 or int(expires) < time.time():
            return False
        expected = signature(self.secret, scope["path"], int(expires))
        return hmac.compare_digest(signed.encode(), expected.encode())

    def refuse(self, scope: Scope) -> Response | None:
        if header(scope, b"origin"):
            message = "this server answers programs, not web pages: send no Origin header"
            return problem(403, message, CLOSE)
        if self.foreign_host(scope):
            message = "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host"
            return problem(403, f"{message} header", CLOSE)
        is_signed = scope["path"].startswith(DOWNLOADS) and self.is_signed(scope)
        if is_signed or self.shows_token(scope):
            return None
        message = "wrong key: set TINKER_API_KEY to the one that `rl serve` prints"
        return problem(401, message, CLOSE)
