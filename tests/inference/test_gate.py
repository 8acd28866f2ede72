"""The token and the size of a body, before any route: driven as an ASGI server does it."""

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from rl.inference.gate import Gate
from rl.wire.gate import MAX_BODY_BYTES

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
    token: str,
    headers: list[tuple[bytes, bytes]] | None = None,
    body_bytes: int = 0,
    kind: str = "http",
    path: str = "/health",
    loopback: bool = True,
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
    asyncio.run(Gate(app, token, loopback)(scope, receive, send))
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


def test_the_token_opens():
    for value in (b"Bearer ", b"bearer ", b"BEARER  "):
        assert ask(TOKEN, bearer(value + TOKEN.encode()), body_bytes=3) == (200, b"3")
    assert ask(TOKEN, bearer(b"Bearer " + TOKEN.encode()), kind="websocket")[0] == "websocket.accept"


OPEN = bearer(b"Bearer " + TOKEN.encode())


@pytest.mark.parametrize("host", [b"evil.example:8000", b"127.0.0.1.evil.example", b"192.168.0.7:8000", b"", b"[::2]:80"])
def test_on_loopback_a_server_goes_by_no_other_name(host):
    """A page whose name was made to point here (DNS rebinding) shows its own name."""
    headers = [*OPEN, (b"host", host)]
    status, content = ask(TOKEN, headers)
    assert (status, json.loads(content)["error"]["type"]) == (403, "foreign_host")
    assert ask(TOKEN, headers, kind="websocket")[0] == "websocket.close"
    assert ask(TOKEN, headers, loopback=False)[0] == 200


def test_hosts_of_loopback_are_known_and_pages_are_refused():
    for host in (b"localhost:8000", b"127.0.0.1", b"127.0.0.1:8000", b"[::1]:8000", b"[::1]"):
        assert ask(TOKEN, [*OPEN, (b"host", host)])[0] == 200, host
    for origin in (b"https://evil.example", b"http://localhost:3000", b"null"):
        for headers in ([*OPEN, (b"origin", origin)], [(b"origin", origin), (b"content-type", b"text/plain")]):
            status, content = ask(TOKEN, headers, path="/load_weights", loopback=False)
            assert (status, json.loads(content)["error"]["type"]) == (403, "foreign_origin")


def test_bodies_have_a_limit():
    length = [*OPEN, (b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    assert ask(TOKEN, OPEN, body_bytes=MAX_BODY_BYTES) == (200, str(MAX_BODY_BYTES).encode())
    for status, content in (ask(TOKEN, length), ask(TOKEN, OPEN, MAX_BODY_BYTES + 1), ask(TOKEN, OPEN, 3 * MAX_BODY_BYTES)):
        assert (status, json.loads(content)["error"]["type"]) == (413, "too_large")
    assert ask(TOKEN, [*OPEN, (b"content-length", b"-1")], body_bytes=5) == (200, b"5")
    assert ask(TOKEN, [*OPEN, (b"content-length", b"1" * 5000)])[0] == 413
