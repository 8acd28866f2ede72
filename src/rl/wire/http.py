"""Single requests to HTTP servers that may be away, busy or starting; callers repeat them until
their own deadline."""

import inspect
import resource
import socket
from typing import Any

import aiohttp
import msgspec

from rl.system.errors import RunError

RETRY_S = 0.5
"""Pause before a server that was away is asked again."""
CONNECT_S = 10.0
TCP_OPTIONS = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 30_000,
}
"""The kernel asks a silent peer after 10 s, then every 5 s: a connection to a host that vanished
ends within 30 s, and one to a host that was started again at once."""
MAX_ANSWER_BYTES = 1 << 28
"""A million tokens with their log-probabilities take a sixth of this."""


class AwayError(Exception):
    """A server gave no usable answer; the message says what happened instead. Caught by callers
    that retry."""


class RefusedError(RunError):
    """A server refused a request for good, with HTTP status `status`. Caught where the run can
    continue without an answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def probing_socket(address: Any) -> socket.socket:
    """A socket for a getaddrinfo entry that has TCP_OPTIONS: an answer may take minutes, and a
    vanished server would be waited for."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in TCP_OPTIONS.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def tcp_connector(most: int) -> aiohttp.TCPConnector:
    """Returns a connector with `probing_socket`, except for aiohttp before 3.12, to which an
    environment may pin its worker."""
    known = "socket_factory" in inspect.signature(aiohttp.TCPConnector).parameters
    options: dict[str, Any] = {"socket_factory": probing_socket} if known else {}
    return aiohttp.TCPConnector(limit=most, **options)


class HttpClient:
    """Sends any number of concurrent requests. Only connecting has a deadline here, and a server's
    host must stay reachable.

    Connections are limited to half of the files that this process may open; further requests are
    queued.
    """

    def __init__(self, socket: str = "") -> None:
        self.socket = socket
        """Unix socket to which all requests go, whatever their address; empty for none."""
        self.session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Sends `body` as JSON (None: no body). Returns status and content of the answer. Raises
        AwayError if there is none, if it is larger than MAX_ANSWER_BYTES, or if its status is
        500 or above."""
        if self.session is None:  # can only be made inside a running event loop
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            connector = (
                aiohttp.UnixConnector(self.socket, limit=most)
                if self.socket
                else tcp_connector(most)
            )
            self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        data = msgspec.json.encode(body) if body is not None else None
        headers = {"Content-Type": "application/json"} | headers
        try:
            async with self.session.request(method, url, data=data, headers=headers) as response:
                content = bytearray()
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise AwayError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AwayError(f"{type(error).__name__} {error}") from None
        if response.status >= 500:
            raise AwayError(describe_refusal(response.status, content))
        return response.status, bytes(content)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


def describe_refusal(status: int, content: bytes | bytearray) -> str:
    """Describes an answer with an error status."""
    return f"answered {status}: {content[:300].decode(errors='replace')}"
