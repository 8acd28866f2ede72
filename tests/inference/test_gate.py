"""The token and the size of a body, before any route: driven as an ASGI server does it."""

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from rl.inference.gate import MAX_BODY_BYTES, Gate

TOKEN = "a-token-of-this-run"
SENT = 1 << 20
"""Bytes of one message of a body."""


async def app(scope, receive, send) -> None:
    """Reads the body and says how long it is."""
    if scope["type"] == "http":
        body = await Request(scope, receive).body()
        await PlainTextResponse(str(len(body)))(scope, receive, send)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.accept"})


def ask(
    token: str | None, headers: list[tuple[bytes, bytes]] | None = None, body_bytes: int = 0, kind: str = "http", path: str = "/health"
):
    """(status or message type, content) that a client sees."""
    sent: list[dict] = []
    left = body_bytes

    async def receive() -> dict:
        nonlocal left
        part, left = min(left, SENT), left - min(left, SENT)
        return {"type": "http.request", "body": bytes(part), "more_body": left > 0}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": kind, "method": "GET", "path": path, "headers": headers or [], "query_string": b""}
    asyncio.run(Gate(app, token)(scope, receive, send))
    if kind == "websocket":
        return sent[0]["type"], b""
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], sent[1]["body"]


def bearer(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", value)]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(b""),
        bearer(b"Bearer"),
        bearer(b"Bearer "),
        bearer(TOKEN.encode()),
        bearer(b"Basic " + TOKEN.encode()),
        bearer(b"Bearer " + TOKEN[:-1].encode()),
        bearer(b"Bearer " + TOKEN.encode() + b"x"),
        bearer(b"Bearer \xff\xfe"),
        bearer(b"Bearer wrong") + bearer(b"Bearer " + TOKEN.encode()),
        [(b"x-api-key", TOKEN.encode())],
    ],
)
def test_every_path_wants_the_token(headers):
    for path in ("/health", "/metrics", "/docs", "/openapi.json", "/pause", "/v1/models", "/no/such/path", "/generate"):
        status, content = ask(TOKEN, headers, path=path)
        assert (status, json.loads(content)["error"]["type"]) == (401, "unauthorized")
        assert TOKEN.encode() not in content
    assert ask(TOKEN, headers, kind="websocket")[0] == "websocket.close"


def test_the_token_opens_and_without_one_nobody_is_asked():
    for value in (b"Bearer ", b"bearer ", b"BEARER  "):
        assert ask(TOKEN, bearer(value + TOKEN.encode()), body_bytes=3) == (200, b"3")
    assert ask(None, body_bytes=3) == (200, b"3")
    assert ask(None, bearer(b"Bearer whatever"), body_bytes=3) == (200, b"3")
    assert ask(TOKEN, bearer(b"Bearer " + TOKEN.encode()), kind="websocket")[0] == "websocket.accept"


def test_bodies_have_a_limit():
    length = [(b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    assert ask(None, body_bytes=MAX_BODY_BYTES) == (200, str(MAX_BODY_BYTES).encode())
    for status, content in (ask(None, length), ask(None, body_bytes=MAX_BODY_BYTES + 1), ask(None, length[:0], 3 * MAX_BODY_BYTES)):
        assert (status, json.loads(content)["error"]["type"]) == (413, "too_large")
    assert ask(None, [(b"content-length", b"-1")], body_bytes=5) == (200, b"5")
    assert ask(None, [(b"content-length", b"1" * 5000)])[0] == 413
