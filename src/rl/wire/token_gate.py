"""Checks every HTTP request to a server of inference before anything else sees it: its origin,
the run's token, the size of its body."""

from starlette.responses import Response
from starlette.types import Scope

from rl.wire.gate import CLOSE, HttpGate, header, refusal


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
