"""Serves the policy over HTTP to versions of verifiers v1 that we have not tested: they query it like any endpoint.

The worker is that endpoint, on loopback and protected by a token. verifiers' client names the trace in each request; ids,
log-probabilities and versions stay here. Costs a second HTTP exchange per turn, and uses no internals of verifiers.
"""

import hmac
import json
import os
import secrets
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

from rl.envs.v1.active import ActiveTrace, completion, not_chat

SESSION = "X-Session-ID"
"""The header in which verifiers' client names the trace."""
TOKEN = "RL_POLICY_TOKEN"
"""Environment variable from which verifiers' client reads the endpoint's key."""
MAX_REQUEST_BYTES = 1 << 24
"""The limit of the inference server, too."""


class HttpSeam:
    """An OpenAI-compatible server of the policy. `active` maps ids to the traces in play."""

    def __init__(self, active: dict[str, ActiveTrace]):
        self.active = active
        self.token = secrets.token_urlsafe(32)

    async def start(self) -> vf.EvalClientConfig:
        """Starts serving on a free port. Returns the config of a client."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_route("*", "/{path:.*}", self.other)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        os.environ[TOKEN] = self.token
        return vf.EvalClientConfig(base_url=f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1", api_key_var=TOKEN)

    async def close(self) -> None:
        await self.runner.cleanup()

    def trace_of(self, request: web.Request) -> ActiveTrace:
        """The trace that a request belongs to. Raises vf.ProviderError."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise vf.ProviderError("this server is for verifiers in its own process", status_code=401)
        name = request.headers.get(SESSION, "")
        active = self.active.get(name)
        if active is None or active.conversation is None:
            raise vf.ProviderError(f"trace {name} is not being played", status_code=409)
        return active

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Plays one turn; see ActiveTrace.answer."""
        try:
            active, body = self.trace_of(request), await request.json()
            answered = completion(*await active.answer(body["messages"], body), body.get("model", "policy"))
        except vf.ProviderError as error:
            return refusal(error)
        if body.get("stream"):
            return web.Response(body=b"".join(events(answered)), content_type="text/event-stream")
        return web.json_response(answered)

    async def other(self, request: web.Request) -> web.Response:
        """Refuses any request other than a chat completion, and blames the harness that sent it."""
        try:
            raise self.trace_of(request).fail(not_chat(request.path))
        except vf.ProviderError as error:
            return refusal(error)


def refusal(error: vf.ProviderError) -> web.Response:
    return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=error.status_code)


def events(answered: dict[str, Any]) -> list[bytes]:
    """A chat completion as server-sent events: one with the whole answer, one with its usage."""
    [choice] = answered["choices"]
    calls = [{**call, "index": i} for i, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    head = {key: answered[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]},
        head | {"choices": [], "usage": answered["usage"]},
    ]
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"]
