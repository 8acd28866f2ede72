"""The token and the size of a body, before any route: driven as an ASGI server does it."""

import asyncio
import contextlib

import pytest
from httpx import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from rl.wire.messages import MAX_BODY_BYTES
from rl.wire.serving import Gate

TOKEN = "a-token-of-this-run"
SENT = 1 << 20
"""Bytes of one message of a body."""


async def app(scope, receive, send):
    """Reads the body and says how long it is."""
    if scope["type"] == "http":
        body = await Request(scope, receive).body()
        await PlainTextResponse(str(len(body)))(scope, receive, send)
    else:
        await send({"type": "websocket.accept"})


def client(loopback):
    return TestClient(Gate(app, TOKEN, loopback), "http://127.0.0.1")


def ask(
    headers,
    body_bytes=0,
    path="/health",
    loopback=True,
):
    """(status, body or kind of the error) that a client gets; its body comes in pieces."""
    pieces = (bytes(min(SENT, body_bytes - at)) for at in range(0, body_bytes, SENT))
    answer = client(loopback).post(path, content=pieces, headers=headers)
    assert TOKEN not in answer.text
    is_ours = answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()["error"]["type"] if is_ours else answer.text


def opens_a_websocket(headers):
    opened = False
    with (
        contextlib.suppress(WebSocketDisconnect),
        client(True).websocket_connect("ws://127.0.0.1/health", headers=Headers(headers)),
    ):
        opened = True
    return opened


def bearer(value):
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
        [(b"x-api-key", TOKEN[:-1].encode())],
        [(b"x-api-key", TOKEN.encode()), *bearer(b"Bearer wrong")],
    ],
)
def test_every_path_wants_the_token(headers):
    for path in (
        "/health",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/pause",
        "/v1/models",
        "/no/such/path",
        "/generate",
    ):
        assert ask(headers, path=path) == (401, "unauthorized")


def test_the_token_opens():
    for value in (b"Bearer ", b"bearer ", b"BEARER  "):
        assert ask(bearer(value + TOKEN.encode()), body_bytes=3) == (200, "3")
    assert ask([(b"x-api-key", TOKEN.encode())]) == (200, "0")  # as Anthropic's clients send it
    assert opens_a_websocket(OPEN) and not opens_a_websocket([])


def test_whoever_probes_a_server_needs_no_token():
    """Kubernetes and load balancers."""
    assert client(False).get("/health").status_code == 200
    assert (
        client(False).get("/health/x").status_code
        == client(False).get("/status").status_code
        == 401
    )
    assert (
        client(False).get("/health", headers={"origin": "https://evil.example"}).status_code == 403
    )


OPEN = bearer(b"Bearer " + TOKEN.encode())


@pytest.mark.parametrize(
    "host", [b"evil.example:8000", b"127.0.0.1.evil.example", b"192.168.0.7:8000", b"", b"[::2]:80"]
)
def test_on_loopback_a_server_goes_by_no_other_name(host):
    """A page whose name was made to point here (DNS rebinding) shows its own name."""
    headers = [*OPEN, (b"host", host)]
    assert ask(headers) == (403, "foreign_host")
    assert not opens_a_websocket(headers)
    assert ask(headers, loopback=False)[0] == 200


def test_hosts_of_loopback_are_known_and_pages_are_refused():
    for host in (b"localhost:8000", b"127.0.0.1", b"127.0.0.1:8000", b"[::1]:8000", b"[::1]"):
        assert ask([*OPEN, (b"host", host)])[0] == 200, host
    for origin in (b"https://evil.example", b"http://localhost:3000", b"null"):
        for headers in (
            [*OPEN, (b"origin", origin)],
            [(b"origin", origin), (b"content-type", b"text/plain")],
        ):
            assert ask(headers, path="/load_weights", loopback=False) == (403, "foreign_origin")


def test_bodies_have_a_limit():
    length = [*OPEN, (b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    assert ask(OPEN, MAX_BODY_BYTES) == (200, str(MAX_BODY_BYTES))
    assert ask(length) == (413, "too_large")
    assert (
        ask(OPEN, MAX_BODY_BYTES + 1) == ask(OPEN, 3 * MAX_BODY_BYTES) == (413, "Content Too Large")
    )
    assert ask([*OPEN, (b"content-length", b"-1")], 5) == (200, "5")
    assert ask([*OPEN, (b"content-length", b"1" * 5000)])[0] == 413


def test_a_body_that_is_too_long_is_read_before_its_refusal():
    """Regression: the connection was closed on a client that still sent, which saw no answer. A
    stranger's body is not read."""
    order = []

    async def receive():
        order.append("read")
        return {"type": "http.request", "body": b"x", "more_body": len(order) < 3}

    async def send(message):
        order.append(message.get("status"))

    def asked(headers):
        order.clear()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/health",
            "headers": [(b"host", b"127.0.0.1"), *headers],
        }
        asyncio.run(Gate(app, TOKEN, True)(scope, receive, send))
        return order[:-1]

    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    assert asked([*OPEN, length]) == ["read", "read", "read", 413]
    assert asked([length]) == [401]
