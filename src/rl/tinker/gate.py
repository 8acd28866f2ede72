"""Checks every request to the server of the Tinker API before anything else sees it."""

import hmac
import time
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from rl.run_dir.access_token import derived
from rl.tinker.replies import problem
from rl.wire.gate import CLOSE, HttpGate, header

KEY_PREFIX = "tml-"
"""With which the SDK wants its keys to begin."""

DOWNLOADS = "/files/"
"""Beginning of the paths that a signed address may read."""


def signature(secret: str, path: str, expires: int) -> str:
    """Returns the text with which an address may be read without the key, until `expires`
    (seconds since the epoch)."""
    return derived(secret, f"download {path} {expires}")


class Gate(HttpGate):
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
        given = {
            key: values[0]
            for key, values in parse_qs(scope["query_string"].decode("latin-1")).items()
        }
        expires = given.get("expires", "")
        if not expires.isdecimal() or len(expires) > 12 or int(expires) < time.time():
            return False
        return hmac.compare_digest(
            given.get("signature", "").encode(),
            signature(self.secret, scope["path"], int(expires)).encode(),
        )

    def refuse(self, scope: Scope) -> Response | None:
        if header(scope, b"origin"):
            return problem(
                403, "this server answers programs, not web pages: send no Origin header", CLOSE
            )
        if self.foreign_host(scope):
            return problem(
                403,
                "this server is bound to loopback: ask for localhost or 127.0.0.1 in the "
                "Host header",
                CLOSE,
            )
        if scope["path"].startswith(DOWNLOADS) and self.is_signed(scope):
            return None
        if self.shows_token(scope):
            return None
        return problem(
            401, "wrong key: set TINKER_API_KEY to the one that `rl serve` prints", CLOSE
        )
