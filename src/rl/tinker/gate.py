"""Checks every request to the server of the Tinker API before anything else sees it."""

from starlette.responses import Response
from starlette.types import Scope

from rl.tinker.replies import problem
from rl.wire.gate import CLOSE, HttpGate, header

KEY_PREFIX = "tml-"
"""With which the SDK wants its keys to begin."""


class Gate(HttpGate):
    """The gate in front of all routes: a key in `X-API-Key`, or as OpenAI's clients send it."""

    max_body_bytes = 256 << 20
    """The SDK sends data in parts of 5 MB, but a larger datum whole: 8,192 tokens with 256 targets each have 25 MB."""

    def refuse(self, scope: Scope) -> Response | None:
        if header(scope, b"origin"):
            return problem(403, "this server answers programs, not web pages: send no Origin header", CLOSE)
        if self.foreign_host(scope):
            return problem(403, "this server is bound to loopback: ask for localhost or 127.0.0.1 in the Host header", CLOSE)
        keys = [*header(scope, b"x-api-key"), *(value.partition(b" ")[2] for value in header(scope, b"authorization"))]
        if any(self.is_token(key.strip().removeprefix(KEY_PREFIX.encode())) for key in keys):
            return None
        return problem(401, "wrong key: set TINKER_API_KEY to the one that `rl serve` prints", CLOSE)
